"""Every flight out of New York, counted: flights, cancellations and minutes of delay per carrier and hour of the day.

Each flight gives one update, so that the output shows whether any flight was missed or counted twice.
"""

import msgspec

from exactlyonce import KafkaSink, KafkaSource, Pipeline


class Flight(msgspec.Struct):
    carrier: str
    hour: int
    dep_delay: int | None
    """Minutes; None: cancelled."""


class Totals(msgspec.Struct, frozen=True):
    flights: int = 0
    cancelled: int = 0
    delay_minutes: int = 0


class Update(msgspec.Struct):
    carrier: str
    hour: int
    totals: Totals


def count(totals: Totals | None, flight: Flight) -> tuple[Totals, Update]:
    before = totals or Totals()
    after = Totals(
        before.flights + 1,
        before.cancelled + (flight.dep_delay is None),
        before.delay_minutes + (flight.dep_delay or 0),
    )
    return after, Update(flight.carrier, flight.hour, after)


pipeline = Pipeline("flights")
(
    pipeline.source("flights", KafkaSource("flights", value=Flight))
    .key_by(lambda flight: (flight.carrier, flight.hour))
    .stateful_map("totals", count)
    .sink("updates", KafkaSink("flight-totals", key=lambda update: f"{update.carrier}-{update.hour}"))
)
