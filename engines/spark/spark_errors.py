"""Spark's errors made short, and what to do about the causes that a user can fix.

Invariant: an error that is not Spark's own is none of this module's business.
"""

from __future__ import annotations

import re

from exactlyonce.pipeline.errors import ConfigError

_REASON_CHARACTERS = 2_000
_ENVIRONMENT = (
    "On this machine, set os.environ['PYSPARK_PYTHON'] = sys.executable before your program builds its session. On a "
    "cluster, give the executors a packed environment with exactlyonce, pandas, pyarrow and what your pipeline "
    "imports: --spark-conf spark.archives=environment.tar.gz#environment --spark-conf "
    "spark.pyspark.python=./environment/bin/python. How to pack one: docs/spark.md."
)
_NO_MODULE = re.compile(r"No module named '([\w.]+)'|\[PACKAGE_NOT_INSTALLED\] (\w+)")
_NO_PYTHON = re.compile(r'Cannot run program "([^"]+)"')
_TRACE = ("at ", "File ", "Traceback ", "^", "...", "During handling", "The above exception")


def is_sparks(error: Exception) -> bool:
    """Whether *error* comes from Spark, or from the way to it: without its JVM, a connection is refused."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc")


def known_cause(reason: str) -> ConfigError | None:
    """What to do about *reason*, which Spark gave, if that is known."""
    if found := _NO_MODULE.search(reason):
        return ConfigError(f"Spark's executors have a Python without {found[1] or found[2]}. {_ENVIRONMENT}")
    if found := _NO_PYTHON.search(reason):
        return ConfigError(f"Spark's executors have no Python at {found[1]}. {_ENVIRONMENT}")
    return None


def in_short(reason: str) -> str:
    """What a person can read of *reason*: no stack traces."""
    lines = [line for line in reason.splitlines() if line.strip() and not line.lstrip().startswith(_TRACE)]
    return "\n  ".join(lines)[:_REASON_CHARACTERS]


def not_ready(what: str, error: Exception) -> ConfigError:
    """The error for Spark's *error* before any work was given to it."""
    return known_cause(str(error)) or ConfigError(f"{what} Spark says:\n  {in_short(str(error))}")
