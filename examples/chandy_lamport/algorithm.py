"""The Chandy-Lamport algorithm: the part of one process in consistent snapshots of a graph of FIFO channels.

Events in, actions out. Invariants, for each snapshot:

- a process records its state once, at the first marker or when it initiates, whichever comes first;
- its markers go down all outputs in the same breath, so that a marker lies between what was sent before and after;
- the state of an input is what came on it after the process's state was recorded and before the input's marker;
- the process's part is complete once a marker has come on every input.

So a process that receives a message after the marker has recorded its state before, and the receiver records the
messages in flight at the cut: the cut is consistent, and nothing is missing. The initiators must reach every process;
cycles, parallel channels and loops from a process to itself are allowed. Any number of processes may initiate one
snapshot, and any number of snapshots, known by their numbers, may be under way at once.

A marker may overtake messages, as long as it names them: they count as received before it.

K. M. Chandy and L. Lamport, Distributed Snapshots: Determining Global States of Distributed Systems, ACM Transactions
on Computer Systems 3(1), 1985.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exactlyonce.pipeline.errors import require

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Initiate:
    """Begin *snapshot*, unless it has begun already."""

    snapshot: int


@dataclass(frozen=True)
class MessageReceived:
    """The process takes *message* from *channel*, and acts upon it after this event."""

    channel: Hashable
    message: Any


@dataclass(frozen=True)
class MarkerReceived:
    """The marker of *snapshot* has come on *channel*, ahead of the messages *overtaken*, the oldest first."""

    channel: Hashable
    snapshot: int
    overtaken: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Forget:
    """The snapshots below *snapshot* are complete everywhere, and nobody will initiate one of them again."""

    snapshot: int


SnapshotEvent = Initiate | MessageReceived | MarkerReceived | Forget

# --- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordState:
    """Record the present state of the process for *snapshot*."""

    snapshot: int


@dataclass(frozen=True)
class SendMarker:
    """Send the marker of *snapshot* down *channel*, before any further message."""

    snapshot: int
    channel: Hashable


@dataclass(frozen=True)
class Complete:
    """The process's part in *snapshot* is complete: its recorded state, and the in-flight messages by input."""

    snapshot: int
    channels: Mapping[Hashable, tuple[Any, ...]]


SnapshotAction = RecordState | SendMarker | Complete

# --- the algorithm --------------------------------------------------------------------------------------------------


class _Recording:
    """A snapshot with a recorded state: the messages since, on inputs whose marker is awaited."""

    def __init__(self, inputs: Iterable[Hashable]) -> None:
        self.channels: dict[Hashable, list[Any]] = {channel: [] for channel in inputs}
        self.awaited = set(self.channels)


class ChandyLamport:
    """One process. Feed it events; perform its actions in order, before anything else is taken or sent.

    >>> process = ChandyLamport(inputs=["a", "b"], outputs=["c"])
    >>> process.handle(MarkerReceived("a", 1))
    [RecordState(snapshot=1), SendMarker(snapshot=1, channel='c')]
    >>> process.handle(MessageReceived("b", "on its way"))
    []
    >>> process.handle(MarkerReceived("b", 1))
    [Complete(snapshot=1, channels={'a': (), 'b': ('on its way',)})]
    """

    def __init__(self, inputs: Iterable[Hashable], outputs: Iterable[Hashable]) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._recordings: dict[int, _Recording] = {}
        self._complete: set[int] = set()
        self._forgotten_below = 0

    @property
    def under_way(self) -> list[int]:
        """The snapshots that have begun here and are not complete, in the order of their beginnings."""
        return list(self._recordings)

    def handle(self, event: SnapshotEvent) -> list[SnapshotAction]:
        """Take *event* and return the actions to perform, in order."""
        match event:
            case MessageReceived(channel, message):
                self._message(channel, message)
                return []
            case Initiate(snapshot):
                return self._begin(snapshot) + self._end(snapshot)
            case MarkerReceived(channel, snapshot, overtaken):
                return self._marker(channel, snapshot, overtaken) + self._end(snapshot)
            case Forget(snapshot):
                self._forget(snapshot)
                return []

    def _begin(self, snapshot: int) -> list[SnapshotAction]:
        """Record the state and send the markers, unless that is done."""
        require(snapshot >= self._forgotten_below, f"snapshot {snapshot} was said to be complete everywhere")
        if snapshot in self._recordings or snapshot in self._complete:
            return []
        self._recordings[snapshot] = _Recording(self.inputs)
        return [RecordState(snapshot), *(SendMarker(snapshot, channel) for channel in self.outputs)]

    def _message(self, channel: Hashable, message: Any) -> None:
        """Record *message* in every snapshot with a recorded state and no marker yet from *channel*."""
        require(channel in self.inputs, f"a message comes on an input, and {channel!r} is none")
        for recording in self._recordings.values():
            if channel in recording.awaited:
                recording.channels[channel].append(message)

    def _marker(self, channel: Hashable, snapshot: int, overtaken: Iterable[Any]) -> list[SnapshotAction]:
        """End the recording of a channel; messages that its marker has overtaken belong to it."""
        require(channel in self.inputs, f"a marker comes on an input, and {channel!r} is none")
        actions = self._begin(snapshot)
        awaited = snapshot in self._recordings and channel in self._recordings[snapshot].awaited
        require(awaited, f"one marker of snapshot {snapshot} comes on channel {channel!r}, not two")
        self._recordings[snapshot].channels[channel].extend(overtaken)
        self._recordings[snapshot].awaited.remove(channel)
        return actions

    def _end(self, snapshot: int) -> list[SnapshotAction]:
        """Complete *snapshot* once no marker is awaited."""
        recording = self._recordings.get(snapshot)
        if recording is None or recording.awaited:
            return []
        del self._recordings[snapshot]
        self._complete.add(snapshot)
        return [Complete(snapshot, {channel: tuple(kept) for channel, kept in recording.channels.items()})]

    def _forget(self, snapshot: int) -> None:
        early = [recording for recording in self._recordings if recording < snapshot]
        require(not early, f"snapshots {early} are not complete here, and so not everywhere")
        self._forgotten_below = max(self._forgotten_below, snapshot)
        self._complete = {complete for complete in self._complete if complete >= snapshot}
