"""Tools for tests of pipelines and of exactlyonce itself: a broker in memory, a clock moved by hand, faults on order.

The stand-ins here, those in `broker/` too, pass the same contract tests as what they stand for. The contracts of what
you may write yourself: `sink_contract/` of a sink, `source_contract/` of a source, `state_contract/` of a state
backend, `storage_contract/` of a block storage. What needs a client library is imported from its own module:
`exactlyonce.testing.broker.real_broker`, `exactlyonce.testing.scripted`. May import everything but `cli`; nothing that
is shipped imports it.
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
