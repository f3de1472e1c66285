"""The backend that the state settings of a run name."""

from __future__ import annotations

from exactlyonce.engines.options import ROCKSDB, StateSettings
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.state.backend import StateBackend
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.rocksdb.backend import RocksDBBackend


def in_memory() -> StateBackend:
    """The backend of one unit of bounded work."""
    return HashMapBackend()


def state_backend(settings: StateSettings, graph: LogicalGraph, subtask: int, parallelism: int) -> StateBackend:
    """The backend of worker *subtask*. Deletes local files of operators that *graph* does not have."""
    if settings.backend != ROCKSDB:
        return in_memory()
    worker = f"{subtask}-of-{parallelism}" if parallelism > 1 else ""
    backend = RocksDBBackend(settings.path / graph.pipeline_id, settings.memory_bytes, worker)
    backend.delete_others([node.id for node in graph.nodes])
    return backend
