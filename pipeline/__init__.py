"""What a user writes: streams, operators, codecs, and the logical graph that engines walk. No I/O."""
