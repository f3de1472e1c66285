"""A Kafka broker in a container, by testcontainers.

The image is built in docker/kafka: it runs the broker on port 9092 and takes the broker's `--override` options as its
command. It advertises the address published on the loopback interface.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from docker.errors import DockerException
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from exactlyonce.connectors.embedded.broker import HOST, answers, free_port
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

INTERNAL = "INTERNAL://127.0.0.1:9094"
"""The listener at which the broker reaches itself."""


@contextlib.contextmanager
def kafka_container(image: str) -> Iterator[KafkaCluster]:
    """Run *image* and yield the cluster once it answers; the container is removed at the end.

    Raises `BrokerUnavailable` without a Docker engine or the image, or if the broker does not come up.
    """
    address = f"{HOST}:{free_port()}"
    # Its reaper is an image to be pulled from a registry; the container is removed here, and nothing is pulled.
    testcontainers_config.ryuk_disabled = True
    with contextlib.ExitStack() as stack:
        try:
            # A network of its own: what another Docker engine left in the usual one would be in the way.
            network = stack.enter_context(Network())
            container = stack.enter_context(_container(image, address).with_network(network))
        except DockerException as problem:
            raise BrokerUnavailable(
                f"No container of {image} could be started: {problem}. Docker must run, and the image must be there: "
                "`make image` in the repository of exactlyonce makes it."
            ) from problem
        deadline = time.monotonic() + LIMIT_S
        while not answers(address, timeout_s=1):
            container.reload()
            if container.status != "running" or time.monotonic() > deadline:
                log = b"".join(container.get_logs()).decode(errors="replace")
                raise BrokerUnavailable(
                    f"The broker in the container of {image} did not come up at {address}; the container is "
                    f"{container.status}:\n{log[-2000:]}"
                )
        yield KafkaCluster(address)


def _container(image: str, address: str) -> DockerContainer:
    container = DockerContainer(image)
    container.with_command(["--override", f"advertised.listeners=PLAINTEXT://{address},{INTERNAL}"])
    host, port = address.split(":")
    container.ports["9092/tcp"] = (host, int(port))  # type: ignore[assignment]  # as the engine's client takes it
    return container
