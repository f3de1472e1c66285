"""The visits of each page in each minute, by the times in the visits; those that come too late are set aside."""

from datetime import datetime

import msgspec

from exactlyonce import Count, EventTime, KafkaSink, KafkaSource, Output, Pipeline, Tumbling, Windowed


class Visit(msgspec.Struct):
    page: str
    at: datetime


class Visits(msgspec.Struct):
    page: str
    minute: datetime
    count: int


def visits_of(counted: Windowed[str, int]) -> Visits:
    return Visits(counted.key, counted.start, counted.value)


late = Output("late", Visit)
pipeline = Pipeline("visits-by-minute")
visits = pipeline.source("visits", KafkaSource("visits", value=Visit, time=EventTime("at", disorder="10s")))
counts = visits.key_by(lambda visit: visit.page).window(Tumbling("1m")).aggregate("counts", Count(), late=late)
counts.map(visits_of).sink("out", KafkaSink("visits-by-minute", key=lambda visits: visits.page))
counts.side(late).sink("late", KafkaSink("late-visits"))
