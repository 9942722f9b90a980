"""The machines of a run: how they find each other and hear of each other.

They meet at an `endpoint` (`rendezvous`), each takes its `seat` and writes on a `board`, under the `token`; `news` is
what is heard of the others while ranks run. `hosts` and `remote` start `sherd run` on other machines through ssh, and
`attendance` is how it is heard there.
"""
