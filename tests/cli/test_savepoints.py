"""`exactlyonce savepoint` and `savepoints`: of a pipeline that runs, and of one that does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.store.files.local import LocalFolder
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.checkpoint.store.mailbox import SAVEPOINT, Asked, Mailbox
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.cli import asking, deleting
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.pipeline.errors import Fenced, StorageUnavailable
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Command

if TYPE_CHECKING:
    from tests.cli.conftest import Here, Orders

pytestmark = pytest.mark.broker


def history(orders: Orders) -> History:
    """What is decided."""
    return read_history({"bootstrap.servers": orders.kafka.bootstrap_servers}, orders.name)


def taken(orders: Orders, *options: str) -> int:
    """Take one; its number."""
    ended = orders.command("savepoint", orders.name, "--json", *options)
    assert ended.code == 0, ended.err
    number: int = json.loads(ended.out)["checkpoint"]
    return number


def test_taken_kept_verified_and_deleted(orders: Orders) -> None:
    """It never expires while the run goes on, and goes when the run is asked to delete it; a stop ends the run."""
    with orders.running("--num-retained", "1") as process:
        first = taken(orders)
        found = history(orders).manifests[first]
        assert found.is_savepoint
        later = taken(orders)
        assert later > first
        listed = json.loads(orders.command("savepoints", "list", orders.name, "--json").out)
        assert [each["checkpoint"] for each in listed] == [first, later]
        verified = orders.command("savepoints", "verify", orders.name, str(first))
        assert (verified.code, "is whole" in verified.out) == (0, True), verified
        deleted = orders.command("savepoints", "delete", orders.name, str(first))
        assert deleted.code == 0, deleted.err
        assert first not in history(orders).manifests
        last = taken(orders, "--stop")
        assert process.wait(LIMIT_S) == 0
    newest = history(orders).latest
    assert newest is not None
    assert (newest.checkpoint, newest.kind) == (last, "savepoint")

    refused = orders.command("savepoints", "delete", orders.name, str(last))
    assert (refused.code, "the next run goes on from it" in refused.err) == (2, True)
    assert orders.command("savepoints", "delete", orders.name, str(later)).code == 0
    assert [each.checkpoint for each in history(orders).retained if each.is_savepoint] == [last]
    asked = orders.command("savepoint", orders.name)
    assert (asked.code, f"goes on from checkpoint {last}" in " ".join(asked.err.split())) == (2, True)
    missing = orders.command("savepoints", "verify", orders.name, str(first))
    assert (missing.code, f"It has {last}." in missing.err) == (2, True)

    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert len(orders.totals()) == 700
    state = orders.command("state", orders.name, "totals", "--at", str(last), "--json")
    assert [json.loads(line)["state"] for line in state.out.splitlines()] == [100] * 7


def test_a_run_that_begins_while_one_is_deleted(orders: Orders, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left in peace: the command is refused, and says that it is to be repeated; nothing is changed."""
    with orders.running() as process:
        first = taken(orders)
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    alone = deleting._delete_alone
    begun: list[Callable[[], Outcome]] = []

    def slow(*arguments: Any) -> None:
        begun.append(orders.begun_elsewhere())
        alone(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(deleting, "_delete_alone", slow)
        refused = here("savepoints", "delete", orders.name, str(first))
    assert (refused.code, "(process 1 on other-host) has begun since" in refused.err) == (2, True), refused
    assert begun[0]() is Outcome.DONE, "it was not fenced"
    assert first in history(orders).savepoints


@pytest.mark.exhaustive
def test_several_that_are_deleted_at_once(orders: Orders) -> None:
    """Each is deleted, or its command says that another was faster, and what to do; no command fences another that is
    at work, but for the instant in which both begin. Repeated, they delete all."""
    with orders.running() as process:
        numbers = [taken(orders) for _ in range(3)]
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    ended: dict[int, int] = {}
    while len(ended) < len(numbers):
        left = [each for each in numbers if each not in ended]
        commands = {each: orders.command.start("savepoints", "delete", orders.name, str(each)) for each in left}
        for each, command in commands.items():
            _, err = command.communicate(timeout=LIMIT_S)
            assert command.returncode in (0, 2, Fenced.exit_code), err
            if command.returncode == 0:
                ended[each] = 0
            elif command.returncode == 2:
                assert "has begun since" in err or "a bounded command" in err
        assert set(history(orders).savepoints) == set(numbers) - ended.keys()


def test_two_who_ask_for_the_end(orders: Orders) -> None:
    """One whose request the run has not seen gets the savepoint behind which it has ended, if that end was asked for;
    else the command says which it is, and that it has taken none."""
    config = ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers})
    with orders.running() as process:
        living = asking.living_run(history(orders))  # as the other one has seen it, too
        assert living is not None
        last = taken(orders, "--stop")
        assert process.wait(LIMIT_S) == 0
    found = asking.savepoint(config, orders.name, living, 60_000, stop=True)
    assert (found.checkpoint, found.kind) == (last, "savepoint")
    with pytest.raises(asking.NotAnswered, match=rf"Its last checkpoint is {last}, a savepoint, which is kept"):
        asking.savepoint(config, orders.name, living, 60_000, stop=False)


@pytest.mark.exhaustive
def test_a_request_whose_asker_is_gone(orders: Orders) -> None:
    """It is in nobody's way for longer than the run takes to see it, though nobody takes it away."""
    with orders.running() as process:
        living = history(orders).newest_incarnation
        assert living is not None
        mailbox = Mailbox({"bootstrap.servers": orders.kafka.bootstrap_servers}, orders.name)
        mailbox.ask(Asked(id="left-behind", incarnation=living.incarnation, action=SAVEPOINT))
        mailbox.close()
        taken(orders, "--timeout", "60s")
        taken(orders, "--stop")
        assert process.wait(LIMIT_S) == 0


def test_an_export_that_fails(orders: Orders, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken for a place that is not there. Of one that fails later the savepoint is kept, and it is said how
    it is deleted."""

    def full(self: LocalFolder, name: str, content: bytes, aside: str) -> None:
        raise StorageUnavailable(f"{self.url} is full: make room there.")

    with orders.running():
        refused = here("savepoint", orders.name, "--to", f"file://{tmp_path}/missing")
        assert not any(each.is_savepoint for each in history(orders).retained)
        with monkeypatch.context() as patched:
            patched.setattr(LocalFolder, "put", full)
            ended = here("savepoint", orders.name, "--to", f"file://{tmp_path}")
        (kept,) = [each.checkpoint for each in history(orders).retained if each.is_savepoint]
    assert (refused.code, "make the folder, or mount it" in refused.err) == (2, True)
    assert ended.code != 0
    assert f"savepoints delete {orders.name} {kept}`" in ended.err


@pytest.mark.exhaustive
def test_a_deletion_of_an_export_that_was_broken_off(orders: Orders, tmp_path: Path) -> None:
    """What is left of it is no savepoint, and goes with the same command, for its own pipeline alone."""
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    (tmp_path / "backups").mkdir()
    exported = orders.command("savepoint", orders.name, "--to", f"file://{tmp_path}/backups", "--json")
    url = json.loads(exported.out)["url"]
    armed = {"EXACTLYONCE_FAILPOINTS": "savepoint-removing=kill", "EXACTLYONCE_FAILPOINTS_FIRED": str(tmp_path)}
    assert orders.command("savepoints", "delete", orders.name, url, **armed).code == -9
    (left,) = (tmp_path / "backups").iterdir()
    assert len([*left.iterdir()]) > 1
    for asked in (("verify", orders.name), ("delete", "another")):
        refused = orders.command("savepoints", *asked, url)
        assert (refused.code, orders.name in refused.err) == (2, True), refused
    assert f"savepoints delete {orders.name} {url}`" in orders.command("savepoints", "verify", orders.name, url).err
    ended = orders.command("savepoints", "delete", orders.name, url, **armed)
    assert ended.code == 0, ended.err
    assert not left.exists()
    assert orders.command("savepoints", "delete", orders.name, url).code == 2


def test_an_export_that_is_broken_off(
    orders: Orders, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has written is removed: on a disk that is full it would stand in the way of the next."""
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    (tmp_path / "backups").mkdir()
    line = ("savepoint", orders.name, "--to", f"file://{tmp_path}/backups")
    put = LocalFolder.put

    def full(self: LocalFolder, name: str, content: bytes, aside: str) -> None:
        put(self, name, content, aside)
        raise StorageUnavailable(f"{self.url} is full: make room there.")

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "put", full)
        failed = here(*line)
        assert failed.code != 0
        assert "is full" in failed.err
    assert list((tmp_path / "backups").iterdir()) == []
    assert here(*line).code == 0


def test_an_export_of_what_expires_meanwhile(
    orders: Orders, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pipeline that did not run, and was started: nothing is damaged, and nothing of it is left."""
    storage = ("--checkpoint-storage", f"file://{tmp_path}")
    assert orders.command("run", "orders:pipeline", "--until", "latest", *storage).code == 0
    (tmp_path / "backups").mkdir()
    check = LocalFolder.check

    def started(self: LocalFolder) -> None:
        check(self)
        if "/place-" not in self.url:
            again = ("run", "orders:pipeline", "--until", "latest", "--num-retained", "1", "--no-incremental")
            for _ in range(2):  # the second one drops for certain what has expired in the first one
                orders.write(700)
                assert orders.command(*again, *storage).code == 0

    monkeypatch.setattr(LocalFolder, "check", started)
    ended = here("savepoint", orders.name, "--to", f"file://{tmp_path}/backups")
    assert (ended.code, "has expired while it was read: the pipeline runs on" in ended.err) == (2, True), ended
    assert list((tmp_path / "backups").iterdir()) == []


@pytest.mark.exhaustive
def test_an_export_of_a_run_with_long_intervals(orders: Orders, tmp_path: Path) -> None:
    """Where it goes from the topic later than one waits for it, one is told where it was exported to all the same."""
    (tmp_path / "backups").mkdir()
    line = ("savepoint", orders.name, "--to", f"file://{tmp_path}/backups", "--timeout", "15s")
    process = orders.command.start("run", "orders:pipeline", "--checkpoint-interval", "10m")
    try:
        deadline = time.monotonic() + LIMIT_S
        while (ended := orders.command(*line)).code == 2:  # at first there is no run that could be asked
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
    assert ended.code == 1, ended
    (folder,) = (tmp_path / "backups").iterdir()
    assert f"was exported to file://{folder}, which is whole" in " ".join(ended.err.split())
    assert orders.command("savepoints", "verify", orders.name, f"file://{folder}").code == 0


@pytest.mark.exhaustive
def test_a_run_that_ends_without_it(orders: Orders) -> None:
    """Whoever asked is told so, and a later run is not asked: the request was not for it."""
    with orders.running("--num-retained", "1") as process:
        process.kill()
        process.wait(LIMIT_S)
        asked = orders.command("savepoint", orders.name, "--timeout", "1s")
    assert asked.code == 1, asked
    assert "has not done within 1.0 s what it was asked for" in " ".join(asked.err.split())
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert not any(each.is_savepoint for each in history(orders).retained)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("place", ["coordinator-triggered", "coordinator-decided"])
def test_a_coordinator_that_is_killed_meanwhile(orders: Orders, tmp_path: Path, place: str) -> None:
    """Whoever asked waits on: what was decided is finished by the next run, and what was not is taken by it."""
    fired = tmp_path / "fired"
    fired.mkdir()
    armed = {"EXACTLYONCE_FAILPOINTS": f"{place}=stop", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
    first = Command(orders.command.folder, {**orders.command.environment, **armed})
    options = ("run", "orders:pipeline", "--checkpoint-interval", "10m", "--parallelism", "2")
    with first.start(*options) as killed:
        asking = None
        deadline = time.monotonic() + LIMIT_S
        while not (fired / place).exists():
            assert time.monotonic() < deadline
            assert killed.poll() is None
            if asking is None or asking.poll() is not None:  # at first there is no run that could be asked
                asking = orders.command.start("savepoint", orders.name, "--stop", "--json", "--timeout", "3m")
            time.sleep(0.1)  # a file of another process has no event to wait for
        killed.kill()
        killed.communicate(timeout=LIMIT_S)
    assert asking is not None
    with orders.command.start(*options) as again:
        out, err = asking.communicate(timeout=LIMIT_S)
        assert asking.returncode == 0, err
        again.communicate(timeout=LIMIT_S)
    found = history(orders)
    savepoints = [each for each in found.retained if each.is_savepoint]
    assert [each.checkpoint for each in savepoints] == [json.loads(out)["checkpoint"]]
    assert savepoints[0].incarnation == (1 if place == "coordinator-decided" else 2)
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert len(orders.totals()) == 700
