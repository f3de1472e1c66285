"""The pipeline as a user writes it: streams, operators, codecs, and the logical graph that engines walk. No I/O.

May import nothing of exactlyonce outside itself; everything else may import it.
"""
