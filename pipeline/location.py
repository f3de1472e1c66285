"""Where in the user's files something was written, so that an error can say it."""

from __future__ import annotations

import os
import sys
from types import FrameType

_OURS = ("exactlyonce.pipeline.", "exactlyonce.connectors.", "exactlyonce.sinks.")


def caller() -> FrameType:
    """The innermost frame that is not of this package: the user's."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return frame


def location(frame: FrameType) -> str:
    """``orders.py:12``, relative to the working directory where the file is below it."""
    path = frame.f_code.co_filename
    below = os.path.join(os.getcwd(), "")
    return f"{path.removeprefix(below)}:{frame.f_lineno}"
