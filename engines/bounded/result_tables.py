"""Results of bounded work as HTML, for notebooks: a sentence and small tables, with all text escaped. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import islice

ROWS_MAX = 50
"""The most rows of a table; a last row counts the others."""


def html_result(sentence: str, *tables: str) -> str:
    """A result in HTML: *sentence*, then *tables*.

    >>> html_result("a < b")
    '<div><p>a &lt; b</p></div>'
    """
    return f"<div><p>{escape(sentence)}</p>{''.join(tables)}</div>"


def html_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a head, of at most `ROWS_MAX` rows; numbers are aligned and have separators, None is empty.

    >>> html_table(["topic"], [])
    ''
    """
    if not rows:
        return ""
    return f"<table><thead>{_row('th', columns)}</thead><tbody>{''.join(_body(rows, len(columns)))}</tbody></table>"


def html_details(summary: str, table: str) -> str:
    """*table* below a line that opens it; empty if *table* is."""
    return f"<details><summary>{escape(summary)}</summary>{table}</details>" if table else ""


def _body(rows: Sequence[Sequence[object]], width: int) -> Iterator[str]:
    yield from (_row("td", row) for row in islice(rows, ROWS_MAX))
    if len(rows) > ROWS_MAX:
        yield f'<tr><td colspan="{width}">and {len(rows) - ROWS_MAX:,} more</td></tr>'


def _row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(_cell(tag, cell) for cell in cells)}</tr>"


def _cell(tag: str, cell: object) -> str:
    if isinstance(cell, int):
        return f'<{tag} style="text-align: right">{cell:,}</{tag}>'
    return f'<{tag} style="text-align: left">{escape("" if cell is None else str(cell))}</{tag}>'
