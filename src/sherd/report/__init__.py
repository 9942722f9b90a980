"""Reports from a run's events: an HTML page, a CSV file, TensorBoard files.

`html` writes the page of one or several runs: `figures` lists its plots; `curves`, `stacks` and `layers` draw them as
`panels`, `thinning` limits their points; `summary` has the text; `page` and its `assets` put everything into one file.
`columns` names the numbers of a step for `csv_file` and `tensorboard`.
"""
