"""Checkpoints that move to another storage, at a savepoint: `run --from-savepoint N --checkpoint-storage URL`."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import pytest

from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import Storages, references
from tests.cli.conftest import Ended, Orders
from tests.cli.test_restoring import exported, run, said, states
from tests.cli.test_savepoints import history, taken

pytestmark = pytest.mark.broker

TOPIC = "topic"


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders that blocks are kept in."""
    found = tmp_path / "blocks", tmp_path / "others"
    for each in found:
        each.mkdir()
    return found


def files(root: Path) -> list[Path]:
    """All that lie there."""
    return [each for each in root.rglob("*") if each.is_file()]


def stopped_by_savepoint(orders: Orders, storage: str) -> int:
    """Run in *storage* until a savepoint ends it; its number."""
    with orders.running("--num-retained", "1", "--checkpoint-storage", storage) as process:
        number = taken(orders, "--stop")
        process.wait()
    return number


def moved(orders: Orders, savepoint: int, storage: str, **environment: str) -> Ended:
    """The command that goes on from *savepoint* in *storage*."""
    line = ("run", "orders:pipeline", "--until", "latest", "--from-savepoint", str(savepoint), "--num-retained", "1")
    return orders.command(*line, "--checkpoint-storage", storage, **environment)


def lies_in(orders: Orders, storage: str) -> int:
    """How many blocks lie there, whatever needs them."""
    config = ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers})
    topic = find_topic(config.confluent(), orders.name)
    with closing(Storages(config, topic)) as storages:
        return len(storages.of("" if storage == TOPIC else storage).since((0,) * topic.partitions).blocks)


def assert_whole(orders: Orders, storage: str, count: int) -> None:
    """Every order counts once; what the newest checkpoint stands on lies in *storage*; nothing lies anywhere that no
    checkpoint stands on."""
    assert states(orders) == {f"c{number}": count // 7 for number in range(7)}
    assert len(orders.totals()) == count
    config = ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers})
    newest = history(orders).latest
    assert newest is not None
    assert newest.storage == ("" if storage == TOPIC else storage)
    with closing(Storages(config, find_topic(config.confluent(), orders.name))) as storages:
        blocks = storages.of(newest.storage)
        wanted = references(newest, blocks)
        assert len(list(blocks.fetch(wanted))) == len(wanted) > 0
    doctor = orders.command("doctor", orders.name, "--deep")
    assert doctor.code == 0, doctor.out
    assert "of no checkpoint" not in doctor.out, doctor.out


@pytest.mark.slow
@pytest.mark.exhaustive
def test_there_and_back(orders: Orders, roots: tuple[Path, Path]) -> None:
    """From the topic to a folder, to another folder and back: without a savepoint it is refused with the very command;
    what was left goes as it expires, and a savepoint stays whole where it is until it is deleted."""
    places = [TOPIC, *(f"file://{root}" for root in roots), TOPIC]
    count = 700
    for old, new in itertools.pairwise(places):
        number = stopped_by_savepoint(orders, old)
        refused = run(orders, "--checkpoint-storage", new)
        assert refused.code == 2
        assert f"run PIPELINE --from-savepoint {number} --checkpoint-storage {new}`" in said(refused), refused.err
        for _ in range(2):  # the second goes on
            orders.write(70)
            count += 70
            done = moved(orders, number, new)
            assert done.code == 0, done.err
            assert_whole(orders, new, count)
        back = run(orders, "--checkpoint-storage", old)
        assert (back.code, f"--checkpoint-storage {new}" in said(back)) == (2, True)
        assert "savepoint N" in said(back)
        verified = orders.command("savepoints", "verify", orders.name, str(number))
        assert (verified.code, "is whole" in verified.out) == (0, True), verified
        assert orders.command("state", orders.name, "totals", "--at", str(number)).code == 0
        listed = orders.command("checkpoints", orders.name)
        assert f"blocks of {number} are kept in" in listed.out, listed.out
        kept = history(orders).manifests[number]
        assert {each.storage for each in history(orders).retained} == {kept.storage, "" if new == TOPIC else new}
        assert orders.command("savepoints", "delete", orders.name, str(number)).code == 0
        assert lies_in(orders, old) == 0, "what nobody needs is removed from where it was"
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    assert [files(root) for root in roots] == [[], []]


PLACES = [
    "coordinator-opened", "savepoint-written", "coordinator-decided", "coordinator-finalized", "coordinator-swept",
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["into the topic", "out of the topic", "from folder to folder"])
def test_a_kill_while_it_moves(way: str, place: str, orders: Orders, roots: tuple[Path, Path], tmp_path: Path) -> None:
    """Wherever it dies, the same command goes on, and nothing is left that no checkpoint stands on."""
    first, second = (f"file://{root}" for root in roots)
    old, new = {"into the topic": (first, TOPIC), "out of the topic": (TOPIC, first)}.get(way, (first, second))
    number = stopped_by_savepoint(orders, old)
    orders.write(70)
    (tmp_path / "fired").mkdir()
    armed = {"EXACTLYONCE_FAILPOINTS": f"{place}=kill", "EXACTLYONCE_FAILPOINTS_FIRED": str(tmp_path / "fired")}
    assert moved(orders, number, new, **armed).code == -9
    again = moved(orders, number, new)
    assert again.code == 0, again.err
    assert_whole(orders, new, 770)
    verified = orders.command("savepoints", "verify", orders.name, str(number))
    assert (verified.code, "is whole" in verified.out) == (0, True), verified


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["into the topic", "out of the topic"])
def test_a_move_that_is_given_up(way: str, orders: Orders, roots: tuple[Path, Path], tmp_path: Path) -> None:
    """Before its manifest is durable nothing has moved: the pipeline goes on where it was, and what had been written
    for the move is removed."""
    places = f"file://{roots[0]}", TOPIC
    old, new = places if way == "into the topic" else reversed(places)
    number = stopped_by_savepoint(orders, old)
    orders.write(70)
    (tmp_path / "fired").mkdir()
    armed = {
        "EXACTLYONCE_FAILPOINTS": "savepoint-written=kill",
        "EXACTLYONCE_FAILPOINTS_FIRED": str(tmp_path / "fired"),
    }
    assert moved(orders, number, new, **armed).code == -9
    assert lies_in(orders, new) > 0
    assert run(orders, "--checkpoint-storage", old).code == 0
    assert_whole(orders, old, 770)
    assert lies_in(orders, new) == 0


@pytest.mark.exhaustive
def test_another_name_of_the_same_place(orders: Orders, roots: tuple[Path, Path], tmp_path: Path) -> None:
    """It is refused before anything is changed: what checkpoints need by one name would be an orphan by the other."""
    (tmp_path / "link").symlink_to(roots[0])
    old, new = f"file://{roots[0]}", f"file://{tmp_path}/link"
    number = stopped_by_savepoint(orders, old)
    orders.write(70)
    refused = moved(orders, number, new)
    assert refused.code == 2, refused
    assert f"a checkpoint in {old} stands on: it is the same place by another name" in said(refused), refused.err
    newest = history(orders).newest_incarnation
    assert newest is not None
    assert newest.incarnation == 1
    assert run(orders, "--checkpoint-storage", old).code == 0
    assert_whole(orders, old, 770)
    verified = orders.command("savepoints", "verify", orders.name, str(number))
    assert (verified.code, "is whole" in verified.out) == (0, True), verified


@pytest.mark.exhaustive
def test_another_name_of_a_place_that_was_left(orders: Orders, roots: tuple[Path, Path], tmp_path: Path) -> None:
    """It is moved to by way of the topic, once nothing is kept by the old name: what is needed is no orphan there."""
    (tmp_path / "link").symlink_to(roots[0])
    old, new = f"file://{roots[0]}", f"file://{tmp_path}/link"
    first = stopped_by_savepoint(orders, old)
    with orders.running("--from-savepoint", str(first), "--checkpoint-storage", TOPIC) as process:
        second = taken(orders, "--stop")
        process.wait()
    refused = moved(orders, second, new)
    assert (refused.code, f"exactlyonce savepoints list {orders.name}" in said(refused)) == (2, True), refused.err
    assert orders.command("savepoints", "delete", orders.name, str(first)).code == 0
    for _ in range(3):
        orders.write(70)
        done = moved(orders, second, new)
        assert done.code == 0, done.err
    assert_whole(orders, new, 910)
    assert orders.command("savepoints", "verify", orders.name, str(second)).code == 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_storage_that_is_gone(orders: Orders, roots: tuple[Path, Path], tmp_path: Path) -> None:
    """What a pipeline has left may be away, also for good: it goes on, says so, and removes what is left once the
    storage is back."""
    old, new = (f"file://{root}" for root in roots)
    number = stopped_by_savepoint(orders, old)
    orders.write(70)
    assert moved(orders, number, new).code == 0
    aside = tmp_path / "aside"
    roots[0].rename(aside)
    for _ in range(2):
        orders.write(7)
        done = run(orders, "--checkpoint-storage", new, "--num-retained", "1")
        assert done.code == 0, done.err
    assert f"{old}, where checkpoints of {orders.name} were kept once, cannot be looked at" in said(done), done.err
    assert len(orders.totals()) == 784
    listed = orders.command("checkpoints", orders.name)
    assert listed.code == 0, listed.err
    assert "cannot be looked at" in " ".join(listed.out.split())
    assert orders.command("savepoints", "delete", orders.name, str(number)).code == 0
    assert len(files(aside)) > 0
    aside.rename(roots[0])
    assert run(orders, "--checkpoint-storage", new).code == 0
    assert files(roots[0]) == []
    assert_whole(orders, new, 784)


@pytest.mark.exhaustive
def test_an_export_begins_in_any_storage(orders: Orders, roots: tuple[Path, Path], tmp_path: Path) -> None:
    """It stands for itself: whatever the storage of the run that it came from, it is restored into that of the new."""
    url = exported(orders, tmp_path / "backups")
    place = f"file://{roots[0]}"
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    done = run(orders, "--from-savepoint", url, "--checkpoint-storage", place)
    assert done.code == 0, done.err
    assert_whole(orders, place, 700)
    again = orders.command("savepoint", orders.name, "--to", f"file://{tmp_path / 'backups'}", "--json")
    assert again.code == 0, again.err
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    assert files(roots[0]) == []
    done = run(orders, "--from-savepoint", again.out.split('"url":"')[1].split('"')[0])
    assert done.code == 0, done.err
    assert_whole(orders, TOPIC, 700)
