"""An interval computed again along its order logs, its state as well, by whichever `Submit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from bounded import Fed, table_of

from exactlyonce.checkpoint.records.manifest import Manifest, OperatorSnapshot
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockReader
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.engines.bounded.recompute import interval_of
from exactlyonce.engines.bounded.stages import Submit, compute
from exactlyonce.engines.bounded.unit.messages import Receipt, Stage
from exactlyonce.engines.bounded.unit.staging import read_lane
from exactlyonce.engines.plan import TaskSpec, plan
from exactlyonce.pipeline.loading import Loaded

Outputs = dict[tuple[str, int], list[Any]]
States = dict[str, dict[bytes, bytes]]


@dataclass(frozen=True)
class Golden:
    """The results of an interval: by sink and subtask, outputs in order; by operator, the bytes of each key's state."""

    outputs: Outputs
    states: States


def states_of(fed: Fed, loaded: Loaded, manifest: Manifest) -> States:
    found: States = {}
    for snapshot in manifest.operators:
        table = table_of(fed.kafka, loaded, manifest, snapshot.operator)
        found[snapshot.operator] = {key: msgspec.msgpack.encode(state) for key, state in table.items()}
    return found


def compute_again(fed: Fed, loaded: Loaded, checkpoint: int, submit: Submit, folder: Path) -> Golden:
    """The interval that *checkpoint* ended. Its blocks are written as well, as orphans."""
    interval = interval_of(fed.history(), checkpoint)
    manifest, topic = interval.manifest, find_topic(fed.config, fed.name)
    folder.mkdir(parents=True, exist_ok=True)
    spec = TaskSpec(
        reference=loaded.reference, parallelism=manifest.parallelism, incarnation=manifest.incarnation,
        attempt=manifest.attempt, manifest=interval.base, topic=topic,
    )  # fmt: skip
    stage = Stage(
        spec=spec, fingerprint=manifest.fingerprint, checkpoint=checkpoint, write_state=True, origins=False,
        files=f"{folder}/", by_partition=False,
    )  # fmt: skip
    reader = BlockReader(fed.config.confluent(), topic)
    logs = {
        (log.task, log.subtask): tuple(block.body for _, block in reader.fetch(log.blocks))
        for log in manifest.order_logs
    }
    physical, settings = plan(loaded.pipeline.build(), manifest.parallelism), dict(fed.config.settings)
    receipts = compute(physical, stage, settings, interval.ranges, submit, logs)
    remade = msgspec.structs.replace(manifest, operators=_snapshots(receipts))
    return Golden(_outputs(receipts), states_of(fed, loaded, remade))


def _outputs(receipts: list[Receipt]) -> Outputs:
    found: Outputs = {}
    for file in (file for receipt in receipts for file in receipt.outputs):
        records = found[file.sink, file.subtask] = []
        for batch in read_lane([file], 0):
            none = [None] * len(batch.values)
            records += zip(batch.values, batch.keys or none, batch.headers or none, strict=True)
    return found


def _snapshots(receipts: list[Receipt]) -> tuple[OperatorSnapshot, ...]:
    acks = sorted(
        ((ack.operator, receipt.ack.subtask, ack) for receipt in receipts for ack in receipt.ack.operators),
        key=lambda each: each[:2],
    )
    names = dict.fromkeys(name for name, _, _ in acks)
    return tuple(
        OperatorSnapshot(name, sum(each == name for each, _, _ in acks), 0,
                         tuple(ack.index for each, _, ack in acks if each == name))
        for name in names
    )  # fmt: skip
