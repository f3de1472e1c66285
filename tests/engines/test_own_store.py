"""The store of docs/writing-a-sink.md in a pipeline that is killed."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, orders

from exactlyonce.testing.cluster import KafkaCluster

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-sink.md"
pytestmark = [pytest.mark.broker, pytest.mark.slow]


def test_each_order_is_in_the_table_once(
    kafka: KafkaCluster, topic_name: str, run: Callable[..., Any], tmp_path: Path,
    failpoint: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Killed before it applies a decided checkpoint, and again at some moment, it leaves each order there once."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "shop.py").write_text("\n\n".join(blocks[:2]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    database = tmp_path / "orders.db"
    topic = kafka.create_topic(f"{topic_name}-orders", partitions=3)
    arguments = ("shop:pipeline", "--param", f"name={topic_name}", "--param", f"path={database}", *QUICK)
    fed = 0
    for kill in ("store-committing", None):
        kafka.produce(topic, orders(3_000, first=fed))
        fed += 3_000
        job = run(*arguments, env=failpoint(kill) if kill else None)
        if kill:
            assert job.wait() != 0
            assert (tmp_path / "fired" / kill).exists()
        else:
            job.await_checkpoint()
            job.kill()
    kafka.produce(topic, orders(3_000, first=fed))
    fed += 3_000
    assert run(*arguments, "--until", "latest").wait() == 0
    with closing(sqlite3.connect(database)) as db:
        ids = [id_ for (id_,) in db.execute("SELECT id FROM orders ORDER BY id")]
    assert ids == list(range(fed))
