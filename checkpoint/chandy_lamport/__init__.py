"""Consistent snapshots of any graph of FIFO channels: the algorithm whose cases the barriers of a pipeline are. Pure.

`algorithm` is one process's part in it, `cuts` judges what comes of it and shares no code with it. May import
`pipeline.errors` alone.
"""
