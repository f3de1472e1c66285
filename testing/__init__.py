"""Tools for tests of pipelines and of exactlyonce itself: a broker in memory, a clock moved by hand, faults on order.

`assert_exactly_once` tries a user's pipeline with a crash at every step; `simulation/` runs it. `assert_merges` tries
the functions of a fold. `servers/` starts real stores.

The in-memory stand-ins, in `broker/` too, pass the contract tests of the real thing. Contract tests for your classes:
`sink_contract/`, `source_contract`, `state_contract/` (state backends), `storage_contract` (block storages). A
module that needs a client library is imported by name: `exactlyonce.testing.scripted`. May import everything but `cli`;
nothing that is shipped imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exactlyonce.testing.broker.interface import (
    Error,
    Fault,
    Fetched,
    Initialized,
    Injection,
    Isolation,
    NoAnswer,
    Produced,
    Record,
    TransactionalBroker,
    UnreliableBroker,
)
from exactlyonce.testing.broker.model import BrokerModel, BrokerSettings
from exactlyonce.testing.clock import SimulatedClock, Timer
from exactlyonce.testing.merges import assert_merges

if TYPE_CHECKING:
    from exactlyonce.testing.exactly_once import assert_exactly_once

__all__ = [
    "BrokerModel",
    "BrokerSettings",
    "Error",
    "Fault",
    "Fetched",
    "Initialized",
    "Injection",
    "Isolation",
    "NoAnswer",
    "Produced",
    "Record",
    "SimulatedClock",
    "Timer",
    "TransactionalBroker",
    "UnreliableBroker",
    "assert_exactly_once",
    "assert_merges",
]


if not TYPE_CHECKING:  # else mypy would accept any name

    def __getattr__(name: str) -> object:
        """Import `assert_exactly_once` on first use: it needs the engine, and the pytest plugin loads this package."""
        if name != "assert_exactly_once":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from exactlyonce.testing.exactly_once import assert_exactly_once

        return assert_exactly_once
