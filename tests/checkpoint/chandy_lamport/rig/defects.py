"""Planted defects: each leaves out a rule of the algorithm or of its channels; the checker finds the named flaws."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from network import AtOnce, Graph, Link, Network, Payment
from schedules import Make, under

from exactlyonce.checkpoint.chandy_lamport.algorithm import (
    ChandyLamport,
    Initiate,
    MarkerReceived,
    RecordState,
    SendMarker,
    SnapshotAction,
    SnapshotEvent,
)
from exactlyonce.checkpoint.chandy_lamport.cuts import Flaw

# --- of the algorithm -----------------------------------------------------------------------------------------------


class NothingRecorded(ChandyLamport):
    def _message(self, channel: Any, message: Any) -> None:
        pass


class StoppedLate(ChandyLamport):
    def _message(self, channel: Any, message: Any) -> None:
        for recording in self._recordings.values():
            recording.channels[channel].append(message)


class OneForAll(ChandyLamport):
    def _message(self, channel: Any, message: Any) -> None:
        if all(channel in recording.awaited for recording in self._recordings.values()):
            super()._message(channel, message)


class StoppedEarly(ChandyLamport):
    def handle(self, event: SnapshotEvent) -> list[SnapshotAction]:
        if isinstance(event, MarkerReceived) and event.snapshot in self._complete:
            return []
        if isinstance(event, MarkerReceived) and event.snapshot in self._recordings:
            self._recordings[event.snapshot].awaited.intersection_update({event.channel})
        return super().handle(event)


class NobodyElse(ChandyLamport):
    def handle(self, event: SnapshotEvent) -> list[SnapshotAction]:
        if isinstance(event, MarkerReceived) and event.snapshot in self._complete:
            return []
        begins = isinstance(event, Initiate) and event.snapshot not in self._recordings
        actions = super().handle(event)
        if begins and isinstance(event, Initiate) and event.snapshot in self._recordings:
            self._recordings[event.snapshot].awaited.clear()
            actions += self._end(event.snapshot)
        return actions


class Again(ChandyLamport):
    def handle(self, event: SnapshotEvent) -> list[SnapshotAction]:
        again = isinstance(event, MarkerReceived) and event.snapshot in self._recordings
        actions = super().handle(event)
        return [RecordState(event.snapshot), *actions] if again and isinstance(event, MarkerReceived) else actions


class NotForwarded(ChandyLamport):
    def handle(self, event: SnapshotEvent) -> list[SnapshotAction]:
        actions = super().handle(event)
        return [each for each in actions if isinstance(event, Initiate) or not isinstance(each, SendMarker)]


class NewestFirst(ChandyLamport):
    def _marker(self, channel: Any, snapshot: int, overtaken: Any) -> list[SnapshotAction]:
        return super()._marker(channel, snapshot, reversed(overtaken))


# --- of the channels ------------------------------------------------------------------------------------------------


class MarkerAfterAMessage(Network):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._late: dict[Link, list[int]] = defaultdict(list)

    def send_marker(self, link: Link, snapshot: int) -> None:
        self._late[link].append(snapshot)

    def pay(self, link: Link, amount: int) -> None:
        super().pay(link, amount)
        self._send(link)

    def drain(self) -> None:
        while any(self._late.values()) or self.takeable:
            for link in self.graph.links:
                self._send(link)
            super().drain()

    def _send(self, link: Link) -> None:
        for snapshot in self._late.pop(link, []):
            super().send_marker(link, snapshot)


class MarkerFirst(Network):
    def take_marker(self, link: Link, snapshot: int, overtaken: tuple[Payment, ...]) -> None:
        super().take_marker(link, snapshot, ())


class MessagesFirst(Network):
    def take(self, link: Link) -> None:
        queue = self.queues[link]
        payment = next((item for item in queue if isinstance(item, Payment)), None)
        if payment is not None:
            queue.remove(payment)
            queue.appendleft(payment)
        super().take(link)


class FirstInitiatorOnly(Network):
    def initiate(self, process: int, snapshot: int) -> None:
        if not self.positions[snapshot]:
            super().initiate(process, snapshot)


class Defect(NamedTuple):
    """A planted defect, and the flaws by which it shows, all of them, over many schedules."""

    make: Make
    flaws: set[Flaw]


DEFECTS = {
    "a marker is sent after a message": Defect(MarkerAfterAMessage, {Flaw.SENT_AFTER, Flaw.UNSENT}),
    "a marker overtakes and names nothing": Defect(MarkerFirst, {Flaw.LOST}),
    "messages overtake a marker": Defect(MessagesFirst, {Flaw.SENT_AFTER, Flaw.UNSENT}),
    "the second initiator is ignored": Defect(FirstInitiatorOnly, {Flaw.NO_STATE}),
    "channels are not recorded": Defect(under(AtOnce, NothingRecorded), {Flaw.LOST}),
    "recording is stopped early": Defect(under(AtOnce, StoppedEarly), {Flaw.LOST}),
    "recording is stopped late": Defect(under(AtOnce, StoppedLate), {Flaw.UNSENT, Flaw.TWICE}),
    "one marker counts for all snapshots": Defect(under(AtOnce, OneForAll), {Flaw.LOST}),
    "an initiator takes its inputs for empty": Defect(under(AtOnce, NobodyElse), {Flaw.LOST}),
    "the state is recorded anew": Defect(under(AtOnce, Again), {Flaw.LOST, Flaw.RECEIVED_TOO, Flaw.SENT_AFTER}),
    "markers are not forwarded": Defect(under(AtOnce, NotForwarded), {Flaw.NO_STATE, Flaw.LOST, Flaw.SENT_AFTER}),
    "what is overtaken is recorded newest first": Defect(under(AtOnce, NewestFirst), {Flaw.OUT_OF_ORDER}),
}
"""Defects by name."""
