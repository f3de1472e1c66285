"""The requests between the last acknowledgement and visible output, as a run tells of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from running import Job, stop

from exactlyonce.connectors.trace import Sent, Trace, as_fields, in_sequence

NEEDED = 4


def test_requests_of_one_round_wait_for_each_other_only_within_a_client() -> None:
    together = [Sent("Metadata", 0, 1), Sent("Produce", 2, 3, client=1), Sent("FindCoordinator", 0, 1, client=2)]
    assert in_sequence(together) == 1
    chain = [*together, Sent("DescribeTransactions", 1.5, 3, client=2)]
    assert in_sequence(chain) == 2
    assert in_sequence([*chain, Sent("EndTxn", 4, 5, round=1), Sent("EndTxn", 4, 6, round=1)]) == 3
    assert in_sequence([]) == 0


def test_a_trace_tells_what_was_sent_and_answered_in_a_time() -> None:
    """Requests that began before or were not answered are left out; durations are in milliseconds from the begin."""
    trace = Trace()
    first, second = trace.client(), trace.client()
    first("Metadata", 0.5, 1.5)
    trace.next_round()
    second("Produce", 1.2, 1.3)
    first("Fetch", 1.1, 1.4)
    first("EndTxn", 1.8, 2.1)
    sent = trace.between(1.0, 2.0)
    assert [(each.request, each.round) for each in sent] == [("Fetch", 1), ("Produce", 1)]
    assert as_fields(sent, 1.0, 2.0) == {
        "duration_ms": 1000.0,
        "in_sequence": 1,
        "requests": [
            {"request": "Fetch", "began_ms": 100.0, "took_ms": 300.0},
            {"request": "Produce", "began_ms": 200.0, "took_ms": 100.0},
        ],
    }


def test_four_requests_wait_for_one_another_until_output_is_visible(job_of: Callable[..., Job]) -> None:
    """The first checkpoint with output also looks up brokers and connects."""
    job = job_of("linear", "--parallelism", "2")
    run = job.start()
    with_output: list[dict[str, Any]] = []
    for _ in range(50):  # a busy broker may ask to be asked again
        job.feed(100)
        run.await_checkpoint()
        seen = [event for event in run.events if event.get("step") == "requests until visible"]
        with_output = [event for event in seen if "DescribeTransactions" in names(event)][1:]
        if len(with_output) >= 3 and min(event["in_sequence"] for event in with_output) <= NEEDED:
            break
    stop(run)
    assert min(event["in_sequence"] for event in with_output) <= NEEDED
    assert all(names(event)[-1] == "EndTxn" for event in with_output)


def names(event: dict[str, Any]) -> list[str]:
    return [each["request"] for each in event["requests"]]
