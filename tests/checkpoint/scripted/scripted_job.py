"""A coordinator that a script drives: a line is an event, and after its arrow stands all that follows from it.

    deciding
    failed a worker died
    +500 tick
    finalized 1 -> announce 1 & restart 1 after 70: a worker died

A number before an event is its time in milliseconds, and `+500` counts from the line before. A line that begins with
an arrow continues the one above. `...` in an effect stands for any text. The first line may give settings of the `job`.
`running`, `triggered` and `deciding` are all events that lead there; `done 1` is `ack 1` and `finalized 1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import pytest
from blank_manifest import blank_manifest

from exactlyonce.checkpoint import events
from exactlyonce.checkpoint.coordinator import NEVER_MS, Coordinator
from exactlyonce.checkpoint.events import Decided, Refuse, Unresolved
from exactlyonce.checkpoint.records.manifest import ChannelLog, Manifest, Precommit, StagedAck, StoreCommittable
from exactlyonce.checkpoint.settings import CheckpointSettings, restart_strategy
from exactlyonce.pipeline import errors

INTERVAL_MS, TIMEOUT_MS = 1_000, 5_000
PRODUCERS = 9
"""How many each sink subtask has when a job runs, unless a script says it."""


def manifest(checkpoint: int = 0, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {"base": 0, "previous": 0, "fingerprint": "f", "parallelism": 2, "block_partitions": 4}
    return blank_manifest(checkpoint=checkpoint, **fields | changes)


def precommit(checkpoint: int, subtask: int = 0, open_ms: int = 0) -> Precommit:
    return Precommit(
        transactional_id=f"id-{checkpoint}-{subtask}", producer_id=7, epoch=0, sink="out", subtask=subtask,
        checkpoint=checkpoint, records=3, open_ms=open_ms,
    )  # fmt: skip


class ScriptedJob:
    """A coordinator of two subtasks, and of so many transactional *sinks*."""

    def __init__(
        self, *, sinks: int = 0, restart: str = "", loops: bool = False, staging: bool = False, **settings: Any
    ) -> None:
        asked = CheckpointSettings(**{"interval_ms": INTERVAL_MS, "timeout_ms": TIMEOUT_MS, **settings})
        if restart == "none":
            strategy = restart_strategy("none")
        else:
            strategy = restart_strategy("fixed_delay", attempts=int(restart or 10), delay_ms=70)
        self.sinks = range(sinks)
        writers = {("out", subtask) for subtask in self.sinks}
        self.core = Coordinator(asked, strategy, {("task", 0), ("task", 1)}, writers, loops=loops, staging=staging)
        self.now_ms = 0
        self.plan: events.PendingCheckpoint | None = None
        """The checkpoint to be decided."""
        self.decided: dict[int, Manifest] = {}

    def __call__(self, event: events.Event) -> list[events.Effect]:
        effects = self.core.handle(event, self.now_ms)
        self.plan = next((each.plan for each in effects if isinstance(each, events.Decide)), self.plan)
        return effects

    def do(self, line: str) -> list[str]:
        time, word, rest = re.fullmatch(r"(?:(\+?\d+) )?(\w+) ?(.*)", line).groups()  # type: ignore[union-attr]  # or it is no line
        if time:
            self.now_ms = int(time) + (self.now_ms if time[0] == "+" else 0)
        if word in QUERIES:
            return [QUERIES[word](self.core)]
        try:
            return [shown(each) for each in getattr(self, f"_{word}")(*rest.split())]
        except errors.InvariantViolation:
            return ["violation"]

    # --- ways to a state ----------------------------------------------------------------------------------------------

    def _running(self, *options: str) -> list[events.Effect]:
        """`running`, `running from 3`, `running with 1`: after a restart, too."""
        named = dict(zip(options[::2], options[1::2], strict=True))
        self._recovered(named.get("from", "0"))
        self._granted(*map(str, [*self.sinks] * int(named.get("with", PRODUCERS))))
        return self(events.Deployed())

    def _triggered(self, *options: str) -> list[events.Effect]:
        self._running(*options)
        self.now_ms += INTERVAL_MS
        assert isinstance(self(events.Tick())[-1], events.Trigger)
        return []

    def _deciding(self, *options: str) -> list[events.Effect]:
        self._triggered(*options)
        assert isinstance(self._ack(str(self.core.attempt.in_flight[-1].checkpoint))[-1], events.Decide)
        return []

    def _done(self, checkpoint: str) -> list[events.Effect]:
        effects = [*self._ack(checkpoint), *self._finalized(checkpoint)]
        others: list[events.Effect] = [each for each in effects if not isinstance(each, events.Decide)]
        assert len(others) == len(effects) - 1, "the checkpoint is decided at once, and no other after it"
        return others

    # --- events -------------------------------------------------------------------------------------------------------

    def _tick(self, *why: str) -> list[events.Effect]:
        """`tick worker 0 hangs | x is slow`"""
        hanging, _, slow = " ".join(why).partition("|")
        return self(events.Tick(hanging.strip(), slow.strip()))

    def _recovered(self, checkpoint: str, *serving: str) -> list[events.Effect]:
        """`recovered 7`, `recovered 7 serving a`"""
        kind: dict[str, Any] = {"kind": "savepoint", "requests": serving[1:]} if serving else {}
        known = self.decided.get(int(checkpoint))
        timeout_ms = self.core.settings.transaction_timeout_ms
        return self(events.Recovered(known or manifest(int(checkpoint), **kind), timeout_ms))

    def _deployed(self) -> list[events.Effect]:
        return self(events.Deployed())

    def _granted(self, *subtasks: str) -> list[events.Effect]:
        """A producer for each of the sink's *subtasks*."""
        return [effect for each in subtasks for effect in self(events.ProducerGranted("out", int(each)))]

    def _ack(self, checkpoint: str, *more: str) -> list[events.Effect]:
        """`ack 1`, `ack 1 by 0`, `ack 1 by 0 with 0 1` precommits of these sinks; then `going-on`, `staging`,
        `declined <why>`."""
        words, extra = [*more], dict[str, Any]()
        if words[-1:] == ["going-on"]:
            words, extra["goes_on"] = words[:-1], True
        if "declined" in words:
            place = words.index("declined")
            words, extra["declined"] = words[:place], " ".join(words[place + 1 :])
        if words[-1:] == ["staging"]:
            row = StoreCommittable(sink="db", subtask=0, checkpoint=int(checkpoint), records=3, kind="rows")
            words, extra["staged"] = words[:-1], (StagedAck(row),)
        if "with" in words:
            place = words.index("with")
            words, extra["precommits"] = (
                words[:place],
                tuple(precommit(int(checkpoint), int(each)) for each in words[place + 1 :]),
            )
        subtasks = words[1:] or ["0", "1"]
        acks = (events.Ack("task", int(each), int(checkpoint), **extra) for each in subtasks)
        return [effect for each in acks for effect in self(events.Acknowledged(each))]

    def _finalized(self, checkpoint: str, **changes: Any) -> list[events.Effect]:
        decision = manifest(int(checkpoint), **changes)
        if self.plan is not None and self.plan.requests:
            decision = msgspec.structs.replace(decision, kind="savepoint", requests=self.plan.requests)
        self.decided[int(checkpoint)] = decision
        return self(events.Concluded(int(checkpoint), Decided(decision)))

    def _looping(self, checkpoint: str) -> list[events.Effect]:
        """Finalized, and records were on their way in a loop, or were overtaken."""
        return self._finalized(checkpoint, channel_logs=(ChannelLog("task", 0, 3, ()),))

    def _unsettled(self, checkpoint: str) -> list[events.Effect]:
        """The manifest is durable, but the broker refused a commit."""
        requests = self.plan.requests if self.plan else ()
        self.decided[int(checkpoint)] = manifest(int(checkpoint), requests=requests)
        verdict = Decided(self.decided[int(checkpoint)], unsettled={"id": "refused"})
        return self(events.Concluded(int(checkpoint), verdict))

    def _refused(self, checkpoint: str, *why: str) -> list[events.Effect]:
        return self(events.Concluded(int(checkpoint), Refuse(" ".join(why))))

    def _unresolved(self, checkpoint: str) -> list[events.Effect]:
        return self(events.Concluded(int(checkpoint), Unresolved(int(checkpoint))))

    def _failed(self, *why: str) -> list[events.Effect]:
        """`failed a worker died`, `failed Halt: no`"""
        kind, _, text = " ".join(why).partition(": ")
        error = getattr(errors, kind)(text) if text else None
        return self(events.Failed(text or kind, error))

    def _uncounted(self, *why: str) -> list[events.Effect]:
        return self(events.Failed(" ".join(why), counts=False))

    def _finished(self) -> list[events.Effect]:
        return self(events.SourcesFinished())

    def _stop(self) -> list[events.Effect]:
        return self(events.Stop())

    def _cancel(self, request: str) -> list[events.Effect]:
        return self(events.CancelAsked(request))

    def _savepoint(self, request: str, *stop: str) -> list[events.Effect]:
        """`savepoint a`, `savepoint a stop`"""
        return self(events.SavepointAsked(request, stop=bool(stop)))

    def _full(self, worker: str) -> list[events.Effect]:
        return self(events.Room(int(worker), has_room=False))

    def _room(self, worker: str) -> list[events.Effect]:
        return self(events.Room(int(worker), has_room=True))


QUERIES: dict[str, Callable[[Coordinator], str]] = {
    "wake": lambda core: "never" if core.wake_ms == NEVER_MS else str(core.wake_ms),
    "pinned": lambda core: " ".join(map(str, sorted(core.pinned))),
    "flying": lambda core: " ".join(str(each.checkpoint) for each in core.attempt.in_flight) or "none",
    "newest": lambda core: str(core.manifest.checkpoint if core.manifest else None),
    "state": lambda core: core.state.value,
    "stopping": lambda core: "yes" if core.stopping else "no",
}
"""The questions that a script may ask."""


def shown(effect: events.Effect) -> str:
    match effect:
        case events.Trigger(checkpoint, base, final, savepoint, after_ms):
            overtakes = "" if after_ms is None else f" overtakes after {after_ms}"
            return f"trigger {checkpoint} on {base}{' final' * final}{' savepoint' * savepoint}{overtakes}"
        case events.Decide(plan):
            parts: dict[str, Sequence[object]] = {
                "after": [plan.previous] * (plan.previous != plan.base),
                "with": [each.transactional_id for each in plan.precommits],
                "staged": [each.committable.checkpoint for each in plan.staged],
                "for": plan.requests,
            }
            more = "".join(f" {word} {' '.join(map(str, part))}" for word, part in parts.items() if part)
            return f"decide {plan.checkpoint} on {plan.base}{' final' * plan.final}{more}"
        case events.AnnounceFinalized(checkpoint):
            return f"announce {checkpoint}"
        case events.Hold(held):
            return "hold" if held else "go on"
        case events.Restart(attempt, delay_ms, reason):
            return f"restart {attempt} after {delay_ms}" + (f": {reason}" if reason else "")
        case events.Deploy(attempt, made):
            return f"deploy {attempt} from {made.checkpoint}"
        case events.End(made, error, cancelled, short):
            at = "nothing" if made is None else made.checkpoint
            if cancelled:
                return f"end at {at} cancelled by {cancelled}"
            return f"end at {at}" + (f": {type(error).__name__} {error}" if error else f" short: {short}" * bool(short))
        case events.Note(text):
            return f"note {text}"


def play(script: str) -> None:
    steps: list[tuple[str, list[str]]] = []
    for line in script.splitlines():
        event, _, effects = line.partition("->")
        if event.strip():
            steps.append((event.strip(), []))
        steps[-1][1].extend(each.strip() for each in effects.split(" & ") if each.strip())
    options = dict[str, Any]()
    if steps[0][0].startswith("job"):
        for each in steps.pop(0)[0].split()[1:]:
            name, _, value = each.partition("=")
            options[name] = int(value) if value.isdigit() and name != "restart" else value or True
    job = ScriptedJob(**options)
    for event, expected in steps:
        following = job.do(event)
        fits = [_fits(*pair) for pair in zip_longest(expected, following, fillvalue="nothing")]
        if not all(fits):
            wanted, others = ("".join(f"\n    -> {each}" for each in some) for some in (expected, following))
            pytest.fail(f"{event}{wanted}\nwas expected; what follows is{others}", pytrace=False)


def _fits(expected: str, effect: str) -> bool:
    return re.fullmatch(re.escape(expected).replace(r"\.\.\.", ".*"), effect) is not None


def scripts(text: str) -> pytest.MarkDecorator:
    """Parametrizes `script` with those in *text*: an empty line is between two, and each begins with its title."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        title = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
        body = "\n".join(line for line in lines if not line.startswith("#"))
        found.append(pytest.param(body, id=title.partition(":")[0].rstrip(".")))
    return pytest.mark.parametrize("script", found)
