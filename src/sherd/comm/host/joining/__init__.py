"""How the ranks of one machine find each other and come to share memory.

`support` (whether this machine has what it takes), `reception` (the socket on which a rank receives the others),
`rendezvous` (who shares a host) and `link` (handing out shared memory and process handles).
"""
