"""A pipeline's run on an engine: its settings as keyword arguments, for type checkers and editors, and its result.

Invariant: the classes between the two marks are what the declarations of settings say; `docs/generate.py` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.extras import ENGINES, announced, loaded
from exactlyonce.pipeline.loading import inline, refuse_while_importing, resolved
from exactlyonce.pipeline.stream import Pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from exactlyonce.pipeline.durations import Duration
    from exactlyonce.pipeline.sizes import Size


@dataclass(frozen=True)
class RunResult:
    """The clean end of a run: its last checkpoint, from which the next run goes on."""

    pipeline: str
    checkpoint: int
    """Its number."""
    offsets: Mapping[str, Mapping[int, int]]
    """The offset at which the next run begins, by source and partition."""


class ClusterSettings(TypedDict, total=False):
    """How to reach a cluster."""

    bootstrap_servers: str
    """one or more brokers, HOST:PORT, separated by commas (default: $EXACTLYONCE_BOOTSTRAP_SERVERS)."""
    kafka: Mapping[str, str | float]
    """settings of librdkafka; secrets as "env:VARIABLE" or "file:PATH"."""
    config: str | Path
    """settings in TOML; keyword arguments win over the file."""


# Written by docs/generate.py.
class RestartSettings(TypedDict, total=False):
    """A restart strategy."""

    strategy: Literal["none", "fixed_delay", "failure_rate", "exponential_delay"]
    attempts: int
    delay: Duration
    failures: int
    window: Duration
    initial: Duration
    max: Duration


class BoundedSettings(ClusterSettings, total=False):
    """The settings of bounded work."""

    parallelism: int
    """worker processes (default: 1)."""
    checkpoint_partitions: int
    """checkpoints: of their topic, when it is created, one of them for decisions (default: 5)."""
    accept_loss: int
    """give up the output of checkpoint N that a halt has named as lost, and go on."""
    accept_new_output: str | Sequence[str]
    """go on into a topic that was created again since the last checkpoint, as a halt has said: records that it lost
    stay lost; any number of topics."""
    skip: str | Sequence[str]
    """leave out a record of the input that an error has named, any number of them; checkpoints note it."""
    repair: Literal["local", "spark", "halt"]
    """output that a decided checkpoint has lost, and that cannot be copied, is computed again from the input: in this
    process (local), on Spark, or not at all (halt) (default: local)."""
    allow_dropped_fields: bool
    """leave behind fields of states that the code does not have, whatever they hold; also without a savepoint."""
    num_retained: int
    """checkpoints: how many are kept (default: 3)."""
    incremental: bool
    """checkpoints: hold what changed since the last one, or all state, each for itself (default: what changed)."""
    store_timeout: Duration
    """checkpoints: how long a store that is away is waited for (default: 10m)."""
    transaction_timeout: Duration
    """checkpoints: the broker aborts a transaction that is open longer (default: the most the broker allows)."""
    checkpoint_storage: str
    """checkpoints: where state is kept: /folder, hdfs://host:port/folder or s3://bucket/prefix (default: topic)."""
    from_savepoint: str | int
    """begin from savepoint N of the pipeline, or from one that was exported to URL; once, if it is repeated."""
    map: Mapping[str, str]
    """operator, source or loop OLD of the savepoint is NEW now, any number of them."""
    allow_dropped_state: bool
    """leave behind state and sources that the pipeline does not have any more."""
    rewind: bool
    """go back to savepoint N, though there are newer checkpoints: output since then is written again."""


class LocalSettings(BoundedSettings, total=False):
    """The settings of a run on this machine."""

    until: Literal["running", "latest"]
    """running: until it is stopped; latest: process what is there, take a last checkpoint and end (default:
    running)."""
    drain: bool
    """with until latest: at the end, close all windows; later records of them are late then."""
    max_late: float
    """stop before a checkpoint in which an operator of event time leaves out more than this share of its latest
    records, since they came late; 1: leave out any number (default: 0.5)."""
    standby: bool
    """wait until no other run of the pipeline leads, then take over (default: take over at once)."""
    broker_timeout: Duration
    """how long a start waits for brokers and registries that do not answer (default: 10m under a supervisor, else
    15s)."""
    ui: str
    """show the run to a browser there, with /live and /ready for probes."""
    metrics: str
    """answer there, over HTTP: /metrics for Prometheus, /live and /ready for probes."""
    serve: str
    """answer there, over HTTP: /state/OPERATOR/KEY, the state of a key at the newest checkpoint."""
    serve_token: str
    """the place of the token that requests for state have, env:NAME or file:/path."""
    traces: str
    """send a span for each checkpoint and each restart to the OpenTelemetry collector there, by OTLP over HTTP."""
    log_format: Literal["auto", "text", "json"]
    """the lines on stderr: text, json with the time in ISO 8601, or auto: text in a terminal, else json (default:
    auto)."""
    inline: bool
    """all in one process, for a debugger."""
    mode: Literal["exactly_once", "at_least_once"]
    """checkpoints: at_least_once: no input is held back, and state may count records twice (default: exactly_once)."""
    unaligned: bool
    """checkpoints: a barrier overtakes the records before it, which become part of the checkpoint."""
    aligned_timeout: Duration
    """checkpoints: with --unaligned: for how long a barrier waits before it overtakes (default: 0s)."""
    checkpoint_interval: Duration
    """checkpoints: from one to the next (default: 1s)."""
    checkpoint_timeout: Duration
    """checkpoints: one that takes longer is aborted (default: 1m)."""
    deploy_timeout: Duration
    """checkpoints: workers that are not ready by then are replaced (default: 5m)."""
    min_pause: Duration
    """checkpoints: from the end of one to the next (default: 0s)."""
    max_concurrent: int
    """checkpoints: how many may be under way (default: 1)."""
    tolerable_failed: int
    """checkpoints: failures in a row without a restart (default: 0)."""
    retention: Literal["retain_on_cancellation", "delete_on_cancellation"]
    """checkpoints: when the run is cancelled, they are kept or deleted (default: retain_on_cancellation)."""
    restart_budget: Duration
    """checkpoints: the longest that a restart takes (default: 1m)."""
    stop_timeout: Duration
    """checkpoints: asked to stop, it ends by then, with or without a last checkpoint (default: 30s)."""
    state_backend: Literal["hashmap", "rocksdb"]
    """state: hashmap: all in memory; rocksdb: a part of it, the rest in local files (default: hashmap)."""
    state_memory: Size
    """state: what rocksdb lets a worker take, with its state (default: 512mb)."""
    state_folder: str
    """state: where rocksdb keeps local files (default: ~/.cache/exactlyonce/state)."""
    restart: RestartSettings
    """after failures (default: {"strategy": "exponential_delay"})."""
    log_level: Literal["debug", "info", "warning", "error"]
    """the lowest level shown (default: info)."""
    on_event: Callable[[dict[str, Any]], object]
    """gets each event; without it, each is a line on stderr, see log_format."""


# The end of what docs/generate.py writes.


class SparkSettings(BoundedSettings, total=False):
    """What the engine "spark" takes, as `exactlyonce.spark.backfill` does."""

    spark: SparkSession
    """the session of the program"""
    chunk_records: int
    """input records of a checkpoint"""
    take_over: bool
    """fence an instance that seems to run"""
    staging: str | Path
    """a folder that all executors see, or a URL of HDFS or S3"""
    progress: Callable[[Any], object]
    """gets a `WorkProgress`"""


class RunSettings(LocalSettings, SparkSettings, total=False):
    """The settings of `run`."""


def run(pipeline: Pipeline | str, engine: str = "local", **settings: Unpack[RunSettings]) -> RunResult | None:
    """Run *pipeline*, one that worker processes can import or `module:attribute`, as `exactlyonce run` does.

    *settings* are its options, with `_` for `-`. *on_event* gets each event as a dict; without it, each is a line on
    stderr, as *log_format* says. In a script, call this under ``if __name__ == "__main__":``, since worker processes
    import it.

    The engine "spark" computes what there is on the session *spark*, with ``until="latest"`` and the options of
    `exactlyonce.spark.backfill`.

    Returns the last checkpoint; None: a standby run was stopped before it led. Raises `exactlyonce.errors`.
    """
    refuse_while_importing()
    engines = announced(ENGINES)
    if engine not in engines:
        raise ConfigError(f"there is no engine {engine!r}; installed: {', '.join(sorted(engines)) or 'none'}")
    named = inline(pipeline) if isinstance(pipeline, Pipeline) and settings.get("inline") else resolved(pipeline)
    result: RunResult | None = loaded(engines[engine])(named, **settings)
    return result
