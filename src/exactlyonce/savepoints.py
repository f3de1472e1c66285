"""Savepoints made by a program, for a pipeline that begins with state that comes from elsewhere."""

from exactlyonce.engines.savepoints.seeding import write_state

__all__ = ["write_state"]
