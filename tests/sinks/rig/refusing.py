"""An act that a store refuses: the error has the right kind, says what to do, and shows no secret in any place."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import pytest


def refused(
    act: Callable[[], object],
    kind: type[Exception] | tuple[type[Exception], ...],
    *texts: str,
    secrets: Sequence[str] = (),
) -> str:
    """The text of the error that *act* raises; it has all of *texts*, and neither it nor its causes have a secret."""
    with pytest.raises(kind) as raised:
        act()
    said = str(raised.value)
    for text in texts:
        assert text in said, said
    whole = said + repr(raised.value) + "".join(traceback.format_exception(raised.value))
    assert [secret for secret in secrets if secret in whole] == []
    return said
