"""Payments by card: a small one with which a thief tries the card, then a large one within a minute, is an alert.

    exactlyonce run fraud:pipeline --bootstrap-servers 127.0.0.1:9092

Payments and timers come in order of their own time, so alerts are a function of the topic: in whatever order payments
arrive, whatever is killed, each alert comes once. A few lines of SQL over the topic find the same.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from exactlyonce import Emit, EventTime, KafkaSink, KafkaSource, Output, Pipeline, Timers

SMALL, LARGE = 100, 50_000
"""Cents: at most, and at least."""
MINUTE = timedelta(minutes=1)


class Payment(msgspec.Struct):
    """A payment by a card."""

    id: int
    card: str
    at: datetime
    cents: int


class Alert(msgspec.Struct):
    """The ids of a small payment, and of the large one right after it."""

    card: str
    small: int
    large: int


class Probe(msgspec.Struct):
    """A small payment that nothing followed for a minute."""

    card: str
    small: int
    until: datetime


probes, late = Output("probes", Probe), Output("late", Payment)


class Detector:
    """The state of a card is its last payment, if that is small and less than a minute ago."""

    def on_record(
        self, card: str, small: Payment | None, payment: Payment, timers: Timers, emit: Emit[Alert]
    ) -> Payment | None:
        """A payment: the minute of the one before it ends."""
        if small is not None:
            timers.event.delete(small.at + MINUTE)
            if payment.cents >= LARGE:
                emit(Alert(card, small.id, payment.id))
        if payment.cents > SMALL:
            return None
        timers.event.set(payment.at + MINUTE)
        return payment

    def on_time(self, card: str, small: Payment | None, at: datetime, timers: Timers, emit: Emit[Alert]) -> None:
        """The minute after a small payment is over."""
        if small is not None:
            emit(Probe(card, small.id, at), probes)


def pipeline(name: str = "fraud") -> Pipeline:
    """Topic NAME-payments to NAME-alerts, NAME-probes and NAME-late."""
    pipeline = Pipeline(name)
    source = KafkaSource(f"{name}-payments", value=Payment, time=EventTime("at", disorder="2s", idle="1m"))
    payments = pipeline.source("payments", source).key_by(lambda payment: payment.card)
    alerts = payments.process("detector", Detector, outputs=[probes], late=late)
    alerts.sink("alerts", KafkaSink(f"{name}-alerts", key=lambda alert: alert.card))
    alerts.side(probes).sink("probes", KafkaSink(f"{name}-probes", key=lambda probe: probe.card))
    alerts.side(late).sink("late", KafkaSink(f"{name}-late", key=lambda payment: payment.card))
    return pipeline
