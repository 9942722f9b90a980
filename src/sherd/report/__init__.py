"""Readers of a run's events that write something for people: an HTML page, a CSV file, TensorBoard's files.

`html` is the page of one or several runs: `figures` draws (what, in `panels`), `thinning` keeps curves short, `page` and
its `assets` put all into one file. `columns` names the numbers of a step for `csv_file` and `tensorboard`.
"""
