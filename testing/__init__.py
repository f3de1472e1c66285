"""Tools for tests of pipelines and of exactlyonce itself: a broker in memory, a clock moved by hand, faults on order.

The in-memory stand-ins, in `broker/` too, pass the contract tests of the real thing. Contract tests for your classes:
`sink_contract/`, `source_contract/`, `state_contract/` (state backends), `storage_contract/` (block storages). Modules
that need a client library are imported by name: `exactlyonce.testing.broker.real_broker`,
`exactlyonce.testing.scripted`. May import everything but `cli`; nothing that is shipped imports it.
"""

from exactlyonce.testing.broker.interface import (
    Error,
    Fetched,
    Initialized,
    Isolation,
    NoAnswer,
    Produced,
    Record,
    TransactionalBroker,
)
from exactlyonce.testing.broker.model import BrokerModel, BrokerSettings
from exactlyonce.testing.broker.unreliable import Fault, Injection, UnreliableBroker
from exactlyonce.testing.clock import SimulatedClock, Timer

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
]
