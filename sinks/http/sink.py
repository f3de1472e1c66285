"""A service over HTTP as a sink: the description. It opens nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlsplit

from exactlyonce.pipeline import shape
from exactlyonce.pipeline.codec import JsonCodec
from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems, write_durations
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.secrets import is_reference, reference_problem
from exactlyonce.pipeline.sink import Sink, StoredRow, StoredRows
from exactlyonce.pipeline.sizes import is_count
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.writer import Opened, WriterContext, codec_problems, holds_keys

T = TypeVar("T")
LANES = 64
"""The most requests at a time. It decides on the numbers of requests, as all in `requests`."""
METHODS = ("POST", "PUT", "PATCH")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")
_SECRET = re.compile(r"auth|cookie|key|password|secret|signature|token", re.IGNORECASE)
_OWN = {"connection", "content-length", "content-type", "host", "idempotency-key", "transfer-encoding"}


def deliveries_topic(pipeline: str, sink: str) -> str:
    """The topic of the ledger of *sink*."""
    return f"{pipeline}.{sink}.deliveries"


def url_problem(url: str) -> str | None:
    """The mistake in an address, without the address, which may hold a password.

    >>> url_problem("https://hooks.example:8443/orders?tenant=7"), url_problem("hooks.example/orders")
    (None, 'it begins with neither http:// nor https://')
    """
    if not url.startswith(("http://", "https://")):
        return "it begins with neither http:// nor https://"
    if not re.fullmatch(r"[\x21-\x7e]+", url):
        return "it has spaces, or letters that are not ASCII: write them in percent"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - it is parsed here
    except ValueError:
        return "it has a host or a port that is none"
    if "@" in parts.netloc:
        return "it has a login in it: give headers={'Authorization': 'env:NAME'} instead"
    if parts.fragment:
        return "it has a fragment (#), which is never sent"
    return None if parts.hostname else "it has no host"


def header_problem(name: str, value: str) -> str | None:
    """The mistake in a header, without its value."""
    if not _HEADER.fullmatch(name):
        return f"{name!r} is no name of a header"
    return None if _VALUE.fullmatch(value) else f"{name} has a line break, or letters that are not ASCII"


@dataclass(frozen=True, eq=False)
class HttpSink(Sink[T], Generic[T]):
    """Sends records to a service over HTTP, as JSON, once their checkpoint is decided, in the order of each key.

    Every request has a header ``Idempotency-Key``, the same on each repeat. A service that remembers it counts each
    record once; one that does not gets some twice after a crash, a timeout or a lost connection.

    - *url*: the address, or a reference to it, as ``env:HOOK_URL``. Redirects are not followed.
    - *key*: a function from the record to its key. A request of a key waits for the answer to the former one. None:
      each request of a subtask waits for the former one.
    - *method*: "POST", "PUT" or "PATCH".
    - *headers*: more headers. Secrets are given by reference, as ``{"Authorization": "env:HOOK_TOKEN"}``.
    - *batch*: the most records of a request; with more than 1 the body is an array.
    - *in_flight*: the most requests at a time, for different keys, up to 64.
    - *timeout*: the longest time of a request.

    A record that the service refuses goes to ``on_error=``, or stops the pipeline.
    """

    url: str
    _: KW_ONLY
    key: Callable[[T], object] | None = None
    method: Literal["POST", "PUT", "PATCH"] = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    batch: int = 1
    in_flight: int = 8
    timeout: Duration = "10s"

    def __post_init__(self) -> None:
        write_durations(self)

    @property
    def transactional(self) -> bool:
        """False: records wait in no Kafka transaction."""
        return False

    @property
    def stages(self) -> bool:
        """True: what is sent cannot be undone, so nothing is sent before its checkpoint is decided."""
        return True

    @property
    def shown(self) -> str:
        """The address without its query, or the reference to it."""
        return self.url if is_reference(self.url) else self.url.partition("?")[0]

    @property
    def timeout_s(self) -> float:
        return duration_ms(self.timeout, "timeout") / 1000

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of address, headers and numbers, and of the type for JSON."""
        if not isinstance(self.url, str):
            yield f"url={self.url!r} must be text"
        elif problem := reference_problem(self.url) if is_reference(self.url) else url_problem(self.url):
            yield f"url= is wrong: {problem}"
        if self.key is not None and not callable(self.key):
            yield f"key={self.key!r} must be a function of the record"
        if self.method not in METHODS:
            yield f"method={self.method!r} must be one of {', '.join(METHODS)}"
        yield from self._header_problems()
        if not is_count(self.batch):
            yield f"batch={self.batch!r} must be 1 or more"
        if not is_count(self.in_flight, most=LANES):
            yield f"in_flight={self.in_flight!r} must be from 1 to {LANES}"
        yield from duration_problems(self.timeout, "timeout")
        if type_ is UNKNOWN:
            return
        if holds_keys(type_):
            yield f"it sends JSON of a type of yours, and the stream is of {shape.type_name(type_)}: map it to a value"
        else:
            yield from codec_problems(JsonCodec, type_)

    def _header_problems(self) -> Iterator[str]:
        if not isinstance(self.headers, Mapping) or not all(
            isinstance(text, str) for pair in self.headers.items() for text in pair
        ):
            yield "headers= must be a dict from names to text"
            return
        for name, value in self.headers.items():
            if name.lower() in _OWN:
                yield f"headers= has {name}, which the sink sets itself"
            elif problem := header_problem(name, value) or reference_problem(value):
                yield f"headers= is wrong: {name}: {problem}"
            elif _SECRET.search(name) and not is_reference(value):
                yield (
                    f"headers= has {name} written out, which may be a secret: put it into a variable, 'env:NAME', or "
                    f"into a file, 'file:/path'"
                )

    def stored_rows(self, type_: Any) -> StoredRows[T]:
        """See `Sink`: the records, of which none replaces another."""

        def rows(records: Sequence[T]) -> list[StoredRow]:
            return [StoredRow(None, record) for record in records]

        return StoredRows(self.shown, "", rows)

    def describe(self, type_: Any) -> dict[str, Any]:
        """What decides on the numbers of requests, and the records' schema. Address and headers may be corrected while
        requests wait."""
        return {"sink": "http", "batch": self.batch, "keyed": self.key is not None, "value": shape.describe(type_)}

    def ledger_of(self, pipeline: str, sink: str) -> str:
        """See `Committer.ledger`."""
        return f"topic {deliveries_topic(pipeline, sink)}"

    def open_committer(self, context: CommitterContext) -> Committer:
        from exactlyonce.sinks.http.committer import HttpCommitter

        return HttpCommitter(context, self)

    def open_writer(self, context: WriterContext) -> Opened:
        """See `Writable`. The service is not asked."""
        from exactlyonce.sinks.http.requests import StagedRows
        from exactlyonce.sinks.write_ahead.writer import RowsWriter

        rows = StagedRows(JsonCodec(context.type), self.key)
        return Opened(RowsWriter(context.sink, context.subtask, context.staging), rows)
