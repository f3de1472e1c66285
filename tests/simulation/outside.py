"""A storage of blocks outside of the checkpoint topic, in memory, that is slow, refuses, loses answers and lists late.

The shipped code puts blocks there and names the files; the faults are those of an object store. The oracle sees every
file that comes and goes: blocks of a retained manifest are never removed; others are removed by the coordinator that
decided so, or by a later one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from watched import demand

from exactlyonce.checkpoint.block_storage import DamagedBlock, Scanned, verified_value
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, decode
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest
from exactlyonce.connectors.block_files import FileBlocks, FileStorage, name_of, reference
from exactlyonce.connectors.filestore.store import StoredFile
from exactlyonce.pipeline.errors import StorageUnavailable

if TYPE_CHECKING:
    from world import World

    from exactlyonce.testing.simulation.clients import Steps
    from exactlyonce.testing.simulation.coordinator import SimulatedCoordinator
    from exactlyonce.testing.simulation.world import Process

R = TypeVar("R")

PAUSE_MS = 10
REFUSED_CHANCE, LOST_CHANCE, AWAY_CHANCE, UNLISTED_CHANCE = 0.04, 0.04, 0.002, 0.1


class Outside:
    """A `FileStore`, as far as blocks need one."""

    url = "s3://simulated/blocks"

    def __init__(self, world: World) -> None:
        self.world = world
        self.contents: dict[str, bytes] = {}
        """Contents by the keys of blocks."""
        self.unlisted: dict[str, int] = {}
        """Files that a listing lacks, and until when."""
        self.removing: dict[SimulatedCoordinator, set[str]] = {}
        """Files that each coordinator has yet to remove, by its own decisions."""
        self.not_known: defaultdict[int, set[int]] = defaultdict(set)
        """Checkpoints whose references an incarnation could not learn: while one is retained, nothing that may be of it
        goes, and what was written later goes as ever."""
        self._away_until_ms = 0

    # --- as whoever asks sees it

    def _asked(self, what: str, answer: Callable[[], R]) -> R:
        world, now_ms = self.world, self.world.clock.monotonic_ms()
        if world.chaos and world.rng.random() < AWAY_CHANCE:
            self._away_until_ms = now_ms + world.rng.choice((20, 200, 1_500))
            world.note("the block storage is away")
        luck = world.rng.random() if world.chaos else 1.0
        if now_ms < self._away_until_ms or luck < REFUSED_CHANCE:
            world.seen["block storage refused"] += 1
            raise StorageUnavailable(f"{what} is refused")
        found = answer()
        if luck < REFUSED_CHANCE + LOST_CHANCE:
            world.seen["answer of block storage lost"] += 1
            raise StorageUnavailable(f"{what} is not answered")
        return found

    def check(self) -> None:
        self._asked("the check", lambda: None)

    def put(self, name: str, content: bytes, aside: str) -> None:
        self._asked("a put", lambda: self.come(name, content))

    def get(self, name: str) -> bytes | None:
        return self._asked("a get", lambda: self.contents.get(_key(name)))

    def files(self) -> Iterator[StoredFile]:
        return iter(self._asked("a listing", self._listed))

    def remove(self, names: Iterable[str]) -> None:
        several = list(names)
        self._asked("a removal", lambda: self._go(several))

    def remove_folder(self) -> bool:
        return False

    # --- as it is

    def come(self, name: str, content: bytes) -> None:
        key, now_ms = _key(name), self.world.clock.monotonic_ms()
        if key not in self.contents and self.world.chaos and self.world.rng.random() < UNLISTED_CHANCE:
            self.unlisted[key] = now_ms + self.world.rng.randint(1, 400)
        self.contents[key] = content
        self.world.oracle.blocks_written([key])

    def _listed(self) -> list[StoredFile]:
        now_ms = self.world.clock.monotonic_ms()
        hidden = {key for key, until_ms in self.unlisted.items() if until_ms > now_ms and key in self.contents}
        self.world.seen["listed late"] += len(hidden)
        found = {key: value for key, value in self.contents.items() if key not in hidden}
        return [StoredFile(_name(key, value), len(value), now_ms) for key, value in sorted(found.items())]

    def _go(self, names: list[str]) -> None:
        for key in map(_key, names):
            self.world.seen["file removed"] += self.contents.pop(key, None) is not None
            self.world.oracle.file_removed(key)

    # --- for coordinators and workers

    def until_answered(self, asked: Callable[[], R]) -> Steps:
        while True:
            yield None
            try:
                return asked()
            except StorageUnavailable:
                yield self.world.clock.monotonic_ms() + PAUSE_MS

    def block(self, ref: BlockRef) -> Block:
        value = self.get(str(name_of(ref)))
        if value is None:
            raise DamagedBlock(f"block {ref.key} is gone", ref)
        return verified_value(ref, value, ref.key)

    def scanned(self, ends: tuple[int, ...]) -> Steps:
        found = yield from self.until_answered(lambda: list(self.files()))
        refs = (reference(each.name, each.size) for each in found)
        return Scanned(tuple(ref for ref in refs if ref is not None), (0,) * len(ends))

    def let_go(self, coordinator: SimulatedCoordinator, refs: list[BlockRef]) -> None:
        """*coordinator* removes them beside everything else, as long as it lives."""
        waiting = self.removing.setdefault(coordinator, set())
        waiting.update(ref.key for ref in refs)

        def steps() -> Steps:
            yield self.world.clock.monotonic_ms() + self.world.rng.choice((0, 0, 30, 300))
            yield from self.until_answered(lambda: FileStorage(cast(Any, self)).dropped(refs))
            waiting.difference_update(ref.key for ref in refs)

        self.world.spawn(coordinator, steps())

    def writer(self, process: Process) -> SimulatedFileBlocks:
        blocks = SimulatedFileBlocks(process, self)
        process.producers.append(blocks)
        return blocks

    # --- for the oracle

    def body(self, ref: BlockRef) -> bytes:
        value = self.contents.get(ref.key)
        demand(value is not None, f"block {ref.key} is referred to, and is not there")
        assert value is not None
        return decode(value, Block).body

    def is_expected(self, key: str) -> bool:
        """Whether nobody can know of it, or somebody is about to remove it."""
        waiting = (keys for coordinator, keys in self.removing.items() if coordinator.alive)
        return key in self.unlisted or any(key in keys for keys in waiting)


class SimulatedFileBlocks(FileBlocks):
    """The shipped writer, whose threads are simulated; it is killed with its process."""

    transactional_id = None

    def __init__(self, process: Process, outside: Outside) -> None:
        attempt = process.attempt
        nonce = f"{process.world.rng.getrandbits(48):x}"
        super().__init__(cast(Any, outside), attempt.incarnation, attempt.number, nonce)
        self._process, self._outside = process, outside
        self._on_their_way: list[Any] = []

    @property
    def queued(self) -> int:
        return self.pending

    def _hand_over(self, put: Any) -> None:
        self._on_their_way.append(put)
        self._process.world.spawn(self._process, self._steps(put))

    def _steps(self, put: Any) -> Steps:
        clock = self._process.world.clock
        yield clock.monotonic_ms() + self._process.world.rng.choice((0, 0, 2, 40))
        for pause_s in self._put(put):
            yield clock.monotonic_ms() + round(1000 * pause_s)
        self._on_their_way.remove(put)
        self._process.wake()

    def last_request(self) -> None:
        """The process was killed while requests were under way, one of which arrives now."""
        if self._on_their_way:
            put = self._process.world.rng.choice(self._on_their_way)
            self._outside.come(str(name_of(put.ref)), put.value)


class Left:
    """Judges what a finalized checkpoint leaves behind, at the next decision of its attempt: removing takes time."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._attempt, self._checkpoint = (0, 0), 0
        self._keys: set[str] = set()

    def finalized(self, manifest: Manifest, unnamed: set[str], retained: Collection[int]) -> None:
        """*unnamed* are there, and nothing refers to them, as far as that is known of those that are *retained*."""
        held = max(self._outside.not_known[manifest.incarnation] & set(retained), default=-1)
        self._attempt, self._checkpoint = _attempt(manifest), manifest.checkpoint
        self._keys = {key for key in unnamed if _checkpoint(key) > held}

    def decided(self, manifest: Manifest) -> None:
        """A coordinator that has finalized the previous one has had time to say what may go."""
        if _attempt(manifest) == self._attempt:
            for key in sorted(self._keys & self._outside.contents.keys()):
                gone = self._outside.is_expected(key)
                demand(gone, f"checkpoint {self._checkpoint} leaves {key} behind, which nothing refers to")


def _attempt(manifest: Manifest) -> tuple[int, int]:
    return manifest.incarnation, manifest.attempt


def _checkpoint(key: str) -> int:
    parsed = BlockKey.parse(key)
    assert parsed is not None
    return parsed.checkpoint


def _key(name: str) -> str:
    found = reference(name, 0)
    assert found is not None
    return found.key


def _name(key: str, value: bytes) -> str:
    assert BlockKey.parse(key) is not None
    return str(name_of(BlockRef(1, 0, key, len(value), hashlib.sha256(value).digest())))
