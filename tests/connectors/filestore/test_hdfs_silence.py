"""A name node that takes connections and is silent."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread, Timer
from threading import enumerate as enumerate_threads

import pytest
from waiting import until

from exactlyonce.connectors.filestore import hdfs
from exactlyonce.connectors.filestore.hdfs import HdfsStore
from exactlyonce.pipeline.errors import StorageUnavailable
from exactlyonce.testing.cluster import LIMIT_S


def test_a_silent_name_node_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has a connection of its own, until too many have not ended: then the next ones wait for these."""
    monkeypatch.setattr(hdfs, "SILENT_S", 0.5)
    monkeypatch.setattr(hdfs, "GIVEN_UP_MAX", 2)
    sockets = list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    sockets.append(listener.accept()[0])

        def end() -> None:
            for each in (listener, *sockets):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        Thread(target=accept, daemon=True).start()
        (timer := Timer(LIMIT_S, end)).start()
        folder = HdfsStore(f"127.0.0.1:{listener.getsockname()[1]}", "prod", "x")
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match=r"has not answered for"):
                folder.get("block")
        until(lambda: len(sockets) == 2)
        with pytest.raises(StorageUnavailable, match=r"does not answer 2 requests"):
            folder.get("block")
        assert len(sockets) == 2
        timer.cancel()
        end()
        for each in enumerate_threads():
            if each.name == "hdfs":
                each.join(LIMIT_S)
    monkeypatch.setattr(hdfs, "SILENT_S", 60.0)
    with pytest.raises(StorageUnavailable, match=r"does not answer: (?!it is silent)"):  # it is asked again
        folder.get("block")
