"""`exactlyonce checkpoints`: what is in the checkpoint topic. Only reads: it fences nobody, and a pipeline runs on."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Finalized, Manifest
from exactlyonce.checkpoint.records.storage_url import described
from exactlyonce.cli import text
from exactlyonce.cli.arguments import Commands, add_cluster, add_command, add_pipeline_name, client, pipeline_name
from exactlyonce.cli.sn import sn_by_source
from exactlyonce.pipeline.sizes import shown_bytes

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.client_config import ClientConfig

_EXAMPLES = """\
List the checkpoints of a pipeline, or of a sink of Spark: when each was taken, what it
wrote, how large the state is, what it committed, and Sn: by partition, the offset of the
first record that is not in it. Decided: it counts, and its transactions are being
committed. Finalized: all of them are. Damaged: it cannot be restored. The pipeline is
not disturbed.

examples:
  exactlyonce checkpoints order-totals
  exactlyonce checkpoints orders:pipeline --bootstrap-servers 127.0.0.1:9092
  exactlyonce checkpoints order-totals --json
"""
_COLUMNS = (">id", "kind", "state", "completed", ">took", ">written", ">state size")


def add(commands: Commands) -> None:
    """The parser."""
    parser = add_command(commands, "checkpoints", "PIPELINE [options]", "list checkpoints", _EXAMPLES, checkpoints)
    add_pipeline_name(parser)
    parser.add_argument("--json", action="store_true", help="all of it, as one JSON document")
    add_cluster(parser)


def checkpoints(args: argparse.Namespace) -> int:
    """Print the list."""
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history

    config = client(args)
    history = read_history(config.confluent(), pipeline_name(args))
    damaged = _damaged(config, history)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(as_json(history, damaged)), indent=2).decode())
    else:
        width = text.terminal_width()
        print(*as_text(history, config.bootstrap_servers, width, damaged), sep="\n")
    return 0


def _damaged(config: ClientConfig, history: History) -> dict[int, str]:
    """By checkpoint, why it cannot be restored, as far as its indexes show: the state itself is not read."""
    from exactlyonce.cli.unclaimed_blocks import standing
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
    from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
    from exactlyonce.engines.blocks import Storages

    with closing(Storages(config, find_topic(config.confluent(), history.pipeline))) as storages:
        found = standing(storages, history)
    damaged = {checkpoint: why for checkpoint, why in found.items() if isinstance(why, str)}
    left = read_history(config.confluent(), history.pipeline).manifests if damaged else {}
    return {checkpoint: why for checkpoint, why in damaged.items() if checkpoint in left}  # else it has expired now


@dataclass(frozen=True)
class ListedCheckpoint:
    """One checkpoint, as it is listed."""

    manifest: Manifest
    finalized: Finalized | None
    damage: str = ""
    """Why nothing can be restored from it; empty: nothing is known to stand in the way."""

    @property
    def state(self) -> str:
        """Whether all of it is known to be committed, or it is damaged."""
        return "damaged" if self.damage else "finalized" if self.finalized else "decided"

    def fate(self, name: str) -> str:
        """What became of one of its committables, by transactional id or name."""
        return dict(self.finalized.fates).get(name, "empty") if self.finalized else "decided"

    def as_json(self) -> dict[str, Any]:
        """All that a person may ask of it; references to blocks are left out."""
        manifest = self.manifest
        names = (
            *("checkpoint", "kind", "incarnation", "attempt", "base", "previous", "parallelism", "max_parallelism"),
            *("fingerprint", "triggered_at_ms", "completed_at_ms", "written_bytes"),
        )
        committables = [
            {**msgspec.to_builtins(each), "records": each.records, "fate": self.fate(each.transactional_id)}
            for each in manifest.committables
        ]
        return {
            **{name: getattr(manifest, name) for name in names},
            "state": self.state,
            "storage": described(manifest.storage),
            "damage": self.damage or None,
            "finalized_at_ms": self.finalized.at_ms if self.finalized else None,
            "duration_ms": _duration_ms(manifest),
            "state_bytes": manifest.state_bytes,
            "records_in_flight": manifest.records_in_flight,
            "offsets": manifest.offsets,
            "skips": manifest.skips,
            "committables": committables,
            "staged": [
                {
                    "sink": each.sink,
                    "subtask": each.subtask,
                    "checkpoint": each.checkpoint,
                    "kind": each.kind,
                    "records": each.records,
                    "fate": self.fate(each.name),
                }
                for each in manifest.staged
            ],
        }

    def row(self) -> text.Row:
        """Its cells under `_COLUMNS`."""
        manifest = self.manifest
        return (
            *(str(manifest.checkpoint), manifest.kind, self.state, text.moment(manifest.completed_at_ms)),
            *(text.duration(_duration_ms(manifest)), shown_bytes(manifest.written_bytes)),
            shown_bytes(manifest.state_bytes),
        )

    def details(self, indent: str, width: int) -> Iterator[str]:
        """What it committed, and Sn of each source."""
        labels = {"damage": self.damage} if self.damage else {}
        labels["committables"] = self._committed()
        if self.manifest.channel_logs:
            labels["on their way"] = self._in_flight()
        if self.manifest.skips:
            labels["left out"] = ", ".join(map(str, self.manifest.skips))
        labels |= _sinks_place(self.manifest) if _is_sinks(self.manifest) else sn_by_source(self.manifest)
        if skipped := list(_skipped(self.manifest)):
            labels["skipped"] = "; ".join(skipped)
        label_width = max(map(len, labels)) + 2
        for label, content in labels.items():
            yield from text.labelled(label, content.strip(), label_width, width, indent)

    def _in_flight(self) -> str:
        written = sum(ref.size for log in self.manifest.channel_logs for ref in log.blocks)
        if any(log.indexed for log in self.manifest.channel_logs):  # of which the manifest names lists
            return f"{text.counted(self.manifest.records_in_flight, 'record')} between operators"
        return f"{text.counted(self.manifest.records_in_flight, 'record')} between operators; {shown_bytes(written)}"

    def _committed(self) -> str:
        names = [each.transactional_id for each in self.manifest.committables]
        names += [each.name for each in self.manifest.staged]
        if not names:
            return "none"
        shown = ", ".join(f"{count} {fate}" for fate, count in sorted(Counter(map(self.fate, names)).items()))
        return f"{shown}; {text.counted(self.manifest.records_committed, 'record')}"


def _skipped(manifest: Manifest) -> Iterator[str]:
    """How many records of each partition do not decode and were skipped up to Sn, and where the last few are."""
    for each in manifest.offsets:
        if each.skipped:
            last = ", ".join(map(str, each.skipped_at))
            yield f"{each.topic}[{each.partition}] {text.counted(each.skipped, 'record')}, the last at {last}"


def _is_sinks(manifest: Manifest) -> bool:
    """Whether it is a checkpoint of a sink of Spark."""
    from exactlyonce.engines.spark.sink.position import KIND

    return manifest.kind == KIND


def _sinks_place(manifest: Manifest) -> dict[str, str]:
    """How far a sink of Spark has come: its query's batch, and the last of the writeIds that it remembers."""
    from exactlyonce.engines.spark.sink.position import Position

    position = Position.of(manifest)
    found = {"query": f"{position.query}, up to batch {position.batch_next - 1}"} if position.query else {}
    if position.writes:
        found["writeIds"] = f"{text.counted(len(position.writes), 'write')}, the last {position.writes[-1]}"
    return found


def _duration_ms(manifest: Manifest) -> int:
    return max(0, manifest.completed_at_ms - manifest.triggered_at_ms)  # clocks may be set back


def _listed(history: History, damaged: Mapping[int, str]) -> list[ListedCheckpoint]:
    return [
        ListedCheckpoint(manifest, history.finalized.get(manifest.checkpoint), damaged.get(manifest.checkpoint, ""))
        for manifest in history.retained
    ]


def as_json(history: History, damaged: Mapping[int, str] = {}) -> dict[str, Any]:
    """All checkpoints, for machines; *damaged* says by checkpoint why it cannot be restored."""
    return {
        "pipeline": history.pipeline,
        "newest_incarnation": history.newest_incarnation,
        "storage": described(history.storage),
        "damaged": history.damaged,
        "checkpoints": [each.as_json() for each in _listed(history, damaged)],
    }


def as_text(history: History, bootstrap_servers: str, width: int, damaged: Mapping[int, str] = {}) -> Iterator[str]:
    """All checkpoints, for people: lines of at most *width* columns, where a word fits."""
    listed, newest = _listed(history, damaged), history.newest_incarnation
    is_sink = history.latest is not None and _is_sinks(history.latest)
    whose = f"{history.pipeline}, a sink of Spark," if is_sink else history.pipeline
    yield f"{whose} at {bootstrap_servers}: {text.counted(len(listed), 'checkpoint')}"
    if history.storage:
        yield f"blocks are kept in {history.storage}"
    for storage in sorted({each.storage for each in history.retained} - {history.storage}):
        numbers = ", ".join(str(each.checkpoint) for each in history.retained if each.storage == storage)
        yield f"blocks of {numbers} are kept in {described(storage)}, from before they were moved"
    if newest is not None:
        seen = f"{'ended' if newest.ended else 'last seen'} {text.moment(newest.heartbeat_ms)}"
        yield f"incarnation {newest.incarnation}: process {newest.process} on {newest.host}, {seen}"
    for key, why in history.damaged.items():
        yield f"damaged: {key}: {why}"
    if not listed:
        return
    header, *rows = text.table(_COLUMNS, [each.row() for each in listed])
    yield from ("", header)
    indent = " " * header.index(_COLUMNS[1])
    for each, row in zip(listed, rows, strict=True):
        yield row
        yield from each.details(indent, width)
