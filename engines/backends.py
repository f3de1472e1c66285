"""The state settings of a run, and the backend that they name."""

from __future__ import annotations

from pathlib import Path

import msgspec

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.names import setting
from exactlyonce.pipeline.sizes import shown_bytes
from exactlyonce.state.backend import StateBackend
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.tiered.backend import RocksDBBackend

HASHMAP, ROCKSDB = "hashmap", "rocksdb"
BACKENDS = (HASHMAP, ROCKSDB)
MEMORY_BYTES = 512 << 20
MEMORY_BYTES_MIN = 1 << 20


class StateSettings(msgspec.Struct, frozen=True):
    """Which backend, and what it may take."""

    backend: str = HASHMAP
    memory_bytes: int = MEMORY_BYTES
    """What a worker may take, with its state; the backend `rocksdb` keeps to it."""
    folder: str = ""
    """Where `rocksdb` keeps the files of this machine; empty: in the user's cache."""
    contradicting: tuple[str, ...] = ()
    """What was given for `rocksdb` though the backend is another one, as an error is to name it."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"{setting('state_backend')} is {self.backend!r}: choose one of {', '.join(BACKENDS)}.")
        if self.memory_bytes < MEMORY_BYTES_MIN:
            given, least = shown_bytes(self.memory_bytes), shown_bytes(MEMORY_BYTES_MIN)
            raise ConfigError(f"{setting('state_memory')} is {given}: give it {least} at least.")

    @property
    def path(self) -> Path:
        """The folder of the local files."""
        if self.folder:
            return Path(self.folder).expanduser()
        from exactlyonce.connectors.embedded.jars import cache_dir  # with all that a download needs

        return cache_dir() / "state"

    def check(self) -> None:
        """Raise `ConfigError` where the backend cannot be used here, or is at odds with what else was given."""
        if self.contradicting:
            backend, shown = setting("state_backend"), " and ".join(self.contradicting)
            raise ConfigError(
                f"{shown}: that is for {ROCKSDB}, and {backend} is {self.backend}, which keeps all state in memory and "
                f"knows no bound. Set {backend} to {ROCKSDB}, or leave {shown} out; for a run whose settings file is "
                f"shared with others, --state-backend {self.backend} says that it is meant."
            )
        if self.backend != ROCKSDB:
            return
        with needing(ROCKSDB, "rocksdict", 'state_backend "rocksdb"'):
            import rocksdict  # noqa: F401 - whether it is there is asked
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The folder of the local files of state, {self.path}, cannot be made: {error.strerror}. Name another "
                f"one with {setting('state_folder')}."
            ) from None


def in_memory() -> StateBackend:
    """What the tables of one unit of bounded work are kept in."""
    return HashMapBackend()


def state_backend(settings: StateSettings, graph: LogicalGraph, subtask: int, parallelism: int) -> StateBackend:
    """What the tables of worker *subtask* are kept in. What operators that *graph* does not have any more have left on
    this machine is deleted."""
    if settings.backend != ROCKSDB:
        return in_memory()
    worker = f"{subtask}-of-{parallelism}" if parallelism > 1 else ""
    backend = RocksDBBackend(settings.path / graph.pipeline_id, settings.memory_bytes, worker)
    backend.delete_others([node.id for node in graph.nodes])
    return backend
