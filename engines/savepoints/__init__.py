"""Savepoints without the run that took them: state read by key, exported as files, made of
rows, restored into a pipeline.

May import modules directly in `engines`, except the leader, and `external_checks/`. Within `engines`, only the leader
and reads of state on Spark import this.
"""
