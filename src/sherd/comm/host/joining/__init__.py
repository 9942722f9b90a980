"""How the ranks of one machine find each other and come to share memory.

`reception` (the socket on which a rank receives the others), `link` (handing out shared memory and process handles) and
`rendezvous` (who shares a host, and whether this machine has what it takes).
"""
