"""The user's part of an exception: where it was raised, and the traceback without frames of this package."""

from __future__ import annotations

import os
import traceback

import exactlyonce
from exactlyonce.pipeline.errors import sendable

_OURS = os.path.dirname(exactlyonce.__file__) + os.sep
"""The folder of stack frames that are not the user's."""


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]


def place_of(error: BaseException) -> str:
    """The place in the user's code where *error* was raised, as `_shown` says; empty if it was elsewhere."""
    frames = _users_frames(error)
    return f" ({_shown(frames[-1])})" if frames else ""


def _shown(frame: traceback.FrameSummary) -> str:
    """The file, without its folder, the line and the function of *frame*: the same on any machine."""
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


def users_traceback(error: BaseException) -> str:
    """The traceback of the user's exception that *error* stems from, without frames of this package; empty if none.

    The exception is a cause of *error* that was raised in other code.
    """
    cause = error.__cause__
    while cause is not None:
        trace = traceback.TracebackException.from_exception(cause)
        theirs = [place for place, frame in enumerate(trace.stack) if not frame.filename.startswith(_OURS)]
        if theirs:
            trace.stack = traceback.StackSummary.from_list(trace.stack[theirs[0] :])
            return sendable("".join(trace.format()))
        cause = cause.__cause__
    return ""


def portable_traceback(error: BaseException) -> str:
    """The user's frames of *error*, innermost last, each as `_shown` and with the text of its line."""
    return "\n".join(f"{_shown(frame)}: {frame.line}" for frame in _users_frames(error))
