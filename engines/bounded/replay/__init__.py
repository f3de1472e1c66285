"""Replays: the output of an interval, recomputed from the checkpoint before it along its order logs.

May import `engines.bounded` and its `unit/`; the leader, the audit and `engines.spark` import it.
"""
