"""Checkpoints that move to another storage, at a savepoint: `run --from-savepoint N --checkpoint-storage URL`."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import pytest

from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.engines.blocks import Storages, references
from tests.cli.conftest import Orders, by_customer, files

pytestmark = pytest.mark.exhaustive

TOPIC = "topic"


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "blocks", tmp_path / "others"
    for each in found:
        each.mkdir()
    return found


def in_storage(storage: str, savepoint: int | None = None) -> tuple[str, ...]:
    begin = () if savepoint is None else ("--from-savepoint", str(savepoint))
    return (*begin, "--num-retained", "1", "--checkpoint-storage", storage)


def lies_in(orders: Orders, storage: str) -> int:
    topic = find_topic(orders.config, orders.name)
    with closing(Storages(orders.config, topic)) as storages:
        return len(storages.of("" if storage == TOPIC else storage).since((0,) * topic.partitions).blocks)


def assert_whole(orders: Orders, storage: str, count: int, *savepoints: int) -> None:
    assert orders.states() == by_customer(count // 7)
    assert len(orders.totals()) == count
    newest = orders.newest()
    assert newest.storage == ("" if storage == TOPIC else storage)
    with closing(Storages(orders.config, find_topic(orders.config, orders.name))) as storages:
        blocks = storages.of(newest.storage)
        wanted = references(newest, blocks)
        assert len(list(blocks.fetch(wanted))) == len(wanted) > 0
    assert "of no checkpoint" not in orders.command.done("doctor", orders.name, "--deep").out
    for each in savepoints:
        assert "is intact" in orders.command.done("savepoints", "verify", orders.name, str(each)).out


@pytest.mark.slow
def test_there_and_back(orders: Orders, roots: tuple[Path, Path]) -> None:
    places = [TOPIC, *(f"file://{root}" for root in roots), TOPIC]
    count = 700
    for old, new in itertools.pairwise(places):
        number = orders.ended_by_savepoint("--checkpoint-storage", old)
        told = f"run PIPELINE --from-savepoint {number} --checkpoint-storage {new}`"
        orders.run_refused(told, "--checkpoint-storage", new)
        for _ in range(2):  # the second goes on
            orders.write(70)
            count += 70
            orders.ran(*in_storage(new, number))
            assert_whole(orders, new, count, number)
        back = orders.run("--checkpoint-storage", old)
        assert (back.code, f"--checkpoint-storage {new}" in back.said, "savepoint N" in back.said) == (2, True, True)
        orders.command.done("state", "show", orders.name, "totals", "--at", str(number))
        assert f"blocks of {number} are kept in" in orders.command("checkpoints", orders.name).out
        kept = orders.history().manifests[number]
        assert {each.storage for each in orders.history().retained} == {kept.storage, "" if new == TOPIC else new}
        orders.command.done("savepoints", "delete", orders.name, str(number))
        assert lies_in(orders, old) == 0, "what nobody needs is removed from where it was"
    orders.reset()
    assert [files(root) for root in roots] == [[], []]


WAYS = ["out of the topic", "into the topic", "from folder to folder"]
PLACES = [
    "coordinator-opened", "savepoint-written", "coordinator-decided", "coordinator-finalized", "coordinator-swept",
]  # fmt: skip


@pytest.mark.parametrize(("place", "way"), [*zip(PLACES, itertools.cycle(WAYS), strict=False)])
def test_a_kill_while_it_moves(way: str, place: str, orders: Orders, roots: tuple[Path, Path]) -> None:
    first, second = (f"file://{root}" for root in roots)
    old, new = {"into the topic": (first, TOPIC), "out of the topic": (TOPIC, first)}.get(way, (first, second))
    number = orders.ended_by_savepoint("--checkpoint-storage", old)
    orders.write(70)
    orders.killed_at(place, *in_storage(new, number))
    orders.ran(*in_storage(new, number))
    assert_whole(orders, new, 770, number)


def test_a_move_that_is_given_up(orders: Orders, roots: tuple[Path, Path]) -> None:
    """Before its manifest is durable nothing has moved, and what was written for the move is removed."""
    old, new = f"file://{roots[0]}", TOPIC
    number = orders.ended_by_savepoint("--checkpoint-storage", old)
    orders.write(70)
    orders.killed_at("savepoint-written", *in_storage(new, number))
    assert lies_in(orders, new) > 0
    orders.ran("--checkpoint-storage", old)
    assert_whole(orders, old, 770)
    assert lies_in(orders, new) == 0


def test_another_name_of_the_same_place(orders: Orders, roots: tuple[Path, Path], tmp_path: Path) -> None:
    """It is refused before anything is changed: what checkpoints need by one name would be an orphan by the other."""
    (tmp_path / "link").symlink_to(roots[0])
    old, new = f"file://{roots[0]}", f"file://{tmp_path}/link"
    number = orders.ended_by_savepoint("--checkpoint-storage", old)
    orders.write(70)
    same = f"a checkpoint in {old} stands on: it is the same place by another name"
    orders.run_refused(same, *in_storage(new, number))
    assert orders.history().incarnation_latest == 1
    orders.ran("--checkpoint-storage", old)
    assert_whole(orders, old, 770, number)


@pytest.mark.slow
def test_a_storage_that_is_gone(orders: Orders, roots: tuple[Path, Path], tmp_path: Path) -> None:
    """A storage that was left may be away: the run goes on, says so, and cleans it once it is back."""
    old, new = (f"file://{root}" for root in roots)
    number = orders.ended_by_savepoint("--checkpoint-storage", old)
    orders.write(70)
    orders.ran(*in_storage(new, number))
    aside = tmp_path / "aside"
    roots[0].rename(aside)
    for _ in range(2):
        orders.write(7)
        done = orders.ran(*in_storage(new))
    assert f"{old}, a former storage of {orders.name}'s checkpoints, cannot be read" in done.said, done.err
    assert len(orders.totals()) == 784
    assert "cannot be looked at" in orders.command.done("checkpoints", orders.name).said
    orders.command.done("savepoints", "delete", orders.name, str(number))
    assert len(files(aside)) > 0
    aside.rename(roots[0])
    orders.ran("--checkpoint-storage", new)
    assert files(roots[0]) == []
    assert_whole(orders, new, 784)
