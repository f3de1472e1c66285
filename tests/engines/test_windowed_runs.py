"""Windows in runs that are killed, at any parallelism: what comes out is what a few lines of SQL say of the topic."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from running import Job, visible
from window_clicks import Clicks

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker

EXAMPLES = Path(__file__).parents[2] / "examples"
WINDOWS = ["tumbling", "hopping", "session", "waiting", "daily", "folded", "topics", "revised", "processed"]


def clicks_of(job_of: Callable[..., Job], window: str, *arguments: str) -> Clicks:
    return Clicks(job_of("window_pipelines:windowed", "--param", f"window={window}", *arguments), window)


@pytest.mark.exhaustive(but=["session", "revised"])
@pytest.mark.parametrize("window", WINDOWS)
def test_results_are_those_of_sql_over_the_topic(window: str, job_of: Callable[..., Job]) -> None:
    clicks = clicks_of(job_of, window)
    clicks.feed()
    clicks.job.finish_here()
    clicks.feed()
    clicks.end()
    clicks.job.finish_here()
    clicks.assert_as_by_sql()


@pytest.mark.exhaustive(but=["hopping-hashmap-1"])
@pytest.mark.parametrize(
    ("window", "backend", "kills"),
    [("hopping", "hashmap", 1), *((window, backend, 4) for window in WINDOWS for backend in ("hashmap", "rocksdb"))],
)
def test_kills_and_other_parallelism_make_no_difference(
    window: str, backend: str, kills: int, job_of: Callable[..., Job], failpoint: Any
) -> None:
    clicks = clicks_of(job_of, window, "--state-backend", backend)
    clicks.crowd(6_000)
    steps = (2, "timed-firing", 1), (3, "timed-fired", 2), (1, "worker-frozen", 1), (2, "coordinator-committed", 1)
    for parallelism, name, nth in steps[:kills]:
        clicks.feed(1_200 // kills)
        clicks.job.run_killed(failpoint(name, nth=nth), parallelism)
    clicks.end()
    clicks.job.finish_here()
    clicks.assert_as_by_sql()


@pytest.mark.exhaustive
def test_a_table_by_key_and_start_ends_with_the_last_result_of_each_window(
    job_of: Callable[..., Job], database_server: Callable[[str], Any], failpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = database_server("postgres")
    monkeypatch.setenv("WINDOWS_DSN", server.dsn("postgres"))
    clicks = clicks_of(job_of, "revised", "--param", "table=window_rows")
    for name in ("timed-fired", "store-committing"):
        clicks.feed(300)
        clicks.job.run_killed(failpoint(name), 2)
    clicks.end()
    clicks.job.finish()
    rows = server.execute('select "user", (extract(epoch from first) * 1000)::bigint, n, spent, most from window_rows')
    last = {(user, first): counted for user, first, _, *counted, _ in clicks.by_sql()[0]}
    assert {(user, first): counted for user, first, *counted in rows} == last
    clicks.assert_as_by_sql()


@pytest.mark.exhaustive
def test_barriers_that_overtake_records_make_no_difference(job_of: Callable[..., Job], failpoint: Any) -> None:
    """Captured records are taken before the watermark goes on, at any parallelism."""
    clicks = clicks_of(job_of, "folded", "--unaligned", "--param", "pause_ms=4")
    for parallelism, name in ((3, "unaligned-captured"), (2, "timed-fired"), (3, "coordinator-decided")):
        clicks.feed(300)
        clicks.job.run_killed(failpoint(name), parallelism)
    assert any(manifest.channel_logs for manifest in clicks.job.history().manifests.values())
    clicks.end()
    clicks.job.finish("--parallelism", "2", "--param", "pause_ms=0")
    clicks.assert_as_by_sql()


@pytest.mark.exhaustive(but=["its source"])
@pytest.mark.parametrize("timed_by", ["its source", "with_time 'again'"])
def test_a_run_stops_before_it_leaves_out_most_records_as_late(timed_by: str, job_of: Callable[..., Job]) -> None:
    """It says what to set, and has written nothing; with a larger max_late, it leaves them out."""
    job = job_of("window_pipelines:left_out", "--param", f"timed_by={timed_by}", partitions=1)
    times = [9_000_000, *range(0, 499_000, 1_000), 9_100_000]
    clicks = [{"id": number, "user": "ann", "at": at, "amount": 1} for number, at in enumerate(times)]
    job.kafka.produce(job.topic, [(click["user"], json.dumps(click)) for click in clicks], 0)
    said = job.finish_here(code=3)
    assert re.search(r"late: operator 'counts' leaves out: .*offset \d+, of 1970-01-01T00:0.*: its time was over", said)
    assert re.search(rf"; disorder= of {timed_by}, larger by more than 2h \d\dm, takes it; late= keeps it", said)
    assert "Operator 'counts' leaves out 499 of its latest 501 records" in said
    assert "more than max_late (--max-late) 0.5 allows" in said
    assert not job.kafka.read_committed(f"{job.name}-out")
    job.finish_here("--max-late", "1")
    (counted,) = job.kafka.read_committed(f"{job.name}-out")
    assert json.loads(counted.value or b"")["value"] == 1


@pytest.mark.exhaustive
def test_at_least_once_no_record_is_missing_in_a_window(job_of: Callable[..., Job], failpoint: Any) -> None:
    clicks = clicks_of(job_of, "tumbling", "--mode", "at_least_once")
    clicks.feed()
    clicks.job.run_killed(failpoint("timed-fired", nth=2), 2)
    clicks.end()
    clicks.job.finish("--parallelism", "3")
    results, late = clicks.by_sql()
    most: dict[Any, int] = {}
    for key, start, _, count, *_ in map(clicks.result, [record.value for record in visible(*clicks.out("out", 1))]):
        most[key, start] = max(count, most.get((key, start), 0))
    assert all(most[key, start] >= count for key, start, _, count, *_ in results)
    assert {json.loads(record.value or b"")["id"] for record in visible(*clicks.out("late", 1))} >= set(late)


@pytest.mark.exhaustive
@pytest.mark.parametrize("window", WINDOWS)
def test_a_savepoint_is_shown_and_goes_on_at_another_parallelism(
    window: str, job_of: Callable[..., Job], tmp_path: Path
) -> None:
    """No window that it has open is lost, and none that has fired comes again; accumulators are migrated."""
    clicks = clicks_of(job_of, window)
    clicks.feed()
    clicks.job.finish_here()
    name, command = clicks.job.name, clicks.job.command
    shown = [json.loads(line) for line in command("state", "show", name, "counts", "--json").splitlines()]
    clicks.assert_open(shown)
    url = json.loads(command("savepoint", name, "--to", f"file://{tmp_path}", "--json"))["url"]
    command("reset", name, "--yes", "--force")
    clicks.feed()
    clicks.end()
    version = ("--param", "version=2") if window == "folded" else ()
    clicks.job.finish("--parallelism", "2", "--from-savepoint", url, *version)
    clicks.assert_as_by_sql()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["delays", "visits"])
def test_the_examples_print_what_the_page_says(
    name: str, kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--bootstrap-servers", kafka.bootstrap_servers, "--topic", topic_name)
    example = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    done = subprocess.run(example, capture_output=True, text=True, timeout=LIMIT_S)
    page = (EXAMPLES.parent / "docs" / "event-time.md").read_text()
    assert (done.returncode, f"```text\n{done.stdout}```" in page) == (0, True), done.stdout + done.stderr
    if name == "delays":
        monkeypatch.syspath_prepend(str(EXAMPLES))
        assert done.stdout.splitlines() == delays_by_hand()


def delays_by_hand() -> list[str]:
    """The lines of examples/delays.py, from the rows of the data."""
    from demo_count import rows

    hour, delays = timedelta(hours=1), defaultdict[datetime, list[str]](list)
    for row in rows():
        if (row["month"], row["day"], row["carrier"]) == ("2", "8", "B6"):
            at = datetime.fromisoformat(row["time_hour"])
            for start in (at - at.hour % 3 * hour, at - (at.hour % 3 + 3) * hour):
                delays[start].append(row["dep_delay"])
    return [
        f"B6  {start:%H:%M} to {start + 6 * hour:%H:%M}  {len(of):2} flights, {of.count('NA'):2} cancelled, "
        f"{max([0, *(int(delay) for delay in of if delay != 'NA')]):3} minutes late at worst"
        for start, of in sorted(delays.items())
    ]
