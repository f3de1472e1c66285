"""The lines of a command on stderr: text for people or, with `--json`, one event each and nothing else.

Invariant: progress and the reason of the end go to stderr through here or a reporter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from exactlyonce.cli.text import terminal_width, to_stderr, wrapped
from exactlyonce.engines import events
from exactlyonce.pipeline.errors import ExactlyOnceError


def new_namespace() -> argparse.Namespace:
    """The namespace of a command before its arguments are parsed."""
    return argparse.Namespace(redact=str, json=False, subject=None)


def show_event(event: dict[str, Any]) -> None:
    to_stderr(json.dumps(event))


def note_for(args: argparse.Namespace) -> Callable[[str], None]:
    """A function that shows notes while the command of *args* runs."""
    if args.json:
        return lambda text: show_event(events.note(args.subject, args.redact(text)))
    return to_stderr


def show_from_handler(line: str) -> None:
    """Show *line* from a signal handler: it bypasses Python's buffers, which are not reentrant."""
    # where stderr is gone, or no file, the signal counts all the same
    with suppress(OSError), open(sys.stderr.fileno(), "wb", buffering=0, closefd=False) as unbuffered:
        unbuffered.write(f"{line}\n".encode())


def show_error(args: argparse.Namespace, error: ExactlyOnceError, trace: str) -> None:
    """Show why the command of *args* ends; *trace* is a traceback to show, or empty."""
    if args.json:
        traced = {"traceback": args.redact(trace)} if trace else {}
        show_event(events.ending(error, args.subject, args.redact) | traced)
        return
    sys.stderr.write(args.redact(trace))
    message = f"exactlyonce: {args.redact(str(error))}"
    to_stderr(wrapped(message, terminal_width()) if sys.stderr.isatty() else message)
