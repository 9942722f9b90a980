"""What a user sees of a run.

The output of ranks (`forwarding`, from a `source`, cut into `pieces`; equal `tracebacks` once) goes to the `console`.
`watching` follows their events, which `display` and `curve` draw.
"""
