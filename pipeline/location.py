"""The line of the user's code behind an error. Apart from the pure `errors`: it asks for the working directory."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType

_OURS = ("exactlyonce.pipeline.", "exactlyonce.connectors.", "exactlyonce.sinks.")
_OTHERS = ("importlib", "contextlib", "pyspark")
"""Python's modules and others in which a user's line fails."""


def caller() -> FrameType:
    """The innermost frame of the user's code."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return frame


def location(frame: FrameType) -> str:
    """``orders.py:12``, relative to the working directory if the file is below it."""
    return _written(frame, frame.f_lineno)


def raised_at(error: BaseException) -> str | None:
    """The innermost line of the user's code in the traceback of *error*, if any."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module != "exactlyonce" and not module.startswith((*_OURS, *_OTHERS)):
            place = _written(frame, line)
    return place


def _written(frame: FrameType, line: int) -> str:
    below = os.path.join(os.getcwd(), "")
    return f"{frame.f_code.co_filename.removeprefix(below)}:{line}"
