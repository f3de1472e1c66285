"""Writes an hour of visits to the topic `visits`, which it creates if it is missing: up to nine seconds out of order,
and one that is late."""

import json
import os
from datetime import datetime, timedelta, timezone

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its stubs hide it

SERVERS = os.environ.get("EXACTLYONCE_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
PAGES = ("home", "shop", "help")

admin = AdminClient({"bootstrap.servers": SERVERS})
try:
    admin.create_topics([NewTopic("visits", num_partitions=1)], request_timeout=60)["visits"].result()
except KafkaException as error:
    if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
        raise SystemExit(f"{SERVERS} made no topic: {error.args[0].str()}") from None

producer = Producer({"bootstrap.servers": SERVERS, "enable.idempotence": True, "max.in.flight": 1, "log_level": 3})
begin = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0) - timedelta(hours=2)
for number in range(3_600):
    at = begin + timedelta(seconds=number - number * 7 % 10)
    producer.produce("visits", value=json.dumps({"page": PAGES[number % 3], "at": at.isoformat()}))
producer.produce("visits", value=json.dumps({"page": "home", "at": begin.isoformat()}))
producer.flush()
print("3,601 visits written.")
