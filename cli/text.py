"""Tables, labels and wrapped text for people, in a terminal of 80 columns."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

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
