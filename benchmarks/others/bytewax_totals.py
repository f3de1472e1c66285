"""A running total per customer on Bytewax, at least once: python bytewax_totals.py SERVERS INPUT OUTPUT FOLDER."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
from bytewax import operators as op
from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource, KafkaSourceMessage
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import run_main

servers, source, sink, folder = sys.argv[1:]


def keyed(message: KafkaSourceMessage) -> tuple[str, dict[str, Any]]:
    """The order by its customer."""
    order = orjson.loads(message.value)
    return order["customer"], order


def add(total: int | None, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The running total."""
    total = (total or 0) + order["total"]
    return total, {"customer": order["customer"], "sum": total, "ts": order["ts"]}


def encoded(keyed: tuple[str, dict[str, Any]]) -> KafkaSinkMessage:
    """The total as a message."""
    return KafkaSinkMessage(keyed[0].encode(), orjson.dumps(keyed[1]))


flow = Dataflow("totals")
orders = op.map("keyed", op.input("in", flow, KafkaSource([servers], [source])), keyed)
totals = op.map("encoded", op.stateful_map("totals", orders, add), encoded)
op.output("out", totals, KafkaSink([servers], sink, {"queue.buffering.max.messages": "1000000"}))
init_db_dir(Path(folder), 1)
run_main(flow, epoch_interval=timedelta(seconds=0.5), recovery_config=RecoveryConfig(folder))
