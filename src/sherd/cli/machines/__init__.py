"""The machines of a run: how they find each other and exchange news.

They meet at an `endpoint` (`rendezvous`); each takes its `seat` and writes on a `board`, sealed with the `token`;
`news` is what they learn of each other while ranks run. `hosts` and `remote` start `sherd run` on other machines over
ssh, and `attendance` is the remote end of that.
"""
