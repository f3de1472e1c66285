"""Publishing: the staged outputs of one subtask of a sink, in one transaction, flushed and left open for the decision.

Invariants: the transaction's id is of no other attempt of this publication, and the next checkpoint uses it again only
if none has failed; whose producer it is was read after its initialisation and before its first record; it is never
ended here: a transaction that no manifest names is swept by the driver.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec

from exactlyonce.checkpoint.records.committable import Precommit, TransactionalId
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.unit.messages import Publication, Published, tries_before
from exactlyonce.engines.bounded.unit.staging import read_outputs
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
"""Of the client: more than its default, at which a fast writer stops, and no more than memory has room for."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Publication)


def publish(publication: bytes, attempt_label: str) -> bytes:
    """Do what the encoded `Publication` says; the encoded `Published`."""
    return _encode(_publish(_decoder.decode(publication), attempt_label))


def _publish(publication: Publication, label: str) -> Published:
    began_ms = SystemClock().now_ms()
    with ThreadPoolExecutor(1, "producers") as executor:
        writer = _ready_writer(publication, label, executor)
        try:
            precommit = _flushed(writer, publication)
        finally:
            writer.abandon()
    wanted = sum(file.file.records for file in publication.files)
    require(precommit is not None and precommit.records == wanted, "all that was staged is in the transaction")
    assert precommit is not None
    hit("publication-flushed")
    return Published(precommit, began_ms, SystemClock().now_ms(), label)


def _flushed(writer: KafkaWriter, publication: Publication) -> Precommit | None:
    """Write all that was staged, and wait until the broker has it."""
    for file in publication.files:
        for batch in read_outputs(file.file):
            writer.write(Outputs(batch.values, batch.keys, batch.headers, batch.timestamps))
            while not writer.room:
                writer.poll(WAIT_S)
            writer.poll()
    writer.barrier(publication.checkpoint)
    while (flushed := writer.take_flushed(publication.checkpoint)) is None:
        writer.poll(WAIT_S)
    return flushed.precommit


def _ready_writer(publication: Publication, label: str, executor: ThreadPoolExecutor) -> KafkaWriter:
    """A writer whose one producer is initialised, and known to be ours."""
    name = TransactionalId(
        publication.pipeline,
        publication.sink,
        publication.subtask,
        publication.incarnation,
        f"{publication.attempt}-{tries_before(label)}",
        SLOT,
    )
    config = ClientConfig({"queue.buffering.max.messages": QUEUE_RECORDS, **publication.client})
    prepared: list[str] = []
    writer = KafkaWriter(
        sink=publication.sink,
        subtask=publication.subtask,
        topic=publication.topic,
        pool=TransactionPool([str(name)]),
        producers=KafkaProducers(publication.topic, config.confluent(), publication.transaction_timeout_ms, executor),
        prepared=prepared.append,
        clock=SystemClock(),
    )
    writer.poll()
    executor.submit(int).result()  # behind the producer's making, on the same thread
    writer.poll()
    require(prepared == [str(name)], "a producer that could be made is prepared")
    _grant(writer, str(name), config)
    return writer


def _grant(writer: KafkaWriter, name: str, config: ClientConfig) -> None:
    transactions = Transactions(config)
    try:
        state = transactions.describe([name])[name]
    finally:
        transactions.close()
    if state is None or state.state != "Empty":
        raise SinkFailed(f"transaction {name} is {state.state if state else 'unknown'} right after its initialisation")
    writer.granted(name, state.producer_id, state.epoch)
