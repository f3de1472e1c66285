"""Pipelines on Quix Streams, exactly once: python quix_pipelines.py totals|counts SERVERS INPUT OUTPUT FOLDER.

`totals` is a running total per customer; `counts` the orders per customer in windows of 10 s, final results only.
"""

import sys
from typing import Any

from quixstreams import Application, State

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
    """The event time of an order: its number, less up to 1.5 s."""
    number: int = order["id"]
    return number + 2_000 - number * 7_919 % 1_500


def named(window: dict[str, Any], key: str, timestamp: int, headers: Any) -> dict[str, Any]:
    """The window with its customer."""
    return {"customer": key, "start": window["start"], "count": window["value"]}


results = application.topic(sink, key_serializer="str", value_serializer="json")
if work == "totals":
    orders = application.topic(source, key_deserializer="str", value_deserializer="json")
    application.dataframe(orders).apply(add, stateful=True).to_topic(results)
else:
    timed = application.topic(source, key_deserializer="str", value_deserializer="json", timestamp_extractor=event_ms)
    windows = application.dataframe(timed).tumbling_window(10_000, grace_ms=2_000).count()
    windows.final(closing_strategy="partition").apply(named, metadata=True).to_topic(results)
application.run()
