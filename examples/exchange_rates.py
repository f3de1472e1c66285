"""Payments as of exchange rates: each gets the rate that counted when it was made, whenever either arrives.

    exactlyonce run exchange_rates:pipeline --bootstrap-servers 127.0.0.1:9092 --parallelism 2

Rates are a table: the topic has the newest one of each currency, and null ends it. A payment that comes up to an hour
late still gets the rate of then. Payments without a rate go to a topic of their own.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from exactlyonce import Emit, EventTime, Joined, KafkaSink, KafkaSource, Output, Pipeline


class Payment(msgspec.Struct):
    id: int
    currency: str
    amount: float
    at: datetime


class Rate(msgspec.Struct):
    euros: float
    """The price of one unit of the currency."""
    at: datetime


class Priced(msgspec.Struct):
    id: int
    euros: float


unpriced = Output("unpriced", Payment)


def price(joined: Joined[str, Payment, Rate | None], emit: Emit[Priced]) -> None:
    if joined.right is None:
        emit(joined.left, unpriced)
    else:
        emit(Priced(joined.left.id, round(joined.left.amount * joined.right.euros, 2)))


def pipeline(name: str = "exchange") -> Pipeline:
    """Topics NAME-payments and NAME-rates to NAME-priced and NAME-unpriced."""
    pipeline = Pipeline(name)
    payments = pipeline.source(
        "payments", KafkaSource(f"{name}-payments", value=Payment, time=EventTime("at", disorder="10s"))
    )
    rates = pipeline.table(
        "rates", KafkaSource.records(f"{name}-rates", key=str, value=Rate, time=EventTime("at", idle="2s"))
    )
    priced = payments.key_by(lambda payment: payment.currency).as_of("as-of", rates, keep="1h")
    euros = priced.split(price, id="price", outputs=[unpriced])
    euros.sink("priced", KafkaSink(f"{name}-priced"))
    euros.side(unpriced).sink("unpriced", KafkaSink(f"{name}-unpriced"))
    return pipeline
