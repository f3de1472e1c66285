"""`run --from-savepoint`: of a number or an export, with changed code, rescaled, and in another cluster."""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Restored
from exactlyonce.checkpoint.requests import Procedure
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.engines import performer
from exactlyonce.engines.configuration import options_from
from exactlyonce.engines.leader import PipelineLeader
from exactlyonce.engines.plan import plan
from exactlyonce.engines.savepoints.restoring import Restoring
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import load_reference
from exactlyonce.testing.cluster import LIMIT_S, OwnCluster
from tests.cli.conftest import Command, Ended, Orders
from tests.cli.test_savepoints import history, taken

pytestmark = pytest.mark.broker


def states(orders: Orders, operator: str = "totals") -> dict[str, object]:
    """The state by key at the newest checkpoint."""
    ended = orders.command("state", orders.name, operator, "--json")
    assert ended.code == 0, ended.err
    return {each["key"]: each["state"] for each in map(json.loads, ended.out.splitlines())}


def exported(orders: Orders, folder: Path) -> str:
    """Run to the end of what is there, and export the newest checkpoint."""
    assert orders.command("run", "orders:pipeline", "--until", "latest", "--parallelism", "3").code == 0
    folder.mkdir()
    ended = orders.command("savepoint", orders.name, "--to", f"file://{folder}", "--json")
    assert ended.code == 0, ended.err
    url: str = json.loads(ended.out)["url"]
    return url


def changed(orders: Orders, *edits: tuple[str, str]) -> None:
    """Edit the pipeline's module."""
    module = orders.command.folder / "orders.py"
    text = module.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    module.write_text(text)


def run(orders: Orders, *options: str) -> Ended:
    """Run to the end of what is there."""
    return orders.command("run", "orders:pipeline", "--until", "latest", *options)


def reference(orders: Orders) -> dict[str, object]:
    """How the pipeline is imported in this process, which may know one of another test by the module's name."""
    sys.modules.pop("orders", None)
    return {"module": "orders", "attribute": "pipeline", "params": {}, "path": str(orders.command.folder)}


def said(ended: Ended) -> str:
    """What the command said, on one line."""
    return " ".join(ended.err.split())


@pytest.mark.exhaustive
def test_another_name_goes_on_from_an_export(orders: Orders, tmp_path: Path) -> None:
    """From parallelism 3 to 1 and 2, once: the same command goes on, and what is there is not overwritten."""
    url = exported(orders, tmp_path / "backups")
    orders.write(70)
    fork = Orders(f"{orders.name}-fork", orders.kafka, orders.command)
    kafka_out = f"{orders.name}-totals"
    first = run(fork, "--param", f"name={fork.name}", "--from-savepoint", url)
    assert first.code != 0  # the module is given as an attribute, not a function
    changed(orders, ('name: str = "', f'name: str = "{fork.name}" or "'))
    first = run(fork, "--from-savepoint", url)
    assert first.code == 0, first.err
    assert states(fork) == {f"c{number}": 110 for number in range(7)}
    assert len(orders.kafka.read_committed(kafka_out)) == 770
    assert history(fork).manifests[0].kind == "restored"
    orders.write(7)
    again = run(fork, "--from-savepoint", url, "--parallelism", "2")
    assert again.code == 0, again.err
    assert states(fork) == {f"c{number}": 111 for number in range(7)}
    assert len(orders.kafka.read_committed(kafka_out)) == 777
    changed(orders, (f'"{fork.name}" or ', ""))
    refused = run(orders, "--from-savepoint", url)
    assert refused.code == 2
    assert "an exported savepoint begins a pipeline that has none" in said(refused)


@pytest.mark.exhaustive
def test_an_export_may_go_once_it_is_restored(orders: Orders, tmp_path: Path) -> None:
    """The same command, repeated, goes on, wherever the export lies by then, and if there is none any more."""
    url = exported(orders, tmp_path / "backups")
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    assert run(orders, "--from-savepoint", url).code == 0
    shutil.copytree(tmp_path / "backups", tmp_path / "moved")
    assert orders.command("savepoints", "delete", orders.name, url).code == 0
    for each in (url.replace("/backups/", "/moved/"), url):
        orders.write(7)
        again = run(orders, "--from-savepoint", each)
        assert again.code == 0, again.err
    assert states(orders) == {f"c{number}": 102 for number in range(7)}
    never = run(orders, "--from-savepoint", f"{url}-never")
    assert (never.code, "There is no savepoint at" in never.err) == (2, True), never.err


@pytest.mark.exhaustive
@pytest.mark.parametrize(("restores", "visible"), [(True, 770), (False, 1_470)], ids=["again", "without it"])
def test_a_kill_before_the_restored_state_is_decided(
    restores: bool, visible: int, orders: Orders, tmp_path: Path
) -> None:
    """What was written for it is nobody's, and goes; the next run begins from the savepoint all the same, or without
    it, if nobody wants it any more."""
    url = exported(orders, tmp_path / "backups")
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    orders.write(70)
    (tmp_path / "fired").mkdir()
    armed = {
        "EXACTLYONCE_FAILPOINTS": "savepoint-written=kill",
        "EXACTLYONCE_FAILPOINTS_FIRED": str(tmp_path / "fired"),
    }
    arguments = ("run", "orders:pipeline", "--until", "latest", "--from-savepoint", url)
    assert orders.command(*arguments, **armed).code == -9
    assert history(orders).latest is None
    again = orders.command(*(arguments if restores else arguments[:-2]), **armed)
    assert again.code == 0, again.err
    assert states(orders) == {f"c{number}": 110 for number in range(7)}
    assert len(orders.totals()) == visible
    assert orders.command("doctor", orders.name, "--deep").code == 0, "no block is left that nobody refers to"


@pytest.mark.exhaustive
def test_a_restore_that_lasts_shows_that_it_goes_on(
    orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heartbeats, so that nobody takes it for dead."""
    url = exported(orders, tmp_path / "backups")
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    beats, heartbeat, write = list[DecisionLog](), DecisionLog.heartbeat, Restoring.write

    def beat(log: DecisionLog, **more: Any) -> Procedure[Outcome]:
        beats.append(log)
        return heartbeat(log, **more)

    def lasting(*arguments: Any) -> Restored:
        deadline = time.monotonic() + LIMIT_S
        while len(beats) < 3:
            assert time.monotonic() < deadline, "heartbeats go on"
            time.sleep(0.01)
        return write(*arguments)

    monkeypatch.setattr(performer, "UPKEEP_INTERVAL_S", 0.05)
    monkeypatch.setattr(DecisionLog, "heartbeat", beat)
    monkeypatch.setattr(Restoring, "write", lasting)
    options = options_from({"bootstrap_servers": orders.kafka.bootstrap_servers, "from_savepoint": url})
    physical = plan(load_reference(reference(orders)).build(), 1)
    leader = PipelineLeader(physical, options, lambda _: None, lambda *_, **__: None, reference(orders))
    with closing(leader) as leading:
        restored = leading.recover()
    assert (restored.kind, restored.checkpoint) == ("restored", 0)
    assert states(orders) == {f"c{number}": 100 for number in range(7)}


def test_a_savepoint_of_the_topic(orders: Orders) -> None:
    """The newest one is gone on from; an older one only if that is what is wanted, and output comes again."""
    with orders.running("--num-retained", "1") as process:
        number = taken(orders, "--stop")
        process.wait()
    visible = len(orders.totals())
    assert run(orders, "--from-savepoint", str(number)).code == 0
    assert len(orders.totals()) == 700
    assert history(orders).manifests[number].is_savepoint
    orders.write(70)
    assert run(orders, "--from-savepoint", str(number)).code == 0
    assert states(orders) == {f"c{number}": 110 for number in range(7)}
    with orders.running("--num-retained", "1") as process:
        taken(orders, "--stop")
        process.wait()
    refused = run(orders, "--from-savepoint", str(number - 1))
    assert (refused.code, "has no savepoint" in said(refused)) == (2, True)
    newest = history(orders).latest
    assert newest is not None
    orders.write(7)
    assert run(orders).code == 0
    refused = run(orders, "--from-savepoint", str(newest.checkpoint))
    assert (refused.code, "would be written again" in said(refused)) == (2, True)
    assert run(orders, "--from-savepoint", str(newest.checkpoint), "--rewind").code == 0
    assert states(orders) == {f"c{number}": 111 for number in range(7)}
    assert len(orders.totals()) == 784
    assert visible <= 700
    again = run(orders, "--from-savepoint", str(newest.checkpoint), "--rewind")
    assert (again.code, "was restored before" in said(again), len(orders.totals())) == (0, True, 784)
    assert run(orders).code == 0
    assert run(orders, "--from-savepoint", str(newest.checkpoint), "--rewind").code == 0
    assert len(orders.totals()) == 791, "it may be gone back to as often as one wants"


def test_a_run_that_goes_on(orders: Orders) -> None:
    """It is not fenced for a savepoint to go back to: that is refused, with what to do."""
    with orders.running() as healthy:
        number = taken(orders)
        refused = run(orders, "--from-savepoint", str(number), "--rewind")
        assert refused.code == 2, refused.err
        assert f"process {healthy.pid} on" in said(refused)
        assert "Nothing was changed: stop it" in said(refused)
        healthy.terminate()
        assert healthy.wait(LIMIT_S) == 0, "it was left in peace"
    again = run(orders, "--from-savepoint", str(number), "--rewind")
    assert again.code == 0, again.err


def test_a_run_that_has_taken_no_checkpoint_yet(orders: Orders) -> None:
    """It is not fenced for a savepoint either, however long its first checkpoint takes."""
    with orders.running() as process:
        number = taken(orders, "--stop")
        process.wait()
    healthy = orders.command.start("run", "orders:pipeline", "--checkpoint-interval", "5m")
    try:
        deadline, found = time.monotonic() + LIMIT_S, None
        while found is None or found.fenced_below != found.incarnation or found.process != healthy.pid:
            assert healthy.poll() is None, healthy.communicate()
            assert time.monotonic() < deadline
            found = history(orders).newest_incarnation
        for rewind in ((), ("--rewind",)):
            refused = run(orders, "--from-savepoint", str(number), *rewind)
            assert (refused.code, f"goes on from checkpoint {number}" in said(refused)) == (2, True), refused.err
        healthy.terminate()
        healthy.communicate(timeout=LIMIT_S)
    finally:
        healthy.kill()
    assert healthy.returncode == 0, "it was left in peace"


@pytest.mark.parametrize("rewind", [False, True], ids=["newest", "rewind"])
def test_a_checkpoint_that_is_taken_right_before_the_fence(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, rewind: bool
) -> None:
    """It is judged behind the fence: with --rewind it changes nothing, else it is said that the other run has ended."""
    with orders.running() as process:
        number = taken(orders, "--stop")
        process.wait()
    begin = Leader.begin

    def slow(leader: Leader) -> Procedure[History]:
        orders.write(7)
        assert run(orders).code == 0
        return begin(leader)

    options = options_from(
        {"bootstrap_servers": orders.kafka.bootstrap_servers, "from_savepoint": str(number), "rewind": rewind}
    )
    physical = plan(load_reference(reference(orders)).build(), 1)
    leading = PipelineLeader(physical, options, lambda _: None, lambda *_, **__: None, reference(orders))
    monkeypatch.setattr(Leader, "begin", slow)
    with closing(leading):
        if rewind:
            assert leading.recover().kind == "restored"
        else:
            with pytest.raises(ConfigError, match=r"has taken over.*is not the newest checkpoint"):
                leading.recover()
    found = history(orders)
    assert found.latest is not None
    assert found.latest.checkpoint > number + rewind
    if not rewind:
        assert found.newest_incarnation is not None
        assert found.newest_incarnation.ended
        monkeypatch.undo()
        assert run(orders).code == 0
        assert len(orders.totals()) == 707


@pytest.mark.exhaustive
def test_operators_that_changed(orders: Orders, tmp_path: Path) -> None:
    """One that is gone is refused by name, and mapped or dropped as asked; one that is new begins empty."""
    url = exported(orders, tmp_path / "backups")
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    changed(orders, ('stateful_map("totals", add)', 'stateful_map("sums", add)'))
    refused = run(orders, "--from-savepoint", url)
    assert refused.code == 2
    assert "state of 'totals', and the pipeline no such operator" in said(refused)
    wrong = run(orders, "--from-savepoint", url, "--map", "total=sums")
    assert (wrong.code, "no state and no source of 'total'" in said(wrong)) == (2, True)
    assert history(orders).latest is None
    orders.write(7)
    mapped = run(orders, "--from-savepoint", url, "--map", "totals=sums")
    assert mapped.code == 0, mapped.err
    assert states(orders, "sums") == {f"c{number}": 101 for number in range(7)}
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    orders.write(7)
    dropped = run(orders, "--from-savepoint", url, "--allow-dropped-state")
    assert dropped.code == 0, dropped.err
    assert states(orders, "sums") == {f"c{number}": 2 for number in range(7)}


@pytest.mark.exhaustive
def test_state_types_that_changed(orders: Orders, tmp_path: Path) -> None:
    """What does not fit is refused by operator and field before anything begins; a migration makes it fit, all of it
    with the first checkpoint: without the migration the run goes on."""
    url = exported(orders, tmp_path / "backups")
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    changed(
        orders,
        ("def add(total: int | None, order: Order) -> tuple[int, int]:",
         "class Total(msgspec.Struct):\n    sum: int\n    count: int = 0\n\n\n"
         "def first(state: int) -> Total:\n    return Total(state)\n\n\n"
         "def add(total: Total | None, order: Order) -> tuple[Total, int]:"),
        ("    total = (total or 0) + order.total\n    return total, total",
         "    total = total or Total(0)\n    return Total(total.sum + order.total, total.count + 1), total.sum"),
    )  # fmt: skip
    refused = run(orders, "--from-savepoint", url)
    assert refused.code == 2, refused.err
    assert "state of operator 'totals' cannot be read as Total" in said(refused)
    assert history(orders).latest is None
    changed(orders, ('"totals", add)', '"totals", add, state_version=2, migrations={1: first})'))
    orders.write(1)
    migrated = run(orders, "--from-savepoint", url)
    assert migrated.code == 0, migrated.err
    counted = {f"c{number}": {"sum": 100, "count": 0} for number in range(7)} | {"c0": {"sum": 101, "count": 1}}
    assert states(orders) == counted
    changed(orders, (", migrations={1: first}", ""))
    orders.write(7)
    assert run(orders).code == 0
    assert states(orders) == {
        key: {"sum": each["sum"] + 1, "count": each["count"] + 1} for key, each in counted.items()
    }
    with orders.running() as healthy:
        changed(orders, (", state_version=2", ""))
        older = run(orders)
        assert older.code == 2, older.err
        assert "is of version 2, and the pipeline knows version 1" in said(older)
        healthy.terminate()
        assert healthy.wait() == 0, "a run that cannot go on fences none that does"


AVRO_STATE = """\
class Total(msgspec.Struct):
    sum: int
    note: str
    first: str


SCHEMA = {"type": "record", "name": "Total", "fields": [
    {"name": "sum", "type": "int"}, {"name": "note", "type": "string"}, {"name": "first", "type": "string"}]}


def added(total: Total | None, order: Order) -> tuple[Total, int]:
    total = total or Total(0, "", order.customer)
    total.sum += order.total
    return total, total.sum


def make("""
GROWN_STATE = """\
class Total(msgspec.Struct):
    sum: float
    customer: str
    orders: int


SCHEMA = {"type": "record", "name": "Total", "fields": [
    {"name": "sum", "type": "double"}, {"name": "customer", "type": "string", "aliases": ["first"]},
    {"name": "orders", "type": "long", "default": 100}]}


def added(total: Total | None, order: Order) -> tuple[Total, int]:
    total = total or Total(0, order.customer, 0)
    total.orders += 1
    return Total(total.sum + order.total, total.customer, total.orders), total.orders


def make("""


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_an_avro_schema_that_changed(orders: Orders, tmp_path: Path, backend: str) -> None:
    """Its states are resolved, those of an export as well: a field is added, one removed, one promoted, one renamed.
    What does not resolve is refused by operator and field, and nothing is lost by that."""
    kept = ["--state-backend", backend, *(["--state-folder", str(tmp_path / "kept")] if backend == "rocksdb" else [])]
    changed(
        orders,
        ("import Pipeline", "import AvroCodec, Pipeline"),
        ("def make(", AVRO_STATE),
        ('"totals", add)', '"totals", added, state=AvroCodec(Total, SCHEMA))'),
    )
    assert run(orders, *kept).code == 0
    with orders.running(*kept) as process:
        savepoint = taken(orders, "--stop")
        process.wait()
    assert states(orders) == {f"c{each}": {"sum": 100, "note": "", "first": f"c{each}"} for each in range(7)}
    changed(orders, ('"name": "sum", "type": "int"', '"name": "sum", "type": "boolean"'))
    orders.write(70)
    for options in ([], ["--from-savepoint", str(savepoint)]):
        refused = run(orders, *kept, *options)
        assert refused.code == 2, refused.err
        assert "operator 'totals' cannot be read as Total: field 'sum' was written as int and is" in said(refused)
    newest = history(orders).latest
    assert newest is not None
    assert newest.checkpoint == savepoint
    changed(orders, ("boolean", "int"), (AVRO_STATE, GROWN_STATE))
    source = str(savepoint)
    if backend == "rocksdb":
        ended = orders.command("savepoint", orders.name, "--to", f"file://{tmp_path}", "--json")
        source = json.loads(ended.out)["url"]
        assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    resolved = run(orders, *kept, "--from-savepoint", source, "--parallelism", "2")
    assert resolved.code == 0, resolved.err
    assert states(orders) == {f"c{each}": {"sum": 110.0, "customer": f"c{each}", "orders": 110} for each in range(7)}
    assert sorted(map(int, filter(None, orders.totals()))) == sorted([*range(1, 111)] * 7)
    table = orders.command("state", orders.name)
    assert "Total(sum: float, customer: str, orders: int) by Avro" in table.out


@pytest.mark.exhaustive
def test_state_that_partitions_distribute(orders: Orders, tmp_path: Path) -> None:
    """All of it is shown and exported, whichever subtask had it; it is restored by one subtask, or for key groups."""
    by_partition = "order.customer, partitioned=True)"
    changed(orders, ("order.customer)", by_partition))
    assert run(orders, "--parallelism", "2").code == 0
    assert states(orders) == {f"c{number}": 100 for number in range(7)}
    ended = orders.command("savepoint", orders.name, "--to", f"file://{tmp_path}", "--json")
    assert ended.code == 0, ended.err
    url = json.loads(ended.out)["url"]
    for code, parallelism in ((by_partition, "1"), ("order.customer)", "2")):
        assert orders.command("reset", orders.name, "--yes", "--force").code == 0
        refused = run(orders, "--from-savepoint", url, "--parallelism", "2")
        assert (refused.code, "no savepoint says which of 2 subtasks" in said(refused)) == (2, True), refused.err
        assert history(orders).latest is None
        changed(orders, (by_partition, code))
        orders.write(7)
        restored = run(orders, "--from-savepoint", url, "--parallelism", parallelism)
        assert restored.code == 0, restored.err
        more = 1 if parallelism == "1" else 2  # the export does not move
        assert states(orders) == {f"c{number}": 100 + more for number in range(7)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", ["a bit", "cut off", "missing", "metadata", "no metadata"])
def test_a_damaged_export(orders: Orders, tmp_path: Path, damage: str) -> None:
    """Verifying names the file, and nothing is restored from it."""
    url = exported(orders, tmp_path / "backups")
    folder = Path(url.removeprefix("file://"))
    whole = orders.command("savepoints", "verify", orders.name, url)
    assert (whole.code, "is whole" in whole.out) == (0, True), whole
    file = folder / ("_metadata.json" if "metadata" in damage else "totals-0.avro")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage in ("missing", "no metadata"):
        file.unlink()
    else:
        file.write_bytes(content[:-1] if damage == "cut off" else content)
    found = orders.command("savepoints", "verify", orders.name, url)
    assert found.code == (2 if damage == "no metadata" else 1), found
    assert file.name in found.out + found.err
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    refused = run(orders, "--from-savepoint", url)
    assert refused.code == (2 if damage == "no metadata" else 6), refused.err
    assert file.name in refused.err
    assert history(orders).latest is None


@pytest.mark.exhaustive
@pytest.mark.slow
def test_another_cluster(orders: Orders, stoppable: OwnCluster, tmp_path: Path) -> None:
    """Topics are found by their names, which is said; records behind the offsets count on."""
    url = exported(orders, tmp_path / "backups")
    environment = {**orders.command.environment, "EXACTLYONCE_BOOTSTRAP_SERVERS": stoppable.bootstrap_servers}
    there = Orders(orders.name, stoppable, Command(orders.command.folder, environment))
    stoppable.create_topic(f"{orders.name}-orders", partitions=2)
    there.write(770)
    restored = run(there, "--from-savepoint", url)
    assert restored.code == 0, restored.err
    assert "taken in another cluster" in restored.err
    assert states(there) == {f"c{number}": 110 for number in range(7)}
    assert len(there.totals()) == 70
    shutil.rmtree(url.removeprefix("file://"))
    assert run(there).code == 0
