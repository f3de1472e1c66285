"""Asks for the state of keys over HTTP, as a process of its own: `python asking.py HOST:PORT PATH KEYS RATE SECONDS`.

PATH ends with the prefix of keys; a number below KEYS follows. RATE is in requests a second, `inf` as many as are
answered; several connections are kept. Prints, as JSON, how many answers came in a second, and how long they took.
"""

from __future__ import annotations

import json
import math
import random
import socket
import sys
import threading
import time

CONNECTIONS = 4
SEEN_BYTES = 1 << 16


def ask(address: tuple[str, int], path: str, keys: int, pause_s: float, until_s: float, took_s: list[float]) -> None:
    """Ask on one connection; appends to *took_s*. Any answer that is no state, and not that there is none yet, is a
    `ValueError`."""
    dice, due_s = random.Random(threading.get_ident()), time.monotonic()
    with socket.create_connection(address, timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (began_s := time.monotonic()) < until_s:
            if due_s > began_s:
                time.sleep(due_s - began_s)
                began_s = time.monotonic()
            due_s += pause_s
            asked = f"GET {path}{dice.randrange(keys):07d} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.sendall(asked.encode())
            answer = b""
            while not answer.endswith(b"}\n"):
                if not (more := connection.recv(SEEN_BYTES)):
                    raise ValueError(f"the connection ended after {answer!r}")
                answer += more
            if not answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 404 ")):  # 404: not in the checkpoint yet
                raise ValueError(answer.decode())
            took_s.append(time.monotonic() - began_s)


def main(address: str, path: str, keys: str, rate: str, seconds: str) -> None:
    """Ask on all connections, and print what came of it."""
    host, _, port = address.rpartition(":")
    pause_s = 0.0 if math.isinf(float(rate)) else CONNECTIONS / float(rate)
    began_s, took_s = time.monotonic(), list[float]()
    asked = (host, int(port)), path, int(keys), pause_s, began_s + float(seconds), took_s
    threads = [threading.Thread(target=ask, args=asked) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s.sort()
    per_s = len(took_s) / (time.monotonic() - began_s)
    p50_ms, p99_ms = (1000 * took_s[len(took_s) * share // 100] for share in (50, 99))
    print(json.dumps({"answers": len(took_s), "per_s": per_s, "p50_ms": p50_ms, "p99_ms": p99_ms}))


if __name__ == "__main__":
    main(*sys.argv[1:])
