"""Shows all counts, as any read_committed consumer sees them."""

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
    unread = set(consumer.list_topics("visits-by-minute", timeout=60).topics["visits-by-minute"].partitions)
except KafkaException as failed:
    raise SystemExit(f"No broker answers: {failed.args[0].str()}") from None
consumer.assign([TopicPartition("visits-by-minute", partition, OFFSET_BEGINNING) for partition in unread])
counts = []
while unread:
    message = consumer.poll(10)
    if message is None:
        raise SystemExit("No broker answers.")
    error = message.error()
    if error is None:
        count = json.loads(message.value() or b"")
        counts.append((count["minute"], count["page"], count["count"]))
    elif error.code() == KafkaError._PARTITION_EOF:
        unread.discard(message.partition())
    else:
        raise SystemExit(error.str())
consumer.close()

for minute, page, visits in sorted(counts):
    print(f"{minute}  {page:<6} {visits:>4}")
print(f"{sum(visits for _, _, visits in counts):,} visits in {len(counts):,} windows")
