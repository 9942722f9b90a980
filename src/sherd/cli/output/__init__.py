"""What a user sees of a run.

What ranks write (`forwarding`, from a `source` by `pieces`; `tracebacks` once) goes to the `console`; their events are
followed by `watching` and drawn by `display` and `curve`.
"""
