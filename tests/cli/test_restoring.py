"""`run --from-savepoint`: of a number or an export, with changed code, rescaled, and in another cluster."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.requests import Procedure
from exactlyonce.engines.configuration import options_from
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import plan
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import load
from exactlyonce.testing.cluster import OwnCluster
from tests.cli.conftest import Orders, by_customer, wait_until


def exported(orders: Orders, tmp_path: Path) -> str:
    orders.ran("--parallelism", "3")
    url = orders.exported(tmp_path / "backups")
    orders.reset()
    return url


def connections_of(orders: Orders, **options: Any) -> PipelineConnections:
    loaded = load("orders:pipeline")
    given = options_from({"bootstrap_servers": orders.kafka.bootstrap_servers, **options})
    physical = plan(loaded.pipeline.build(), 1)
    return PipelineConnections(physical, given, lambda _: None, lambda *_: None, loaded.reference)


@pytest.mark.exhaustive
def test_another_name_goes_on_from_an_export(orders: Orders, tmp_path: Path) -> None:
    """An export of parallelism 3 is restored at 1 and 2, once: the same command continues and overwrites nothing."""
    orders.ran("--parallelism", "3")
    url = orders.exported(tmp_path / "backups")
    orders.write(70)
    fork = replace(orders, name=f"{orders.name}-fork")
    asked = ("--param", f"name={fork.name}", "--from-savepoint", url)
    assert fork.run(*asked).code != 0  # the module is given as an attribute, not a function
    orders.change(('name: str = "', f'name: str = "{fork.name}" or "'))
    fork.ran("--from-savepoint", url)
    assert fork.states() == by_customer(110)
    assert len(orders.totals()) == 770
    assert fork.history().manifests[0].kind == "restored"
    orders.write(7)
    fork.ran("--from-savepoint", url, "--parallelism", "2")
    assert fork.states() == by_customer(111)
    assert len(orders.totals()) == 777
    orders.change((f'"{fork.name}" or ', ""))
    orders.run_refused("an exported savepoint begins a pipeline that has none", "--from-savepoint", url)


@pytest.mark.exhaustive
def test_a_kill_before_the_restored_state_is_decided(orders: Orders, tmp_path: Path) -> None:
    """Blocks written for it go; the next run begins from the savepoint again."""
    savepoint = ("--from-savepoint", exported(orders, tmp_path))
    orders.write(70)
    orders.killed_at("savepoint-written", *savepoint)
    assert orders.history().latest is None
    orders.ran(*savepoint)
    assert orders.states() == by_customer(110)
    assert len(orders.totals()) == 770
    orders.command.done("doctor", orders.name, "--deep")  # no block is left that nobody refers to


def test_a_savepoint_of_the_topic(orders: Orders) -> None:
    """The newest one is gone on from. An older one needs --rewind, and output comes again."""
    number = orders.ended_by_savepoint()
    visible = len(orders.totals())
    orders.ran("--from-savepoint", str(number))
    assert len(orders.totals()) == 700
    assert orders.history().manifests[number].is_savepoint
    orders.write(70)
    orders.ran("--from-savepoint", str(number))
    assert orders.states() == by_customer(110)
    newest = ("--from-savepoint", str(orders.ended_by_savepoint()))
    orders.run_refused("has no savepoint", "--from-savepoint", str(number - 1))
    orders.write(7)
    orders.ran()
    orders.run_refused("would be written again", *newest)
    orders.ran(*newest, "--rewind")
    assert orders.states() == by_customer(111)
    assert len(orders.totals()) == 784
    assert visible <= 700
    assert "was restored before" in orders.ran(*newest, "--rewind").said
    assert len(orders.totals()) == 784
    orders.ran()
    orders.ran(*newest, "--rewind")
    assert len(orders.totals()) == 791, "it may be gone back to as often as one wants"


def has_recovered(orders: Orders) -> bool:
    newest = orders.incarnation()
    return not newest.ended and newest.fenced_below == newest.incarnation


@pytest.mark.exhaustive
def test_a_run_that_goes_on(orders: Orders) -> None:
    """Going back to a savepoint fences no live run, not even one without a checkpoint: it is refused."""
    with orders.running() as healthy:
        number = orders.taken()
        back = ("--from-savepoint", str(number), "--rewind")
        refused = orders.run(*back)
        assert (refused.code, "Nothing was changed: stop it" in refused.said) == (2, True), refused
        assert f"runs: process {os.getpid()} on" in refused.said
        assert healthy.stop() == 0, "it was left in peace"
    orders.ran(*back)
    number = orders.ended_by_savepoint()
    with orders.running("--checkpoint-interval", "10m", until='"event": "started"') as healthy:
        wait_until(lambda: has_recovered(orders))
        for rewind in ((), ("--rewind",)):
            orders.run_refused(f"goes on from checkpoint {number}", "--from-savepoint", str(number), *rewind)
        assert healthy.stop() == 0, "it was left in peace"


@pytest.mark.exhaustive
def test_a_checkpoint_that_is_taken_right_before_the_fence(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says that the other run has ended."""
    number = orders.ended_by_savepoint()
    begin = Leader.begin

    def slow(leader: Leader) -> Procedure[History]:
        monkeypatch.setattr(Leader, "begin", begin)
        orders.write(7)
        orders.ran()
        return begin(leader)

    connections = connections_of(orders, from_savepoint=str(number))
    monkeypatch.setattr(Leader, "begin", slow)
    with closing(connections), pytest.raises(ConfigError, match=r"has taken over.*is not the newest checkpoint"):
        connections.recover()
    assert orders.newest().checkpoint > number
    assert orders.incarnation().ended
    orders.ran()
    assert len(orders.totals()) == 707


@pytest.mark.exhaustive
def test_operators_that_changed(orders: Orders, tmp_path: Path) -> None:
    savepoint = ("--from-savepoint", exported(orders, tmp_path))
    orders.change(('stateful_map("totals", add)', 'stateful_map("sums", add)'))
    orders.run_refused("state of 'totals', and the pipeline no such operator", *savepoint)
    orders.run_refused("no state and no source of 'total'", *savepoint, "--map", "total=sums")
    assert orders.history().latest is None
    orders.write(7)
    orders.ran(*savepoint, "--map", "totals=sums")
    assert orders.states("sums") == by_customer(101)
    orders.reset()
    orders.write(7)
    orders.ran(*savepoint, "--allow-dropped-state")
    assert orders.states("sums") == by_customer(2)


@pytest.mark.exhaustive
def test_state_types_that_changed(orders: Orders, tmp_path: Path) -> None:
    savepoint = ("--from-savepoint", exported(orders, tmp_path))
    orders.change(
        ("def add(total: int | None, order: Order) -> tuple[int, int]:",
         "class Total(msgspec.Struct):\n    sum: int\n    count: int = 0\n\n\n"
         "def first(state: int) -> Total:\n    return Total(state)\n\n\n"
         "def add(total: Total | None, order: Order) -> tuple[Total, int]:"),
        ("    total = (total or 0) + order.total\n    return total, total",
         "    total = total or Total(0)\n    return Total(total.sum + order.total, total.count + 1), total.sum"),
    )  # fmt: skip
    orders.run_refused("state of operator 'totals' cannot be read as Total", *savepoint)
    assert orders.history().latest is None
    orders.change(('"totals", add)', '"totals", add, state_version=2, migrations={1: first})'))
    orders.write(1)
    orders.ran(*savepoint)
    counted = by_customer({"sum": 100, "count": 0}) | {"c0": {"sum": 101, "count": 1}}
    assert orders.states() == counted
    orders.change((", migrations={1: first}", ""))
    orders.write(7)
    orders.ran()
    assert orders.states() == by_customer({"sum": 101, "count": 1}) | {"c0": {"sum": 102, "count": 2}}
    with orders.running() as healthy:
        orders.change((", state_version=2", ""))
        orders.run_refused("is of version 2, and the pipeline knows version 1")
        assert healthy.stop() == 0, "a run that cannot go on fences none that does"


@pytest.mark.exhaustive
def test_state_that_partitions_distribute(orders: Orders, tmp_path: Path) -> None:
    """All of it is shown and exported, whichever subtask had it; it is restored by one subtask, or for key groups."""
    by_partition = "order.customer, partitioned='consistent_random')"
    orders.change(("order.customer)", by_partition))
    orders.ran("--parallelism", "2")
    assert orders.states() == by_customer(100)
    savepoint = ("--from-savepoint", orders.exported(tmp_path))
    for code, parallelism, total in ((by_partition, "1", 101), ("order.customer)", "2", 102)):  # it does not move
        orders.reset()
        orders.run_refused("no savepoint says which of 2 subtasks", *savepoint, "--parallelism", "2")
        assert orders.history().latest is None
        orders.change((by_partition, code))
        orders.write(7)
        orders.ran(*savepoint, "--parallelism", parallelism)
        assert orders.states() == by_customer(total)


DAMAGE = {"a bit": "totals-0.avro", "no metadata": "_metadata.json"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_export(orders: Orders, tmp_path: Path, damage: str) -> None:
    orders.ran()
    url, verify = orders.exported(tmp_path / "backups"), ("savepoints", "verify", orders.name)
    assert "is intact" in orders.command.done(*verify, url).out
    file = Path(url.removeprefix("file://")) / DAMAGE[damage]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "no metadata":
        file.unlink()
    else:
        file.write_bytes(content)
    orders.command.refused(file.name, *verify, url, code=2 if damage == "no metadata" else 1)
    orders.reset()
    orders.run_refused(file.name, "--from-savepoint", url, code=2 if damage == "no metadata" else 6)
    assert orders.history().latest is None


@pytest.mark.exhaustive
@pytest.mark.slow
def test_another_cluster(
    orders: Orders, stoppable: OwnCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics are found by their names, which is said; records behind the offsets count on."""
    url = exported(orders, tmp_path)
    monkeypatch.setenv("EXACTLYONCE_BOOTSTRAP_SERVERS", stoppable.bootstrap_servers)
    there = replace(orders, kafka=stoppable)
    stoppable.create_topic(f"{orders.name}-orders", partitions=2)
    there.write(770)
    assert "taken in another cluster" in there.ran("--from-savepoint", url).err
    assert there.states() == by_customer(110)
    assert len(there.totals()) == 70
    shutil.rmtree(url.removeprefix("file://"))
    there.ran()
