"""Savepoints apart from the run that took them: state read by key, exported as files, restored into a pipeline.

May import what lies directly in `engines`, but for the leader, and `surroundings/`. Of `engines` only the leader,
and what reads state on Spark, import this.
"""
