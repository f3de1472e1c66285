"""Pipelines on Quix Streams, exactly once: python quix_pipelines.py WORK SERVERS INPUTS OUTPUT FOLDER.

WORK is one of those in work.py. It joins a record with earlier ones of the other topic, in order of Kafka's time.
"""

import sys
from datetime import timedelta
from typing import Any

from quixstreams import Application, State
from quixstreams.dataframe import StreamingDataFrame

work, servers, source, sink, folder = sys.argv[1:]
application = Application(
    broker_address=servers,
    consumer_group=f"{sink}-quix",
    processing_guarantee="exactly-once",
    commit_interval=0.5,
    auto_offset_reset="earliest",
    state_dir=folder,
    loglevel="WARNING",
    producer_extra_config={"queue.buffering.max.messages": 1_000_000},
)


def add(order: dict[str, Any], state: State) -> dict[str, Any]:
    """The running total."""
    total = state.get("sum", 0) + order["total"]
    state.set("sum", total)
    return {"customer": order["customer"], "sum": total, "ts": order["ts"]}


def event_ms(order: dict[str, Any], headers: Any, timestamp: int, timestamp_type: Any) -> int:
    """The event time of an order or a payment: its number, less up to 1.5 s."""
    number: int = order["id"]
    return number + 2_000 - number * 7_919 % 1_500


def named(window: dict[str, Any], key: str, timestamp: int, headers: Any) -> dict[str, Any]:
    """The window with its customer."""
    return {"customer": key, "start": window["start"], "count": window["value"]}


def paid(order: dict[str, Any], payment: dict[str, Any]) -> dict[str, Any]:
    """The order with its payment."""
    return {
        "order": order["id"], "customer": order["customer"], "total": order["total"], "amount": payment["amount"]
    }  # fmt: skip


def first(order: dict[str, Any], state: State) -> bool:
    """Whether it has not come within the hour before."""
    number = str(order["id"])
    if state.exists(number):
        return False
    state.set(number, True, ttl=timedelta(hours=1))
    return True


def orders_of(topic: str, timed: bool = True) -> StreamingDataFrame:
    """The records of *topic*, with their event times if they are needed."""
    return application.dataframe(
        application.topic(
            topic,
            key_deserializer="str",
            value_deserializer="json",
            timestamp_extractor=event_ms if timed else None,
        )
    )


results = application.topic(sink, key_serializer="str", value_serializer="json")
if work == "totals":
    orders_of(source, timed=False).apply(add, stateful=True).to_topic(results)
elif work == "counts":
    windows = orders_of(source).tumbling_window(10_000, grace_ms=2_000).count()
    windows.final(closing_strategy="partition").apply(named, metadata=True).to_topic(results)
elif work == "payments":
    orders, payments = map(orders_of, source.split(","))
    joined = orders.join_interval(payments, on_merge=paid, grace_ms=7_000, forward_ms=5_000)
    joined.to_topic(results, key=lambda paid: paid["customer"])
elif work == "once":
    orders_of(source).filter(first, stateful=True).to_topic(results)
else:
    sys.exit(f"there is no {work}")
application.run()
