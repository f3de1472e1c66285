"""Publishing: the staged outputs of a sink in some partitions, in one transaction, left open for the decision.

Invariants: a partition gets the outputs of each subtask in turn, all in this transaction; no other attempt of this
publication has the transaction's id, and the next checkpoint reuses it only if no attempt has failed; the producer's id
and epoch are read between its initialisation and its first record; the transaction is never ended here: the driver
sweeps it unless a manifest names it.
"""

from __future__ import annotations

from contextlib import closing

import msgspec

from exactlyonce.checkpoint.records.manifest import TransactionalId
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.unit.messages import Publication, Published, tries_before
from exactlyonce.engines.bounded.unit.staging import OutputFile, StagedFiles, read_outputs
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.kafka.open_transaction import OpenTransaction
from exactlyonce.sinks.kafka.sink import Outputs

SLOT = "0"

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Publication)
_outputs_decoder = msgspec.msgpack.Decoder(list[OutputFile])


def publish(publication: bytes, attempt_label: str) -> bytes:
    """Write an encoded `Publication`; return the encoded `Published`."""
    began_ms, work = SystemClock().now_ms(), _decoder.decode(publication)
    with closing(StagedFiles()) as files:
        outputs = _outputs_decoder.decode(files.message(work.outputs, 0))
        transaction = _begun(work, attempt_label)
        for output in outputs:
            for partition in work.partitions:
                _write(transaction, work.topic, files, output, partition)
    transaction.flush()
    precommit = transaction.precommit(work.sink, work.publisher, work.checkpoint, SystemClock().monotonic_ms())
    transaction.drop()
    wanted = sum(output.counts.get(partition, 0) for output in outputs for partition in work.partitions)
    require(precommit.records == wanted, "all that was staged is in the transaction")
    hit("publication-flushed")
    return _encode(Published(precommit, began_ms, SystemClock().now_ms(), attempt_label))


def _begun(work: Publication, label: str) -> OpenTransaction:
    attempt = f"{work.attempt}-{tries_before(label)}"
    name = str(TransactionalId(work.pipeline, work.sink, work.publisher, work.incarnation, attempt, SLOT))
    config = ClientConfig(work.client)
    with closing(Transactions(config)) as transactions:
        return OpenTransaction.begun(
            config,
            name,
            transactions,
            timeout_ms=work.transaction_timeout_ms,
            topic=work.topic,
            subject=f"sink {work.sink!r}",
            opened_ms=SystemClock().monotonic_ms(),
        )


def _write(transaction: OpenTransaction, topic: str, files: StagedFiles, output: OutputFile, partition: int) -> None:
    """Write all that a subtask has staged for *partition*."""
    before, staged = transaction.records, output.counts.get(partition, 0)
    for batch in read_outputs(files, output.file, partition) if staged else ():
        places = [partition] * len(batch.values)
        transaction.write(topic, Outputs(batch.values, batch.keys, batch.headers, batch.timestamps, partitions=places))
    require(transaction.records - before == staged, "all that a subtask has staged for a partition is written")
