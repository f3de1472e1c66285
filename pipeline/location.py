"""The place in the user's files where something was written, so that an error can say it."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType

_OURS = ("exactlyonce.pipeline.", "exactlyonce.connectors.", "exactlyonce.sinks.")
_PYTHONS = ("importlib", "contextlib")


def caller() -> FrameType:
    """The innermost frame that is not of this package: the user's."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return frame


def location(frame: FrameType) -> str:
    """``orders.py:12``, relative to the working directory where the file is below it."""
    return _written(frame, frame.f_lineno)


def raised_at(error: BaseException) -> str | None:
    """The innermost line of the user's that *error* went through, if it went through one."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_globals.get("__name__", "").startswith((*_OURS, *_PYTHONS)):
            found = _written(frame, line)
    return found


def _written(frame: FrameType, line: int) -> str:
    below = os.path.join(os.getcwd(), "")
    return f"{frame.f_code.co_filename.removeprefix(below)}:{line}"
