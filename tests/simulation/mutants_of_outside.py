"""Planted defects, continued: rules about blocks outside of the checkpoint topic. See `mutants_of_coordinators`.

Where blocks lie in the topic, none of them changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from planting import LEFT, Table, unchecked

from exactlyonce.checkpoint import decision_log, retention
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import Reached, RemoveBlocks
from exactlyonce.checkpoint.store.files.names import name_of
from exactlyonce.checkpoint.store.files.writer import FileBlocks
from exactlyonce.pipeline.errors import StorageUnavailable

OUTSIDE = Table()
"""By name."""
mutant = OUTSIDE.mutant
MISSING = r"is referred to, and is not there"
REMOVED = r"stands on block .*, which is removed"


@mutant("a block that was refused is taken for durable", MISSING, luck="outside")
def _not_durable() -> Iterable[Any]:
    def put(self: Any, put: Any) -> Iterator[float]:
        with suppress(StorageUnavailable):
            self._folder.put(str(name_of(put.ref)), put.value, "")
        put.told = True
        yield from ()

    yield patch.object(FileBlocks, "_put", put)


@mutant("files are removed before the decision that drops them", REMOVED, luck="outside")
def _early() -> Iterable[Any]:
    real = decision_log.DecisionLog._produce

    def produce(self: Any, staged: Any) -> Any:
        yield RemoveBlocks(tuple(each for each in staged.dropped if each.storage != TOPIC))
        return (yield from real(self, staged))

    yield patch.object(decision_log.DecisionLog, "_produce", produce)


@mutant("files that are dropped are not removed", LEFT, luck="outside")
def _never() -> Iterable[Any]:
    yield patch.object(decision_log, "RemoveBlocks", lambda _: Reached("nothing"))


@mutant("files are told apart by partition and offset", LEFT, luck="outside")
def _alike() -> Iterable[Any]:
    yield patch.object(retention, "_key", lambda ref: (ref.partition, ref.offset))


@mutant("nothing is held for a checkpoint that cannot be looked at", REMOVED, luck="references not known")
def _nothing_held() -> Iterable[Any]:
    yield patch.object(retention, "may_be_of", lambda *_: False)
    yield unchecked(decision_log, "A block that a manifest names")


@mutant("everything is held for a checkpoint that cannot be looked at", LEFT, luck="references not known")
def _all_held() -> Iterable[Any]:
    yield patch.object(retention, "may_be_of", lambda *_: True)
