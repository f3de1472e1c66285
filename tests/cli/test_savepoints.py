"""`exactlyonce savepoint` and `savepoints`: of a pipeline that runs, and of one that does not; also in S3 and HDFS."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.checkpoint.requests import Outcome
from exactlyonce.connectors.filestore.local import LocalStore
from exactlyonce.engines import run_requests
from exactlyonce.engines.connections import short_incarnation
from exactlyonce.engines.savepoints import exported, retained
from exactlyonce.engines.savepoints.exported import METADATA
from exactlyonce.pipeline.errors import StorageUnavailable
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Orders, armed, by_customer, wait_until


def test_taken_kept_verified_and_deleted(orders: Orders) -> None:
    command = orders.command
    with orders.running("--num-retained", "1") as run:
        first, later = orders.taken(), orders.taken()
        assert later > first
        assert orders.history().manifests[first].is_savepoint
        listed = command.done("savepoints", "list", orders.name, "--json").json
        assert [each["checkpoint"] for each in listed] == [first, later]
        assert "is intact" in command.done("savepoints", "verify", orders.name, str(first)).out
        command.done("savepoints", "delete", orders.name, str(first))
        assert first not in orders.history().manifests
        last = orders.taken("--stop")
        assert run.wait() == 0
    assert (orders.newest().checkpoint, orders.newest().kind) == (last, "savepoint")

    command.refused("the next run goes on from it", "savepoints", "delete", orders.name, str(last))
    command.done("savepoints", "delete", orders.name, str(later))
    assert [each.checkpoint for each in orders.history().retained if each.is_savepoint] == [last]
    command.refused(f"goes on from checkpoint {last}", "savepoint", orders.name)
    command.refused(f"It has {last}.", "savepoints", "verify", orders.name, str(first))

    orders.ran()
    assert len(orders.totals()) == 700
    state = command.done("state", "show", orders.name, "totals", "--at", str(last), "--json")
    assert [json.loads(line)["state"] for line in state.out.splitlines()] == [100] * 7


@pytest.mark.exhaustive
def test_a_run_that_begins_while_one_is_deleted(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left in peace: the command is refused, and says that it is to be repeated; nothing is changed."""
    with orders.running() as run:
        first = orders.taken()
        assert run.stop() == 0
    begun: list[Callable[[], Outcome]] = []

    def slow(*arguments: Any, **named: Any) -> Any:
        begun.append(orders.begun_elsewhere())
        return short_incarnation(*arguments, **named)

    monkeypatch.setattr(retained, "short_incarnation", slow)
    deletion = ("savepoints", "delete", orders.name, str(first))
    orders.command.refused("(process 1 on other-host) has begun since", *deletion)
    assert begun[0]() is Outcome.DONE, "it was not fenced"
    assert first in orders.history().savepoints


PUT = LocalStore.put


def full(folder: LocalStore, name: str, content: bytes, aside: str) -> None:
    PUT(folder, name, content, aside)
    raise StorageUnavailable(f"{folder.url} is full: make room there.")


def test_an_export_that_fails(orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that can be no folder takes no savepoint. A later failure keeps it and says how to delete it."""
    monkeypatch.setattr(exported, "AWAY_TIMEOUT_S", -1.0)  # it is not asked for half a minute
    backups = tmp_path / "backups"
    line = ("savepoint", orders.name, "--to", f"file://{backups}")
    with orders.running() as run:
        backups.touch()
        orders.command.refused("a file is where a folder is needed", *line)
        assert not any(each.is_savepoint for each in orders.history().retained)
        backups.unlink()
        with monkeypatch.context() as patched:
            patched.setattr(LocalStore, "put", full)
            failed = orders.command(*line)
        (kept,) = [each.checkpoint for each in orders.history().retained if each.is_savepoint]
        assert run.stop() == 0
    assert (failed.code, f"savepoints delete {orders.name} {kept}`" in failed.err) == (4, True), failed
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "put", full)
        orders.command.refused("is full", *line, code=4)
    assert list(backups.iterdir()) == []
    orders.command.done(*line)


@pytest.mark.exhaustive
def test_a_deletion_of_an_export_that_was_broken_off(orders: Orders, tmp_path: Path) -> None:
    """The rest of it is no savepoint, and goes with the same command, for its own pipeline alone."""
    orders.ran()
    url, command = orders.exported(tmp_path / "backups"), orders.command
    deletion = ("savepoints", "delete", orders.name, url)
    assert command.process(*deletion, **armed(tmp_path, "savepoint-removing")).code == -9
    (left,) = (tmp_path / "backups").iterdir()
    assert len([*left.iterdir()]) > 1
    command.refused(f"savepoints delete {orders.name} {url}`", "savepoints", "verify", orders.name, url)
    command.refused(orders.name, "savepoints", "delete", "another", url)
    command.done(*deletion)
    assert not left.exists()
    assert command(*deletion).code == 2


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("place", ["coordinator-triggered", "coordinator-decided"])
def test_a_coordinator_that_is_killed_meanwhile(orders: Orders, tmp_path: Path, place: str) -> None:
    """The asker hears of it, and waits on: the next run finishes what was decided, and takes what was not."""
    notes: list[str] = []
    options = ("run", "orders:pipeline", "--checkpoint-interval", "10m", "--parallelism", "2")
    with orders.command.start(*options, **armed(tmp_path, place, "stop")) as killed, ThreadPoolExecutor(1) as asker:
        wait_until(orders.lives, lambda: killed.poll() is None)
        living = run_requests.living_run(orders.history())
        assert living is not None
        # Asked in this process, where a silent run does not count as dead.
        asking_for = orders.config, orders.name, living, LIMIT_S * 1000
        asked = asker.submit(run_requests.savepoint, *asking_for, stop=True, note=notes.append)
        wait_until(lambda: (tmp_path / "fired" / place).exists(), lambda: killed.poll() is None)
        killed.kill()
        killed.communicate(timeout=LIMIT_S)
        dead = f"process {living.process} on {living.host}, has died. If {orders.name} is run again within"
        wait_until(lambda: any(dead in note for note in notes), lambda: not asked.done())
        with orders.command.start(*options) as again:
            taken = asked.result(LIMIT_S).checkpoint
            again.communicate(timeout=LIMIT_S)
    (savepoint,) = (each for each in orders.history().retained if each.is_savepoint)
    assert savepoint.checkpoint == taken
    assert savepoint.incarnation == (1 if place == "coordinator-decided" else 2)
    orders.ran()
    assert len(orders.totals()) == 700


# --- exported to S3 (moto) and to HDFS (MiniDFSCluster) ---------------------------------------------------------------


@pytest.fixture
def base(block_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in block_server.env.items():
        monkeypatch.setenv(name, value)
    return f"{block_server.url}/prod"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_exported_verified_restored_and_deleted(orders: Orders, base: str) -> None:
    command = orders.command
    with orders.running("--checkpoint-storage", f"{base}/blocks", "--parallelism", "2") as run:
        url = command.done("savepoint", orders.name, "--to", f"{base}/savepoints", "--json").json["url"]
        assert url.startswith(f"{base}/savepoints/{orders.name}-")
        last = orders.taken("--stop", "--to", f"{base}/savepoints")
        assert run.wait() == 0
    assert orders.history().manifests[last].storage == f"{base}/blocks"
    assert "is intact" in command.done("savepoints", "verify", orders.name, url).out
    orders.reset()
    before = len(orders.totals())
    orders.ran("--from-savepoint", url)
    assert orders.states() == by_customer(100)
    orders.write(70)
    number = orders.ended_by_savepoint()
    orders.ran("--from-savepoint", str(number), "--checkpoint-storage", f"{base}/blocks")
    assert orders.states() == by_customer(110)
    assert len(orders.totals()) >= before + 70
    command.done("savepoints", "delete", orders.name, url)
    command.refused(METADATA, "savepoints", "verify", orders.name, url)
    command.done("doctor", orders.name, "--deep")
