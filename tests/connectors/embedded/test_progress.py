"""The lines about what takes long, and where they go."""

from __future__ import annotations

import io

from exactlyonce.connectors.embedded.progress import Passing, seldom, told_on
from exactlyonce.testing.clock import SimulatedClock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_the_next_line_replaces_a_passing_one() -> None:
    terminal = Terminal()
    tell = told_on(terminal)
    for line in ("begins", Passing("  1 of 2"), Passing("  2 of 2"), "ended"):
        tell(line)
    assert terminal.getvalue() == "\r\x1b[Kbegins\n\r\x1b[K  1 of 2\r\x1b[K  2 of 2\r\x1b[Kended\n"


def test_elsewhere_passing_lines_are_seldom() -> None:
    told = list[str]()
    clock = SimulatedClock()
    tell = seldom(told.append, 5.0, lambda: clock.monotonic_ms() / 1000)
    for line in ("begins", Passing("4"), Passing("8"), Passing("12"), "ended"):
        tell(line)
        clock.advance(4_000)
    assert told == ["begins", "8", "ended"]


def test_a_file_gets_lines() -> None:
    file = io.StringIO()
    told_on(file)("begins")
    assert file.getvalue() == "begins\n"
