"""How ranks find and identify each other before they have a communicator, and notice when a process ends.

`network` (which interface leads to the other hosts), `meeting_place` (the store that ranks meet in), `notes` (what they
leave for each other there, sealed), `tickets` (numbers that they draw there); `peers` and `guard` (whether processes of
this host and of others still run); and `handshake`, which puts them together.
"""
