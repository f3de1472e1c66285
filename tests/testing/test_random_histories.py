"""The model against a real broker on random histories.

    EXACTLYONCE_SEEDS=1000-1999 python -m pytest tests/testing/test_random_histories.py

plays other seeds than the ones below; a failing seed is shown with the fewest steps that still fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from broker_histories import Stage, Step, difference, play, shortest
from random_histories import random_history

from exactlyonce.testing import SimulatedClock
from exactlyonce.testing.broker.model import BrokerModel

STEPS = 80
USUAL = range(12)
NewStage = Callable[[], Stage]


def seeds() -> range:
    """`EXACTLYONCE_SEEDS`, one number or first-last, or the usual ones."""
    first, _, last = os.environ.get("EXACTLYONCE_SEEDS", f"0-{USUAL[-1]}").partition("-")
    return range(int(first), int(last or first) + 1)


def differs(history: Sequence[Step], one: NewStage, other: NewStage) -> str | None:
    """How the two see *history* differently; a history without sense, as shortening makes them, is no difference."""
    try:
        return difference(history, one(), other())
    except LookupError:
        return None


@pytest.mark.exhaustive(but=[str(seed) for seed in seeds()[:2]])
@pytest.mark.parametrize("seed", seeds())
def test_the_model_answers_as_the_real_broker(seed: int, new_model_stage: NewStage, new_real_stage: NewStage) -> None:
    history = random_history(seed, STEPS)
    if difference(history, new_model_stage(), new_real_stage()) is None:
        return
    short = shortest(history, lambda shorter: differs(shorter, new_model_stage, new_real_stage) is not None)
    pytest.fail(
        f"{differs(short, new_model_stage, new_real_stage)}\n"
        f"Here, one is the model and other the real broker. To see it again:\n"
        f"    EXACTLYONCE_SEEDS={seed} python -m pytest tests/testing/test_random_histories.py",
        pytrace=False,
    )


ANSWERS = {
    "Init": "NONE",
    "Produce": "NONE INVALID_PRODUCER_EPOCH INVALID_TXN_STATE OUT_OF_ORDER_SEQUENCE_NUMBER",
    "End": "NONE PRODUCER_FENCED INVALID_TXN_STATE INVALID_PRODUCER_ID_MAPPING",
    "Add": "NONE INVALID_PRODUCER_EPOCH",
    "Describe": "Empty Ongoing CompleteCommit CompleteAbort",
    "Read": "NONE OFFSET_OUT_OF_RANGE",
    "AddPartitions": "NONE INVALID_PARTITIONS",
    "DeleteRecords": "NONE OFFSET_OUT_OF_RANGE",
    **dict.fromkeys(("Producers", "Listed"), "shown"),
    **dict.fromkeys(("Fence", "CreateTopic", "DeleteTopic"), "NONE"),
}


def test_every_answer_is_drawn() -> None:
    """The usual seeds reach every error that their steps can meet, so agreeing on them means something."""
    drawn = set()
    for seed in USUAL:
        history = random_history(seed, STEPS)
        for step, seen in zip(history, _seen(history), strict=True):
            answer = seen[0] if isinstance(seen, tuple) else seen
            drawn.add((type(step).__name__, answer if isinstance(answer, str) else "shown"))
    assert drawn == {(step, answer) for step, answers in ANSWERS.items() for answer in answers.split()}


def _seen(history: Sequence[Step]) -> list[Any]:
    clock = SimulatedClock()
    return play(history, Stage(BrokerModel(clock), clock.advance, ""))
