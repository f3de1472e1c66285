"""The loop by hand that the engine is compared with, as fast as we can make it.

    python by_hand.py passing|mapping|totals SERVERS INPUT OUTPUT COUNT

Consumes in batches, decodes and encodes by msgspec, keeps totals in a dict, produces in transactions of 500 ms with the
offsets in them, until COUNT records are processed. Its state is lost at the end. Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import msgspec
from cluster import PARTITIONS, WRITER, reader, require_records
from confluent_kafka import Message, Producer
from orders import CHEAP, Order, Priced, Total

INTERVAL_S = 0.5
BATCH_RECORDS = 2_000
WAIT_S = 0.02
LIMIT_S = 600.0

Process = Callable[[list[Message]], None]


def passing(producer: Producer, topic: str) -> Process:
    """Bytes as they are."""
    produce = producer.produce

    def process(messages: list[Message]) -> None:
        for message in messages:
            produce(topic, message.value())

    return process


def mapping(producer: Producer, topic: str) -> Process:
    """A filter and a map."""
    produce, decode, encode = producer.produce, msgspec.json.Decoder(Order).decode, msgspec.json.Encoder().encode

    def process(messages: list[Message]) -> None:
        for message in messages:
            order = decode(message.value() or b"")
            if order.total >= CHEAP:
                produce(topic, encode(Priced(order.id, order.customer, order.total * 100)), order.customer)

    return process


def totals(producer: Producer, topic: str) -> Process:
    """A running total per customer."""
    produce, decode, encode = producer.produce, msgspec.json.Decoder(Order).decode, msgspec.json.Encoder().encode
    sums: dict[str, int] = {}

    def process(messages: list[Message]) -> None:
        for message in messages:
            order = decode(message.value() or b"")
            customer = order.customer
            sums[customer] = total = sums.get(customer, 0) + order.total
            produce(topic, encode(Total(customer, total, order.ts)), customer)

    return process


def transactional_producer(servers: str) -> Producer:
    """A producer whose records all arrive, or the process ends."""
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "transactional.id": f"by-hand-{time.time_ns()}",
            "max.in.flight": 1,  # as ours have: with more it may lose records; see docs/settings.md
            "delivery.report.only.error": True,
            "on_delivery": _undelivered,
            **WRITER,
        }
    )
    producer.init_transactions(LIMIT_S)
    return producer


class Loop:
    """The consumer, the producer, and the measurements."""

    def __init__(self, servers: str, source: str) -> None:
        self.producer = transactional_producer(servers)
        self.consumer = reader(servers, source, range(PARTITIONS))
        self.records = 0
        self.batch_s = self.longest_gap_s = 0.0
        self.commits: list[tuple[float, int]] = []
        """The time of each, and the number of records processed by then."""

    def run(self, process: Process, count: int) -> None:
        """Go on until *count* records are committed."""
        producer, consume = self.producer, self.consumer.consume
        producer.begin_transaction()
        commit_at_s = time.monotonic() + INTERVAL_S
        while self.records < count:
            messages = consume(BATCH_RECORDS, WAIT_S)
            if messages:
                require_records(messages)
                process(messages)
                self._processed(len(messages))
            producer.poll(0)
            if time.monotonic() >= commit_at_s:
                self._commit()
                producer.begin_transaction()
                commit_at_s = time.monotonic() + INTERVAL_S
        self._commit()

    def _processed(self, records: int) -> None:
        now = time.monotonic()
        if self.records:
            self.longest_gap_s = max(self.longest_gap_s, now - self.batch_s)
        self.batch_s = now
        self.records += records

    def _commit(self) -> None:
        positions = self.consumer.position(self.consumer.assignment())
        self.producer.send_offsets_to_transaction(positions, self.consumer.consumer_group_metadata(), LIMIT_S)
        self.producer.commit_transaction(LIMIT_S)
        self.commits.append((time.monotonic(), self.records))


def _undelivered(error: object, message: Message) -> None:
    sys.exit(f"by hand: a record was not delivered: {error}")


def main() -> None:
    """Run the loop and print the measurements."""
    name, servers, source, sink, count = sys.argv[1:]
    loop = Loop(servers, source)
    process = {"passing": passing, "mapping": mapping, "totals": totals}[name](loop.producer, sink)
    loop.run(process, int(count))
    if len(loop.commits) < 2:
        sys.exit(f"by hand: {count} records are too few for two commits, {INTERVAL_S} s apart")
    (first_s, first_records), (last_s, last_records) = loop.commits[0], loop.commits[-1]
    rate = (last_records - first_records) / (last_s - first_s)
    print(json.dumps({"rate": rate, "longest_gap_ms": loop.longest_gap_s * 1000}))


if __name__ == "__main__":
    main()
