"""Planted defects of coordinators: decisions, recovery, cleaning, savepoints and files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import msgspec
from planting import (
    ABORTED,
    COUNT,
    DISORDER,
    LEFT,
    OPEN,
    RETAKEN,
    STATE,
    SWEPT,
    TWICE,
    UNCOMMITTED,
    UNNAMED,
    in_place_of,
    mutant,
    unchecked,
)

from exactlyonce.checkpoint import decision_log, kept_blocks, leader, requests
from exactlyonce.checkpoint.commits import kafka as kafka_commits
from exactlyonce.checkpoint.coordinator import Coordinator, SavepointRequests
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.events import Refuse, Tick
from exactlyonce.checkpoint.kept_blocks import BlockRetention
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.records import history
from exactlyonce.checkpoint.records.manifest import Manifest, coordinator_id
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import Reached, RemoveBlocks
from exactlyonce.checkpoint.transactions import commit
from exactlyonce.connectors.block_files import FileBlocks, name_of
from exactlyonce.engines.local.job import Job
from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.savepoints import restoring
from exactlyonce.pipeline.errors import StorageUnavailable

# --- the decision ---------------------------------------------------------------------------------------------------


@mutant("commit before the manifest", UNNAMED)
@in_place_of(Leader, "_decide")
def _commit_first(real: Any, self: Any, plan: Any, pinned: Any) -> Any:
    checked = yield from self.transactions.check_uncounted(plan.precommits, plan.ages_ms)
    if not isinstance(checked, Refuse):
        yield from commit.commit(checked)
    return (yield from real(self, plan, pinned))


mutant(
    "a commit does not wait for its markers", UNCOMMITTED + "|" + TWICE + "|" + DISORDER,
    patch.object(commit, "await_markers", lambda committables, *, commit: _nothing(set())), luck="markers", first=6,
)  # fmt: skip


@mutant(
    "zombie coordinators are not fenced",
    r"there are two manifests|checkpoint ids only grow|is decided before|is finalized in its turn|which is tombstoned|"
    r"goes back from",
    luck="zombies", first=3,
)  # fmt: skip
def _no_fence() -> Iterable[Any]:
    numbers = itertools.count()
    yield patch.object(decision_log, "coordinator_id", lambda pipeline: f"{coordinator_id(pipeline)}-{next(numbers)}")


# --- recovery -------------------------------------------------------------------------------------------------------


@mutant("producers are initialised before the decided transactions are committed", RETAKEN)
@in_place_of(Leader, "finish")
def _init_first(real: Any, self: Leader, manifest: Any, expire: Any) -> Any:
    for each in manifest.committables:
        yield requests.InitTransactions(
            transactional_id=each.transactional_id, transaction_timeout_ms=60_000, wait_ms=0
        )
    return (yield from real(self, manifest, expire))


mutant(
    "no sweep of older transactions", SWEPT + "|" + OPEN,
    patch.object(kafka_commits, "sweep", lambda *_, **__: _nothing(0)),
)  # fmt: skip


@mutant("older transactions are swept before the decided ones are committed", ABORTED, first=6)
@in_place_of(Leader, "finish")
def _sweep_first(real: Any, self: Leader, manifest: Any, expire: Any) -> Any:
    yield from self.transactions.sweep()
    return (yield from real(self, manifest, expire))


# --- first runs -----------------------------------------------------------------------------------------------------


@mutant("a run that finds no checkpoint notes the start anew", "there are two manifests", luck="beginnings")
@in_place_of(Leader, "recover", unchecked(history, "Checkpoint ids only grow"))
def _starts_anew(real: Any, self: Leader) -> Any:
    latest = self.log.history.latest
    if latest is not None and latest.checkpoint == 0:
        yield from self._first_manifest()
    return (yield from real(self))


# --- the job ------------------------------------------------------------------------------------------------------


@mutant("a job does not hand over what was acknowledged", LEFT)
@in_place_of(Job, "_heard")
def _not_handed_over(real: Any, self: Job, worker: Any, message: Any) -> None:
    with patch.object(self.leader, "acknowledged", lambda ack: None):
        real(self, worker, message)


# --- the coordinator ------------------------------------------------------------------------------------------------


@mutant("output of aborted checkpoints is not carried", COUNT, luck="carried", first=2)
@in_place_of(Coordinator, "_late")
def _drop_carried(real: Any, self: Coordinator, tick: Tick, now_ms: int) -> Any:
    effects = real(self, tick, now_ms)
    if effects:
        self.attempt.undecided.precommits = []
    return effects


@mutant(
    "a restart does not finish what is decided", r"is decided before the one before it is finalized|" + ABORTED,
    luck="naps", first=131,
)  # fmt: skip
@in_place_of(Leader, "finish", unchecked(history, "Checkpoint "))
def _unfinished_restart(real: Any, self: Leader, *given: Any) -> Any:
    return real(self, *given) if self.attempt == self.config.attempt else _nothing({})


def _nothing(result: Any) -> Any:
    return result
    yield


# --- cleaning ---------------------------------------------------------------------------------------------------------


mutant(
    "recovery looks behind a manifest that is not finalized", LEFT,
    patch.object(kept_blocks, "first_places", lambda history: history.latest.block_end_offsets), first=18,
)  # fmt: skip


@mutant("a finished checkpoint is finalized before its orphans are dropped", LEFT, first=43)
@in_place_of(leader, "finish")
def _finish_drops_nothing(real: Any, *known: Any, **options: Any) -> Any:
    *others, expire = known

    def nothing(manifest: Any) -> Any:
        yield from expire(manifest)
        return (), ()

    return real(*others, nothing, **options)


# --- cancelled runs ---------------------------------------------------------------------------------------------------


@mutant("a cancelled run leaves its transactions open", r"is left Ongoing", luck="cancelled")
@in_place_of(Coordinator, "_cancel")
def _left_open(real: Any, self: Any, request: str, now_ms: int) -> Any:
    effects = real(self, request, now_ms)
    return self._end(None) if effects else []


@mutant(
    "a cancelled run does not finish what is decided",
    r"checkpoint \d+ is condemned before it is known to be committed|a clean end leaves nothing unfinalized",
    luck="cancelled and deleted", first=135,
)  # fmt: skip
@in_place_of(Coordinator, "_restart")
def _unfinished(real: Any, self: Any, reason: str, now_ms: int, *, unfinished: bool = False) -> Any:
    if unfinished and self._ending.cancelled:
        return self._end(None)
    return real(self, reason, now_ms, unfinished=unfinished)


@mutant("a cancelled run condemns its savepoints", r"savepoints .* are condemned", luck="cancelled and deleted")
@in_place_of(Leader, "conclude")
def _savepoints(real: Any, self: Any, cancelled: str = "") -> Any:
    yield from _without_savepoints(real(self, cancelled))


def _without_savepoints(procedure: Any) -> Any:
    answer = None
    while True:
        with patch.object(Manifest, "is_savepoint", False):
            try:
                request = procedure.send(answer)
            except StopIteration as end:
                return end.value
        answer = yield request


# --- savepoints -------------------------------------------------------------------------------------------------------

DROPPED = r"savepoint \d+ is dropped though nobody has deleted it"
SERVED_TWICE = r"request-\d+ is served twice"


@mutant("recovery does not know savepoints", DROPPED, luck="savepoints")
@in_place_of(BlockRetention, "recover")
def _forgotten(real: Any, self: Any, history: Any, incarnation: int) -> Any:
    return _without_savepoints(real(self, history, incarnation))


WHOLE = r"checkpoint \d+ stands on a block of checkpoint \d+"


@mutant("checkpoints are increments where each is to hold all state", WHOLE, luck="whole state")
@in_place_of(Subtask, "__post_init__")
def _increments(real: Any, self: Any) -> None:
    self.incremental = True
    real(self)


mutant(
    "a request that is served is not taken off the list", SERVED_TWICE,
    patch.object(SavepointRequests, "serve", lambda *_: False), luck="savepoints",
)  # fmt: skip


mutant(
    "a restored state lies with the wrong subtask", STATE,
    patch.object(restoring, "subtask_of", lambda group, parallelism, most: 0), luck="from savepoint",
)  # fmt: skip


@mutant("a savepoint is restored without where its sources stood", r"Sn of .* goes back from", luck="from savepoint")
@in_place_of(restoring, "offsets_now")
def _from_the_start(real: Any, saved: Any, around: Any, asked: Any) -> Any:
    return tuple(msgspec.structs.replace(each, offset=0, leader_epoch=-1) for each in saved.offsets)


@mutant("what a restore left that died is not looked for", LEFT, luck="from savepoint")
@in_place_of(BlockRetention, "ends_to_note")
def _not_behind(real: Any, self: Any, checkpoint: int, base: int, *, final: bool) -> Any:
    ends = real(self, checkpoint, base, final=final)
    return (10**9,) * len(ends) if checkpoint == base > 0 else ends


# --- blocks outside of the topic --------------------------------------------------------------------------------------

MISSING = r"is referred to, and is not there"
REMOVED = r"stands on block .*, which is removed"


@mutant("a block that was refused is taken for durable", MISSING, luck="outside")
@in_place_of(FileBlocks, "_put")
def _not_durable(real: Any, self: Any, put: Any) -> Any:
    with suppress(StorageUnavailable):
        self._store.put(str(name_of(put.ref)), put.value, "")
    put.durable = True
    yield from ()


@mutant("files are removed before the decision that drops them", REMOVED, luck="outside", first=1)
@in_place_of(DecisionLog, "_produce")
def _early(real: Any, self: Any, staged: Any) -> Any:
    yield RemoveBlocks(tuple(each for each in staged.dropped if each.storage != TOPIC))
    return (yield from real(self, staged))


@mutant("files that are dropped are not removed", LEFT, luck="outside")
@in_place_of(DecisionLog, "commit")
def _not_removed(real: Any, self: Any) -> Any:
    def answer(request: requests.Request) -> Any:
        return (yield Reached("nothing") if isinstance(request, RemoveBlocks) else request)

    return requests.relayed(real(self), answer)


mutant(
    "nothing is held for a checkpoint that cannot be looked at", REMOVED,
    patch.object(kept_blocks, "may_need", lambda *_: False), unchecked(decision_log, "A block that a manifest names"),
    luck="references not known",
)  # fmt: skip


# --- failures -------------------------------------------------------------------------------------------------------


mutant(
    "a run that fails leaves its transactions open", OPEN,
    patch.object(Leader, "_abort_undecided", lambda self: _nothing(None)), luck="failures",
)  # fmt: skip
