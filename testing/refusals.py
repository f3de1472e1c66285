"""The refusals that contracts ask for: an action that must raise, and what is wrong where it does not."""

from __future__ import annotations

from collections.abc import Callable


def refused(action: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...], why: str) -> Exception:
    """The error of *kind* that *action* must raise; *why* says what is wrong where it does not."""
    __tracebackhide__ = True
    try:
        result = action()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{why}\nIt raised {type(error).__name__}: {error}, and not {kind}.") from error
    raise AssertionError(f"{why}\nIt returned {repr(result)[:200]}, and did not raise {kind}.")
