"""Records that go round, on a real broker: examples with loops, with kills, stops and other parallelisms between."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from running import QUICK, exactlyonce, stop, visible

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.runtime.in_flight import frames_of
from exactlyonce.engines.savepoints.contents import kept_state
from exactlyonce.testing.cluster import KafkaCluster

EXAMPLES = {"PYTHONPATH": str(Path(__file__).parents[2] / "examples")}
_records = msgspec.msgpack.Decoder(tuple[list[dict[str, Any]], Any, Any, Any, Any, Any])
ACCOUNTS = [f"a{i}" for i in range(9)]


def manifests(kafka: KafkaCluster, name: str) -> tuple[list[Manifest], Any]:
    client = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    found = list(read_history(client, name).retained)
    return found, block_storage(client, find_topic(client, name), found[-1].storage)


def on_their_way(manifest: Manifest, blocks: Any) -> Iterator[dict[str, Any]]:
    for log in manifest.channel_logs:
        for each in frames_of(log, blocks):
            yield from _records.decode(each.frame)[0]


def money_on_its_way(manifest: Manifest, blocks: Any) -> int:
    return sum(each["amount"] for each in on_their_way(manifest, blocks) if not each["booked"] and each["amount"] > 0)


def sum_of_money(manifest: Manifest, blocks: Any) -> int:
    balances: list[int] = [
        msgspec.msgpack.decode(entry.state) for entry in kept_state(manifest, "balances", blocks).entries()
    ]
    return sum(balances) + money_on_its_way(manifest, blocks)


def loops_with_records(kafka: KafkaCluster, name: str) -> set[str]:
    found, blocks = manifests(kafka, name)
    return {each.loop for log in found[-1].channel_logs for each in frames_of(log, blocks)}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["aligned 2", "unaligned 1-3-2"])
def test_money_is_the_same_in_every_snapshot(case: str, kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """Some of it is in flight in the log of the loop; every transfer is booked once on either side."""
    mode = ("--unaligned", "--aligned-timeout", "50ms") if case.startswith("unaligned") else ()
    parallelisms = case.split()[1].split("-")
    topic = kafka.create_topic(f"{topic_name}-transfers", 3)
    transfers: list[dict[str, Any]] = []

    def transfer_more() -> None:
        some = range(len(transfers), len(transfers) + 2_000)
        pairs = [(ACCOUNTS[i % 9], ACCOUNTS[(i * 5 + 1 + i // 9) % 9]) for i in some]
        more = [{"id": i, "payer": a, "payee": b, "amount": i % 40 + 1} for i, (a, b) in zip(some, pairs, strict=True)]
        kafka.produce(topic, [(str(each["id"]), json.dumps(each)) for each in more])
        transfers.extend(more)

    target = ("accounts:pipeline", "--param", f"name={topic_name}", "--param", "pause=300ms")
    arguments = (*target, "--num-retained", "1000", *QUICK, *mode)
    for parallelism in parallelisms:
        transfer_more()
        job = run(*arguments, "--parallelism", parallelism, env=EXAMPLES)
        job.await_checkpoint()
        while "credits" not in loops_with_records(kafka, topic_name):
            transfer_more()
            job.await_checkpoint()
        job.kill()
    transfer_more()
    last = run(*arguments, "--inline", "--until", "latest", env=EXAMPLES)
    assert last.wait() == 0, last.said
    found, blocks = manifests(kafka, topic_name)
    assert {sum_of_money(each, blocks) for each in found if each.operators} == {0}
    assert not found[-1].channel_logs
    assert {each.parallelism for each in found if money_on_its_way(each, blocks)} >= {*map(int, parallelisms)}
    entries = Counter(
        (entry["transfer"], entry["account"], entry["amount"])
        for entry in values(kafka, f"{topic_name}-entries", 2 * len(transfers))
    )
    sides = [(t["id"], t["payer"], -t["amount"]) for t in transfers]
    assert entries == Counter(sides + [(t["id"], t["payee"], t["amount"]) for t in transfers])


def values(kafka: KafkaCluster, topic: str, count: int) -> list[dict[str, Any]]:
    return [json.loads(each.value or b"") for each in visible(kafka, topic, count)]


def assert_charged_once(kafka: KafkaCluster, name: str) -> None:
    charged, given_up = values(kafka, f"{name}-charged", 500), values(kafka, f"{name}-given-up", 200)
    assert sorted((each["order"], each["tries"]) for each in charged) == [
        (i, i % 7 + 1) for i in range(700) if i % 7 < 5
    ]
    assert sorted((each["order"], each["tries"]) for each in given_up) == [(i, 5) for i in range(700) if i % 7 >= 5]


def orders_to_retry(kafka: KafkaCluster, name: str) -> tuple[str, ...]:
    topic = kafka.create_topic(f"{name}-orders", 2)
    kafka.produce(topic, [(str(i), json.dumps({"id": i, "total": i})) for i in range(700)])
    return ("retry:pipeline", "--param", f"name={name}", *QUICK)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_goes_round_outlives_a_stop_and_a_kill(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """A stop does not wait for retries: its last checkpoint has them, and the next run goes on with them."""
    target = orders_to_retry(kafka, topic_name)
    stopped = run(*target, "--param", "pause=10m", "--parallelism", "2", "--until", "latest", env=EXAMPLES)
    stopped.await_checkpoint()
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.wait() == 130, stopped.said
    found, _ = manifests(kafka, topic_name)
    assert found[-1].kind == "final"
    assert found[-1].records_in_flight > 0
    saved = run(*target, "--param", "pause=10m", env=EXAMPLES)
    saved.await_event(lambda event: event["event"] == "checkpoint")
    exactlyonce(kafka, "savepoint", topic_name, "--stop")
    assert saved.wait() == 0, saved.said
    found, _ = manifests(kafka, topic_name)
    assert found[-1].is_savepoint
    assert found[-1].records_in_flight > 0
    killed = run(*target, "--param", "pause=10m", env=EXAMPLES)
    killed.await_event(lambda event: event["event"] == "checkpoint")
    killed.kill()
    found, _ = manifests(kafka, topic_name)
    assert found[-1].records_in_flight > 0
    last = run(*target, "--param", "pause=50ms", "--parallelism", "3", "--until", "latest", env=EXAMPLES)
    assert last.wait() == 0, last.said
    found, _ = manifests(kafka, topic_name)
    assert found[-1].records_in_flight == 0
    assert_charged_once(kafka, topic_name)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_goes_round_goes_along_with_a_savepoint(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, run: Any
) -> None:
    target = orders_to_retry(kafka, topic_name)
    resting = (*target, "--param", "pause=10m")
    first = run(*resting, "--parallelism", "2", env=EXAMPLES)
    first.await_event(lambda event: event["event"] == "checkpoint" and event["records_in"] > 0)
    taken = json.loads(exactlyonce(kafka, "savepoint", topic_name, "--stop", "--json"))["checkpoint"]
    assert first.wait() == 0, first.said
    found, _ = manifests(kafka, topic_name)
    resting_records = found[-1].records_in_flight
    assert resting_records > 0
    second = run(*resting, "--parallelism", "3", "--num-retained", "100", "--from-savepoint", str(taken), env=EXAMPLES)
    second.await_event(lambda event: event["event"] == "checkpoint")
    exported = exactlyonce(kafka, "savepoint", topic_name, "--stop", "--to", f"file://{tmp_path}", "--json")
    url = json.loads(exported)["url"]
    assert second.wait() == 0, second.said
    found, _ = manifests(kafka, topic_name)
    assert [each.records_in_flight for each in found if each.kind == "restored"] == [resting_records]
    assert found[-1].records_in_flight > 0
    exactlyonce(kafka, "savepoints", "verify", topic_name, url)
    exactlyonce(kafka, "reset", topic_name, "--yes")
    last = run(*target, "--param", "pause=50ms", "--until", "latest", "--from-savepoint", url, env=EXAMPLES)
    assert last.wait() == 0, last.said
    assert_charged_once(kafka, topic_name)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_pipeline_that_cannot_take_what_goes_round_fences_nobody(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, run: Any
) -> None:
    target = orders_to_retry(kafka, topic_name)
    code, old = (Path(EXAMPLES["PYTHONPATH"]) / "retry.py").read_text(), 'feedback("retry"'
    assert old in code
    (tmp_path / "changed.py").write_text(code.replace(old, 'feedback("once-more"'))
    arguments = (*target[1:], "--param", "pause=10m")
    healthy = run("retry:pipeline", *arguments, env=EXAMPLES)
    healthy.await_event(lambda event: event["event"] == "checkpoint" and event["records_in"] > 0)
    healthy.await_event(lambda event: event["event"] == "checkpoint")
    refused = run("changed:pipeline", *arguments, env={"PYTHONPATH": str(tmp_path)})
    assert refused.wait() == 2, refused.said
    assert "holds records that went round loop 'retry', which the pipeline" in " ".join(refused.said.split())
    stop(healthy)
