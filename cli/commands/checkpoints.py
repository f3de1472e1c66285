"""`exactlyonce checkpoints`: lists the checkpoints in the topic. It only reads, and fences nobody."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.checkpoint.records.storage_url import described
from exactlyonce.cli import text
from exactlyonce.cli.arguments import (
    Parser,
    add_cluster,
    add_pipeline_name,
    at_least_one,
    client,
    pipeline_name,
    set_command,
)
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.event_time import NO_FLOOR, shown_time
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.sizes import counted, shown_bytes

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset
    from exactlyonce.views.checkpoints import CheckpointsView, CheckpointView, Start

_EXAMPLES = """\
List the checkpoints of a pipeline or of a Spark sink: the time, the bytes written, the
size of the state, the committables, and Sn: by partition, the offset of the first record
after the checkpoint. Decided: the checkpoint counts, and its transactions are being
committed. Finalized: all of them are committed. Damaged: it cannot be restored. --plot
draws durations, the lag at each trigger, and starts, also of expired checkpoints that the
log still has. A running pipeline is not disturbed.

With CHECKPOINT its subtasks are listed, the slowest first, with the time that each spent
in its phases: waiting for the first barrier, aligning, writing its snapshot, capturing
in-flight records, flushing or staging its output. - means that it is not known.

examples:
  exactlyonce checkpoints order-totals
  exactlyonce checkpoints order-totals 41
  exactlyonce checkpoints orders:pipeline --bootstrap-servers 127.0.0.1:9092
  exactlyonce checkpoints order-totals --json --last 1
  exactlyonce checkpoints order-totals --plot order-totals.svg
"""
LAST = 60
"""The most checkpoints, unless told: an index of each is read."""
_COLUMNS = (">id", "kind", "state", "completed", ">took", ">written", ">state size")
_PHASES = ("acknowledged_ms", "waiting_ms", "aligning_ms", "snapshot_ms", "capture_ms", "flush_ms")
_SUBTASK_COLUMNS = (
    *("subtask", ">took", ">waiting", ">aligning", ">snapshot", ">capture", ">flush"),
    *(">state", ">written", ">in flight"),
)

FORMATS = (".png", ".svg")
"""Of `--plot`."""


def add(parser: Parser) -> None:
    usage = "PIPELINE [CHECKPOINT] [options]"
    set_command(parser, usage, _EXAMPLES, checkpoints)
    add_pipeline_name(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs="?", type=int, help="the number of one: its subtasks")
    parser.add_argument("--last", metavar="N", type=at_least_one, default=LAST, help=f"the last N (default: {LAST})")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="as one JSON document")
    plot = "as a drawing over time, FILE.png or FILE.svg, by the extra `plot`"
    shown.add_argument("--plot", metavar="FILE", type=Path, help=plot)
    add_cluster(parser)


def checkpoints(args: argparse.Namespace) -> int:
    from exactlyonce.views import checkpoints as views

    if args.plot is not None:
        return _plotted(args)
    config = client(args)
    view = views.checkpoints(config, pipeline_name(args), args.last, args.checkpoint)
    opened = None if args.checkpoint is None else view.one(args.checkpoint)
    if args.json:
        document = (
            as_json(view) if opened is None else checkpoint_as_json(opened) | msgspec.structs.asdict(opened.phases)
        )
        print(text.document(document))
    elif opened is None:
        print(*as_text(view, config.bootstrap_servers, text.terminal_width()), sep="\n")
    else:
        print(*opened_as_text(opened, text.terminal_width()), sep="\n")
    return 0


def _plotted(args: argparse.Namespace) -> int:
    from exactlyonce.views.checkpoints import lags, recorded, starts

    require_format(args.plot)
    config, pipeline = client(args), pipeline_name(args)
    history, manifests = recorded(config, pipeline)
    manifests = manifests[-args.last :]
    plot(args.plot, pipeline, manifests, lags(config, manifests), [*starts(history, manifests)])
    print(f"{args.plot}: {counted(len(manifests), 'checkpoint')} of {pipeline}")
    return 0


def as_json(view: CheckpointsView) -> dict[str, Any]:
    history = view.history
    return {
        "pipeline": history.pipeline,
        "newest_incarnation": history.newest_incarnation,
        "storage": described(history.storage),
        "damaged": history.damaged,
        "older": view.older,
        "checkpoints": [checkpoint_as_json(checkpoint) for checkpoint in view.checkpoints],
    }


def checkpoint_as_json(checkpoint: CheckpointView) -> dict[str, Any]:
    """One checkpoint, for machines, without references to blocks."""
    manifest, finalized = checkpoint.manifest, checkpoint.finalized
    names = (
        *("checkpoint", "kind", "incarnation", "attempt", "base", "previous", "parallelism", "max_parallelism"),
        *("fingerprint", "triggered_at_ms", "completed_at_ms", "written_bytes"),
    )
    committables = [
        {
            **msgspec.to_builtins(committable),
            "records": committable.records,
            "fate": checkpoint.fate(committable.transactional_id),
        }
        for committable in manifest.committables
    ]
    staged = [
        {name: getattr(output, name) for name in ("sink", "subtask", "checkpoint", "kind", "records")}
        | {"fate": checkpoint.fate(output.name)}
        for output in manifest.staged
    ]
    return {
        **{name: getattr(manifest, name) for name in names},
        "state": checkpoint.state, "storage": described(manifest.storage), "damage": checkpoint.damage or None,
        "finalized_at_ms": finalized.at_ms if finalized else None, "duration_ms": checkpoint.duration_ms,
        "state_bytes": manifest.state_bytes, "records_in_flight": manifest.records_in_flight,
        "offsets": [_position(offset) for offset in manifest.offsets], "skips": manifest.skips,
        "committables": committables, "staged": staged,
    }  # fmt: skip


def as_text(view: CheckpointsView, bootstrap_servers: str, width: int) -> Iterator[str]:
    """All checkpoints, for people, in lines of at most *width* columns unless a word is longer."""
    history, listed, newest = view.history, view.checkpoints, view.history.newest_incarnation
    title = f"{history.pipeline}, a Spark sink," if view.is_spark_sink else history.pipeline
    yield f"{title} at {bootstrap_servers}: {counted(len(listed) + view.older, 'checkpoint')}"
    if view.older:
        yield f"the last {len(listed)} are shown, and looked at for damage: --last {len(history.manifests)} shows all"
    if history.storage:
        yield f"blocks are kept in {history.storage}"
    for storage in sorted({manifest.storage for manifest in history.retained} - {history.storage}):
        numbers = ", ".join(str(manifest.checkpoint) for manifest in history.retained if manifest.storage == storage)
        yield f"blocks of {numbers} are kept in {described(storage)}, from before a move"
    if newest is not None:
        seen = f"{'ended' if newest.ended else 'last seen'} {text.moment(newest.heartbeat_ms)}"
        yield f"incarnation {newest.incarnation}: process {newest.process} on {newest.host}, {seen}"
        if newest.exit_code:
            yield text.wrapped(f"it {newest.end}", width)
    for key, why in history.damaged.items():
        yield f"damaged: {key}: {why}"
    if not listed:
        return
    header, *rows = text.table(_COLUMNS, list(map(_row, listed)))
    yield from ("", header)
    indent = " " * header.index(_COLUMNS[1])
    for checkpoint, row in zip(listed, rows, strict=True):
        yield row
        yield from _details(checkpoint, indent, width)


def opened_as_text(checkpoint: CheckpointView, width: int) -> Iterator[str]:
    """One checkpoint with its subtasks, for people."""
    header, row = text.table(_COLUMNS, [_row(checkpoint)])
    yield from (header, row)
    yield from _details(checkpoint, " " * header.index(_COLUMNS[1]), width)
    begun_ms, phases = checkpoint.manifest.triggered_at_ms, checkpoint.phases
    for name, at_ms in (("decided", phases.decided_at_ms), ("committed", phases.committed_at_ms)):
        if at_ms is not None:
            yield f"{name} {shown_duration(max(0, at_ms - begun_ms))} after its trigger"
    if phases.slowest:
        yield text.wrapped(f"slowest: {phases.slowest}", width)
    if phases.subtasks:
        yield from ("", *text.table(_SUBTASK_COLUMNS, [*map(_subtask_row, phases.subtasks)]))
    for aborted in phases.aborted:
        why = f"{aborted.reason}, after {shown_duration(aborted.lasted_ms)}"
        yield text.wrapped(f"aborted before it: checkpoint {aborted.checkpoint}: {why}", width)


def _subtask_row(figures: dict[str, Any]) -> text.Row:
    times = ("-" if figures[name] is None else shown_duration(figures[name]) for name in _PHASES)
    in_flight = f"{figures['records_in_flight']:,}" if figures["records_in_flight"] else ""
    sizes = (shown_bytes(figures[name]) for name in ("state_bytes", "written_bytes"))
    return (f"{figures['task']}[{figures['subtask']}]", *times, *sizes, in_flight)


def _row(checkpoint: CheckpointView) -> text.Row:
    manifest = checkpoint.manifest
    return (
        *(str(manifest.checkpoint), manifest.kind, checkpoint.state, text.moment(manifest.completed_at_ms)),
        *(shown_duration(checkpoint.duration_ms), shown_bytes(manifest.written_bytes)),
        shown_bytes(manifest.state_bytes),
    )


def _details(checkpoint: CheckpointView, indent: str, width: int) -> Iterator[str]:
    manifest = checkpoint.manifest
    labels = {"damage": checkpoint.damage} if checkpoint.damage else {}
    fates = ", ".join(f"{count} {fate}" for fate, count in sorted(checkpoint.fates.items()))
    labels["committables"] = f"{fates}; {counted(manifest.records_committed, 'record')}" if fates else "none"
    if manifest.channel_logs:
        in_flight, size = checkpoint.bytes_in_flight, counted(manifest.records_in_flight, "record")
        labels["in flight"] = f"{size} between operators{'' if in_flight is None else f'; {shown_bytes(in_flight)}'}"
    if manifest.skips:
        labels["skips"] = ", ".join(map(str, manifest.skips))
    labels |= _query_place(manifest) if manifest.is_spark_sink else text.sn_by_source(manifest)
    if watermarks := list(_watermarks(manifest)):
        labels["watermark"] = "; ".join(watermarks)
    if skipped := list(_skipped(manifest)):
        labels["skipped"] = "; ".join(skipped)
    label_width = max(map(len, labels)) + 2
    for label, content in labels.items():
        yield from text.labelled(label, content.strip(), label_width, width, indent)


def _position(offset: SourceOffset) -> dict[str, Any]:
    floor = None if offset.floor == NO_FLOOR else offset.floor
    return msgspec.structs.asdict(offset) | {"floor": floor}


def _watermarks(manifest: Manifest) -> Iterator[str]:
    """The watermark of each source with event time, and the split that holds it back."""
    from exactlyonce.views.checkpoints import source_watermarks

    for source, at_ms, place, splits in source_watermarks(manifest):
        if at_ms is None:
            yield f"{source} none yet: {place} has had no record"
        else:
            yield f"{source} {shown_time(at_ms)}" + (f", held back by {place}" if splits > 1 else "")


def _skipped(manifest: Manifest) -> Iterator[str]:
    """The records that did not decode and were skipped, by partition, with the offsets of the last few."""
    for offset in manifest.offsets:
        if offset.skipped:
            last = ", ".join(map(str, offset.skipped_at))
            yield f"{offset.topic}[{offset.partition}] {counted(offset.skipped, 'record')}, the last at {last}"


def _query_place(manifest: Manifest) -> dict[str, str]:
    """The progress of a Spark sink: the batch of its query, and its newest writeId."""
    from exactlyonce.engines.spark.sink.position import Position

    position = Position.of(manifest)
    labels = {"query": f"{position.query}, up to batch {position.batch_next - 1}"} if position.query else {}
    if position.writes:
        labels["writeIds"] = f"{counted(len(position.writes), 'write')}, the last {position.writes[-1]}"
    return labels


def require_format(path: Path) -> None:
    """Raise `ConfigError` unless the name of *path* says PNG or SVG."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path} is of no known format: let its name end with {' or '.join(FORMATS)}.")


def plot(
    path: Path, pipeline: str, manifests: Sequence[Manifest], lags: Mapping[int, int], starts: Sequence[Start]
) -> None:
    """Draw the durations of checkpoints and *lags*, in records by checkpoint, into *path*, with a line at each start.

    Raises `ConfigError` without matplotlib, and `OSError` where the file cannot be written.
    """
    from exactlyonce.views.checkpoints import CheckpointView

    with needing("plot", "matplotlib", "--plot"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    durations, lag = figure.subplots(2, sharex=True)
    figure.suptitle(pipeline)
    times = [_time(manifest.triggered_at_ms) for manifest in manifests]
    durations.plot(times, [CheckpointView(manifest, None).duration_ms / 1000 for manifest in manifests], marker=".")
    durations.set_ylabel("checkpoint duration in s")
    lag.plot(times, [lags.get(manifest.checkpoint, math.nan) for manifest in manifests], marker=".", color="C1")
    lag.set_ylabel("lag in records")
    lag.set_xlabel("time in UTC")
    runs = [start.at_ms for start in starts if not start.is_restart]
    restarts = [start.at_ms for start in starts if start.is_restart]
    for axes in (durations, lag):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        for at_ms, color, style in (*((at, "0.4", ":") for at in runs), *((at, "C3", "--") for at in restarts)):
            axes.axvline(_time(at_ms), color=color, linestyle=style)
    count = sum(start.restarts for start in starts if start.is_restart)
    durations.plot([], [], color="0.4", linestyle=":", label=f"{counted(len(runs), 'run')} began")
    durations.plot([], [], color="C3", linestyle="--", label=f"{counted(count, 'restart')} of workers")
    durations.legend(loc="upper left")
    lag.tick_params(axis="x", rotation=30)
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path)


def _time(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, timezone.utc)
