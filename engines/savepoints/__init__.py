"""Savepoints without the run that took them: state read by key, exported as files, made of rows, restored.

May import modules directly in `engines`, except the leader, `runtime/` and `external_checks/`. Within `engines`, the
leader, bounded work and reads of state on Spark import this.
"""
