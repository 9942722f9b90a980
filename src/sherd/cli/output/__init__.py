"""What a user sees of a run.

What ranks write (`forwarding`, by `pieces`; `tracebacks` once) goes to the `console`; their events are followed by
`watching` and drawn by `display` and `curve`.
"""
