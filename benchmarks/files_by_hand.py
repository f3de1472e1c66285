"""The loop by hand over a file of JSON lines, with a running total: as fast as we can make it.

    python files_by_hand.py SERVERS FILE OUTPUT

Decodes and encodes by msgspec, keeps totals in a dict, produces in transactions of 500 ms. Its position and its state
are lost at the end. Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice

import msgspec
from by_hand import BATCH_RECORDS, INTERVAL_S, LIMIT_S, transactional_producer
from orders import Order, Total


def main() -> None:
    """Run the loop and print the rate, from the first commit to the last."""
    servers, path, sink = sys.argv[1:]
    producer = transactional_producer(servers)
    produce, decode, encode = producer.produce, msgspec.json.Decoder(Order).decode, msgspec.json.Encoder().encode
    sums: dict[str, int] = {}
    records, commits = 0, list[tuple[float, int]]()
    producer.begin_transaction()
    commit_at_s = time.monotonic() + INTERVAL_S
    with open(path, "rb") as file:
        while lines := list(islice(file, BATCH_RECORDS)):
            for line in lines:
                order = decode(line)
                customer = order.customer
                sums[customer] = total = sums.get(customer, 0) + order.total
                produce(sink, encode(Total(customer, total, order.ts)), customer)
            records += len(lines)
            producer.poll(0)
            if time.monotonic() >= commit_at_s:
                producer.commit_transaction(LIMIT_S)
                commits.append((time.monotonic(), records))
                producer.begin_transaction()
                commit_at_s = time.monotonic() + INTERVAL_S
    producer.commit_transaction(LIMIT_S)
    commits.append((time.monotonic(), records))
    (first_s, first_records), (last_s, last_records) = commits[0], commits[-1]
    print(json.dumps({"rate": (last_records - first_records) / (last_s - first_s)}))


if __name__ == "__main__":
    main()
