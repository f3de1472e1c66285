"""Random histories: one seed always gives the same history.

Producers, and zombies of all their earlier lives, send any request in any order, also those that no client would send:
the model must answer them as a broker does.
"""

from __future__ import annotations

from random import Random

from broker_histories import (
    Add,
    AddPartitions,
    CreateTopic,
    DeleteRecords,
    DeleteTopic,
    Describe,
    End,
    Fence,
    Init,
    Listed,
    Produce,
    Producers,
    Read,
    Step,
)

PRODUCERS = ("a", "b", "c")
IDEMPOTENT = "i"
TOPICS = ("t", "u")
PARTITIONS = 2


def random_history(seed: int, steps: int = 40) -> list[Step]:
    """A history of about *steps* steps that begins with creating topics and ends with reading everything."""
    draw = _Draw(Random(seed))
    history: list[Step] = [CreateTopic(topic, PARTITIONS) for topic in TOPICS]
    history += [Init(producer) for producer in PRODUCERS]
    history += [Init(IDEMPOTENT, transactional=False)]
    while len(history) < steps:
        history += draw.steps()
    for topic in TOPICS:
        for partition in range(PARTITIONS):
            history += [Producers(topic, partition), Read(topic, partition), Read(topic, partition, committed=False)]
    return [*history, *map(Describe, PRODUCERS), Listed()]


class _Draw:
    """Draws steps, knowing only what the producers of the history could know."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._lives = dict.fromkeys(PRODUCERS, 1)
        self._value = 0

    def steps(self) -> list[Step]:
        kinds = (self._produce, self._end, self._zombie, self._init, self._look, self._fence, self._rare)
        return self._random.choices(kinds, weights=(30, 20, 12, 12, 12, 4, 4))[0]()

    def _init(self) -> list[Step]:
        producer = self._producer()
        self._lives[producer] += 1
        return [Init(producer)]

    def _produce(self) -> list[Step]:
        producer = IDEMPOTENT if self._random.random() < 0.1 else self._producer()
        sequence = self._random.choice((0, 1, 2, 5)) if self._random.random() < 0.1 else None
        return [Produce(producer, *self._place(), self._values(), sequence=sequence)]

    def _zombie(self) -> list[Step]:
        producer = self._producer()
        life = -self._random.randint(1, self._lives[producer])
        if self._random.random() < 0.5:
            return [End(producer, commit=self._random.random() < 0.5, life=life)]
        return [Produce(producer, *self._place(), self._values(), life=life, added=self._random.random() < 0.5)]

    def _end(self) -> list[Step]:
        producer = self._producer()
        later = self._random.choice((0, 0, 0, 0, 0, 1, -1))
        of = self._producer() if self._random.random() < 0.1 else None
        end = End(producer, commit=self._random.random() < 0.6, epochs_later=later, of=of)
        return [end] * self._random.choice((1, 1, 2))

    def _fence(self) -> list[Step]:
        return [Fence(self._producer())]

    def _look(self) -> list[Step]:
        place = self._place()
        committed = self._random.random() < 0.6
        looks: list[Step] = [
            Read(*place, offset=self._random.choice((0, 0, 3, 7)), committed=committed),
            Producers(*place),
            Describe(self._producer()),
            Listed(),
        ]
        return [self._random.choice(looks)]

    def _rare(self) -> list[Step]:
        topic, partition = self._place()
        rare: list[list[Step]] = [
            [Add(self._producer(), topic, partition)],
            [DeleteRecords(topic, partition, self._random.choice((-1, 0, 2, 5)))],
            [AddPartitions(topic, PARTITIONS + 1)],
            [DeleteTopic(topic), CreateTopic(topic, PARTITIONS)],
        ]
        return self._random.choice(rare)

    def _producer(self) -> str:
        return self._random.choice(PRODUCERS)

    def _place(self) -> tuple[str, int]:
        return self._random.choice(TOPICS), self._random.randrange(PARTITIONS)

    def _values(self) -> list[str]:
        """Values that are unique in the history."""
        count = self._random.randint(1, 3)
        self._value += count
        return [f"v{number}" for number in range(self._value - count, self._value)]
