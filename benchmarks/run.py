"""The benchmarks of exactlyonce: `python benchmarks/run.py [SCENARIO ...]`; docs/benchmarks.md explains them.

The exit code is 0 unless something crashed or an output was wrong; the table shows figures below their bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import elsewhere
import enrich
import event_time
import event_time_extremes
import files
import formats
import keyed_state
import lakes
import large_state
import liveness
import map_batches
import memory
import monitoring
import overtaking
import parquet_files
import scarce
import spark_audit
import spark_backfill
import spark_follow
import spark_reading
import spark_sink
import spark_sizes
import spark_splits
import spark_staging
import spark_state
import state_asked
import store_sinks
import table_changes
import table_join
import throughput
import visibility
from bench import Bench
from cluster import Cluster
from figures import Figure, as_json, table

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.connectors.embedded.progress import told_on

SCENARIOS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "pass-through": throughput.passing,
    "map-filter": throughput.mapping,
    "totals": throughput.totals,
    "many-totals": throughput.many_totals,
    "event-time": event_time.scenario,
    "event-time-extremes": event_time_extremes.scenario,
    "table-join": table_join.scenario,
    "enrich": enrich.scenario,
    "map-batches": map_batches.scenario,
    "files": files.scenario,
    "visibility": visibility.visible,
    "visibility-dense": visibility.dense,
    "unaligned": overtaking.scenario,
    "scarce": scarce.scenario,
    "liveness": liveness.scenario,
    "monitoring": monitoring.scenario,
    "state-asked": state_asked.scenario,
    "checkpoints": keyed_state.checkpoints,
    "gap": keyed_state.gap,
    "memory": memory.resident,
    "large-state": large_state.ratios,
    "large-restore": large_state.restores,
    "large-checkpoints": large_state.checkpoints,
    "spark-backfill": spark_backfill.scenario,
    "spark-audit": spark_audit.scenario,
    "touched-groups": spark_state.touched_groups,
    "spark-reading": spark_reading.scenario,
    "spark-sink": spark_sink.scenario,
    "spark-follow": spark_follow.scenario,
    "spark-crossing": spark_sizes.crossing,
    "spark-widths": spark_sizes.widths,
    "spark-splits": spark_splits.scenario,
    "spark-staging": spark_staging.scenario,
    "postgres": store_sinks.postgres,
    "duckdb": store_sinks.duckdb,
    "mariadb": store_sinks.mariadb,
    "redis": store_sinks.redis,
    "changes": table_changes.scenario,
    "parquet": parquet_files.scenario,
    "parquet-s3": parquet_files.to_s3,
    "lakes": lakes.scenario,
    "stores": store_sinks.all_of_them,
    "formats": formats.scenario,
    "elsewhere": elsewhere.scenario,
}
ASKED_FOR = {"stores", "formats", "elsewhere", "parquet-s3", "spark-staging"}
"""Scenarios that run only when named: all stores in one, and those that need or download other software."""


@contextmanager
def cluster(servers: str | None) -> Iterator[Cluster]:
    """The cluster at *servers*, which is left as it was, or a broker that lives as long as the benchmarks."""
    if servers:
        existing = Cluster(servers)
        try:
            yield existing
        finally:
            existing.clear()
        return
    with tempfile.TemporaryDirectory(prefix="exactlyonce-bench-") as folder:
        broker = EmbeddedBroker(Path(folder), port=0, lifetime="process")
        broker.start(told_on(sys.stdout))
        try:
            yield Cluster(broker.bootstrap_servers)
        finally:
            broker.stop()


def measure(bench: Bench, names: list[str]) -> list[Figure]:
    """Run the scenarios, one after the other."""
    figures: list[Figure] = []
    for name in names:
        print(f"{name}:", flush=True)
        began = time.monotonic()
        for figure in SCENARIOS[name](bench):
            bench.say(str(figure))
            figures.append(figure)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    return figures


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in SCENARIOS if name not in ASKED_FOR]
    names = f"of {', '.join(SCENARIOS)} (default: all but {', '.join(ASKED_FOR)})"
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO", help=names)
    parser.add_argument("--quick", action="store_true", help="less of everything: to see that it works")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each comparison")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE, too")
    parser.add_argument("--bootstrap-servers", help="an existing cluster; otherwise one is started")
    arguments = parser.parse_args()
    if unknown := set(arguments.scenario) - SCENARIOS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; scenarios are {', '.join(SCENARIOS)}")
    with cluster(arguments.bootstrap_servers) as kafka:
        figures = measure(Bench(kafka, arguments.quick, arguments.rounds), arguments.scenario or default)
    print(f"\n{table(figures)}\n\npass* reaches the aim, too")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(as_json(figures), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
