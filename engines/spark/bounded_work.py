"""Commands for a program with a Spark session: backfill, catch-up, audit, replay, diff and savepoint.

Invariant: settings are `Pipeline.run`'s, with the same errors; the session is neither changed nor ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.audit import SHOWN as FINDINGS_SHOWN
from exactlyonce.engines.bounded.audit import Audit, AuditReport
from exactlyonce.engines.bounded.catch_up import CatchUp, Summary
from exactlyonce.engines.bounded.diff import SHOWN, Diff, DiffReport
from exactlyonce.engines.bounded.recompute import ExpectedOutput
from exactlyonce.engines.bounded.reproduce import Replay, Replayed
from exactlyonce.engines.bounded.stages import Executors
from exactlyonce.engines.configuration import client_from, options_from, parallelism_given, read_file
from exactlyonce.engines.options import RunOptions, settings_of_bounded_work
from exactlyonce.engines.savepoints.taking import TakenSavepoint, take
from exactlyonce.engines.spark.expected_rows import expected_frame, require_columns
from exactlyonce.engines.spark.session import refuse_speculation_in, runs_here
from exactlyonce.engines.spark.submit import executors_of
from exactlyonce.pipeline.durations import Duration, duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import Loaded, cell_file, refuse_while_importing, resolved
from exactlyonce.pipeline.names import name_problem, nearest
from exactlyonce.pipeline.positions import TO
from exactlyonce.pipeline.running import BoundedSettings, ClusterSettings, LocalSettings, RunResult
from exactlyonce.pipeline.sizes import counted
from exactlyonce.pipeline.stream import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import Unpack

StopAt = str | datetime | Mapping[str, Mapping[int, int]]
"""Where bounded work ends: see `exactlyonce backfill --to`."""


@dataclass(frozen=True)
class WorkProgress:
    """The progress at one moment; its text is a line for people.

    >>> print(WorkProgress("orders: checkpoint 12, stage totals", 3, 40, 5_000_000, 12_000_000))
    orders: checkpoint 12, stage totals, 3 of 40 units; 5,000,000 of 12,000,000 offsets
    >>> print(WorkProgress("orders: checkpoint 12", 0, 0, 12_000_000, 12_000_000))
    orders: checkpoint 12; 12,000,000 of 12,000,000 offsets
    """

    stage: str
    """The pipeline, the checkpoint and the stage; without a stage the checkpoint is complete."""
    units_done: int
    units: int
    """The units of the stage."""
    offsets_done: int
    """The offsets of complete checkpoints."""
    offsets: int
    """The offsets of all the work; 0 for a repair before it begins."""

    def __str__(self) -> str:
        units = f", {self.units_done:,} of {counted(self.units, 'unit')}" if self.units else ""
        offsets = f"; {self.offsets_done:,} of {counted(self.offsets, 'offset')}" if self.offsets else ""
        return f"{self.stage}{units}{offsets}"


OnProgress = Callable[[WorkProgress], object]
"""A program's function for progress, as `print`."""


class Listener:
    """The listener to bounded work that shows notes on stderr, and gives progress to *on_progress*, if there is one."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress or (lambda progress: None)
        self._offsets_done = self._offsets = 0

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def began(self, manifest: Manifest, offsets: int) -> None:
        self._offsets_done, self._offsets = 0, offsets

    def units(self, stage: str, done: int, units: int) -> None:
        self._on_progress(WorkProgress(stage, done, units, self._offsets_done, self._offsets))

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        self._offsets_done += offsets
        self.units(f"{advanced.manifest.pipeline}: checkpoint {advanced.manifest.checkpoint}", 0, 0)

    def passed(self, offsets: int) -> None:
        self._offsets_done += offsets


def backfill(
    spark: SparkSession,
    pipeline: Pipeline | str,
    *,
    to: StopAt = "latest",
    no_output: bool = False,
    chunk_records: int | None = None,
    take_over: bool = False,
    params: Mapping[str, str] | None = None,
    staging: str | Path | None = None,
    progress: OnProgress | None = None,
    **settings: Unpack[BoundedSettings],
) -> Summary:
    """Compute *pipeline* over the history of its topics, up to *to*, and end with a checkpoint that a run goes on from.

    *pipeline* is one that executors can import, or `module:attribute`; *params* are the arguments of a function that
    `module:function` names, as text. *to* is "latest", a time, or offsets by topic and partition, as a dict or as text
    for `exactlyonce backfill`; *staging* a folder that all executors see, or a URL of HDFS or S3, needed where they are
    on other machines; *take_over* fences an instance that seems to run. *no_output* computes state alone, since output
    up to *to* is another application's. Broken off, it goes on at its last checkpoint when it is repeated. *progress*
    gets a `WorkProgress` as stages begin, units end and checkpoints are complete, sometimes from another thread:
    `progress=print` prints lines.
    Raises what the command says: `ConfigError`, `Halt`, `BrokerUnavailable`.
    """
    return _caught_up(
        spark, pipeline, params, settings, staging, progress, to=to, chunk_records=chunk_records,
        take_over=take_over, from_nothing=True, no_output=no_output,
    )  # fmt: skip


def catch_up(
    spark: SparkSession,
    pipeline: Pipeline | str,
    *,
    to: StopAt = "latest",
    follow: bool = False,
    stop: Event | None = None,
    chunk_records: int | None = None,
    take_over: bool = False,
    params: Mapping[str, str] | None = None,
    staging: str | Path | None = None,
    progress: OnProgress | None = None,
    **settings: Unpack[BoundedSettings],
) -> Summary:
    """Go on from the last checkpoint of *pipeline*, up to *to*; otherwise as `backfill`.

    With *follow* it goes on with new records, one checkpoint after the other. *stop* is a `threading.Event`: once it is
    set, from another thread or a signal handler, the function returns after the present checkpoint.
    """
    if follow and to != "latest":
        raise ConfigError(f"follow={follow!r} has no end, and to={to!r:.100} is one: leave one of them out.")
    if stop is not None and not isinstance(stop, Event):
        raise ConfigError(f"stop={stop!r:.100} must be a threading.Event, which your program sets.")
    return _caught_up(
        spark, pipeline, params, settings, staging, progress, to=to, follow=follow, stopping=stop,
        chunk_records=chunk_records, take_over=take_over, from_nothing=False,
    )  # fmt: skip


def run(
    loaded: Loaded,
    *,
    spark: SparkSession | None = None,
    until: str | None = None,
    chunk_records: int | None = None,
    take_over: bool = False,
    staging: str | Path | None = None,
    progress: OnProgress | None = None,
    **settings: Unpack[BoundedSettings],
) -> RunResult:
    """Implements `Pipeline.run(engine="spark")`: a backfill up to the present end, with its last checkpoint."""
    if spark is None:
        raise ConfigError('The engine "spark" runs on the session of your program: give it, as spark=spark.')
    until = until or read_file(settings.get("config")).get("run", {}).get("until")
    if until != "latest":
        raise ConfigError(
            f"until is {until or 'not given'}: a run on Spark ends at the present end of its topics, so say "
            f'until="latest". A run that goes on needs the engine "local", or catch_up(..., follow=True).'
        )
    summary = _caught_up(
        spark, loaded, None, settings, staging, progress, to="latest", chunk_records=chunk_records, take_over=take_over,
        from_nothing=True,
    )  # fmt: skip
    return RunResult(summary.manifest.pipeline, summary.checkpoint, summary.offsets)


def _caught_up(
    spark: SparkSession,
    pipeline: Pipeline | str | Loaded,
    params: Mapping[str, str] | None,
    settings: BoundedSettings,
    staging: str | Path | None,
    progress: OnProgress | None,
    *,
    to: StopAt,
    stopping: Event | None = None,
    **how: Any,
) -> Summary:
    _check(spark, staging, progress, **how)
    position = TO.read(to)
    loaded = pipeline if isinstance(pipeline, Loaded) else resolved(pipeline, params)
    listener, checked = Listener(progress), _run_options(settings)
    refuse_speculation_in(spark)
    work = CatchUp(
        loaded=loaded, options=checked, parallelism=parallelism_given(settings), progress=listener,
        to=position, stopping=stopping or Event(), **how,
    )  # fmt: skip
    checked.client.check()
    work.judge()
    return work.run(_executors(spark, loaded, staging, listener, progress))


def audit(
    spark: SparkSession,
    pipeline: Pipeline | str,
    *,
    first: int | None = None,
    last: int | None = None,
    ignore_foreign: bool = False,
    shown: int = FINDINGS_SHOWN,
    params: Mapping[str, str] | None = None,
    staging: str | Path | None = None,
    progress: OnProgress | None = None,
    **settings: Unpack[ClusterSettings],
) -> AuditReport:
    """Compare what readers see of *pipeline* with what its input gives, from checkpoint *first* to *last*.

    The report has at most *shown* findings, and counts the others.
    *params* are as of `backfill`. *settings* say which cluster. A running
    pipeline runs on.
    """
    _check(spark, staging, progress, first=first, last=last, ignore_foreign=ignore_foreign, shown=shown)
    loaded, listener = resolved(pipeline, params), Listener(progress)
    work = Audit(loaded, _client(settings), first, last, ignore_foreign=ignore_foreign, shown=shown)
    return work.run(_executors(spark, loaded, staging, listener, progress), listener)


def replay(
    spark: SparkSession,
    pipeline: Pipeline | str,
    checkpoint: int,
    *,
    into: str | None = None,
    sink: str | None = None,
    params: Mapping[str, str] | None = None,
    staging: str | Path | None = None,
    progress: OnProgress | None = None,
    **settings: Unpack[ClusterSettings],
) -> Replayed:
    """Compute the output of *checkpoint* again and count it; *into* is a topic that gets the records of *sink*.

    *params* and *settings* are as for `audit`. A running pipeline runs on.
    """
    _check(spark, staging, progress, checkpoint=checkpoint, into=into, sink=sink)
    loaded, listener = resolved(pipeline, params), Listener(progress)
    work = Replay(loaded, _client(settings), checkpoint, into=into, sink=sink)
    return work.run(_executors(spark, loaded, staging, listener, progress), listener)


@contextmanager
def expected(
    spark: SparkSession,
    pipeline: Pipeline | str,
    sink: str | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
    chunk_records: int | None = None,
    params: Mapping[str, str] | None = None,
    staging: str | Path | None = None,
    progress: OnProgress | None = None,
    **settings: Unpack[ClusterSettings],
) -> Iterator[DataFrame]:
    """The output that *sink* should have of the checkpoints from *first* to *last*, as a DataFrame.

    A sink of Kafka has the columns `key`, `value`, `headers`, `topic`, `partition` and `timestamp`; the last two are
    null where the client chooses them. A sink of a store has `value`, the record with its fields. Both have
    `checkpoint` and the place of the input record: `input_topic`, `input_partition`, `input_offset`. *sink* is optional
    in a pipeline with one; by default all retained checkpoints whose interval can be computed are taken. So many of
    them are computed together as have *chunk_records* records, one at least; None: as a chunk of `backfill`. The
    DataFrame reads staged files: use it within the block. Nothing else is written. Raises `ConfigError` if the outputs
    will not fit into *staging*. *params* and *settings* are as for `audit`.
    """
    _check(spark, staging, progress, sink=sink, first=first, last=last, chunk_records=chunk_records)
    loaded, listener = resolved(pipeline, params), Listener(progress)
    work = ExpectedOutput(loaded, _client(settings), sink, first=first, last=last, chunk_records=chunk_records)
    require_columns(loaded.reference, work.sink)
    executors = _executors(spark, loaded, staging, listener, progress)
    with work.computed(executors, listener) as lanes:
        yield expected_frame(spark, loaded.reference, work.sink, lanes)


def diff(
    spark: SparkSession,
    old: Pipeline | str,
    new: Pipeline | str,
    *,
    checkpoint: int | None = None,
    to: StopAt = "latest",
    chunk_records: int | None = None,
    shown: int = SHOWN,
    params: Mapping[str, str] | None = None,
    staging: str | Path | None = None,
    progress: OnProgress | None = None,
    **settings: Unpack[ClusterSettings],
) -> DiffReport:
    """Compare the outputs that versions *old* and *new* of a pipeline give for the same input.

    Both begin with the state of *checkpoint*, by default the newest savepoint, else the oldest checkpoint that is
    retained, and read up to *to*, in chunks of *chunk_records*, as for `backfill`. Nothing is written, and a running
    pipeline runs on. `DiffReport.frame(spark)` has the differences as a DataFrame, at most *shown* of each sink. Raises
    `ConfigError` if the outputs, kept until they are compared, will not fit into *staging*. *params*, of both versions,
    and *settings* are as for `audit`.
    """
    _check(spark, staging, progress, checkpoint=checkpoint, chunk_records=chunk_records, shown=shown)
    end, versions, listener = TO.read(to), (resolved(old, params), resolved(new, params)), Listener(progress)
    work = Diff(*versions, _client(settings), checkpoint=checkpoint, to=end, chunk_records=chunk_records, shown=shown)
    _send_cells(spark, *versions)
    return work.run(executors_of(spark, staging, None if progress is None else listener.units), listener)


def savepoint(
    spark: SparkSession,
    pipeline: Pipeline | str,
    *,
    to: str | Path | None = None,
    stop: bool = False,
    timeout: Duration = "10m",
    params: Mapping[str, str] | None = None,
    **settings: Unpack[ClusterSettings],
) -> TakenSavepoint:
    """Have the run of *pipeline*, on whatever machine, take a savepoint, as `exactlyonce savepoint` does.

    *pipeline* may be its name alone. *to* exports the savepoint into a new folder below a URL; of a pipeline that does
    not run it exports the newest checkpoint. *stop* ends the run after it. *params* and *settings* are as for `audit`.
    The result's `from_savepoint` is the option of that name, for `backfill`, say.
    Raises what the command says: `ConfigError` where there is no run that takes requests, as on Spark, and no *to*; an
    error if the run has not done it within *timeout*, and may do it yet.
    """
    _check(spark, None, None, stop=stop)
    if not isinstance(to, str | Path | None):
        raise ConfigError(f"to={to!r:.100} must be a folder or a URL, as text.")
    timeout_ms, name = duration_ms(timeout, "timeout"), _name_of(pipeline, params)
    place = None if to is None else str(to)
    return take(_client(settings), name, to=place, stop=stop, timeout_ms=timeout_ms, note=Listener(None).note)


def _name_of(pipeline: Pipeline | str, params: Mapping[str, str] | None) -> str:
    """The name of *pipeline*, which is a pipeline, its name, or `module:attribute`."""
    if isinstance(pipeline, Pipeline) and not params:
        return pipeline.name
    if not isinstance(pipeline, str) or ":" in pipeline:
        return resolved(pipeline, params).pipeline.name
    if problem := name_problem(pipeline):
        raise ConfigError(f"The pipeline name {problem}. Give its name, or module:pipeline.")
    if params:
        raise ConfigError(f"params= are for a function that returns a pipeline; {pipeline} is the name of one.")
    return pipeline


def _executors(
    spark: SparkSession,
    loaded: Loaded,
    staging: str | Path | None,
    listener: Listener,
    progress: OnProgress | None,
) -> Executors:
    """The executors of *spark*, whose tasks are watched only for a program that asks for progress."""
    _send_cells(spark, loaded)
    return executors_of(spark, staging, None if progress is None else listener.units)


def _send_cells(spark: SparkSession, *pipelines: Loaded) -> None:
    """Send the cells of a notebook that define *pipelines* to executors on other machines: they have no such module."""
    for pipeline in pipelines:
        file = cell_file(pipeline.reference)
        if file is not None and not runs_here(spark):
            spark.addArtifacts(str(file), pyfile=True)


def _run_options(settings: BoundedSettings) -> RunOptions:
    """The checked *settings*; ConfigError for one that is for worker processes alone. A file may have those, too."""
    known = [*ClusterSettings.__annotations__, *(setting.keyword for setting in settings_of_bounded_work())]
    if refused := sorted(name for name, value in settings.items() if value is not None and name not in known):
        known += [*_Arguments.__struct_fields__, "params", "progress", "staging", "to"]
        options = f"options are, not each of every function: {', '.join(sorted({*known}))}."
        if refused[0] in LocalSettings.__annotations__:
            raise ConfigError(
                f"{', '.join(refused)}: bounded work on Spark has no such option, for a checkpoint there is a chunk of "
                f"the input and a unit is tried again by Spark. Leave it out; {options}"
            )
        near = nearest(refused[0], known)
        raise ConfigError(f"There is no option {', '.join(refused)}. {f'Did you mean {near}?' if near else options}")
    return options_from(settings)


class _Arguments(msgspec.Struct, kw_only=True):
    """The arguments that are numbers, flags and names, with their types; a default stands for "not given"."""

    chunk_records: Annotated[int, Meta(ge=1)] | None = None
    no_output: bool = False
    take_over: bool = False
    from_nothing: bool = False
    follow: bool = False
    first: int | None = None
    last: int | None = None
    checkpoint: int | None = None
    ignore_foreign: bool = False
    shown: Annotated[int, Meta(ge=1)] = SHOWN
    into: str | None = None
    sink: str | None = None
    stop: bool = False


def _check(spark: Any, staging: str | Path | None, progress: OnProgress | None, **arguments: Any) -> None:
    """Raise ConfigError where an argument is of another type than its function says, before anything is begun, and in a
    module that is only imported."""
    refuse_while_importing()
    if not hasattr(spark, "createDataFrame"):
        raise ConfigError(f"spark={spark!r:.100} is no session: give the SparkSession of your program.")
    if not isinstance(staging, str | Path | None):
        raise ConfigError(f"staging={staging!r:.100} must be a folder or a URL, as text.")
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress={progress!r:.100} must be a function, which gets a WorkProgress.")
    try:
        msgspec.convert(arguments, _Arguments)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise ConfigError(f"{name}={arguments.get(name)!r:.100} is of another type or range: {problem}.") from None


def _client(settings: ClusterSettings) -> ClientConfig:
    """The client's configuration; ConfigError for any other option."""
    if refused := sorted(settings.keys() - ClusterSettings.__annotations__.keys()):
        known = ", ".join(ClusterSettings.__annotations__)
        raise ConfigError(f"There is no option {', '.join(map(repr, refused))} here. Options are: {known}.")
    client = client_from(settings, read_file(settings.get("config")))
    client.check()
    return client
