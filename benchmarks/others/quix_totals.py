"""A running total per customer on Quix Streams, exactly once: python quix_totals.py SERVERS INPUT OUTPUT FOLDER."""

import sys
from typing import Any

from quixstreams import Application, State

servers, source, sink, folder = sys.argv[1:]
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


orders = application.topic(source, key_deserializer="str", value_deserializer="json")
totals = application.topic(sink, key_serializer="str", value_serializer="json")
application.dataframe(orders).apply(add, stateful=True).to_topic(totals)
application.run()
