"""Stages to play histories on: the in-memory broker, and a real one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from broker_histories import Stage
from real_broker import RealBroker

from exactlyonce.testing import BrokerModel, SimulatedClock

if TYPE_CHECKING:
    from exactlyonce.testing.cluster import KafkaCluster


class Mutant(NamedTuple):
    """A class that leaves out a rule: what is replaced, by what, the test that fails, and some of what it says."""

    owner: Any
    name: str
    defect: Any
    test: str
    says: str

    def is_missed_by(self, contract: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.owner, self.name, self.defect, raising=False)
        with pytest.raises(Exception, match=f"(?i){self.says}"):
            getattr(contract, f"test_{self.test}")()


def _sleep(duration_ms: int) -> None:
    time.sleep(duration_ms / 1000)


@pytest.fixture
def pause() -> Callable[[int], None]:
    return _sleep


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def model(clock: SimulatedClock) -> BrokerModel:
    return BrokerModel(clock)


@pytest.fixture
def new_model_stage() -> Callable[[], Stage]:
    def make() -> Stage:
        clock = SimulatedClock()
        return Stage(BrokerModel(clock), clock.advance, "")

    return make


@pytest.fixture(scope="session")
def real_broker(kafka: KafkaCluster) -> Iterator[RealBroker]:
    broker = RealBroker(kafka.bootstrap_servers)
    yield broker
    broker.close()


@pytest.fixture
def new_real_stage(real_broker: RealBroker, topic_name: str) -> Callable[[], Stage]:
    stages = 0

    def make() -> Stage:
        nonlocal stages
        stages += 1
        return Stage(real_broker, _sleep, f"{topic_name}-{stages}-")

    return make


@pytest.fixture(params=["model", pytest.param("real", marks=pytest.mark.broker)])
def stage(request: pytest.FixtureRequest) -> Stage:
    made: Stage = request.getfixturevalue(f"new_{request.param}_stage")()
    return made
