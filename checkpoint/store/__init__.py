"""The checkpoint topic in a real cluster: its settings, the decision log, blocks, and how they are read.

The only rooms of `checkpoint` with I/O. May import the protocol; the protocol never imports it.
"""
