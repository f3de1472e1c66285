"""Pipelines on Bytewax, at least once: python bytewax_pipelines.py WORK SERVERS INPUT OUTPUT FOLDER.

WORK is `totals` or `counts` of work.py.
"""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
from bytewax import operators as op
from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource, KafkaSourceMessage
from bytewax.dataflow import Dataflow
from bytewax.operators.windowing import EventClock, TumblingWindower, count_window
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import run_main

work, servers, source, sink, folder = sys.argv[1:]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def decoded(message: KafkaSourceMessage) -> dict[str, Any]:
    """The order."""
    order: dict[str, Any] = orjson.loads(message.value)
    return order


def keyed(message: KafkaSourceMessage) -> tuple[str, dict[str, Any]]:
    """The order by its customer."""
    order = decoded(message)
    return order["customer"], order


def add(total: int | None, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The running total."""
    total = (total or 0) + order["total"]
    return total, {"customer": order["customer"], "sum": total, "ts": order["ts"]}


def encoded_total(keyed: tuple[str, dict[str, Any]]) -> KafkaSinkMessage:
    """The total as a message."""
    return KafkaSinkMessage(keyed[0].encode(), orjson.dumps(keyed[1]))


def event_time(order: dict[str, Any]) -> datetime:
    """The event time of an order: its number in ms, less up to 1.5 s."""
    number = order["id"]
    return EPOCH + timedelta(milliseconds=number + 2_000 - number * 7_919 % 1_500)


def encoded_window(window: tuple[str, tuple[int, int]]) -> KafkaSinkMessage:
    """The window with its customer."""
    customer, (number, count) = window
    return KafkaSinkMessage(
        customer.encode(), orjson.dumps({"customer": customer, "start": number * 10_000, "count": count})
    )


flow = Dataflow(work)
messages = op.input("in", flow, KafkaSource([servers], [source]))
if work == "totals":
    results = op.map("encoded", op.stateful_map("totals", op.map("keyed", messages, keyed), add), encoded_total)
else:
    # Its watermark is the greatest event time and the system's time since then: a clock that stands makes runs agree.
    clock = EventClock(event_time, timedelta(seconds=2), now_getter=lambda: EPOCH, to_system_utc=lambda time: None)
    windower = TumblingWindower(timedelta(seconds=10), EPOCH)
    orders = op.map("decoded", messages, decoded)
    windows = count_window("counts", orders, clock, windower, lambda order: order["customer"])
    results = op.map("encoded", windows.down, encoded_window)
op.output("out", results, KafkaSink([servers], sink, {"queue.buffering.max.messages": "1000000"}))
init_db_dir(Path(folder), 1)
run_main(flow, epoch_interval=timedelta(seconds=0.5), recovery_config=RecoveryConfig(folder))
