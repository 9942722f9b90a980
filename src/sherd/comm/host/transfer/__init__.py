"""How tensors move between the ranks of a host.

`staging` (the chunks they go through), `streams` (the movements of collectives), `results` (what is done with what
arrives), `short_paths` (for small calls, and for reductions of what is lent), `channel` (send and receive).
"""
