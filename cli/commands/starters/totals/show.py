"""Shows the newest total of each customer, as any read_committed consumer sees it."""

import json
import os

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

consumer = Consumer(
    {
        "bootstrap.servers": os.environ.get("EXACTLYONCE_BOOTSTRAP_SERVERS", "127.0.0.1:9092"),
        "group.id": "show",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
)
try:
    unread = set(consumer.list_topics("order-totals", timeout=60).topics["order-totals"].partitions)
except KafkaException as failed:
    raise SystemExit(f"No broker answers: {failed.args[0].str()}") from None
consumer.assign([TopicPartition("order-totals", partition, OFFSET_BEGINNING) for partition in unread])
totals: dict[str, int] = {}
updates = 0
while unread:
    message = consumer.poll(10)
    if message is None:
        raise SystemExit("No broker answers.")
    error = message.error()
    if error is None:
        total = json.loads(message.value() or b"")
        totals[total["customer"]] = total["sum"]
        updates += 1
    elif error.code() == KafkaError._PARTITION_EOF:
        unread.discard(message.partition())
    else:
        raise SystemExit(error.str())
consumer.close()

for customer, total in sorted(totals.items()):
    print(f"{customer:<10} {total:>8,}")
print(f"{updates:,} updates")
