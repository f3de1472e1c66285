"""Notes of a subtask for people: lines, and faults that repeat.

Invariant: of a fault that repeats, with a thousand records a second perhaps, one record is named at once. The others
are one line with their number, from time to time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from exactlyonce.pipeline.durations import shown_duration

REPEATED_INTERVAL_S = 30.0
"""The least time between two lines about the same fault."""

Repeated = dict[str, tuple[int, str]]
"""By fault, the number of records, and the last one."""


@dataclass
class Notes:
    """The notes of a subtask since they were taken.

    >>> notes = Notes()
    >>> notes.add("paused")
    >>> notes.repeat("skipped: source 'a'", lambda: "in[0] offset 7 is no JSON")
    >>> notes.repeat("skipped: source 'a'", lambda: "in[0] offset 9 is no JSON", records=2)
    >>> notes.take_lines()
    ['paused', "skipped: source 'a': 3 records, the last: in[0] offset 9 is no JSON"]
    """

    _plain: list[str] = field(default_factory=list)
    _repeated: dict[str, tuple[int, Callable[[], str]]] = field(default_factory=dict)

    def add(self, line: str) -> None:
        self._plain.append(line)

    def repeat(self, fault: str, record: Callable[[], str], records: int = 1) -> None:
        """Note so many more *records* with a *fault*, as "dead letter: operator 'a'". *record* says which the last of
        them is, and why; it is called only if no other one comes after it."""
        count, _ = self._repeated.get(fault, (0, record))
        self._repeated[fault] = count + records, record

    def take(self) -> tuple[list[str], Repeated]:
        """The lines, and the faults that repeat."""
        plain, self._plain = self._plain, []
        repeated, self._repeated = self._repeated, {}
        return plain, {fault: (count, record()) for fault, (count, record) in repeated.items()}

    def take_lines(self) -> list[str]:
        """All of it as lines."""
        plain, repeated = self.take()
        return [*plain, *(_line(fault, count, record) for fault, (count, record) in repeated.items())]


class RepeatedNotes:
    """Adds up the faults that subtasks repeat, of all workers and attempts of a run.

    >>> told = []
    >>> notes = RepeatedNotes(told.append)
    >>> for now_s in (0, 1, 5, 40):
    ...     notes.add({"skipped: source 'a'": (1, f"in[0] offset {now_s}")}, now_s)
    >>> told
    ["skipped: source 'a': in[0] offset 0", "skipped: source 'a': 3 records in 40.0 s, the last: in[0] offset 40"]
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._since_s: dict[str, float] = {}
        """By fault, the time of its last line."""
        self._untold: Repeated = {}

    def add(self, repeated: Repeated, now_s: float) -> None:
        """Add what one subtask has taken at *now_s*, in seconds of a monotonic clock; say what is due."""
        for fault, (count, record) in repeated.items():
            if fault not in self._since_s:
                self._since_s[fault] = now_s
                self._note(_line(fault, count, record))
                continue
            before, _ = self._untold.get(fault, (0, ""))
            self._untold[fault] = before + count, record
        self.look(now_s)

    def look(self, now_s: float) -> None:
        """Say what is due at *now_s*."""
        self._tell(now_s, REPEATED_INTERVAL_S)

    def flush(self, now_s: float) -> None:
        """Say all that is not said yet."""
        self._tell(now_s, 0.0)

    def _tell(self, now_s: float, pause_s: float) -> None:
        for fault, (count, record) in [*self._untold.items()]:
            elapsed_s = now_s - self._since_s[fault]
            if elapsed_s >= pause_s:
                del self._untold[fault]
                self._since_s[fault] = now_s
                self._note(_line(fault, count, record, f" in {shown_duration(round(1000 * elapsed_s))}"))


def _line(fault: str, count: int, record: str, when: str = "") -> str:
    """A line about *count* records with a *fault*; *record* is the last of them."""
    return f"{fault}: {record}" if count == 1 else f"{fault}: {count:,} records{when}, the last: {record}"
