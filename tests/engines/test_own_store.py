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
pytestmark = pytest.mark.broker


def test_each_order_is_in_the_table_once(
    kafka: KafkaCluster, topic_name: str, run: Callable[..., Any], tmp_path: Path,
    failpoint: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Killed before it applies a decided checkpoint, it leaves each order there once."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "shop.py").write_text("\n\n".join(blocks[:2]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    database = tmp_path / "orders.db"
    topic = kafka.create_topic(f"{topic_name}-orders", partitions=3)
    arguments = ("shop:pipeline", "--param", f"name={topic_name}", "--param", f"path={database}", *QUICK)
    kafka.produce(topic, orders(1_000))
    killed = run(*arguments, env=failpoint("store-committing"))
    assert killed.wait() == -9, killed.said
    kafka.produce(topic, orders(1_000, first=1_000))
    last = run(*arguments, "--inline", "--until", "latest")
    assert last.wait() == 0, last.said
    with closing(sqlite3.connect(database)) as db:
        ids = [id_ for (id_,) in db.execute("SELECT id FROM orders ORDER BY id")]
    assert ids == list(range(2_000))
