"""The host transport: ranks of one machine, through memory they share.

Read in this order: `memory` (blocks, the keeper), `futex` (sleeping on a word), `support` (whether this machine has
what it takes), `peers` (who is alive), `rendezvous` (who shares a host, and how they come to share memory), `board`
(flags, headers, last words), `waiting`, `operation` and `scheduler` (what is under way), `headers` (what ranks announce
and compare), `staging` and `shared` (where contributions lie), `streams` (how collectives move them), `small` (the
short way), `channel` (send and receive), and `communicator`, which puts them together.
"""
