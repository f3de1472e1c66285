"""The signals by which people and supervisors ask a command to stop.

Invariant: none that comes after the import of this module is lost, or ends the command by its default. The package
imports it first of all: process 1 of a container ignores SIGTERM until there is a handler, any other one dies of it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_early: list[int] = []
"""The signals that came while the command imported its modules."""


def _is_command(words: list[str]) -> bool:
    """Whether a process with the command line *words* is the command `exactlyonce`, and no program that imports it.

    >>> _is_command(["python", "/usr/bin/exactlyonce", "run"]), _is_command(["python", "-m", "exactlyonce.cli.main"])
    (True, True)
    >>> _is_command(["python", "-m", "pytest", "exactlyonce"]), _is_command(["python"])
    (False, False)
    """
    return words[1:3] == ["-m", "exactlyonce.cli.main"] or (words[1:2] != [] and words[1].endswith("/exactlyonce"))


def _handle_in_command(handler: Callable[..., Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if _is_command(sys.orig_argv) and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


_handle_in_command(lambda number, _: _early.append(number))


def imports_were_stopped() -> bool:
    """Whether the command was asked to stop before its imports were over. From now on SIGTERM is like Ctrl-C in it."""
    _handle_in_command(signal.default_int_handler)
    return bool(_early)


@contextmanager
def handling_stop_signals(handler: Callable[..., Any]) -> Iterator[None]:
    """Have SIGINT and SIGTERM call *handler*, on the main thread only. The handlers before are set again at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
