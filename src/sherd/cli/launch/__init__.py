"""From the options of `sherd run` to an exit status, on this machine.

In the order of a run: `request`, `checks` and `variables` (before anything starts), `start`, `launcher`, `ranks` (each
started through `tied`), `stopping` (signals).
"""
