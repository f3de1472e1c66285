"""Events of an auction house as the Nexmark benchmark has them: persons, auctions and bids, from event numbers alone.

Event *n* is the same in every run. Of 50 events one is a person, three are auctions and 46 bids; an event comes every
10 ms, and up to ten of them out of order. Auctions and bidders that are hot get most of the bids. Bids and auctions may
name an auction or a seller that comes a little later.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from random import Random

import msgspec

BEGIN = datetime(2015, 7, 14, 23, 59, 30, tzinfo=timezone.utc)
"""Midnight comes soon, for the queries by day."""
PERSONS, AUCTIONS, EVENTS = 1, 3, 50
"""Of so many events each."""
STEP_MS, GROUP = 10, 10
"""The time between two events, and how many of them are out of order among each other."""
FIRST, FIRST_CATEGORY = 1_000, 10
HOT, LEAD, ACTIVE_PERSONS, OPEN_AUCTIONS = 100, 10, 1_000, 100
SLOTS = 400
"""No two auctions expire in one millisecond, so that "the last ten" are clear."""
SIDE = 1_000
"""The number of keys of the side input."""


class Person(msgspec.Struct, tag=True):
    id: int
    name: str
    email: str
    city: str
    state: str
    at: datetime


class Auction(msgspec.Struct, tag=True):
    id: int
    item: str
    initial: int
    reserve: int
    at: datetime
    expires: datetime
    seller: int
    category: int


class Bid(msgspec.Struct, tag=True):
    auction: int
    bidder: int
    price: int
    """Cents."""
    channel: str
    url: str
    at: datetime
    extra: str


Event = Person | Auction | Bid


def events(first: int, last: int) -> Iterator[Event]:
    """Events *first* to *last*, without the last, in the order in which they come."""
    for number in range(first, last):
        group, place = divmod(number, GROUP)
        yield event(group * GROUP + place * 7 % GROUP)


def event(number: int) -> Event:
    """Event *number* by its time."""
    chance, at = Random(number), BEGIN + timedelta(milliseconds=STEP_MS * number)
    epoch, place = divmod(number, EVENTS)
    last_person = epoch
    if place < PERSONS:
        name = f"{chance.choice(FIRST_NAMES)} {chance.choice(LAST_NAMES)}"
        city, state = chance.choice(CITIES), chance.choice(STATES)
        return Person(FIRST + last_person, name, f"{_letters(chance, 7)}@{_letters(chance, 5)}.com", city, state, at)
    last_auction = epoch * AUCTIONS + min(place - PERSONS, AUCTIONS - 1)
    if place < PERSONS + AUCTIONS:
        initial = _price(chance)
        length_ms = chance.randrange(2 * STEP_MS * OPEN_AUCTIONS * EVENTS // AUCTIONS)
        expires_ms = (STEP_MS * number + length_ms) // SLOTS * SLOTS + SLOTS + last_auction % SLOTS
        expires = BEGIN + timedelta(milliseconds=expires_ms)
        return Auction(
            FIRST + last_auction, _letters(chance, 20), initial, initial + _price(chance), at, expires,
            FIRST + (last_person // HOT * HOT if chance.randrange(4) else _person(chance, last_person)),
            FIRST_CATEGORY + chance.randrange(5),
        )  # fmt: skip
    near = max(last_auction - OPEN_AUCTIONS, 0)
    auction = last_auction // HOT * HOT if chance.randrange(2) else chance.randrange(near, last_auction + 1 + LEAD)
    bidder = last_person // HOT * HOT + 1 if chance.randrange(4) else _person(chance, last_person)
    url = f"https://www.nexmark.com/{_letters(chance, 5)}/{_letters(chance, 5)}/{_letters(chance, 5)}/item.htm?query=1"
    channel = chance.choice(HOT_CHANNELS) if chance.randrange(2) else f"channel-{chance.randrange(10_000)}"
    if channel not in HOT_CHANNELS and chance.randrange(10):
        url += f"&channel_id={chance.randrange(1 << 31)}"
    return Bid(FIRST + auction, FIRST + bidder, _price(chance), channel, url, at, _letters(chance, 30))


def side_input() -> Iterator[tuple[int, str]]:
    return ((key, f"value-{key}") for key in range(SIDE))


STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = ("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent")
FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")


def _letters(chance: Random, length: int) -> str:
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=length))


def _price(chance: Random) -> int:
    return round(10 ** (chance.random() * 6) * 100)


def _person(chance: Random, last: int) -> int:
    active = min(last + 1, ACTIVE_PERSONS)
    return last + 1 - active + chance.randrange(active + LEAD)
