"""The archive of the broker's classes is made once, and used by every broker that it fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.connectors.embedded.class_archive import ensure_class_archive
from exactlyonce.connectors.embedded.jars import cache_dir, class_archive, kafka_jars
from exactlyonce.connectors.embedded.java import find_java
from exactlyonce.testing.cluster import OwnCluster


def takes(broker: EmbeddedBroker, archive: Path) -> bool:
    return str(archive) in Path(f"/proc/{broker.status().pid}/maps").read_text()


def test_a_broker_takes_the_archive_that_is_there(stoppable: OwnCluster) -> None:
    java = find_java()
    archive = class_archive(java, kafka_jars(print))
    assert takes(stoppable.broker, archive) == archive.exists()


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exactlyonce").mkdir()
    (tmp_path / "exactlyonce" / "kafka").symlink_to(kafka_jars(print))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jars = cache_dir() / "kafka"
    jars.rename(cache_dir() / jars.resolve().name)
    told: list[str] = []
    archive = ensure_class_archive(told.append)
    assert archive is not None
    assert [line.split()[0] for line in told] == ["Archiving"]
    assert ensure_class_archive(told.append) == archive
    assert len(told) == 1
    assert sorted(each.suffix for each in cache_dir().iterdir()) == [".1", ".jsa"]
    broker = EmbeddedBroker(tmp_path / "broker", port=0, lifetime="process")
    broker.start()
    assert takes(broker, archive)
    broker.kill()
