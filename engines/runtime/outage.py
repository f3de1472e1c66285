"""The rule for an error of the user's code: it is an outage, a bad record, or a defect of the code.

Invariant: an error that may come from an outage never counts as a bad record, so that nothing is skipped for it.

An outage is an OSError (TimeoutError and ConnectionError among them), an `Unavailable`, or an error raised from one
(`raise ... from error`, as HTTP clients do). The work is repeated: codecs after a pause, everything by a restart. A bad
record is an error that decoders raise on bytes. On any other error the job stops before the record.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable
from gzip import BadGzipFile
from typing import TypeVar

from fastavro.read import SchemaResolutionError

from exactlyonce.pipeline.errors import USERS_ERRORS, Unavailable

T = TypeVar("T")

RETRY_PAUSES_S = (0.1, 0.5)
"""The pauses of a codec during an outage. After the last attempt the job restarts."""
pause: Callable[[float], None] = time.sleep
"""Waits for seconds; a parameter wherever it is used."""

_OF_THE_RECORD = (
    ValueError,  # msgspec's errors and UnicodeError are ValueErrors
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    EOFError,
    StopIteration,
    RecursionError,
    BadGzipFile,
    SchemaResolutionError,
    struct.error,
    zlib.error,
)
"""Errors of decoders on bytes, or on parsed values of another shape."""


def is_outage(error: BaseException) -> bool:
    """Whether *error* comes from an outage of a service that the user's code asks.

    >>> is_outage(ConnectionRefusedError()), is_outage(ValueError("no number"))
    (True, False)
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | Unavailable) and not isinstance(cause, BadGzipFile):
            return True
        cause = cause.__cause__
    return False


def is_bad_record(error: BaseException) -> bool:
    """Whether *error* is one that a decoder raises on bytes that it cannot read.

    >>> is_bad_record(KeyError("id")), is_bad_record(RuntimeError()), is_bad_record(TimeoutError())
    (True, False, False)
    """
    return isinstance(error, _OF_THE_RECORD) and not is_outage(error)


def retried(call: Callable[[], T], sleep: Callable[[float], None] = pause) -> T:
    """The result of *call*, repeated after each of `RETRY_PAUSES_S` during an outage."""
    for pause_s in RETRY_PAUSES_S:
        try:
            return call()
        except USERS_ERRORS as error:
            if not is_outage(error):
                raise
        sleep(pause_s)
    return call()
