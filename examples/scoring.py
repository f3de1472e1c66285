# pyright: basic
"""Images of handwritten digits, read by a model of scikit-learn that gets many of them at a time.

    python examples/scoring.py --bootstrap-servers 127.0.0.1:9092

The model is made on the worker, of the first half of the images; the pipeline reads the other half. One image is cut
off: it goes to the dead letters, and those beside it are read. In the end, all that is in the topic is compared with
what the model says of all images at once. It needs the extra `arrow`, and scikit-learn (`pip install scikit-learn`).
"""

from __future__ import annotations

import argparse
import uuid
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from exactlyonce import Context, DeadLetters, KafkaSink, KafkaSource, Operator, Pipeline
from exactlyonce.cli.demo.feeding import create_topics

LIMIT_S = 60
PIXELS = 64


class Image(msgspec.Struct):
    id: int
    pixels: list[float]
    """Row by row, each from 0 to 16."""


class Digit(msgspec.Struct):
    id: int
    digit: int
    sure: float


class Model(Operator):
    def open(self, context: Context) -> None:
        pixels, digits = load_digits(return_X_y=True)
        half = len(digits) // 2
        self.model: Any = LogisticRegression(max_iter=1_000).fit(pixels[:half] / 16, digits[:half])

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        pixels = batch["pixels"].flatten().to_numpy().reshape(batch.num_rows, PIXELS)
        sure = self.model.predict_proba(pixels / 16).max(axis=1)
        return pa.record_batch({"id": batch["id"], "digit": self.model.predict(pixels / 16), "sure": sure.round(3)})


def make(topic: str) -> Pipeline:
    """The images of *topic* to topic-digits, those that are no image to topic-dead."""
    pipeline = Pipeline(topic)
    images = pipeline.source("images", KafkaSource(topic, value=Image))
    digits = images.map_batches(Model, schema=Digit, id="model", on_error=DeadLetters(f"{topic}-dead"))
    digits.sink("digits", KafkaSink(f"{topic}-digits"))
    return pipeline


def give_images(servers: str, topic: str) -> dict[int, int]:
    """Write the second half of the images, and one without its last pixel; returns what the model says of them all."""
    pixels, digits = load_digits(return_X_y=True)
    half = len(digits) // 2
    images = [Image(id, pixels[id].tolist()) for id in range(half, len(digits))]
    producer = Producer({"bootstrap.servers": servers})
    for image in [*images, Image(len(digits), images[0].pixels[:-1])]:
        producer.produce(topic, msgspec.json.encode(image))
    producer.flush(LIMIT_S)
    model = Model()
    model.open(Context("model", 0, 1))
    batch = pa.record_batch({"id": [image.id for image in images], "pixels": [image.pixels for image in images]})
    read = model(batch)
    print(f"{len(images)} images, {PIXELS} pixels each, and one that is cut off")
    print(f"right: more than nine of ten: {np.mean(digits[half:] == read['digit'].to_numpy()) > 0.9}")
    return dict(zip(read["id"].to_pylist(), read["digit"].to_pylist(), strict=True))


def records(servers: str, topic: str) -> list[bytes]:
    """The values of a topic of one partition, as readers of committed records see them."""
    settings = {"bootstrap.servers": servers, "group.id": "scoring", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values = []
    while (message := consumer.poll(LIMIT_S)) is not None and not message.error():
        values.append(message.value() or b"")
    consumer.close()
    return values


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--topic", default=f"images-{uuid.uuid4().hex[:8]}")
    options = parser.parse_args()
    servers, topic = options.bootstrap_servers, options.topic
    create_topics(servers, [topic, f"{topic}-digits", f"{topic}-dead"], 1)
    expected = give_images(servers, topic)
    make(topic).run(bootstrap_servers=servers, until="latest", inline=True, log_level="error")
    digits = [msgspec.json.decode(value, type=Digit) for value in records(servers, f"{topic}-digits")]
    same = sum(expected[read.id] == read.digit for read in digits)
    twice = len(digits) - len(Counter(read.id for read in digits))
    print(f"{len(digits)} digits, {twice} of them twice, {same} as the model reads all images at once")
    print(f"{len(records(servers, f'{topic}-dead'))} dead letter")


if __name__ == "__main__":
    main()
