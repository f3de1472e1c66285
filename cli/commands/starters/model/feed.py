"""Writes 1,000 payments to the topic `payments`, which it creates if it is missing."""

import json
import os

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its stubs hide it

SERVERS = os.environ.get("EXACTLYONCE_BOOTSTRAP_SERVERS", "127.0.0.1:9092")

admin = AdminClient({"bootstrap.servers": SERVERS})
try:
    admin.create_topics([NewTopic("payments", num_partitions=2)], request_timeout=60)["payments"].result()
except KafkaException as error:
    if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
        raise SystemExit(f"{SERVERS} made no topic: {error.args[0].str()}") from None

producer = Producer({"bootstrap.servers": SERVERS, "enable.idempotence": True, "max.in.flight": 1, "log_level": 3})
for number in range(1_000):
    payment = {"id": number, "cents": number * 997 % 100_000, "abroad": number % 3 == 0}
    producer.produce("payments", value=json.dumps(payment))
producer.flush()
print("1,000 payments written.")
