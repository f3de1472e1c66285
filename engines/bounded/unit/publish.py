"""Publishing: the staged outputs of a sink in some partitions, in one transaction, left open for the decision.

Invariants: a partition gets the outputs of each subtask in turn, all in this transaction; no other attempt of this
publication has the transaction's id, and the next checkpoint reuses it only if no attempt has failed; the producer's id
and epoch are read between its initialisation and its first record; the transaction is never ended here: the driver
sweeps it unless a manifest names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec

from exactlyonce.checkpoint.records.manifest import Precommit, TransactionalId
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.unit.messages import Publication, Published, tries_before
from exactlyonce.engines.bounded.unit.staging import OutputFile, StagedFiles, read_outputs
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.kafka.producers import KafkaProducers
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.kafka.transaction_pool import TransactionPool
from exactlyonce.sinks.kafka.writer import KafkaWriter
from exactlyonce.sinks.writer import SinkFailed

WAIT_S = 0.005
SLOT = "0"
QUEUE_RECORDS = "200000"
"""The client's queue: a fast writer stalls at the default, and memory bounds it."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Publication)
_outputs_decoder = msgspec.msgpack.Decoder(list[OutputFile])


def publish(publication: bytes, attempt_label: str) -> bytes:
    """Write an encoded `Publication`; return the encoded `Published`."""
    began_ms, work = SystemClock().now_ms(), _decoder.decode(publication)
    with closing(StagedFiles()) as files, ThreadPoolExecutor(1, "producers") as executor:
        outputs = _outputs_decoder.decode(files.message(work.outputs, 0))
        writer = _ready_writer(work, attempt_label, executor)
        try:
            precommit = _flushed(writer, work, outputs, files)
        finally:
            writer.abandon()
    wanted = sum(output.counts.get(partition, 0) for output in outputs for partition in work.partitions)
    require(precommit is not None and precommit.records == wanted, "all that was staged is in the transaction")
    assert precommit is not None
    hit("publication-flushed")
    return _encode(Published(precommit, began_ms, SystemClock().now_ms(), attempt_label))


def _flushed(
    writer: KafkaWriter, publication: Publication, outputs: Sequence[OutputFile], files: StagedFiles
) -> Precommit | None:
    for output in outputs:
        for partition in publication.partitions:
            staged = output.counts.get(partition, 0)
            written = _written(writer, files, output, partition) if staged else 0
            require(written == staged, "all that a subtask has staged for a partition is written")
    writer.barrier(publication.checkpoint)
    while (flushed := writer.take_flushed(publication.checkpoint)) is None:
        writer.poll(WAIT_S)
    return flushed.precommit


def _written(writer: KafkaWriter, files: StagedFiles, output: OutputFile, partition: int) -> int:
    written = 0
    for batch in read_outputs(files, output.file, partition):
        count = len(batch.values)
        writer.write(Outputs(batch.values, batch.keys, batch.headers, batch.timestamps, partitions=[partition] * count))
        written += count
        while not writer.room:
            writer.poll(WAIT_S)
        writer.poll()
    return written


def _ready_writer(publication: Publication, label: str, executor: ThreadPoolExecutor) -> KafkaWriter:
    """A writer whose one producer is initialised, and known to be ours."""
    attempt = f"{publication.attempt}-{tries_before(label)}"
    transaction = TransactionalId(
        publication.pipeline, publication.sink, publication.publisher, publication.incarnation, attempt, SLOT
    )
    name = str(transaction)
    config = ClientConfig({"queue.buffering.max.messages": QUEUE_RECORDS, **publication.client})
    prepared: list[str] = []
    writer = KafkaWriter(
        sink=publication.sink,
        subtask=publication.publisher,
        topic=publication.topic,
        pool=TransactionPool([name]),
        producers=KafkaProducers(publication.topic, config.confluent(), publication.transaction_timeout_ms, executor),
        prepared=prepared.append,
        clock=SystemClock(),
    )
    writer.poll()
    executor.submit(int).result()  # runs after the producer is made, on the same thread
    writer.poll()
    require(prepared == [name], "a producer that could be made is prepared")
    with closing(Transactions(config)) as transactions:
        state = transactions.describe([name])[name]
    if state is None or state.state != "Empty":
        raise SinkFailed(f"transaction {name} is {state.state if state else 'unknown'} right after its initialisation")
    writer.granted(name, state.producer_id, state.epoch)
    return writer
