"""The error texts of stores: one text for one error, whatever the store.

`StoreUnavailable` passes by itself or by an operator's hand, and rows wait for it; another attempt would meet a
`StoreError` again, which says what to do. *server* begins a sentence; *message* is the server's or the driver's text,
without secrets and without a full stop.
"""

from __future__ import annotations

from exactlyonce.pipeline.errors import ASKED_AGAIN, StoreError, StoreUnavailable


def silent(server: str, timeout_s: float, advice: str = "") -> StoreUnavailable:
    """The server has not answered for *timeout_s*.

    >>> str(silent("db", 3.00002)).partition(" s. ")[0]
    'db has not answered for 3'
    """
    return StoreUnavailable(
        f"{server} has not answered for {round(timeout_s, 2):g} s. {advice}{' ' if advice else ''}{ASKED_AGAIN}"
    )


def unreachable(server: str, message: str) -> StoreUnavailable:
    """No connection could be made."""
    return StoreUnavailable(f"{server} cannot be reached: {message}. Start it, or correct its address. {ASKED_AGAIN}")


def cut_off(server: str, message: str) -> StoreUnavailable:
    """The connection has ended during a request."""
    return StoreUnavailable(f"{server} has closed the connection, or it was cut: {message}. {ASKED_AGAIN}")


def passing(server: str, why: str, message: str, kind: type[StoreUnavailable] = StoreUnavailable) -> StoreUnavailable:
    """The server cannot do it now."""
    end = "" if why.endswith("?") else "."
    return kind(f"{server} cannot do it now: {why}{end} It says: {message}. {ASKED_AGAIN}")


def refused(server: str, message: str, advice: str, kind: type[StoreError] = StoreError) -> StoreError:
    """The server refuses, and will until somebody follows *advice*."""
    return kind(f"{server} refuses: {message}. {advice}")
