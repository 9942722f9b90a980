"""The host transport: ranks of one machine, through memory they share.

Read in this order: `memory` (blocks of shared memory, and the tensors in them), `futex` (sleeping on a word), the room
`joining` (who shares a host, and how they come to share memory), `board` (flags, headers, last words), `operation`,
`waiting` and `scheduler` (what is under way), `remote_reader` (reading a peer's private memory), the room
`transfer` (how tensors move), and `communicator`, which puts them together.
"""
