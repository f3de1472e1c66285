"""The errors that a program may meet, or raise itself: `Unavailable` and `Halt`. All are an `ExactlyOnceError`.

`UserError` is the base of those that the user can fix; their message says how. See `exit_code` for a command's end.
"""

from exactlyonce.pipeline.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    EndedAtOnce,
    EndedEarly,
    ExactlyOnceError,
    Fenced,
    GraphError,
    Halt,
    InvariantViolation,
    OutputLost,
    RecordError,
    StoppedShort,
    StorageUnavailable,
    StoreError,
    StoreUnavailable,
    TopicError,
    Unavailable,
    Undetermined,
    UserError,
)

__all__ = [
    "BrokerRefused",
    "BrokerUnavailable",
    "ConfigError",
    "EndedAtOnce",
    "EndedEarly",
    "ExactlyOnceError",
    "Fenced",
    "GraphError",
    "Halt",
    "InvariantViolation",
    "OutputLost",
    "RecordError",
    "StoppedShort",
    "StorageUnavailable",
    "StoreError",
    "StoreUnavailable",
    "TopicError",
    "Unavailable",
    "Undetermined",
    "UserError",
]
