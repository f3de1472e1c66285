"""A chunk on Spark that is staged in S3 against one staged in a folder: moto, behind a port that adds 20 ms to each
request."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import Bench
from figures import Figure
from spark_backfill import MASTER, PARALLELISM
from spark_sizes import CUSTOMERS, FEW_RECORDS, WIDE, chunk

from exactlyonce.engines.spark.session import session
from exactlyonce.testing.servers.s3 import BUCKET, Forwarder, S3Server

DELAY_S = 0.02


class Distant(Forwarder):
    """Forwards an answer `DELAY_S` after its server has given it."""

    def __init__(self, target: int) -> None:
        self._asked = set[frozenset[socket.socket]]()
        super().__init__(target)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            is_answer, pair = source.getpeername()[1] == self._target, frozenset((source, sink))
            while data := source.recv(1 << 16):
                if not is_answer:
                    self._asked.add(pair)
                elif pair in self._asked:
                    self._asked.discard(pair)
                    time.sleep(DELAY_S)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            self._open.discard(end)


def scenario(bench: Bench) -> Iterator[Figure]:
    """The ratio."""
    records, units = bench.size(20_000_000, 1_000_000), bench.size(WIDE, WIDE // 4)
    source, few = bench.input(records, CUSTOMERS), bench.input(FEW_RECORDS, CUSTOMERS)
    with closing(S3Server()) as server, TemporaryDirectory() as folder:
        distant = Distant(server.door.port)
        os.environ.update(server.env, AWS_ENDPOINT_URL=f"http://127.0.0.1:{distant.port}")
        stagings: dict[str, str | Path] = {"folder": Path(folder), "s3": f"s3://{BUCKET}/staging"}
        with session(MASTER, {"spark.driver.memory": "3g"}, "benchmark") as spark:
            for staging in stagings.values():
                chunk(bench, spark, staging, few, FEW_RECORDS, PARALLELISM)
            taken_s = {
                name: chunk(bench, spark, staging, source, records, units).taken_s for name, staging in stagings.items()
            }
        distant.go_away()
    detail = f"{units} units; {taken_s['s3']:.1f} s, in a folder {taken_s['folder']:.1f} s"
    yield Figure(
        f"chunk staged in S3 against a folder, {records:,} records", taken_s["folder"] / taken_s["s3"], "", detail
    )
