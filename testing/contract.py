"""The parts that all contracts share: hooks that may be left out, cleaning up, and actions that must raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest


class Contract:
    """A contract, as a test class to inherit from."""

    @pytest.fixture(autouse=True)
    def _life(self) -> Iterator[None]:
        self._to_close: list[Any] = []
        """Readers, stores and the like, closed when the test ends."""
        yield
        for opened in self._to_close:
            opened.close()

    @staticmethod
    def left_out(hook: str, what: str) -> NoReturn:
        """Skip the test that needs *hook*."""
        pytest.skip(f"{what}: write `{hook}` in the test class, and it is tested")


def refused(action: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...], why: str) -> Exception:
    """The error of *kind* that *action* must raise; *why* says what is wrong if it does not."""
    __tracebackhide__ = True
    try:
        result = action()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{why}\nIt raised {type(error).__name__}: {error}, and not {kind}.") from error
    raise AssertionError(f"{why}\nIt returned {repr(result)[:200]}, and did not raise {kind}.")
