"""A pipeline whose manifests are larger than a record: killed, run again, shown, and its old checkpoints dropped."""

from __future__ import annotations

import signal

import pytest

from exactlyonce.checkpoint.requests import DecisionRecord
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_log, stable_end
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.names import checkpoint_topic
from tests.cli.conftest import Orders, armed

SMALL_PARTS = """from functools import partial

from exactlyonce.engines import connections

connections.DecisionLog = partial(connections.DecisionLog, part_bytes=60)
"""
"""At the top of the pipeline's module: only its own processes write such small parts."""


def keys(orders: Orders) -> list[str]:
    """The keys in the decision log that are not tombstoned, oldest first."""
    topic = checkpoint_topic(orders.name)
    topics = Topics(orders.config)
    live: dict[str, None] = {}
    for item in read_log(topics, topic, stable_end(topics, topic)).items:
        assert isinstance(item, DecisionRecord)
        key = (item.key or b"").decode()
        live.pop(key, None)
        if item.value is not None:
            live[key] = None
    topics.close()
    return [*live]


@pytest.mark.exhaustive
def test_killed_runs_with_manifests_in_parts(orders: Orders) -> None:
    failpoint = "coordinator-decided"
    module = orders.command.folder / "orders.py"
    module.write_text(SMALL_PARTS + module.read_text())
    line = ("run", "orders:pipeline", "--until", "latest", "--inline", "--num-retained", "1")
    for number in range(3):
        killed = orders.command.process(*line, **armed(orders.command.folder, failpoint))
        assert killed.code == -signal.SIGKILL, killed
        (orders.command.folder / "fired" / failpoint).unlink()
        ended = orders.command.process(*line)
        assert ended.code == 0, ended
        assert len(orders.totals()) == 700 * (number + 1)
        orders.write(700)
    history = orders.history()
    kept = [manifest.checkpoint for manifest in history.retained]
    assert (len(kept) < 3, history.damaged) == (True, {})
    assert {key.split("/")[1] for key in keys(orders) if key.startswith("manifest/")} == set(map(str, kept))
    assert ([*history.parts], min(map(len, history.parts.values())) > 1) == (kept, True)
    assert orders.states() == {f"c{number}": 300 for number in range(7)}
    listed = orders.command.done("checkpoints", orders.name, "--json").json["checkpoints"]
    assert [each["checkpoint"] for each in listed] == kept
    assert "damaged" not in orders.command("doctor", orders.name).said
