"""Errors of a sink, and of the functions that a sink was given, told as what they are."""

from __future__ import annotations

import asyncio

import pytest

from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.pipeline.sink import FunctionRaised, mapped, naming


class Held(StoreUnavailable):
    pass


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(StoreError, StoreError), (StoreUnavailable, StoreUnavailable), (Held, StoreUnavailable), (ConfigError,) * 2],
)
def test_the_sink_is_named(raised: type[Exception], kind: type[Exception]) -> None:
    """A store does not know its sink: its caller names it, and unavailability stays retriable."""
    with pytest.raises(kind, match=r"^Sink 'table': there is no table\.$") as error, naming("table"):
        raise raised("there is no table.")
    assert type(error.value) is kind


def test_other_errors_are_not_touched() -> None:
    with pytest.raises(ValueError, match=r"^it does not fit$"), naming("table"):
        raise ValueError("it does not fit")


def test_a_function_that_raises_is_told_by_its_argument() -> None:
    """The error is kept, with the place in the user's code; an exit and a cancelled task count as errors."""
    assert mapped("key", str, [1, 2]) == ["1", "2"]
    for kind in (KeyError, SystemExit, asyncio.CancelledError):

        def fail(record: object, kind: type[BaseException] = kind) -> str:
            raise kind("no")

        with pytest.raises(FunctionRaised) as error:
            mapped("key", fail, [1])
        assert (error.value.argument, type(error.value.__cause__)) == ("key", kind)


def test_an_interrupt_is_no_error_of_a_record() -> None:
    def interrupted(record: object) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mapped("key", interrupted, [1])
