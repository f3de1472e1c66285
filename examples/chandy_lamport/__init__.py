"""Consistent snapshots of any graph of FIFO channels; a pipeline's barriers are cases of this algorithm.

`algorithm` is one process's part. `cuts` checks the result and shares no code with it. The page docs/algorithms.md
explains both.
"""
