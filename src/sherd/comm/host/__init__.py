"""The host transport: ranks of one machine, through memory they share.

Read in this order: `memory` (segments, the keeper), `futex` (sleeping on a word), `rendezvous` (who shares a host, and
how they come to share memory), `peers` (who is alive), `board` (flags, headers, last words), `staging` (a rank's
chunks), `operation` (one operation under way), `communicator` (the operations themselves), `channel` (send and recv).
"""
