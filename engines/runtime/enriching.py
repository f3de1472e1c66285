"""The operator of `Stream.enrich`: it calls a service for each batch, and waits for all answers.

Invariants: no call is under way between two batches, so a cut has none, and records, watermarks and barriers keep their
order. The answers are noted before they are passed on; a replay takes the noted ones.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from exactlyonce.engines.runtime.activity import BREATH_INTERVAL_S
from exactlyonce.engines.runtime.answers import AnswerCodec, Answers, FetchFailed
from exactlyonce.engines.runtime.batch import Batch, shown_origin
from exactlyonce.engines.runtime.operators import BatchOperator, facts_of, or_skip
from exactlyonce.engines.runtime.outage import is_outage
from exactlyonce.engines.runtime.users_code import place_of
from exactlyonce.pipeline.enrich import Calls, Enriched
from exactlyonce.pipeline.errors import RecordError, text_of
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.schema import type_name

PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 5.0
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
    """A call failed for good, of records from *place* on, with the error that is its cause."""

    def __init__(self, place: int, error: BaseException) -> None:
        super().__init__(place)
        self.place, self.error = place, error


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
        return self._wrong(batch, place, f"gave an answer that is no {name}, or cannot be kept as one: {error}")

    def _wrong(self, batch: Batch, place: int, what: str) -> RecordError:
        origin = batch.origins[place]
        return RecordError(
            f"Operator {self.id!r} {what.removesuffix('.')}. That was for {shown_origin(origin)}. The job has stopped "
            f"before it; nothing is lost. Fix the function, and run again{or_skip(origin)}.",
            **facts_of(self.id, origin),
        )

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
                raise self._wrong(batch, failed.place, str(failed.error)) from None
            raise self.error(batch.origins[failed.place], failed.error) from failed.error
        return answers

    async def _all(self, fetch: Callable[[list[Any]], Any], records: Sequence[Any]) -> list[Any]:
        size, answers = self.calls.batch, [None] * len(records)
        free = asyncio.Semaphore(max(1, self.calls.in_flight // size))

        async def one(start: int) -> None:
            async with free:
                end = min(start + size, len(records))
                answers[start:end] = await self._answers(fetch, records[start:end], start)

        tasks = [asyncio.ensure_future(one(start)) for start in range(0, len(records), size)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return answers

    async def _answers(self, fetch: Callable[..., Any], records: Sequence[Any], place: int) -> list[Any]:
        """The answers for *records*, from *place* on. A call that fails for good is made again for each record alone,
        which shows the records that make it fail; not so if that is an outage."""
        pause_s = PAUSE_MIN_S
        for attempt in range(self.calls.retries + 1):
            answers, failure = await self._outcome(fetch, records)
            if failure is None:
                return answers
            if isinstance(failure, _Miscounted):
                raise _Failed(place, failure)
            if attempt < self.calls.retries:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
        if len(records) > 1 and not is_outage(failure):
            alone = [await self._answers(fetch, [record], place + number) for number, record in enumerate(records)]
            return [answer for (answer,) in alone]
        if not self.survives(failure):
            raise _Failed(place, failure)
        return [FetchFailed(type(failure).__name__, f"{text_of(failure)}{place_of(failure)}")]

    async def _outcome(self, fetch: Callable[..., Any], records: Sequence[Any]) -> tuple[list[Any], Any]:
        """The answers and None, or the error, as a value: a `CancelledError` of the function is none of ours."""
        call = asyncio.ensure_future(_answers_of(fetch, records))
        try:
            await asyncio.wait([call], timeout=self.calls.timeout_s)
            is_late = not call.done()
        finally:
            call.cancel()
            await asyncio.wait([call])
        try:
            return call.result(), None
        except asyncio.CancelledError as error:
            return [], TimeoutError(f"no answer within {self.calls.timeout}") if is_late else error
        except BaseException as error:
            return [], error


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
