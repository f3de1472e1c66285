"""Writes 1,000 orders to the topic `orders`, which it creates if it is missing."""

import json
import os

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its stubs hide it

SERVERS = os.environ.get("EXACTLYONCE_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
CUSTOMERS = ("ann", "bob", "cho", "dee", "eve")

admin = AdminClient({"bootstrap.servers": SERVERS})
try:
    admin.create_topics([NewTopic("orders", num_partitions=2)], request_timeout=60)["orders"].result()
except KafkaException as error:
    if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
        raise SystemExit(f"{SERVERS} made no topic: {error.args[0].str()}") from None

producer = Producer({"bootstrap.servers": SERVERS, "enable.idempotence": True, "max.in.flight": 1, "log_level": 3})
for number in range(1_000):
    customer = CUSTOMERS[number % len(CUSTOMERS)]
    order = {"id": number, "customer": customer, "total": number % 100}
    producer.produce("orders", key=customer, value=json.dumps(order))
producer.flush()
print("1,000 orders written.")
