"""`exactlyonce demo`: a pipeline whose processes are killed, and an exact count of its output, on a broker of its own.

Needs nothing but the package, and what the embedded broker needs. The names of its topics are new each time; on a
cluster that exists already they are deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from exactlyonce.cli.arguments import Parser, at_least_one, set_command
from exactlyonce.pipeline.errors import ConfigError

CUSTOMERS = 200
PARTITIONS = 4
PARALLELISM = 2
_EXAMPLES = """\
Watch a pipeline survive: orders stream through it for half a minute, while its processes are
killed (SIGKILL) at random instants. Then a plain consumer counts its output: each order
must have counted once. It starts a Kafka of its own, in a folder that is removed at the
end, and takes a minute; the first time it downloads that Kafka (45 MB).

examples:
  exactlyonce demo
  exactlyonce demo --kills 12 --seconds 60
  exactlyonce demo --bootstrap-servers 127.0.0.1:9092
                              on a Kafka that runs, without a login; the demo's topics are
                              deleted at the end

Exit code 0: each order counted once; 1: not.
"""
_OTHER_WAYS = """
Other ways to see the demo:
  with Java and the downloader from the package index
      uvx --from 'exactlyonce-kafka[broker]' exactlyonce demo
  on Docker's Kafka
      docker run --rm -p 9092:9092 apache/kafka:4.3.1
      exactlyonce demo --bootstrap-servers 127.0.0.1:9092"""


def add(parser: Parser) -> None:
    set_command(parser, "[options]", _EXAMPLES, demo)
    parser.add_argument("--kills", metavar="N", type=at_least_one, default=5, help="how many (default: 5)")
    parser.add_argument(
        "--seconds", metavar="N", type=at_least_one, default=30, help="how long orders come in (default: 30)"
    )
    parser.add_argument(
        "--orders", metavar="N", type=at_least_one, default=60_000, help="how many come in (default: 60000)"
    )
    parser.add_argument("--seed", metavar="N", type=int, help="repeat the roles and instants of a demo that printed it")
    parser.add_argument(
        "--bootstrap-servers",
        metavar="HOST:PORT",
        help="an existing Kafka (default: $EXACTLYONCE_BOOTSTRAP_SERVERS, else one of its own)",
    )


def demo(args: argparse.Namespace) -> int:
    from exactlyonce.engines.configuration import BOOTSTRAP_VARIABLE

    seed = int.from_bytes(os.urandom(3), "big") if args.seed is None else args.seed
    servers = args.bootstrap_servers or os.environ.get(BOOTSTRAP_VARIABLE)
    name = f"exactlyonce-demo-{os.urandom(3).hex()}"
    with _topics_deleted(servers, name) if servers else _own_broker() as servers:
        survived = _play(servers, name, seed, args)
    print("\nEXACTLY ONCE" if survived else "\nNOT EXACTLY ONCE")
    if survived:
        print("\nA pipeline of your own: exactlyonce init totals")
    return 0 if survived else 1


def _play(servers: str, name: str, seed: int, args: argparse.Namespace) -> bool:
    from exactlyonce.cli.demo.count import verdict
    from exactlyonce.cli.demo.feeding import Feeder, create_topics
    from exactlyonce.cli.demo.kills import Job, Killer

    source, target = f"{name}-orders", f"{name}-totals"
    records = list(_orders(args.orders, seed))
    create_topics(servers, [source, target], PARTITIONS)
    print(f"\n{args.orders:,} orders in {args.seconds} s, parallelism {PARALLELISM}, {args.kills} kills, seed {seed}")
    pipeline = ["exactlyonce.cli.demo.orders:pipeline", "--param", f"name={name}"]
    job = Job(servers, pipeline, None, "--parallelism", str(PARALLELISM))
    killer = Killer(
        job, servers, [(target, partition) for partition in range(PARTITIONS)], kills=args.kills, seed=seed,
        seconds=args.seconds, parallelism=PARALLELISM,
    )  # fmt: skip
    clean = killer.stream(Feeder(servers, source, records, args.seconds), f"eo:{name}:")
    print("\nCounted by a plain read_committed consumer:")
    return verdict(servers, target, _expected(records), _read_update) and clean


def _orders(count: int, seed: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Orders by customer."""
    drawn = random.Random(seed)
    for _ in range(count):
        customer = f"customer-{drawn.randint(1, CUSTOMERS)}"
        yield customer, {"customer": customer, "total": drawn.randint(1, 10_000)}


def _expected(records: list[tuple[str, dict[str, object]]]) -> dict[object, list[tuple[int, int]]]:
    """The running number and sum of the orders of each customer."""
    updates: dict[object, list[tuple[int, int]]] = {}
    for customer, order in records:
        of_customer = updates.setdefault(customer, [])
        before, total = of_customer[-1] if of_customer else (0, 0), order["total"]
        assert isinstance(total, int)
        of_customer.append((before[0] + 1, before[1] + total))
    return updates


def _read_update(value: dict[str, dict[str, int]]) -> tuple[object, tuple[int, int]]:
    return value["customer"], (value["totals"]["orders"], value["totals"]["sum"])


@contextmanager
def _own_broker() -> Iterator[str]:
    """The address of a broker that lives as long as the demo."""
    from exactlyonce.connectors.embedded.broker import EmbeddedBroker
    from exactlyonce.connectors.embedded.progress import told_on

    with tempfile.TemporaryDirectory(prefix="exactlyonce-demo-") as folder:
        broker = EmbeddedBroker(Path(folder), port=0, lifetime="process")
        try:
            broker.start(told_on(sys.stdout))
        except ConfigError as error:
            raise ConfigError(f"{error}{_OTHER_WAYS}") from None
        try:
            yield broker.bootstrap_servers
        finally:
            broker.stop()


@contextmanager
def _topics_deleted(servers: str, name: str) -> Iterator[str]:
    """*servers*, where the demo's topics are deleted at the end."""
    from exactlyonce.connectors.kafka.client_config import ClientConfig
    from exactlyonce.connectors.kafka.topics import Topics

    try:
        yield servers
    finally:
        with closing(Topics(ClientConfig({"bootstrap.servers": servers}))) as topics:
            for topic in topics.all().values():
                if topic.name in (f"{name}-orders", f"{name}-totals", f"{name}.checkpoints"):
                    topics.delete(topic)
