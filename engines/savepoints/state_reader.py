"""The state of a pipeline by key at its newest checkpoint, asked again and again, from any process.

Invariants: one answer is of one checkpoint, which was decided, so that nothing undoes it; no later answer is of an
earlier one, unless the pipeline was reset. A key group that was read is kept while there is room, and brought to the
next checkpoint by the blocks of that alone. The running pipeline is not disturbed. Any thread may call.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from threading import Event, Lock, RLock
from typing import Any, NamedTuple

from exactlyonce.checkpoint.block_storage import BlockStorage, DamagedBlock
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, TopicInfo
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import Storages
from exactlyonce.engines.configuration import client_from, read_file
from exactlyonce.engines.savepoints.contents import KeptEntry, KeptState, kept_state, schema_of_keys
from exactlyonce.engines.savepoints.retained import choose_checkpoint
from exactlyonce.engines.savepoints.shown_state import KeyView, key_views
from exactlyonce.pipeline.durations import Duration, duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_WATERMARK
from exactlyonce.pipeline.keys import canonical_key, described_forms, holds_keys, key_forms_of, key_group
from exactlyonce.pipeline.sizes import Size, byte_count
from exactlyonce.state.chain import Chain, Index, IndexHead
from exactlyonce.state.slots import key_of, unpacked_slot
from exactlyonce.state.state_type import RawState

LOOK_S = 0.1
"""A checkpoint is known so long after it was decided, or sooner."""
ENTRY_BYTES = 250
"""What an entry takes in memory beside its key and its state."""
MEMORY_BYTES = 512 << 20
BLOCKS_BYTES = 64 << 20
"""The most that stays of fetched blocks."""
KNOWN_S = 1.0
"""An answer is at hand if the newest checkpoint was looked for no longer ago."""
NO_SLOT = END_OF_TIME + 1


class NotAtHand(Exception):
    """An answer has to be read or waited for."""


class Found(NamedTuple):
    """An answer, of one checkpoint."""

    pipeline: str
    operator: str
    checkpoint: int
    completed_at_ms: int
    timed: bool
    """Whether the operator keeps states by time: then they are `TimedKeyView`, maybe several of a key."""
    states: list[KeyView]
    """In the order of the keys; a key without a state is left out."""


@dataclass
class _KeptGroup:
    """The states of a key group, which an old subtask had."""

    refs: tuple[BlockRef, ...] = ()
    """The blocks in which they lie."""
    states: defaultdict[int, dict[bytes, RawState]] = field(default_factory=lambda: defaultdict(dict))
    """By slot, `NO_SLOT` in a table without any, and key."""
    size: int = 0
    """About the bytes that they take in memory."""

    def take(self, subtask: _Subtask, group: int, changes: Mapping[bytes, RawState | None]) -> None:
        """Go on to the checkpoint of *subtask*, with *changes* since the last one; *group* is this one."""
        self.refs, timed = subtask.refs(group), subtask.head.times is not None
        for place, state in changes.items():
            slot, key = (unpacked_slot(place), key_of(place)) if timed else (NO_SLOT, place)
            self._weigh(key, self.states[slot].pop(key, None), -1)
            if state is not None:
                self.states[slot][key] = state
                self._weigh(key, state, 1)
        floor = subtask.floors.get(group, NO_WATERMARK)
        for slot in [slot for slot in self.states if slot <= floor]:
            for key, gone in self.states.pop(slot).items():
                self._weigh(key, gone, -1)

    def _weigh(self, key: bytes, state: RawState | None, sign: int) -> None:
        if state is not None:
            self.size += sign * (len(key) + len(state.msgpack) + ENTRY_BYTES)

    def entries(self, group: int, key: bytes | None = None) -> Iterator[KeptEntry]:
        """The states of *key*, or all, by slot."""
        for slot, states in sorted(self.states.items(), key=itemgetter(0)):
            own = None if slot == NO_SLOT else slot
            for each in states if key is None else (key,) if key in states else ():
                yield KeptEntry(group, each, states[each].msgpack, states[each].version, own)


class _Subtask(NamedTuple):
    """What an old subtask had of an operator."""

    kept: KeptState
    indexes: list[Index]
    chain: Chain
    floors: Mapping[int, int]
    """By key group: slots up to here are forgotten."""

    @property
    def head(self) -> IndexHead:
        return self.indexes[0].head

    def refs(self, group: int) -> tuple[BlockRef, ...]:
        """The blocks that *group* needs."""
        return tuple(block.ref for block, _ in self.chain.needed(1 << group))


Subtasks = dict[int, _Subtask]
"""Those with state of an operator, by number."""
Place = tuple[str, int, int]
"""Operator, old subtask, key group."""


@dataclass
class OperatorKeys:
    """What the keys of an operator are."""

    schema: Any
    """As it was noted, or derived from the keys; None: unknown."""
    _held: dict[int, bool] = field(default_factory=dict)
    """By the form of a key."""

    def may_have(self, key: bytes) -> bool:
        """Whether canonical *key* is of their type."""
        form = key_forms_of([key])
        if form not in self._held:
            self._held[form] = holds_keys(self.schema, described_forms(form))
        return self._held[form]


@dataclass
class _At:
    """One checkpoint."""

    manifest: Manifest
    operators: dict[str, Subtasks] = field(default_factory=dict)
    """Those that were asked for."""
    keys: dict[str, OperatorKeys] = field(default_factory=dict)
    """Their `StateReader.keys`."""


@dataclass
class _RecentBlocks:
    """Blocks that were fetched lately: each holds a part of many key groups."""

    storage: BlockStorage
    _bodies: OrderedDict[BlockRef, Block] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        known = {ref: self._bodies[ref] for ref in refs if ref in self._bodies}
        yield from known.items()
        for ref, block in self.storage.fetch([ref for ref in refs if ref not in known]):
            self._bodies[ref] = block
            self._bytes += ref.size
            while self._bytes > BLOCKS_BYTES:
                self._bytes -= self._bodies.popitem(last=False)[0].size
            yield ref, block


class AtHand:
    """What a reader knows and keeps, asked as the reader itself: it waits for nothing, and raises `NotAtHand`."""

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader

    def reach(self, checkpoint: int, timeout: Duration) -> None:
        reader = self._reader
        is_known = time.monotonic() - reader._looked_s <= KNOWN_S
        if not is_known or reader._now is None or reader._now.manifest.checkpoint < checkpoint:
            raise NotAtHand

    def find(self, operator: str, keys: Iterable[bytes]) -> Found:
        reader = self._reader
        with reader._swap:
            answer = reader._answer(operator, keys)
        if answer is None:
            raise NotAtHand
        return reader._found(operator, *answer)

    def scan(self, operator: str) -> Iterator[Found]:
        raise NotAtHand

    def keys(self, operator: str) -> OperatorKeys:
        if (at := self._reader._now) is None or operator not in at.operators:
            raise NotAtHand
        return self._reader._keys(at, operator)


class StateReader:
    """Reads the state of *pipeline* by key: ``StateReader("order-totals").get("totals", "ann")``.

    - *memory*: for key groups that were read, 512 MiB unless it is said. Those that nobody asked for lately are read
      again when they are wanted.
    - *bootstrap_servers*, *kafka*, *config*: as of `Pipeline.run`.

    Close it, or use it in a ``with``. Any thread may call it. Source: Kafka Streams' interactive queries.
    """

    def __init__(
        self, pipeline: str, *, memory: Size = MEMORY_BYTES, bootstrap_servers: str | None = None,
        kafka: Mapping[str, str] | None = None, config: str | Path | None = None,
    ) -> None:  # fmt: skip
        client = client_from({"bootstrap_servers": bootstrap_servers, "kafka": kafka}, read_file(config))
        client.check()
        self._begin(client, pipeline, byte_count(memory, "memory"))

    @classmethod
    def of(cls, client: ClientConfig, pipeline: str, memory_bytes: int) -> StateReader:
        """A reader with the settings of *client*."""
        reader = cls.__new__(cls)
        reader._begin(client, pipeline, memory_bytes)
        return reader

    def _begin(self, client: ClientConfig, pipeline: str, memory_bytes: int) -> None:
        self.pipeline, self._client, self._memory_bytes = pipeline, client, memory_bytes
        self._log = LogFollower(client, pipeline)
        self._topic: TopicInfo | None = None
        self._storages: Storages | None = None
        self._recent: dict[str, _RecentBlocks] = {}
        self._reading = RLock()
        """Of the thread that asks brokers and storages, or changes what is kept."""
        self._swap = Lock()
        """For `_now`, `_kept` and the states in it; nobody is waited for meanwhile."""
        self._now: _At | None = None
        self._kept: OrderedDict[Place, _KeptGroup] = OrderedDict()
        """The last one was asked for last."""
        self._looked_s = float("-inf")
        self._closed = Event()

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections, and what waits."""
        self._closed.set()
        with self._reading:
            self._log.close()
            if self._storages is not None:
                self._storages.close()

    # --- questions ----------------------------------------------------------------------------------------------------

    def get(self, operator: str, key: Any, *, min_checkpoint: int = 0, timeout: Duration = "30s") -> Any:
        """The state of *key*, or None; of an operator that keeps it by time, as windows, a list of `TimedKeyView`.

        A state is plain values: a record is a dict. *key* has the type that ``key_by`` gives. With *min_checkpoint* it
        waits until that checkpoint is complete, for *timeout* at most.

        Raises `ConfigError` for a pipeline without a checkpoint, an operator without state, and a key of another type
        than its keys, TimeoutError, and
        `BrokerUnavailable` while no broker answers.
        """
        self.reach(min_checkpoint, timeout)
        canonical, keys = canonical_key(key), self.keys(operator)
        if not keys.may_have(canonical):
            raise ConfigError(f"{key!r} is no key of {operator!r}: its keys are {keys.schema}.")
        found = self.find(operator, [canonical])
        if found.timed:
            return found.states
        return found.states[0].state if found.states else None

    def find(self, operator: str, keys: Iterable[bytes]) -> Found:
        """The states of canonical *keys* (`pipeline.keys`), all at one checkpoint; see `get`."""
        keys = [*keys]
        self.reach(0, "0s")
        with self._swap:
            answer = self._answer(operator, keys)
        while answer is None:
            with self._reading:  # nothing else changes what is kept
                at = self._fill(operator, ())
                self._fill(operator, [key_group(key, at.manifest.max_parallelism) for key in keys])
                with self._swap:
                    answer = self._answer(operator, keys)
        return self._found(operator, *answer)

    def scan(self, operator: str) -> Iterator[Found]:
        """All states of *operator*, by key group, at one checkpoint: the next one waits meanwhile. If blocks expire
        while they are read, the rest is of a later one."""
        self.reach(0, "0s")
        with self._reading:
            group, groups = 0, 1
            while group < groups:
                at = self._fill(operator, [group])
                with self._swap:
                    places = [(operator, number, group) for number in at.operators[operator]]
                    kept = [self._kept[place] for place in places if place in self._kept]
                    entries = [entry for one in kept for entry in one.entries(group)]
                groups, group = at.manifest.max_parallelism, group + 1
                yield self._found(operator, at, sorted(entries, key=lambda entry: entry.key))

    def keys(self, operator: str) -> OperatorKeys:
        """What the keys of *operator* are."""
        with suppress(NotAtHand):
            return AtHand(self).keys(operator)
        self.reach(0, "0s")
        with self._reading:
            return self._keys(self._fill(operator, ()), operator)

    def _keys(self, at: _At, operator: str) -> OperatorKeys:
        if operator not in at.keys:
            subtasks = at.operators[operator].values()
            schema = schema_of_keys(index for subtask in subtasks for index in subtask.indexes)
            at.keys[operator] = OperatorKeys(schema)
        return at.keys[operator]

    def _found(self, operator: str, at: _At, entries: list[KeptEntry]) -> Found:
        heads = [subtask.head for subtask in at.operators[operator].values()]
        timed, manifest = bool(heads) and heads[0].times is not None, at.manifest
        views = list(key_views(heads[0] if heads else None, entries))
        return Found(self.pipeline, operator, manifest.checkpoint, manifest.completed_at_ms, timed, views)

    def _answer(self, operator: str, keys: Iterable[bytes]) -> tuple[_At, list[KeptEntry]] | None:
        """What is kept of *keys*; None unless that is all."""
        at, entries = self._now, list[KeptEntry]()
        if at is None or operator not in at.operators:
            return None
        for key in keys:
            group = key_group(key, at.manifest.max_parallelism)
            for number, subtask in at.operators[operator].items():
                place = operator, number, group
                if place in self._kept:
                    self._kept.move_to_end(place)
                    entries += self._kept[place].entries(group, key)
                elif subtask.refs(group):
                    return None
        return at, entries

    def reach(self, checkpoint: int, timeout: Duration) -> None:
        """See what the newest checkpoint is, unless it was seen lately; wait until *checkpoint* is complete, for
        *timeout* at most. No later answer is of one before. Raises as `get`."""
        until_s = None
        while True:
            self.look(wait=self._now is None or self._now.manifest.checkpoint < checkpoint)
            known = self._now.manifest.checkpoint if self._now is not None else 0
            if known >= checkpoint:
                return
            if until_s is None:
                until_s = time.monotonic() + duration_ms(timeout, "timeout") / 1000
            if time.monotonic() >= until_s:
                raise TimeoutError(
                    f"Checkpoint {checkpoint} of {self.pipeline} is not complete: its newest is {known}. Ask again "
                    f"later; `exactlyonce doctor {self.pipeline}` looks for what may be wrong."
                )
            if self._closed.wait(LOOK_S / 2):
                raise ConfigError("The reader was closed while it waited.")

    # --- reading ------------------------------------------------------------------------------------------------------

    def look(self, *, wait: bool = True) -> None:
        """See what the newest checkpoint is, unless it was seen lately, and bring what is kept to it.

        *wait*: also while another thread does so.
        """
        if time.monotonic() - self._looked_s < LOOK_S or not self._reading.acquire(blocking=wait):
            return
        try:
            while True:
                history = self._log.look()
                history.halt_if_damaged()
                manifest = choose_checkpoint(history, None)
                if self._now is not None and self._topic == self._log.topic and manifest == self._now.manifest:
                    break
                try:
                    self._advance(manifest)
                    break
                except DamagedBlock:
                    if self._log.look().latest == manifest:
                        raise  # else it expired while it was read
            self._looked_s = time.monotonic()
        finally:
            self._reading.release()

    def _advance(self, manifest: Manifest) -> None:
        topic, before = self._log.topic, self._now
        assert topic is not None, "a checkpoint was in it"
        if topic != self._topic or (before is not None and manifest.checkpoint < before.manifest.checkpoint):
            if self._storages is not None:
                self._storages.close()
            self._storages, self._topic = Storages(self._client, topic, stays_connected=True), topic
            self._recent, before = {}, None
        at = _At(manifest)
        with_state = {snapshot.operator for snapshot in manifest.operators}
        for operator in before.operators.keys() & with_state if before is not None else ():
            at.operators[operator] = self._subtasks(manifest, operator)
        fresh: dict[Place, Mapping[bytes, RawState | None]] = {}
        for operator, subtasks in at.operators.items():
            for number, subtask in subtasks.items():
                fresh |= self._fresh(operator, number, subtask)
        with self._swap:
            for place in self._kept.keys() - fresh.keys():
                del self._kept[place]
            for (operator, number, group), changes in fresh.items():
                self._kept[operator, number, group].take(at.operators[operator][number], group, changes)
            self._now = at

    def _fresh(self, operator: str, number: int, subtask: _Subtask) -> dict[Place, Mapping[bytes, RawState | None]]:
        """What later blocks have of the kept key groups of *subtask*, but for those of which older blocks went."""
        with self._swap:
            kept = {place[2]: states.refs for place, states in self._kept.items() if place[:2] == (operator, number)}
        ahead: dict[int, tuple[BlockRef, ...]] = {}
        for group, before in kept.items():
            now = subtask.refs(group)
            if now[: len(before)] == before:
                ahead[group] = now[len(before) :]
        fresh: dict[Place, Mapping[bytes, RawState | None]] = {(operator, number, group): {} for group in ahead}
        new, groups = set(chain.from_iterable(ahead.values())), [group for group, refs in ahead.items() if refs]
        later = Chain(block for block in subtask.chain.blocks if block.ref in new)
        stored = replace(subtask.kept.stored(subtask.indexes, groups), chain=later)
        return fresh | {(operator, number, group): changes for group, changes in stored.reading_changes(groups)}

    def _subtasks(self, manifest: Manifest, operator: str) -> Subtasks:
        assert self._storages is not None
        storage = self._storages.of(manifest.storage)
        kept = kept_state(manifest, operator, self._recent.setdefault(manifest.storage, _RecentBlocks(storage)))
        subtasks: Subtasks = {}
        for number, indexes in kept.indexes().items():
            times = indexes[0].head.times
            floors = {} if times is None else dict(zip(times.groups, times.floors, strict=True))
            subtasks[number] = _Subtask(
                kept, indexes, Chain(block for part in indexes for block in part.blocks), floors
            )
        return subtasks

    def _fill(self, operator: str, groups: Iterable[int]) -> _At:
        """Keep what there is of *operator* in *groups*."""
        while True:
            at = self._now
            assert at is not None
            try:
                if operator not in at.operators:
                    subtasks = self._subtasks(at.manifest, operator)
                    with self._swap:
                        at.operators[operator] = subtasks
                wanted = {
                    (operator, number, group)
                    for group in groups
                    for number, subtask in at.operators[operator].items()
                    if subtask.refs(group)
                }
                for place in wanted - self._kept.keys():
                    kept = self._read(at.operators[operator][place[1]], place[2])
                    with self._swap:
                        self._kept[place] = kept
                self._make_room(wanted)
                return at
            except DamagedBlock:
                self._looked_s = float("-inf")
                self.look()
                if self._now is at:
                    raise  # else it expired while it was read

    def _read(self, subtask: _Subtask, group: int) -> _KeptGroup:
        kept = _KeptGroup()
        for _, read in subtask.kept.stored(subtask.indexes, [group]).reading_raw([group]):
            kept.take(subtask, group, read.states)
        return kept

    def _make_room(self, wanted: Collection[Place]) -> None:
        with self._swap:
            size = sum(kept.size for kept in self._kept.values())
            for place in [place for place in self._kept if place not in wanted]:
                if size <= self._memory_bytes:
                    return
                size -= self._kept.pop(place).size
