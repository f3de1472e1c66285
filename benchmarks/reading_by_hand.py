"""The loop that reading by Spark is compared with: plain confluent-kafka that fills the same Arrow columns.

    python reading_by_hand.py SERVERS TOPIC END:PARTITION ...

Prints that it is ready, waits for a line, reads its partitions from the beginning up to the offset END of each, batch
by batch, and prints sums of the records as a line of JSON.
"""

from __future__ import annotations

import gc
import json
import sys

import pyarrow as pa
import pyarrow.compute as pc
from cluster import reader, require_records
from confluent_kafka import Message

BATCH_RECORDS = 10_000
WAIT_S = 0.02


def record_batch(messages: list[Message]) -> pa.RecordBatch:
    """The columns of Spark's Kafka source."""
    times = [message.timestamp() for message in messages]
    columns = {
        "key": pa.array([message.key() for message in messages], pa.binary()),
        "value": pa.array([message.value() for message in messages], pa.binary()),
        "topic": pa.array([message.topic() for message in messages], pa.string()),
        "partition": pa.array([message.partition() for message in messages], pa.int32()),
        "offset": pa.array([message.offset() for message in messages], pa.int64()),
        "timestamp": pa.array([time[1] * 1000 for time in times], pa.timestamp("us", "UTC")),
        "timestampType": pa.array([time[0] - 1 for time in times], pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


def read(servers: str, topic: str, ends: dict[int, int]) -> list[int]:
    """Records, their bytes and the sum of their offsets."""
    consumer = reader(servers, topic, ends)
    left, seen = sum(ends.values()), [0, 0, 0]
    while left:
        messages = consumer.consume(min(BATCH_RECORDS, left), WAIT_S)
        require_records(messages)
        if messages:
            batch = record_batch(messages)
            sizes = [pc.sum(pc.binary_length(batch[name])).as_py() for name in ("key", "value")]
            seen = [a + b for a, b in zip(seen, (len(batch), sum(sizes), pc.sum(batch["offset"]).as_py()), strict=True)]
            left -= len(messages)
    consumer.close()
    return seen


def main() -> None:
    """See the module."""
    servers, topic, *ends = sys.argv[1:]
    wanted = {int(partition): int(end) for end, partition in (word.split(":") for word in ends)}
    record_batch([])
    print("ready", flush=True)
    if sys.stdin.readline().strip() == "without collections":
        gc.disable()
    print(json.dumps(read(servers, topic, wanted)), flush=True)


if __name__ == "__main__":
    main()
