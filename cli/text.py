"""Text for people, in a terminal of 80 columns, and the lines of a command on stderr.

Invariant: progress and the reason of the end go to stderr through here or a reporter: as text or, with `--json`, one
event each and nothing else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.cli.arguments import with_pipeline
from exactlyonce.engines import events
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest

Row = Sequence[str]
_WIDTH_MAX = 120


def terminal_width() -> int:
    """The width of the terminal, or 80; 120 at most."""
    return min(_WIDTH_MAX, shutil.get_terminal_size().columns)


def document(value: Any) -> str:
    """*value* as one JSON document, for people, too."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def printable(data: bytes | None) -> str | None:
    """*data* as text where it is UTF-8, else as Python writes bytes; None stays None.

    >>> printable(b"ann"), printable(b"\\xff")
    ('ann', "b'\\\\xff'")
    """
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return repr(data)


def table(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """A line of headers and one for each row, aligned; a column whose header begins with ``>`` is right-aligned.

    >>> table(["name", ">size"], [["a", "1 kB"], ["long", "20 kB"]])
    ['name   size', 'a      1 kB', 'long  20 kB']
    """
    headers = [column.lstrip(">") for column in columns]
    widths = [max(map(len, cells)) for cells in zip(headers, *rows, strict=True)]

    def line(cells: Row) -> str:
        placed = zip(columns, cells, widths, strict=True)
        return "  ".join(c.rjust(width) if column[0] == ">" else c.ljust(width) for column, c, width in placed).rstrip()

    return [line(headers), *map(line, rows)]


def labelled(label: str, text: str, label_width: int, width: int, indent: str = "  ") -> list[str]:
    """*text* after its label, wrapped at *width* between words; further lines are indented below the first.

    >>> labelled("Sn", "0:10 1:20", 4, 12)
    ['  Sn  0:10', '      1:20']
    """
    further = " " * (len(indent) + label_width)
    first = f"{indent}{label:<{label_width}}"
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )


def wrapped(text: str, width: int) -> str:
    """*text* with long lines wrapped between words; indented lines, which may be commands to copy, stay.

    >>> wrapped("one two three\\n  four five six", 9)
    'one two\\nthree\\n  four five six'
    """
    return "\n".join(
        line if line.startswith(" ") else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def moment(at_ms: int) -> str:
    """A date and time in this machine's time zone."""
    return datetime.fromtimestamp(at_ms // 1000).isoformat(sep=" ")


def sn_by_source(manifest: Manifest) -> Mapping[str, str]:
    """Sn of each source, by label: `topic[partition]=offset` of its partitions, and how many splits have ended."""
    labels: dict[str, list[str]] = {}
    ended = Counter(offset.source for offset in manifest.offsets if offset.ended)
    for offset in manifest.offsets:
        places = labels.setdefault(f"Sn of {offset.source}", [])
        places += [] if offset.ended else [f"{offset.topic}[{offset.partition}]={offset.offset}"]
    for source, count in ended.items():
        labels[f"Sn of {source}"].append(f"{count:,} ended")
    return {label: " ".join(places) for label, places in labels.items()}


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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

    def shown(text: str) -> str:
        return with_pipeline(str(args.redact(text)), args)

    if args.json:
        traced = {"traceback": args.redact(trace)} if trace else {}
        show_event(events.ending(error, args.subject, shown) | traced)
        return
    sys.stderr.write(args.redact(trace))
    message = f"exactlyonce: {shown(str(error))}"
    to_stderr(wrapped(message, terminal_width()) if sys.stderr.isatty() else message)


def agreed(question: str) -> bool:
    """The answer on the terminal. Raises `ConfigError` without one."""
    if not sys.stdin.isatty():
        raise ConfigError("Nothing was changed: there is no terminal to ask on. Add --yes to agree beforehand.")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
