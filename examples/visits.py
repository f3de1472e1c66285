"""Visits to a shop, from its clicks: a visit goes on while a click follows another within half an hour.

    python examples/visits.py --bootstrap-servers 127.0.0.1:9092

Phones send clicks when they are online again: a click up to two minutes late counts, also where it unites two visits.
One that comes later may be of a visit that is already told: it goes to a topic of its own.
"""

from __future__ import annotations

import argparse
from datetime import datetime

import msgspec
from confluent_kafka import Consumer, TopicPartition

from exactlyonce import Count, EventTime, KafkaSink, KafkaSource, Last, Output, Pipeline, Session, Sum
from exactlyonce.cli.demo.feeding import create_topics, feed

LIMIT_S = 60
CLICKS = [
    ("ann", "09:00:00", "home", 0),
    ("bob", "09:10:00", "home", 0),
    ("ann", "09:20:00", "lamp", 0),
    ("ann", "09:58:00", "cart", 30),
    ("ann", "10:01:00", "paid", 30),
    ("ann", "09:59:30", "desk", 200),  # out of order, in time
    ("bob", "10:05:00", "sofa", 0),
    ("ann", "09:45:00", "sale", 15),  # would unite ann's visits, and is late
]


class Click(msgspec.Struct):
    user: str
    at: datetime
    page: str
    euros: int


class Visit(msgspec.Struct):
    clicks: int
    euros: int
    left: str


def make(topic: str) -> Pipeline:
    """TOPIC to TOPIC-visits and TOPIC-late."""
    late = Output("late", Click)
    pipeline = Pipeline(topic)
    visits = (
        pipeline.source("clicks", KafkaSource(topic, value=Click, time=EventTime("at", disorder="2m")))
        .key_by(lambda click: click.user)
        .window(Session("30m"))
        .aggregate("visits", Visit, clicks=Count(), euros=Sum("euros"), left=Last("page"), late=late)
    )
    visits.sink("out", KafkaSink(f"{topic}-visits", key=lambda visit: visit.key, create_partitions=1))
    visits.side(late).sink("late", KafkaSink(f"{topic}-late", key=lambda click: click.user, create_partitions=1))
    return pipeline


def show(servers: str, topic: str) -> None:
    """Print the values of *topic*."""
    settings = {"bootstrap.servers": servers, "group.id": "visits", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    while (message := consumer.poll(LIMIT_S)) is not None and not message.error():
        print((message.value() or b"").decode())
    consumer.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--bootstrap-servers", default="127.0.0.1:9092")
    arguments.add_argument("--topic", default="clicks")
    given = arguments.parse_args()
    servers, topic = given.bootstrap_servers, given.topic
    create_topics(servers, [topic], 1)
    clicks = [
        (user, {"user": user, "at": f"2026-11-20T{at}Z", "page": page, "euros": euros})
        for user, at, page, euros in CLICKS
    ]
    feed(servers, topic, clicks)
    make(topic).run(inline=True, until="latest", drain=True, bootstrap_servers=servers, log_level="error")
    print("Visits:")
    show(servers, f"{topic}-visits")
    print("Late:")
    show(servers, f"{topic}-late")


if __name__ == "__main__":
    main()
