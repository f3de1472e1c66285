"""The words of a store's refusals: one text for one error, whatever the store.

`StoreUnavailable` passes by itself, or by an operator's hand, and its rows wait; `StoreError` is what another attempt
would meet again, and says what to do. *server* begins a sentence; *said* are the server's or the driver's words,
without a secret and without a full stop.
"""

from __future__ import annotations

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable

AGAIN = "Nothing is lost: it is asked again."


def silent(server: str, timeout_s: float, advice: str = "") -> StoreUnavailable:
    """The server has given no sign of life for so long."""
    return StoreUnavailable(f"{server} has not answered for {timeout_s:g} s. {AGAIN}{' ' if advice else ''}{advice}")


def unreachable(server: str, said: str) -> StoreUnavailable:
    """No connection comes about."""
    return StoreUnavailable(f"{server} cannot be reached: {said}. Start it, or correct its address. {AGAIN}")


def cut_off(server: str, said: str) -> StoreUnavailable:
    """The connection has ended during a request."""
    return StoreUnavailable(f"{server} has closed the connection, or it was cut: {said}. {AGAIN}")


def passing(server: str, why: str, said: str, kind: type[StoreUnavailable] = StoreUnavailable) -> StoreUnavailable:
    """The server answers that it cannot do it now."""
    return kind(f"{server} cannot do it now: {why}. It says: {said}. {AGAIN}")


def refused(server: str, said: str, advice: str, kind: type[StoreError] = StoreError) -> StoreError:
    """The server answers what it would answer again, until somebody follows *advice*."""
    return kind(f"{server} refuses: {said}. {advice}")
