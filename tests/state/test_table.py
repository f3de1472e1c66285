"""Tables: what the contract of a state backend does not say of them."""

from __future__ import annotations

from typing import Any

import pytest

from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.hash_map import KeyedTable
from exactlyonce.state.stored import StoredState


def test_a_function_that_returns_no_pair_is_located() -> None:
    def fn(_: int | None, record: int) -> Any:
        return (1, 1) if record else record

    with pytest.raises(ApplyFailed) as failure:
        KeyedTable(StoredState(operator="totals", type=int, groups=range(128), max_parallelism=128)).apply(
            fn, [canonical_key("ann")] * 3, [5, 7, 0]
        )
    assert failure.value.index == 2
    assert isinstance(failure.value.__cause__, TypeError)
