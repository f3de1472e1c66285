"""The base of what says, as data, how an operator keeps its state by time: a window, a join, a set of timers.

The engine makes the operator by the class of it, and all refusals and descriptions go by its facts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from exactlyonce.pipeline.durations import write_durations


class Timed(ABC):
    """How an operator keeps its state by time: a frozen dataclass."""

    def __post_init__(self) -> None:
        write_durations(self)

    @property
    def by_key(self) -> bool:
        """Whether the operator asks for the slots of a key."""
        return False

    @property
    def needs_times(self) -> bool:
        """Whether all of its records must have event times."""
        return True

    @property
    def has_clock(self) -> bool:
        """Whether it goes by the clock, too. Its results then depend on the run."""
        return False

    @property
    @abstractmethod
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""

    def state_of(self, entry: Any) -> Any:
        """The type of the state that the user's function has, in what is kept as *entry*."""
        return entry

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What its slots stand for, by name, with sizes in ms. State of another meaning is not read as this."""

    @abstractmethod
    def __str__(self) -> str:
        """It in a line, for `explain`."""
