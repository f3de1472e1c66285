"""Consistent snapshots of any graph of FIFO channels; a pipeline's barriers are cases of this algorithm. Pure.

`algorithm` is one process's part, `cuts` checks the result and shares no code with it. May import `pipeline.errors`
alone.
"""
