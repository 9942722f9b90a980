"""What every transport needs while it waits for other ranks.

`patience` (how long a rank has waited), `progress` (moving everything else on meanwhile), `side_thread` (calls that
block inside the backend), `deadlock` (ranks that wait for each other in a circle), `faults` (the text of errors and
warnings).
"""
