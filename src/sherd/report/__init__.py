"""Readers of a run's events that write something for people: an HTML page, a CSV file, TensorBoard's files.

`html` writes the page of one or several runs: `figures` says which plots it has; `curves`, `stacks` and `layers` draw
them as `panels`, `thinning` keeps them short; `summary` has the words; `page` and its `assets` put all into one file.
`columns` names the numbers of a step for `csv_file` and `tensorboard`.
"""
