"""Errors of ours as Spark shows them: the sentence, without causes and without the traceback of a process of Spark's.

Spark puts the traceback of its Python process into the message of its own error, before the sentence; on Spark Connect,
too. That process ends after an error, and before that looks whether the traceback is to be hidden. Invariants: a defect
keeps its traceback and its causes; nothing changes in a process of the user's, and nothing if the user has turned
`spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled` off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from exactlyonce.pipeline.errors import ExactlyOnceError, InvariantViolation

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
_SHORTENS, _HIDES = "SPARK_SIMPLIFIED_TRACEBACK", "SPARK_HIDE_TRACEBACK"
"""Variables of Spark's Python processes."""


def without_causes(use: Callable[[], R]) -> R:
    """The result of *use*. An error of ours loses its causes, and in Spark's processes its traceback; it must end the
    process."""
    try:
        return use()
    except InvariantViolation:
        raise
    except ExactlyOnceError as error:
        hide_traceback()
        raise error.with_traceback(None) from None


def hide_traceback() -> None:
    """Hide the traceback of the error with which this process of Spark's will end."""
    if os.environ.get(_SHORTENS):
        os.environ[_HIDES] = "1"


def shown_alone(method: F) -> F:
    """*method*, which Spark calls; see `without_causes`."""

    @wraps(method)
    def called(*arguments: Any, **options: Any) -> Any:
        return without_causes(lambda: method(*arguments, **options))

    return cast("F", called)
