"""How tensors move between the ranks of a host.

`staging` (the chunks they go through), `streams` (the movements of collectives), `results` (what is done with what
arrives), `small` (the short path for small calls), `channel` (send and receive).
"""
