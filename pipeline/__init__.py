"""The pipeline as a user writes it: streams, operators, codecs, and the logical graph that engines walk. No I/O.

It may import no other package of exactlyonce; all others may import it.
"""
