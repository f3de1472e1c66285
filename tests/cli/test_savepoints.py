"""`exactlyonce savepoint` and `savepoints`: of a pipeline that runs, and of one that does not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.testing.cluster import LIMIT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Orders

pytestmark = pytest.mark.broker


def history(orders: Orders) -> History:
    """What is decided."""
    return read_history({"bootstrap.servers": orders.kafka.bootstrap_servers}, orders.name)


@contextmanager
def running(orders: Orders, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has taken a checkpoint; it ends by itself, or is killed."""
    arguments = ("run", "orders:pipeline", "--checkpoint-interval", "100ms", "--num-retained", "1", *options)
    with orders.command.start(*arguments) as process:
        assert process.stderr is not None
        while '"event": "checkpoint"' not in process.stderr.readline():
            assert process.poll() is None
        try:
            yield process
        finally:
            process.kill()
            process.stderr.read()


def taken(orders: Orders, *options: str) -> int:
    """Take one; its number."""
    ended = orders.command("savepoint", orders.name, "--json", *options)
    assert ended.code == 0, ended.err
    number: int = json.loads(ended.out)["checkpoint"]
    return number


def test_taken_kept_verified_and_deleted(orders: Orders) -> None:
    """It never expires while the run goes on, and goes when the run is asked to delete it; a stop ends the run."""
    with running(orders) as process:
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


def test_a_run_that_ends_without_it(orders: Orders) -> None:
    """Whoever asked is told so, and a later run is not asked: the request was not for it."""
    with running(orders) as process:
        process.kill()
        process.wait(LIMIT_S)
        asked = orders.command("savepoint", orders.name, "--timeout", "1s")
    assert asked.code == 1, asked
    assert "has not done within 1.0 s what it was asked for" in " ".join(asked.err.split())
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert not any(each.is_savepoint for each in history(orders).retained)
