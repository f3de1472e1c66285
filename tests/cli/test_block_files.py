"""Commands with a pipeline whose blocks are files outside of the checkpoint topic: the manifest tells them."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.connectors.block_files import name_of
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.engines.blocks import block_storage, references
from tests.cli.conftest import Orders, files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "blocks"
    folder.mkdir()
    return folder


def settings(root: Path) -> list[str]:
    config = root.with_name("settings.toml")
    config.write_text(f'[checkpoint]\nstorage = "file://{root}"\n')
    return ["--config", str(config)]


def test_looking_at_it(orders: Orders, root: Path) -> None:
    command = orders.command
    orders.killed_at("coordinator-finalized", *settings(root))
    assert command("checkpoints", orders.name, "--json").json["storage"] == f"file://{root}"
    assert f"blocks are kept in file://{root}" in command("checkpoints", orders.name).out
    orders.ran(*settings(root))
    healthy = command("doctor", orders.name, "--deep")
    assert "of no checkpoint" not in healthy.out, healthy.out
    assert "Damaged" not in healthy.out
    some = next(each for each in files(root) if ".totals." in each.name)
    orphan = some.with_name(some.name.replace(".totals.", ".orphaned.", 1))
    orphan.write_bytes(some.read_bytes())
    assert "orphans of a run that was ended in the middle" in command("doctor", orders.name).said
    orphan.unlink()
    some.write_bytes(b"x" * some.stat().st_size)
    found = command("doctor", orders.name, "--deep").said
    assert f"Damaged in file://{root}" in found
    assert some.name.rpartition(".")[2] not in found, "people know blocks by their keys"


@pytest.mark.exhaustive
def test_files_that_cannot_be_read(orders: Orders, root: Path) -> None:
    taken = orders.ended_by_savepoint("--parallelism", "3", *settings(root))
    state, index = blocks_of_newest(orders, root)
    for ref in state[:2]:
        make_unreadable(root, ref)
    damaged = next(root.rglob(name_of(state[2]) or ""))
    damaged.write_bytes(b"x" * state[2].size)
    found = orders.command("doctor", orders.name, "--deep").said
    for ref in state[:2]:
        assert re.search(rf"Block {ref.key} in \S+ cannot be read: .* Is a directory", found), found
    assert f"Block {state[2].key}" in found
    assert f"checkpoint {taken}, the newest among them" in found
    assert "failed all blocks" not in found
    verified = orders.command("savepoints", "verify", orders.name, str(taken))
    assert (verified.code, verified.out.count(f"Savepoint {taken} cannot be restored: Block")) == (1, 3), verified
    make_unreadable(root, index)
    found = orders.command("doctor", orders.name).said
    assert re.search(rf"Damaged in file://{root}: Block {index.key} in \S+ cannot be read", found), found


def make_unreadable(root: Path, ref: BlockRef) -> None:
    place = next(root.rglob(name_of(ref) or ""))
    place.unlink()
    place.mkdir()


def blocks_of_newest(orders: Orders, root: Path) -> tuple[list[BlockRef], BlockRef]:
    newest, topic = orders.newest(), find_topic(orders.config, orders.name)
    with closing(block_storage(orders.config, topic, f"file://{root}")) as storage:
        refs = references(newest, storage)
    indexes = {ref for each in newest.operators for parts in each.index for ref in parts}
    return [ref for ref in refs - indexes if "/totals/" in ref.key], next(iter(indexes))


@pytest.mark.exhaustive
def test_a_damaged_savepoint(orders: Orders, root: Path) -> None:
    """It keeps what was written up to it, and no more with every start. Readers learn how to release it."""

    def run() -> str:
        orders.write(70)
        return orders.ran("--num-retained", "1", *settings(root)).said

    number = orders.ended_by_savepoint(*settings(root))
    run()
    index = next(iter(orders.history().manifests[number].operators[0].index[0]))
    damaged = next(each for each in files(root) if index.sha256.hex() in each.name)
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    deletion = ("savepoints", "delete", orders.name, str(number))
    ends = f"`exactlyonce {' '.join(deletion)}`"
    lie = []
    for _ in range(3):
        said = run()
        assert f"savepoint {number} is damaged and can no longer be restored" in said
        assert ends in said
        lie.append(len(files(root)))
    assert lie[0] == lie[1] == lie[2]
    found = orders.command("doctor", orders.name, "--deep").said
    assert (ends in found, "when the checkpoint expires" in found) == (True, False), found
    orders.command.done(*deletion)
    assert "is damaged" not in run()
    assert len(files(root)) < lie[0]
    found = orders.command("doctor", orders.name, "--deep").out
    assert ("Damaged" in found, "of no checkpoint" in found) == (False, False), found


def test_a_disk_that_is_not_mounted(orders: Orders, root: Path) -> None:
    """Starts and readers ask whether it is mounted: nothing is made, and nobody is told to reset."""
    orders.ran(*settings(root))
    before = orders.history().newest_incarnation
    unmounted = root.with_name("unmounted")
    root.rename(unmounted)
    root.mkdir()
    lie = sorted(root.rglob("*"))
    for ended in (orders.run(*settings(root)), orders.command("state", "show", orders.name, "totals")):
        assert (ended.code, "is it mounted" in ended.said, "reset" in ended.said) == (4, True, False), ended
    assert sorted(root.rglob("*")) == lie
    assert orders.history().newest_incarnation == before, "nobody was fenced"
    for each in lie[::-1]:
        each.rmdir()
    root.rmdir()
    unmounted.rename(root)
    orders.ran(*settings(root))


@pytest.mark.exhaustive
def test_reset(orders: Orders, root: Path) -> None:
    orders.ran(*settings(root))
    assert files(root)
    neighbour = root / "neighbour" / "topic" / "file"
    neighbour.parent.mkdir(parents=True)
    neighbour.write_text("of another pipeline")
    ended = orders.command.done("reset", orders.name, "--yes")
    assert f"all files of this pipeline in file://{root}" in ended.said
    assert files(root) == [neighbour]
    assert sorted(each.name for each in root.iterdir()) == ["neighbour"]
    orders.ran()
    assert files(root) == [neighbour]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host/folder", "there is no storage ftp://"),
        ("mnt/checkpoints", "it is neither a URL nor"),
        ("file:///missing/folder", "does not exist: create the folder"),
        ("s3://canary-user:canary-secret@bucket/x", "it holds a user or a password"),
        ("s3://bucket/x?key=canary-secret", "it has a query"),
    ],
    ids=["scheme", "path", "missing", "password", "query"],
)
def test_what_is_refused_at_start(url: str, says: str, orders: Orders) -> None:
    line = ("run", "orders:pipeline", "--until", "latest", "--inline", "--checkpoint-storage", url)
    assert "canary" not in orders.command.refused(says, *line).err
    assert orders.command("checkpoints", orders.name).out.count("checkpoint") <= 1, "there is none"
