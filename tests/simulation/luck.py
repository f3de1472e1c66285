"""Luck: tilts a history towards one kind of fault, for rules that are seldom needed otherwise.

A tilt changes how often something happens and the job's settings, never the effect of a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Luck:
    kinds: tuple[str, ...] = ()
    """Events between two steps: methods of the fault injector. None: as drawn."""
    fates: tuple[str, ...] = ()
    """Events at a coordinator before a request, likewise."""
    chances: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the fault injector, with their values."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the pipeline, with their values."""
    stores: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the store, with their values."""
    rescale_chance: float = 0.0
    """That the next coordinator runs with another parallelism."""
    aligned_chance: float = 0.0
    """That a checkpoint must be aligned though the settings let barriers overtake, as a savepoint must."""
    restore_chance: float = 0.0
    """That a coordinator is to begin from the newest checkpoint, where that is a savepoint."""
    local_files: float | None = None
    """How often a history has local files."""
    parallelism: int | None = None
    output_partitions: int | None = None
    parts_chance: float = 0.5
    """How often manifests are larger than a record."""
    load: bool = False
    """Whether records cost time, and what waits for it is judged; see load.py."""


_AT_LEAST_ONCE = Luck(
    kinds=("kill_worker", "slow_worker"),
    chances={
        "_chance": 0.006, "_network_chance": 0.0, "_request_chance": 0.0, "_decided_chance": 0.0, "cleaned_chance": 0.0,
    },
    settings={"mode": "at_least_once", "interval_ms": 60},
    parallelism=3,
)  # fmt: skip
_CYCLES = Luck(
    kinds=("kill_worker", "slow_worker", "crash_coordinator", "stop"),
    chances={"_chance": 0.004, "_request_chance": 0.005, "cleaned_chance": 0.0},
)
_JOINS = Luck(
    kinds=("kill_worker", "kill_worker", "slow_worker", "slow_worker", "crash_coordinator", "stop"),
    chances={"_chance": 0.006, "_request_chance": 0.005, "cleaned_chance": 0.0}, rescale_chance=0.5,
)  # fmt: skip
_CALM = {"_chance": 0.0, "_request_chance": 0.0}
_LOAD = Luck(
    chances={**_CALM, "_network_chance": 0.0, "_delivery_chance": 0.0, "_marker_chance": 0.0, "_decided_chance": 0.0,
        "_remakes": False, "_adds_at": 1 << 60},
    settings={"interval_ms": 1_000, "timeout_ms": 8_000, "max_concurrent": 1, "tolerable_failed": 0}, load=True,
)  # fmt: skip
LUCK = {
    "network": Luck(fates=("crash", "sleep"), chances={"_network_chance": 0.02, "_request_chance": 0.03}),
    "unanswered": Luck(chances={"_chance": 0.0, "_network_chance": 0.01, "ending_factor": 30, "_request_chance": 0.0}),
    "deliveries": Luck(chances={"_delivery_chance": 0.01, "failed_chance": 0.01}),
    "markers": Luck(
        kinds=("crash_coordinator", "downtime"),
        chances={"_chance": 0.002, "_marker_chance": 0.3, "_request_chance": 0.15, "rewriting_chance": 0.5},
        output_partitions=3,
    ),
    "naps": Luck(kinds=("kill_worker", "stop"), fates=("nap",), chances={"_chance": 0.006, "_request_chance": 0.15}),
    "carried": Luck(
        kinds=("slow_worker",), fates=("crash", "nap"),
        chances={"_chance": 0.02, "_network_chance": 0.0, "_request_chance": 0.0, "carried_chance": 0.3,
            "cleaned_chance": 1.0, "_decided_chance": 0.0, "_remakes": False},
        settings={"tolerable_failed": 2, "timeout_ms": 200, "interval_ms": 20}, parallelism=3,
    ),
    "replays": Luck(
        kinds=("clean", "downtime", "crash_coordinator", "slow_worker"),
        chances={"_chance": 0.002, "cleaned_chance": 1.0, "_decided_chance": 0.3, "_request_chance": 0.15},
        parallelism=2,
    ),
    "late requests": Luck(
        kinds=("kill_writing_worker",),
        chances={"_chance": 0.03, "_network_chance": 0.0, "_request_chance": 0.0, "last_chance": 1.0},
        settings={"interval_ms": 60}, parallelism=3,
    ),
    "zombies": Luck(
        kinds=("sleep_at_start", "sleep_at_start", "kill_worker"), chances={"_chance": 0.01, "wakes_apart": True},
    ),
    "stores": Luck(
        kinds=("crash_coordinator", "kill_worker"), fates=("crash", "sleep"),
        chances={"_chance": 0.001, "_network_chance": 0.0, "_request_chance": 0.03},
        stores={"network_chance": 0.2, "away_chance": 0.001, "commit_chance": 0.3, "rescale_chance": 0.5, "harm": ""},
    ),
    "slow stores": Luck(
        kinds=("crash_coordinator", "kill_worker"), fates=("crash", "sleep"),
        chances={"_chance": 0.001, "_request_chance": 0.03},
        stores={"network_chance": 0.1, "away_chance": 0.001, "commit_chance": 0.3, "slow_chance": 0.6, "harm": ""},
    ),
    "late rows": Luck(
        kinds=("kill_writing_worker",),
        chances={"_chance": 0.03, "_network_chance": 0.0, "_request_chance": 0.0, "last_chance": 1.0},
        settings={"interval_ms": 60, "max_concurrent": 1}, stores={"harm": ""},
    ),
    "restored while down": Luck(chances=_CALM, stores={"harm": "restore_while_down", "network_chance": 0.0}),
    "restored while away": Luck(chances=_CALM, stores={"harm": "restore_while_away", "network_chance": 0.0}),
    "reset": Luck(
        chances=_CALM, stores={"harm": "reset", "network_chance": 0.0, "commit_chance": 0.5, "_harm_at": 0},
    ),
    "topic made anew": Luck(chances=_CALM, stores={"harm": "make_topic_anew", "network_chance": 0.0}),
    "at least once": replace(_AT_LEAST_ONCE, stores={"harm": ""}),
    "unaligned": Luck(
        kinds=("kill_worker", "slow_worker", "crash_coordinator"), chances={"_chance": 0.004, "_request_chance": 0.005},
        settings={"unaligned": True}, rescale_chance=0.5,
    ),
    "overtaken late": Luck(
        kinds=("kill_worker", "slow_worker", "crash_coordinator"), chances={"_chance": 0.004, "_request_chance": 0.005},
        settings={"unaligned": True, "aligned_timeout_ms": 15}, rescale_chance=0.5,
    ),
    "crowded": Luck(
        kinds=("slow_worker", "kill_worker"),
        chances={"_chance": 0.01, "_network_chance": 0.0, "_request_chance": 0.0, "_decided_chance": 0.0},
        settings={"unaligned": True, "max_concurrent": 3, "interval_ms": 20, "timeout_ms": 200, "tolerable_failed": 2},
        parallelism=3,
    ),
    "savepoints between": Luck(
        kinds=("slow_worker", "kill_worker"), chances={"_chance": 0.006, "_request_chance": 0.005},
        settings={"unaligned": True, "max_concurrent": 3, "interval_ms": 20}, aligned_chance=0.4, rescale_chance=0.25,
    ),
    "unaligned replays": Luck(
        kinds=("clean", "downtime", "crash_coordinator", "slow_worker"),
        chances={"_chance": 0.002, "cleaned_chance": 1.0, "_decided_chance": 0.3, "_request_chance": 0.15},
        settings={"unaligned": True}, rescale_chance=0.5,
    ),
    "local files": Luck(
        kinds=("kill_worker", "crash_coordinator", "slow_worker"),
        chances={"_chance": 0.006, "_network_chance": 0.0, "_request_chance": 0.01}, settings={"tolerable_failed": 1},
        local_files=1.0,
    ),
    "savepoints": Luck(
        kinds=(*("ask_for_savepoint", "ask_for_savepoint", "ask_for_savepoint", "delete_savepoint", "delete_savepoint"),
            *("crash_coordinator", "kill_worker")),
        chances={"_chance": 0.01, "_network_chance": 0.0, "_request_chance": 0.01, "_decided_chance": 0.0},
        settings={"interval_ms": 20, "max_concurrent": 1}, stores={"harm": ""},
    ),
    "late savepoints": Luck(
        kinds=("ask_for_savepoint", "slow_worker", "slow_worker", "kill_worker"),
        chances={"_chance": 0.02, "_network_chance": 0.0, "_request_chance": 0.005, "_decided_chance": 0.0},
        settings={"interval_ms": 20, "timeout_ms": 200, "max_concurrent": 1}, parallelism=3,
    ),
    "whole state": Luck(
        kinds=("kill_worker", "slow_worker", "crash_coordinator"), chances={"_chance": 0.004, "_request_chance": 0.005},
        settings={"incremental": False, "tolerable_failed": 2}, rescale_chance=0.25, local_files=0.5,
    ),
    "parts": Luck(
        kinds=("compact_while_down",), fates=("crash",),
        chances={"_chance": 0.004, "_network_chance": 0.0, "_request_chance": 0.01},
        settings={"interval_ms": 20, "num_retained": 1}, parts_chance=1.0,
    ),
    "cancelled": Luck(
        kinds=("cancel", "cancel", "crash_coordinator", "kill_worker", "slow_worker"),
        chances={"_chance": 0.004, "_request_chance": 0.01}, rescale_chance=0.25,
    ),
    "cancelled and deleted": Luck(
        kinds=("cancel", "crash_coordinator", "kill_worker", "ask_for_savepoint", "delete_savepoint"),
        chances={"_chance": 0.003, "_request_chance": 0.01},
        settings={"retention": "delete_on_cancellation", "max_concurrent": 1}, rescale_chance=0.25,
    ),
    "cycles": _CYCLES,
    "rescaled cycles": replace(_CYCLES, rescale_chance=0.5),
    "unaligned cycles": replace(_CYCLES, settings={"unaligned": True}, rescale_chance=0.5),
    "cycles at least once": _AT_LEAST_ONCE,
    "cycles from savepoint": Luck(
        kinds=("ask_for_savepoint", "ask_for_savepoint", "delete_savepoint", "crash_coordinator", "kill_worker"),
        chances={"_chance": 0.012, "_network_chance": 0.0, "_request_chance": 0.005, "cleaned_chance": 0.0},
        settings={"interval_ms": 20, "max_concurrent": 1}, rescale_chance=0.6, restore_chance=0.8,
    ),
    "from savepoint": Luck(
        kinds=("ask_for_savepoint", "ask_for_savepoint", "delete_savepoint", "crash_coordinator", "kill_worker"),
        chances={"_chance": 0.012, "_network_chance": 0.001, "_request_chance": 0.015, "_decided_chance": 0.0},
        settings={"interval_ms": 20, "max_concurrent": 1}, stores={"harm": ""}, rescale_chance=0.6, restore_chance=0.8,
    ),
    "outside": Luck(
        kinds=("kill_worker", "kill_writing_worker", "crash_coordinator", "slow_worker"), fates=("crash", "sleep"),
        chances={"_chance": 0.004, "_network_chance": 0.002, "_request_chance": 0.01, "last_chance": 0.5},
        settings={"storage": "s3://simulated/blocks"},
    ),
    "references not known": Luck(
        kinds=("ask_for_savepoint", "delete_savepoint", "crash_coordinator", "kill_writing_worker"),
        chances={"_chance": 0.012, "_network_chance": 0.0, "_request_chance": 0.01, "unread_chance": 0.4},
        settings={"storage": "s3://simulated/blocks", "interval_ms": 20, "max_concurrent": 1}, stores={"harm": ""},
    ),
    "windows": Luck(
        kinds=("kill_worker", "kill_worker", "slow_worker", "crash_coordinator", "stop"),
        chances={"_chance": 0.006, "_request_chance": 0.005, "cleaned_chance": 0.0},
        rescale_chance=0.5, local_files=0.0,
    ),
    "window replays": Luck(
        kinds=("clean", "downtime", "crash_coordinator", "slow_worker"),
        chances={"_chance": 0.002, "cleaned_chance": 1.0, "_decided_chance": 0.3, "_request_chance": 0.15},
        rescale_chance=0.5, local_files=0.0,
    ),
    "unaligned windows": Luck(
        kinds=("kill_worker", "kill_worker", "slow_worker", "slow_worker", "crash_coordinator"),
        chances={"_chance": 0.008, "_request_chance": 0.005, "cleaned_chance": 0.0},
        settings={"unaligned": True}, rescale_chance=0.5, local_files=0.0,
    ),
    "constant load": _LOAD,
    "unaligned load": replace(_LOAD, settings={**_LOAD.settings, "unaligned": True}),
    "load and crashes": replace(
        _LOAD, kinds=("kill_worker", "crash_coordinator"), chances={**_LOAD.chances, "_chance": 0.0005},
    ),
    "beginnings": Luck(
        kinds=("crash_beginning",), fates=("crash", "sleep"),
        chances={"_chance": 0.01, "_network_chance": 0.001, "_request_chance": 0.01},
    ),
    "stops": Luck(kinds=("stop",), chances={"_chance": 0.004, "_request_chance": 0.0}),
    "unaligned stops": Luck(
        kinds=("stop", "slow_worker"), chances={"_chance": 0.01, "_request_chance": 0.0}, settings={"unaligned": True},
        parallelism=3,
    ),
    "failures": Luck(
        kinds=("poison", "poison", "kill_writing_worker", "crash_coordinator"), fates=("crash", "sleep"),
        chances={"_chance": 0.006, "_network_chance": 0.003, "_request_chance": 0.01},
    ),
    "joins": _JOINS,
    "unaligned joins": replace(_JOINS, settings={"unaligned": True}),
}  # fmt: skip
"""Lucks by name."""
NONE = Luck()
HARMS = ("restored while down", "restored while away", "topic made anew", "reset")
"""Methods that harm the store or the checkpoint topic."""
