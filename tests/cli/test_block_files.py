"""Commands with a pipeline whose blocks are files outside of the checkpoint topic: the manifest tells them."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.store.files.names import name_of
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import block_storage, references
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.test_savepoints import history, taken

if TYPE_CHECKING:
    from tests.cli.conftest import Here, Orders

pytestmark = pytest.mark.broker


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where blocks are kept."""
    folder = tmp_path / "blocks"
    folder.mkdir()
    return folder


def files(root: Path) -> list[Path]:
    return sorted(each for each in root.rglob("*") if each.is_file())


def settings(root: Path) -> list[str]:
    """As a file has them."""
    config = root.with_name("settings.toml")
    config.write_text(f'[checkpoint]\nstorage = "file://{root}"\ninterval = "200ms"\n')
    return ["--config", str(config)]


def test_looking_at_it(orders: Orders, here: Here, root: Path) -> None:
    """`checkpoints` and `doctor` read the files, say where they are, and find a damaged one and orphans."""
    orders.killed_at("coordinator-finalized", *settings(root))
    listed = json.loads(here("checkpoints", orders.name, "--json").out)
    assert listed["storage"] == f"file://{root}"
    assert f"blocks are kept in file://{root}" in here("checkpoints", orders.name).out
    assert orders.command("run", "orders:pipeline", "--until", "latest", *settings(root)).code == 0
    healthy = here("doctor", orders.name, "--deep")
    assert "of no checkpoint" not in healthy.out, healthy.out
    assert "Damaged" not in healthy.out
    some = next(each for each in files(root) if ".totals." in each.name)
    orphan = some.with_name(some.name.replace(".totals.", ".orphaned.", 1))
    orphan.write_bytes(some.read_bytes())
    found = here("doctor", orders.name).out
    assert "orphans of a run that was ended in the middle" in " ".join(found.split()), found
    orphan.unlink()
    some.write_bytes(b"x" * some.stat().st_size)
    found = " ".join(here("doctor", orders.name, "--deep").out.split())
    assert f"Damaged in file://{root}" in found
    assert some.name.rpartition(".")[2] not in found, "people know blocks by their keys"


def test_files_that_cannot_be_read(orders: Orders, here: Here, root: Path) -> None:
    """Each is named with the checkpoint that needs it, by `doctor --deep` and `savepoints verify`, and the others are
    read all the same; where it is an index, the other checks of `doctor` go on."""
    with orders.running("--parallelism", "3", *settings(root)) as process:
        taken = json.loads(orders.command("savepoint", orders.name, "--stop", "--json").out)["checkpoint"]
        assert process.wait(LIMIT_S) == 0
    state, index = blocks_of_newest(orders, root)
    for ref in state[:2]:
        place = next(root.rglob(name_of(ref) or ""))
        place.unlink()
        place.mkdir()
    damaged = next(root.rglob(name_of(state[2]) or ""))
    damaged.write_bytes(b"x" * state[2].size)
    found = " ".join(here("doctor", orders.name, "--deep").out.split())
    for ref in state[:2]:
        assert re.search(rf"Block {ref.key} in \S+ cannot be read: .* Is a directory", found), found
    assert f"Block {state[2].key}" in found
    assert f"checkpoint {taken}, the newest among them" in found
    assert "failed all blocks" not in found
    verified = here("savepoints", "verify", orders.name, str(taken))
    assert (verified.code, verified.out.count(f"Savepoint {taken} cannot be restored: Block")) == (1, 3), verified
    place = next(root.rglob(name_of(index) or ""))
    place.unlink()
    place.mkdir()
    found = " ".join(here("doctor", orders.name).out.split())
    assert re.search(rf"Damaged in file://{root}: Block {index.key} in \S+ cannot be read", found), found


def blocks_of_newest(orders: Orders, root: Path) -> tuple[list[BlockRef], BlockRef]:
    """Blocks of state that the newest checkpoint stands on, and one of its indexes."""
    config = ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers})
    newest = read_history(config.confluent(), orders.name).latest
    assert newest is not None
    with closing(block_storage(config, find_topic(config.confluent(), orders.name), f"file://{root}")) as storage:
        refs = references(newest, storage)
    indexes = {ref for each in newest.operators for parts in each.index for ref in parts}
    return [ref for ref in refs - indexes if "/totals/" in ref.key], next(iter(indexes))


def test_a_damaged_savepoint(orders: Orders, here: Here, root: Path) -> None:
    """It keeps what was written up to it, and not more with every start; who reads of it learns how to let it go."""

    def run() -> str:
        orders.write(70)
        done = orders.command("run", "orders:pipeline", "--until", "latest", "--num-retained", "1", *settings(root))
        assert done.code == 0, done.err
        return " ".join(done.err.split())

    with orders.running("--num-retained", "1", *settings(root)) as process:
        number = taken(orders, "--stop")
        process.wait()
    run()
    index = next(iter(history(orders).manifests[number].operators[0].index[0]))
    damaged = next(each for each in files(root) if index.sha256.hex() in each.name)
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    ends = f"`exactlyonce savepoints delete {orders.name} {number}`"
    lie = []
    for _ in range(3):
        said = run()
        assert f"savepoint {number} is damaged and can be restored from no more" in said
        assert ends in said
        lie.append(len(files(root)))
    assert lie[0] == lie[1] == lie[2]
    found = " ".join(here("doctor", orders.name, "--deep").out.split())
    assert (ends in found, "when the checkpoint expires" in found) == (True, False), found
    assert here("savepoints", "delete", orders.name, str(number)).code == 0
    assert "is damaged" not in run()
    assert len(files(root)) < lie[0]
    found = here("doctor", orders.name, "--deep").out
    assert ("Damaged" in found, "of no checkpoint" in found) == (False, False), found


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_a_disk_that_is_not_mounted(folder: str, orders: Orders, here: Here, root: Path) -> None:
    """A start asks whether it is mounted, and so does who reads a checkpoint: nothing is made, nobody told to reset."""
    line = ("run", "orders:pipeline", "--until", "latest", *settings(root))
    assert orders.command(*line).code == 0
    before = history(orders).newest_incarnation
    unmounted = root.with_name("unmounted")
    root.rename(unmounted)
    root.mkdir()
    if folder == "empty":
        (root / next(unmounted.glob("*/*")).relative_to(unmounted)).mkdir(parents=True)
    lie = sorted(root.rglob("*"))
    for ended in (orders.command(*line), here("state", orders.name, "totals")):
        said = " ".join(ended.err.split())
        assert (ended.code, "is it mounted" in said, "reset" in said) == (4, True, False), said
    assert sorted(root.rglob("*")) == lie
    assert history(orders).newest_incarnation == before, "nobody was fenced"
    for each in lie[::-1]:
        each.rmdir()
    root.rmdir()
    unmounted.rename(root)
    assert orders.command(*line).code == 0


@pytest.mark.exhaustive
def test_what_a_crash_leaves_is_committed(orders: Orders, here: Here, root: Path) -> None:
    """`transactions commit` takes over with the storage that the manifest names."""
    orders.killed_at("coordinator-decided", *settings(root))
    done = here("transactions", "commit", orders.name, "--take-over")
    assert done.code == 0, done.err
    assert here("transactions", "list", orders.name).code == 0
    ended = orders.command("run", "orders:pipeline", "--until", "latest", *settings(root))
    assert ended.code == 0, ended.err
    assert len(orders.totals()) == 700


@pytest.mark.exhaustive
def test_reset(orders: Orders, here: Here, root: Path) -> None:
    """It shows the storage, removes every file, and the next run may keep its blocks elsewhere."""
    assert orders.command("run", "orders:pipeline", "--until", "latest", *settings(root)).code == 0
    assert files(root)
    neighbour = root / "neighbour" / "topic" / "file"
    neighbour.parent.mkdir(parents=True)
    neighbour.write_text("of another pipeline")
    ended = here("reset", orders.name, "--yes")
    assert ended.code == 0, ended.err
    assert f"all files of this pipeline in file://{root}" in " ".join(ended.out.split())
    assert files(root) == [neighbour]
    assert sorted(each.name for each in root.iterdir()) == ["neighbour"]
    again = orders.command("run", "orders:pipeline", "--until", "latest")
    assert again.code == 0, again.err
    assert files(root) == [neighbour]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host/folder", "there is no storage ftp://"),
        ("/mnt/checkpoints", "it is no URL"),
        ("file:///missing/folder", "is not there: make the folder"),
        ("s3://canary-user:canary-secret@bucket/x", "it holds a user or a password"),
        ("s3://bucket/x?key=canary-secret", "it has a query"),
    ],
    ids=["scheme", "path", "missing", "password", "query"],
)
def test_what_is_refused_at_start(url: str, says: str, orders: Orders, root: Path) -> None:
    """A storage that cannot be is refused with what to do, before anything is written, and no secret is shown."""
    refused = orders.command("run", "orders:pipeline", "--until", "latest", "--checkpoint-storage", url)
    assert refused.code == 2, refused.err
    assert says in " ".join(refused.err.split())
    assert "canary" not in refused.err
    assert orders.command("checkpoints", orders.name).out.count("checkpoint") <= 1, "there is none"
