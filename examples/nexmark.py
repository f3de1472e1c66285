"""The queries of the Nexmark benchmark over the events of an auction house, each in a few lines.

    exactlyonce run nexmark:pipeline --bootstrap-servers 127.0.0.1:9092 --parallelism 2
    exactlyonce run nexmark:pipeline --param only=q5,q7 --bootstrap-servers 127.0.0.1:9092

docs/nexmark.md says what each asks, and where its results are other than Flink's SQL gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any

import msgspec
from nexmark_events import Auction, Bid, Person

from exactlyonce import (
    Aggregate,
    Count,
    CountDistinct,
    Emit,
    EventTime,
    First,
    Hopping,
    KafkaSink,
    KafkaSource,
    Max,
    Mean,
    Min,
    Pipeline,
    Session,
    Stream,
    Sum,
    Table,
    Timers,
    TopN,
    Tumbling,
    Windowed,
)

LONG = ("-1h", "1h")
"""Longer than the events that are joined lie apart."""
EURO = Decimal("0.908")
DAY = Tumbling("1d", zone="UTC")


class Inputs:
    """The topics NAME-persons, NAME-auctions, NAME-bids and NAME-side, each read if a query needs it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @cached_property
    def persons(self) -> Stream[Person]:
        return self._source("persons", Person)

    @cached_property
    def auctions(self) -> Stream[Auction]:
        return self._source("auctions", Auction)

    @cached_property
    def bids(self) -> Stream[Bid]:
        return self._source("bids", Bid)

    @cached_property
    def side(self) -> Table[int, str]:
        source = KafkaSource.records(f"{self._pipeline.name}-side", key=int, value=str)
        return self._pipeline.table("side", source)

    def _source(self, of: str, type: Any) -> Stream[Any]:
        topic = f"{self._pipeline.name}-{of}"
        return self._pipeline.source(
            of, KafkaSource(topic, value=type, time=EventTime("at", disorder="4s", ahead=None))
        )


# --- one record at a time -------------------------------------------------------------------------------------------


def q0(of: Inputs) -> Stream[Any]:
    """All bids."""
    return of.bids


class InEuros(msgspec.Struct):
    auction: int
    bidder: int
    price: Decimal
    at: datetime
    kind: str = ""
    count: int = 0


def q1(of: Inputs) -> Stream[Any]:
    """All bids in euros."""
    return of.bids.map(lambda bid: InEuros(bid.auction, bid.bidder, EURO * bid.price, bid.at), output=InEuros)


def q2(of: Inputs) -> Stream[Any]:
    """The bids of some auctions."""
    return of.bids.filter(lambda bid: bid.auction % 123 == 0)


class Minute(msgspec.Struct):
    auction: int
    bidder: int
    price: int
    day: str
    minute: str


def q10(of: Inputs) -> Stream[Any]:
    """All bids with their day and minute."""
    return of.bids.map(
        lambda bid: Minute(bid.auction, bid.bidder, bid.price, f"{bid.at:%Y-%m-%d}", f"{bid.at:%H:%M}"), output=Minute
    )


def kind_of(hour: int) -> str:
    return "day" if 8 <= hour <= 18 else "night" if hour <= 6 or hour >= 20 else "other"


def q14(of: Inputs) -> Stream[Any]:
    """Dear bids in euros, with the kind of the hour, and how often a letter is in a text."""
    dear = of.bids.filter(lambda bid: 1_000_000 < EURO * bid.price < 50_000_000)
    return dear.map(
        lambda bid: InEuros(
            bid.auction, bid.bidder, EURO * bid.price, bid.at, kind_of(bid.at.hour), bid.extra.count("c")
        ),
        output=InEuros,
    )


class Channel(msgspec.Struct):
    auction: int
    bidder: int
    price: int
    channel: str
    id: str


CHANNELS = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}


def channel(bid: Bid) -> Iterator[Channel]:
    known, found = CHANNELS.get(bid.channel.lower()), re.search("channel_id=([^&]*)", bid.url)
    if known or found:
        yield Channel(bid.auction, bid.bidder, bid.price, bid.channel, known or (found[1] if found else ""))


def q21(of: Inputs) -> Stream[Any]:
    """The bids whose channel has an id."""
    return of.bids.flat_map(channel)


class Folders(msgspec.Struct):
    auction: int
    bidder: int
    price: int
    channel: str
    folders: list[str]


def q22(of: Inputs) -> Stream[Any]:
    """The bids with the folders of their address."""
    return of.bids.map(
        lambda bid: Folders(bid.auction, bid.bidder, bid.price, bid.channel, bid.url.split("/")[3:6]), output=Folders
    )


# --- joins ----------------------------------------------------------------------------------------------------------


def q3(of: Inputs) -> Stream[Any]:
    """Sellers of some states with their auctions of one category."""
    sellers = of.persons.filter(lambda person: person.state in ("OR", "ID", "CA")).key_by(lambda person: person.id)
    auctions = of.auctions.filter(lambda auction: auction.category == 10).key_by(lambda auction: auction.seller)
    return sellers.join("q3", auctions, within=LONG)


def q8(of: Inputs) -> Stream[Any]:
    """Persons who open auctions in the 10 s in which they come."""
    window = Tumbling("10s")
    persons = of.persons.key_by(lambda person: person.id).window(window).aggregate("q8-persons", First("name"))
    sellers = of.auctions.key_by(lambda auction: auction.seller).window(window).aggregate("q8-sellers", Count())
    return persons.key_by(lambda new: new.key).join("q8", sellers.key_by(lambda new: new.key), within=("0s", "0s"))


def q13(of: Inputs) -> Stream[Any]:
    """All bids with a value of the side input."""
    return of.bids.key_by(lambda bid: bid.auction % 1_000).lookup("q13", of.side, how="inner")


def q20(of: Inputs) -> Stream[Any]:
    """The bids for auctions of one category, with the auction."""
    auctions = of.auctions.filter(lambda auction: auction.category == 10).key_by(lambda auction: auction.id)
    return of.bids.key_by(lambda bid: bid.auction).join("q20", auctions, within=LONG)


# --- auctions that end ----------------------------------------------------------------------------------------------


class Sold(msgspec.Struct):
    auction: Auction
    bid: Bid


class Open(msgspec.Struct):
    auction: Auction
    bid: Bid | None = None


class Auctioneer:
    """An auction from its begin until it expires: the highest bid wins, the earlier one of equals."""

    def on_record(
        self, id: int, open: Open | None, event: Auction | Bid, timers: Timers, emit: Emit[Sold]
    ) -> Open | None:
        if isinstance(event, Auction):
            timers.event.set(event.expires)
            return Open(event)
        if open is not None and (open.bid is None or event.price > open.bid.price):
            open.bid = event
        return open

    def on_time(self, id: int, open: Open | None, at: datetime, timers: Timers, emit: Emit[Sold]) -> None:
        if open is not None and open.bid is not None:
            emit(Sold(open.auction, open.bid))


def q9(of: Inputs, id: str = "q9") -> Stream[Sold]:
    """The winning bid of each auction, when it ends."""
    both = of.auctions.union(of.bids, id=f"{id}-both")
    return both.key_by(lambda event: event.id if isinstance(event, Auction) else event.auction).process(id, Auctioneer)


class Average(msgspec.Struct):
    of: int
    """A category, or a seller."""
    price: float


class Prices(msgspec.Struct):
    count: int
    sum: int


def averaged(prices: Prices | None, sold: Sold) -> tuple[Prices, Average]:
    now = Prices(prices.count + 1, prices.sum + sold.bid.price) if prices else Prices(1, sold.bid.price)
    return now, Average(sold.auction.category, now.sum / now.count)


def q4(of: Inputs) -> Stream[Any]:
    """The average price of each category: a running one, whose last is the average of all."""
    return q9(of, "q4-sold").key_by(lambda sold: sold.auction.category).stateful_map("q4", averaged)


class LastTen:
    def on_record(
        self, seller: int, prices: list[int] | None, sold: Sold, timers: Timers, emit: Emit[Average]
    ) -> list[int]:
        prices = [*(prices or []), sold.bid.price][-10:]
        emit(Average(seller, sum(prices) / len(prices)))
        return prices


def q6(of: Inputs) -> Stream[Any]:
    """The average price of the last ten auctions of each seller, after each, in the order in which they end."""
    return q9(of, "q6-sold").key_by(lambda sold: sold.auction.seller).process("q6", LastTen)


# --- windows --------------------------------------------------------------------------------------------------------


class Bids(msgspec.Struct):
    auction: int
    count: int


def most(best: list[Bids], counted: Windowed[int, int]) -> list[Bids]:
    new = Bids(counted.key, counted.value)
    if best and best[0].count != new.count:
        return best if best[0].count > new.count else [new]
    return sorted([*best, new], key=lambda bids: bids.auction)


def q5(of: Inputs) -> Stream[Any]:
    """The auctions with the most bids of the last 10 s, every 2 s."""
    counts = of.bids.key_by(lambda bid: bid.auction).window(Hopping("10s", every="2s")).aggregate("q5-counts", Count())
    return counts.key_by(lambda counted: counted.end).window(Tumbling("2s")).fold("q5", list[Bids], most)


def q7(of: Inputs) -> Stream[Any]:
    """The highest bid of each 10 s."""
    window = Tumbling("10s")
    highest = of.bids.key_by(lambda bid: bid.auction).window(window).aggregate("q7-auctions", TopN(1, "price"))
    return highest.key_by(lambda top: top.end).window(window).aggregate("q7", TopN(1, lambda top: top.value[0].price))


def q11(of: Inputs) -> Stream[Any]:
    """The number of bids in each session of a bidder."""
    return of.bids.key_by(lambda bid: bid.bidder).window(Session("10s")).aggregate("q11", Count())


class Every:
    """Counts what comes within ten seconds from the first."""

    def on_record(self, bidder: int, count: int | None, bid: Bid, timers: Timers, emit: Emit[Bids]) -> int:
        if count is None:
            timers.clock.set(timers.clock.now + timedelta(seconds=10))
        return (count or 0) + 1

    def on_clock(self, bidder: int, count: int | None, at: datetime, timers: Timers, emit: Emit[Bids]) -> None:
        emit(Bids(bidder, count or 0))


def q12(of: Inputs) -> Stream[Any]:
    """The number of bids of a bidder within ten seconds by the clock."""
    return of.bids.key_by(lambda bid: bid.bidder).process("q12", Every, order="arrival")


def rank(bid: Bid) -> int:
    return 1 if bid.price < 10_000 else 2 if bid.price < 1_000_000 else 3


class Ranked(msgspec.Struct):
    rank: int
    """0: of all ranks."""
    bid: Bid


def ranked(bid: Bid) -> Iterator[Ranked]:
    yield Ranked(0, bid)
    yield Ranked(rank(bid), bid)


def statistics() -> dict[str, Aggregate[Ranked, Any]]:
    return {
        "bids": Count(),
        "bidders": CountDistinct(lambda ranked: ranked.bid.bidder),
        "auctions": CountDistinct(lambda ranked: ranked.bid.auction),
    }


def minute(ranked: Ranked) -> str:
    return f"{ranked.bid.at:%H:%M}"


def q15(of: Inputs) -> Stream[Any]:
    """Bids, bidders and auctions of each day, of all prices and by their rank."""
    bids = of.bids.flat_map(ranked, id="q15-ranked")
    return bids.key_by(lambda ranked: ranked.rank).window(DAY).aggregate("q15", statistics())


def q16(of: Inputs) -> Stream[Any]:
    """The same for each channel, with the last minute."""
    bids = of.bids.flat_map(ranked, id="q16-ranked")
    by_channel = bids.key_by(lambda ranked: (ranked.bid.channel, ranked.rank))
    return by_channel.window(DAY).aggregate("q16", {"minute": Max(minute), **statistics()})


def q17(of: Inputs) -> Stream[Any]:
    """Bids and prices of each auction and day."""
    return (
        of.bids.key_by(lambda bid: bid.auction)
        .window(DAY)
        .aggregate(
            "q17",
            {
                "bids": Count(),
                "rank1": Sum(lambda bid: rank(bid) == 1, type=int),
                "rank2": Sum(lambda bid: rank(bid) == 2, type=int),
                "rank3": Sum(lambda bid: rank(bid) == 3, type=int),
                "least": Min("price"),
                "most": Max("price"),
                "mean": Mean("price"),
                "sum": Sum("price"),
            },
        )
    )


# --- the last, and the first ten ------------------------------------------------------------------------------------


def q18(of: Inputs) -> Stream[Any]:
    """The last bid of each bidder for an auction: bids in the order of their time, so that the last by key is that."""
    return of.bids.key_by(lambda bid: (bid.bidder, bid.auction)).in_order("q18")


def q19(of: Inputs) -> Stream[Any]:
    """The ten highest bids of each auction and day."""
    return of.bids.key_by(lambda bid: bid.auction).window(DAY).aggregate("q19", TopN(10, "price"))


QUERIES: dict[str, Callable[[Inputs], Stream[Any]]] = {
    query.__name__: query
    for query in (
        q0, q1, q2, q3, q4, q5, q6, q7, q8, q9, q10, q11, q12, q13, q14, q15, q16, q17, q18, q19, q20, q21, q22,
    )
}  # fmt: skip


def pipeline(name: str = "nexmark", only: str = "") -> Pipeline:
    """The inputs to the topics NAME-q0 and so on; *only* some: ``"q5,q7"``."""
    pipeline = Pipeline(name)
    inputs = Inputs(pipeline)
    for query in only.split(",") if only else QUERIES:
        QUERIES[query](inputs).sink(f"{query}-out", KafkaSink(f"{name}-{query}", create_partitions=1))
    return pipeline
