"""The checkpoint topic in a real cluster: its settings, the decision log, blocks, and how they are read; and the
mailbox beside it, in which people ask a run for something.

`storage` is the seam of what keeps blocks, `blocks` the first one, the topic; files/ has those of files. The only rooms
of `checkpoint` with I/O. May import the protocol; the protocol never imports it.
"""
