"""Exactlyonce in a Spark program: bounded work of pipelines on the program's session, their savepoints, and the format
`exactlyonce`.

Needs the extra `spark`. The session is the caller's: it is used as it is, and not stopped.
"""

from exactlyonce.pipeline.extras import needing

with needing("spark", "PySpark", "exactlyonce.spark"):
    from exactlyonce.engines.spark.bounded_work import audit, backfill, catch_up, diff, expected, replay, savepoint
    from exactlyonce.engines.spark.data_source import register
    from exactlyonce.pipeline.running import BoundedSettings, ClusterSettings

__all__ = [
    "BoundedSettings",
    "ClusterSettings",
    "audit",
    "backfill",
    "catch_up",
    "diff",
    "expected",
    "register",
    "replay",
    "savepoint",
]
