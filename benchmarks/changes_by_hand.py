"""The slot, or the table, that the captured changes are compared with, read by psycopg and dropped.

    python changes_by_hand.py slot|copy|typed URL NAME COUNT

Reads COUNT changes of the slot NAME, or all rows of the table NAME by one COPY: as bytes, or as Python's types. Prints
a line of JSON: the seconds from the first to the last.
"""

from __future__ import annotations

import json
import select
import sys
import time
from contextlib import closing

import psycopg
from psycopg import generators

LIMIT_S = 600
CHANGES = b"IUD"
HEADER = 25


def slot(url: str, name: str, count: int) -> float:
    """The changes of a slot, by pgoutput, as messages of bytes."""
    with closing(psycopg.connect(url, replication="database", autocommit=True)) as connection:
        stream = connection.pgconn
        options = f"proto_version '1', publication_names '\"{name}\"'"
        stream.send_query(f"START_REPLICATION SLOT {name} LOGICAL 0/0 ({options})".encode())
        connection.wait(generators.execute(stream))
        stream.nonblocking = 1
        seen, began = 0, 0.0
        while seen < count:
            length, message = stream.get_copy_data(1)
            if length > 0:
                began = began or time.monotonic()
                seen += len(message) > HEADER and message[HEADER] in CHANGES
            elif length == 0:
                if not select.select([stream.socket], [], [], LIMIT_S)[0]:
                    raise TimeoutError(f"{seen} of {count} changes came")
                stream.consume_input()
            else:
                raise psycopg.OperationalError("the server has ended the stream")
        return time.monotonic() - began


def copy(url: str, name: str, count: int, typed: bool = False) -> float:
    """The rows of a table by COPY."""
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        began = time.monotonic()
        with cursor.copy(f"COPY {name} TO STDOUT".encode()) as rows:
            rows.set_types(["int8", "text", "int4", "int8"])
            seen = sum(1 for _ in (rows.rows() if typed else rows))
        if seen != count:
            raise ValueError(f"{seen} rows came, not {count}")
        return time.monotonic() - began


def main() -> None:
    """Read, and print the time."""
    way, url, name, count = sys.argv[1:]
    seconds = slot(url, name, int(count)) if way == "slot" else copy(url, name, int(count), way == "typed")
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
