"""A unit of bounded work: one subtask of one task, from its inputs' beginning to their end, in whatever process.

Invariants: it reads exactly the ranges and files that it is given; all that it writes, files and blocks, carries its
attempt's label or a fresh key, so that two attempts of one unit never meet; it opens no transaction; nothing that it
did counts before the driver has its receipt.
"""

from __future__ import annotations

import msgspec

from exactlyonce.checkpoint.events import Ack
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.bounded.unit.assembly import Assembly
from exactlyonce.engines.bounded.unit.messages import Receipt, Unit
from exactlyonce.engines.bounded.unit.ordering import take_along, take_by_time
from exactlyonce.engines.collector import collecting_rarely
from exactlyonce.engines.plan import plan
from exactlyonce.engines.runtime.blocks import WorkerBlocks
from exactlyonce.engines.runtime.order_log import OrderRuns, order_runs
from exactlyonce.engines.runtime.steps import finish
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import load_reference

BLOCKS_TIMEOUT_S = 120.0
SINK_WAIT_S = 0.05

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Unit)


def run_unit(unit: bytes, attempt_label: str) -> bytes:
    """Do what the encoded `Unit` says; the encoded `Receipt`. No two attempts have the same label."""
    return _encode(_run(_decoder.decode(unit), attempt_label))


def _run(unit: Unit, label: str) -> Receipt:
    began_ms = SystemClock().now_ms()
    physical = plan(_graph(unit), unit.parallelism)
    task = next(each for each in physical.tasks if each.name == unit.task)
    blocks = _block_writer(unit)
    assembly = Assembly(unit, physical, task, label, blocks)
    try:
        with collecting_rarely():
            several = len(assembly.lanes) > 1 or bool(assembly.partitions)
            assembly.operators.order = order_runs(task, physical.shuffles, several=several)
            _take(unit, assembly)
            channels = tuple(file for sending in assembly.sendings for file in sending.close())
            outputs = tuple(file for staging in assembly.stagings for file in staging.close())
            ack = _acknowledgement(unit, assembly, blocks)
    finally:
        notes = assembly.close()
    hit("unit-computed")
    return Receipt(
        ack=ack,
        channels=channels,
        outputs=outputs,
        records=sum(lane.records for lane in assembly.partitions),
        skipped=tuple(each for decoder in assembly.decoders for each in decoder.skipped.values()),
        began_ms=began_ms,
        ended_ms=SystemClock().now_ms(),
        label=label,
        notes=tuple(notes),
    )


def _graph(unit: Unit) -> LogicalGraph:
    graph = load_reference(unit.reference).build()
    if graph.fingerprint() != unit.fingerprint:
        raise GraphError(
            "A unit imported another pipeline than the driver: the executors have another version of its module, or "
            "the graph depends on something that differs between processes (time, random numbers, the environment)."
        )
    return graph


def _take(unit: Unit, assembly: Assembly) -> None:
    """Push all input through the operators, which note the order.

    A subtask that had one lane wrote no order log once: without one, it is taken as it comes.
    """
    order = assembly.operators.order
    follows = unit.order is not None and order is not None and _has_several_orders(assembly, order)
    if unit.order or unit.left or follows:
        take_along(assembly.lanes, unit.order or (), order, unit.left)
    else:
        take_by_time(assembly.lanes, order, assembly.clock)


def _has_several_orders(assembly: Assembly, order: OrderRuns) -> bool:
    """Whether what there is to take can be taken in more than one way: a log of it must be there, and fit."""
    return order.batches or sum(lane.time_ms() is not None for lane in assembly.lanes) > 1


def _block_writer(unit: Unit) -> WorkerBlocks | None:
    """None: the unit writes no blocks, for it computes again what is there already."""
    if not unit.write_state:
        return None
    storage = block_storage(ClientConfig(unit.client), unit.topic, unit.storage)
    return WorkerBlocks(storage.begin(unit.incarnation, unit.attempt))


def _acknowledgement(unit: Unit, assembly: Assembly, blocks: WorkerBlocks | None) -> Ack:
    ends = {(lane.name, lane.partition): lane.decoder.noted(lane.reader.position()) for lane in assembly.partitions}
    offsets = tuple(ends[reading.source, reading.partition] for reading in unit.readings)
    if blocks is None:
        return Ack(unit.task, unit.subtask, unit.checkpoint, offsets)
    operators, attempt = assembly.operators, blocks.attempt
    cut = operators.cut(unit.checkpoint, unit.base.checkpoint, offsets, whole=not unit.incremental)

    def wait() -> None:
        attempt.wait(BLOCKS_TIMEOUT_S)
        for writer in operators.sinks:
            writer.poll(SINK_WAIT_S)

    return finish(cut.acknowledge(operators.blocks(blocks, unit.checkpoint)), wait)
