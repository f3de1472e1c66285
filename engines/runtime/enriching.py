"""The operator of `Stream.enrich`: it calls a service for each batch, and waits for all answers.

Invariants: no call is under way between two batches, so a cut has none, and records, watermarks and barriers keep their
order. The answers are noted before they are passed on; a replay takes the noted ones. A call is repeated, or made for
fewer records, only while there is time before the checkpoint's timeout: see `Answers.repeats_for_s`.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from itertools import chain
from typing import Any

from exactlyonce.engines.runtime.activity import BREATH_INTERVAL_S
from exactlyonce.engines.runtime.batch import Batch, facts_of, or_skip, shown_origin
from exactlyonce.engines.runtime.faults import is_outage, place_of, record_error
from exactlyonce.engines.runtime.operators import BatchOperator
from exactlyonce.engines.runtime.order_log import AnswerCodec, Answers, FetchFailed
from exactlyonce.pipeline.enrich import Calls, Enriched
from exactlyonce.pipeline.errors import RecordError, Unavailable, text_of
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.names import setting
from exactlyonce.pipeline.retries import OF_SERVICE
from exactlyonce.pipeline.shape import type_name

"""The pause before the first retry, which doubles, and the longest one."""


class Service:
    """The user's function with the event loop that it runs in, a thread of its own. `open` and `close` of the function
    may be async."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._loop = asyncio.new_event_loop()
        over = self._loop.create_future()
        self._thread = threading.Thread(target=_run, args=(self._loop, over), name="enrich", daemon=True)
        self._thread.start()
        # An attempt that fails drops its services, and a run in one process goes on.
        self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, over.set_result, None)
        self._end.atexit = False

    def start(self, call: Callable[[], Any]) -> futures.Future[Any]:
        """Make *call* in the loop. The future gets its result, awaited if it is awaitable."""

        async def run() -> Any:
            result = call()
            return await result if isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def open(self, context: Any) -> None:
        if hasattr(self.function, "open"):
            self.start(lambda: self.function.open(context)).result()

    def close(self) -> None:
        """Close the function, and end the thread."""
        try:
            if hasattr(self.function, "close"):
                self.start(self.function.close).result()
        finally:
            self._end()
            self._thread.join()


def _run(loop: asyncio.AbstractEventLoop, over: asyncio.Future[None]) -> None:
    """Run *loop* until *over*. An exit of the user's code is the result of its task, and does not end the loop."""
    while not over.done():
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(over)
    loop.close()


class _Failed(Exception):
    """A call for so many *records* from *place* on failed for good, with the error that is its cause."""

    def __init__(self, place: int, records: int, error: BaseException, *, cut_short: bool = False) -> None:
        """*cut_short*: there was no time for further attempts."""
        super().__init__(place)
        self.place, self.records, self.error, self.cut_short = place, records, error, cut_short
        self.answered: int | None = None
        """How many records of the batch got an answer when each was asked about alone; None: they were not."""


class _Room:
    """Room for so many records in calls, given in the order in which calls ask."""

    def __init__(self, records: int) -> None:
        self._free = records
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    async def take(self, records: int) -> None:
        async with self._turn:
            while self._free < records:
                self._freed.clear()
                await self._freed.wait()
            self._free -= records

    def give_back(self, records: int) -> None:
        self._free += records
        self._freed.set()


@dataclass(slots=True)
class Enricher(BatchOperator):
    """Passes on each record with its answer, in order."""

    service: Service | None
    """None: a replay."""
    calls: Calls
    codec: AnswerCodec
    answers: Answers

    def __call__(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        records = len(batch.records)
        if self.service is None:
            answers = self.answers.take(self.id, self.codec, records)
        else:
            answers = self._noted(batch, self._asked(batch, self.service))
        self.activity.leave(self.id, entered_s, records)
        failed = [(place, answer) for place, answer in enumerate(answers) if isinstance(answer, FetchFailed)]
        batch = self._without(batch, failed)
        answers = [answer for answer in answers if not isinstance(answer, FetchFailed)] if failed else answers
        if batch.records:
            self.push(batch.unkeyed(list(map(Enriched, batch.records, answers))))

    def _noted(self, batch: Batch, answers: Sequence[Any]) -> list[Any]:
        """*answers* as a replay will read them, which are noted for it."""
        try:
            bodies = list(self.codec.encode(answers))
            read = [answer for body in bodies for answer in self.codec.decode(body)]
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # msgspec's are ValueErrors
            raise self._misfit(batch, answers, error) from error
        self.answers.noted += ((self.id, body) for body in bodies)
        hit("enrich-answered")
        return read

    def _misfit(self, batch: Batch, answers: Sequence[Any], error: Exception) -> RecordError:
        place = 0
        for number, answer in enumerate(answers):
            try:
                for body in self.codec.encode([answer]):
                    self.codec.decode(body)
            except (TypeError, ValueError, OverflowError, RecursionError) as first:
                place, error = number, first
                break
        name = type_name(self.calls.answer)
        return self.misuse(batch.origins[place], f"gave an answer that is no {name}, or cannot be kept as one: {error}")

    # --- calls --------------------------------------------------------------------------------------------------------

    def _asked(self, batch: Batch, service: Service) -> list[Any]:
        """The answer, or a `FetchFailed`, for each record."""
        hit("enrich-asking")
        calls = service.start(lambda: self._all(service.function, batch.records))
        try:
            while not futures.wait([calls], BREATH_INTERVAL_S).done:
                self.activity.breathe()
        finally:
            calls.cancel()
        try:
            answers: list[Any] = calls.result()
        except _Failed as failed:
            if isinstance(failed.error, _Miscounted):
                raise self.misuse(batch.origins[failed.place], str(failed.error)) from None
            raise self._failure(batch, failed) from failed.error
        return answers

    def _failure(self, batch: Batch, failed: _Failed) -> RecordError | Unavailable:
        origin, error = batch.origins[failed.place], failed.error
        shown = shown_origin(origin)
        call = shown if failed.records == 1 else f"a call for {failed.records} records, of which {shown} is the first"
        if failed.cut_short:
            raised = f"raised {type(error).__name__}: {text_of(error).removesuffix('.')}{place_of(error)}, on {call}"
            return Unavailable(
                f"Operator {self.id!r} {raised}. There was no time to repeat or to divide the call: a batch has "
                f"{self.answers.repeats_for_s:g} s for that, a third of {setting('checkpoint_timeout')}. Nothing is "
                f"skipped or lost, and the records come again. If restarts do not help, each is asked about alone.",
                **facts_of(self.id, None),
            )
        if failed.records > 1:
            return record_error(f"Operator {self.id!r}", self.id, None, error, on=call)
        stops = self.error(origin, error)
        if failed.answered is None or not isinstance(stops, Unavailable):
            return stops
        advice = f"If it never gets one, change the service, the record or timeout={or_skip(origin)}."
        others = f"{failed.answered} others of its batch got answers. {advice}"
        alone = others if failed.answered else "no other record of its batch got an answer, either."
        why = "Restarts did not help, so each record was asked about alone"
        return Unavailable(f"{stops} {why}: {alone}", **stops.facts)

    async def _all(self, fetch: Callable[[list[Any]], Any], records: Sequence[Any]) -> list[Any]:
        alone = self.answers.asks_alone
        size, room = 1 if alone else self.calls.batch, _Room(self.calls.in_flight)
        parts = [(start, records[start : start + size]) for start in range(0, len(records), size)]
        answers = await _side_by_side((self._answers(fetch, part, start, room) for start, part in parts), to_end=alone)
        if failures := [answer for answer in answers if isinstance(answer, BaseException)]:
            if isinstance(first := failures[0], _Failed):
                first.answered = len(answers) - len(failures)
            raise first
        return [*chain.from_iterable(answers)]

    @property
    def _has_time(self) -> bool:
        """Whether a call may be repeated: a barrier may wait since the loop last came round."""
        return self.activity.now_s() < self.activity.turned_s + self.answers.repeats_for_s

    async def _answers(self, fetch: Callable[..., Any], records: Sequence[Any], place: int, room: _Room) -> list[Any]:
        """The answers for *records*, from *place* on.

        A call for several that fails is made for each half, side by side, and so on down to the records that make it
        fail; not so if that is an outage. A call for one, and an outage, is repeated.
        """
        pauses = iter(OF_SERVICE)
        for attempt in range(self.calls.retries + 1):
            answers, failure = await self._outcome(fetch, records, room)
            if failure is None:
                return answers
            if isinstance(failure, _Miscounted):
                raise _Failed(place, len(records), failure)
            divides = len(records) > 1 and not is_outage(failure)
            if (divides or attempt < self.calls.retries) and not self._has_time:
                if not is_outage(failure) and not self.answers.asks_alone:
                    raise _Failed(place, len(records), failure, cut_short=True)
                break
            if divides:
                middle = len(records) // 2
                halves = (records[:middle], place), (records[middle:], place + middle)
                return [*chain(*await _side_by_side(self._answers(fetch, *half, room) for half in halves))]
            if attempt < self.calls.retries:
                await asyncio.sleep(next(pauses) / 1000)
        if not self.survives(failure):
            raise _Failed(place, len(records), failure)
        return [FetchFailed(type(failure).__name__, f"{text_of(failure)}{place_of(failure)}")]

    async def _outcome(self, fetch: Callable[..., Any], records: Sequence[Any], room: _Room) -> tuple[list[Any], Any]:
        """The answers and None, or the error, as a value: a `CancelledError` of the function is none of ours."""
        await room.take(len(records))
        call = asyncio.ensure_future(_answers_of(fetch, records))
        try:
            await asyncio.wait([call], timeout=self.calls.timeout_s)
            is_late = not call.done()
        finally:
            call.cancel()
            await asyncio.wait([call])
            room.give_back(len(records))
        try:
            return call.result(), None
        except asyncio.CancelledError as error:
            return [], TimeoutError(f"no answer within {self.calls.timeout}") if is_late else error
        except BaseException as error:
            return [], error


async def _side_by_side(calls: Iterable[Coroutine[Any, Any, Any]], *, to_end: bool = False) -> list[Any]:
    """The results of *calls*. The first error ends the others; *to_end*: errors are among the results."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks, return_exceptions=to_end)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answers_of(fetch: Callable[..., Any], records: Sequence[Any]) -> list[Any]:
    returned = fetch(list(records))
    if not isawaitable(returned):
        raise _Miscounted(f"returned {returned!r:.100} instead of awaiting it: write it as async def")
    try:
        returned = await returned
    except asyncio.TimeoutError as error:  # the builtin one is an OSError, that of Python 3.10 is not
        raise TimeoutError(str(error) or "no answer in time") from error
    if isinstance(returned, str | bytes | Mapping | Set) or not isinstance(returned, Iterable):
        raise _Miscounted(f"returned {returned!r:.100}, which is no list: it must return one answer for each record")
    answers = list(returned)
    if len(answers) != len(records):
        raise _Miscounted(f"returned {len(answers)} answers for {len(records)} records: it must return one for each")
    return answers


class _Miscounted(Exception):
    """The function does not do what it should, on whatever records."""
