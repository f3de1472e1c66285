"""A run of several incarnations has one restart strategy: what any incarnation completes is progress to it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka_proxy import Fate, Fault, proxy_before
from running import Job, no_decision_counts, stop

from exactlyonce.connectors.kafka.client import can_reach
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.refusals import unreachable
from exactlyonce.engines import processes
from exactlyonce.engines.local import run as module
from exactlyonce.engines.local.reporting import Report
from exactlyonce.engines.local.run import Stopper, _is_stopped_within, _Starting
from exactlyonce.engines.options import RunOptions
from exactlyonce.pipeline.errors import BrokerUnavailable, StorageUnavailable, StoreUnavailable

API_VERSIONS, FETCH = 18, 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_incarnations_that_complete_checkpoints_never_use_up_the_strategy(job_of: Callable[..., Job]) -> None:
    job = job_of("linear", "--restart", "fixed_delay:attempts=2,delay=1s")
    run = job.start()
    for _ in range(4):
        job.feed(200)
        run.await_checkpoint()
        if len(job.fed) < 800:
            with no_decision_counts(job.kafka, job.name):
                run.await_event(lambda event: "A new incarnation begins" in event.get("text", ""))
    stop(run)
    assert [event["incarnation"] for event in run.events if event["event"] == "started"] == [1, 2, 3, 4]
    job.finish_here()  # a stop may come before all that was fed is read
    job.assert_totals()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_start_waits_for_a_broker_that_is_away_and_leaves_a_silent_connection(
    job_of: Callable[..., Job], tmp_path: Path
) -> None:
    """A connection is silent without an end where a router has forgotten it, here while the decisions are read."""
    job = job_of("linear", "--broker-timeout", "10m")
    job.feed(200)
    with proxy_before(job.kafka, tmp_path) as proxy:
        away = proxy.arm(Fault(API_VERSIONS, Fate.REQUEST_LOST, dark=True))
        run = job.start(servers=proxy.bootstrap_servers)
        noted = run.await_event(lambda event: "This run looks again until one answers" in event.get("text", ""))
        assert "for 10m from its start, by broker_timeout (--broker-timeout)." in noted["text"]
        assert away.met.is_set()
        proxy.heal()
        run.await_checkpoint()
        stop(run)
        job.feed(200)
        silent = proxy.arm(Fault(FETCH, Fate.ANSWER_LATE))
        run = job.start(servers=proxy.bootstrap_servers)
        run.await_event(lambda event: "This run looks again until one answers" in event.get("text", ""))
        assert silent.met.is_set()
        assert not silent.arrived.is_set(), "its answer never comes"
        run.await_checkpoint()
        stop(run)
        proxy.disarm(silent)
    job.assert_totals()


@pytest.mark.exhaustive
def test_a_start_gives_up_at_its_timeout_and_a_stop_ends_its_wait(job_of: Callable[..., Job]) -> None:
    job = job_of("linear")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    waiting = job.start("--broker-timeout", "10m", servers=nobody)
    ended = job.start("--broker-timeout", "1ms", servers=nobody)
    assert ended.wait() == 4
    assert "looks again" not in ended.said
    waiting.await_event(lambda event: "This run looks again until one answers" in event.get("text", ""))
    waiting.process.terminate()
    assert waiting.wait() == 9
    assert "Stopped, as asked for, before anything ran. Nothing is lost." in waiting.said


def test_a_start_that_gives_up_on_a_store_asks_for_another_run() -> None:
    options = RunOptions(ClientConfig({"bootstrap.servers": "127.0.0.1:1"}), broker_timeout_ms=0)
    with pytest.raises(StoreUnavailable) as raised:
        _Starting(options).require_time(unreachable("PostgreSQL", "refused"), Report("p", [], str))
    said = "PostgreSQL cannot be reached: refused. Start it, or correct its address. "
    assert str(raised.value) == said + "Nothing is lost: run it again once it is there."


def test_the_pause_before_an_incarnation_ends_once_a_broker_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only brokers that were away meanwhile shorten it: others have another reason not to answer."""
    reached = [True, False, False, True, True]
    monkeypatch.setattr(module, "REACH_INTERVAL_MS", 1)
    monkeypatch.setattr(module, "can_reach", lambda _: reached.pop(0))
    stopper, client = Stopper(), ClientConfig({"bootstrap.servers": "127.0.0.1:1"})
    away = BrokerUnavailable("no broker answers")
    assert not _is_stopped_within(3_600_000, away, client, stopper)
    assert reached.pop(), "one look is left"
    assert not _is_stopped_within(5, StorageUnavailable("S3 does not answer"), client, stopper), "and asks no broker"
    stopper.stop()
    assert _is_stopped_within(3_600_000, away, client, stopper)


def test_a_broker_can_be_reached_if_one_address_takes_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert can_reach(ClientConfig({"bootstrap.servers": f"127.0.0.1:1,PLAINTEXT://127.0.0.1:{port}"}))
    assert not can_reach(ClientConfig({"bootstrap.servers": "127.0.0.1:1"}))


def test_a_start_waits_longer_under_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RunOptions(ClientConfig({"bootstrap.servers": "127.0.0.1:1"}))
    assert options.start_timeout_ms(is_supervised=True) > options.start_timeout_ms(is_supervised=False) > 8_000
    for name in processes._SUPERVISORS:
        monkeypatch.delenv(name, raising=False)
    assert not processes.is_supervised()
    monkeypatch.setenv("INVOCATION_ID", "1f2e")
    assert processes.is_supervised()
