"""Shows the payments of the highest risk, as any read_committed consumer sees it."""

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
    unread = set(consumer.list_topics("payments-scored", timeout=60).topics["payments-scored"].partitions)
except KafkaException as failed:
    raise SystemExit(f"No broker answers: {failed.args[0].str()}") from None
consumer.assign([TopicPartition("payments-scored", partition, OFFSET_BEGINNING) for partition in unread])
risks: dict[int, float] = {}
count = 0
while unread:
    message = consumer.poll(10)
    if message is None:
        raise SystemExit("No broker answers.")
    error = message.error()
    if error is None:
        scored = json.loads(message.value() or b"")
        risks[scored["id"]] = scored["risk"]
        count += 1
    elif error.code() == KafkaError._PARTITION_EOF:
        unread.discard(message.partition())
    else:
        raise SystemExit(error.str())
consumer.close()

for id, risk in sorted(risks.items(), key=lambda scored: -scored[1])[:10]:
    print(f"payment {id:>4}  {risk:.3f}")
print(f"{count:,} payments, {count - len(risks):,} of them twice")
