"""Columns of pgvector's type take lists of floats of their dimensions, and refuse all other records by name."""

from __future__ import annotations

import json
import math
import re
import struct
from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_rows import Database, chunks
from table_rows import entry

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.postgres.store import PostgresStore

EXISTING: dict[str, Any] = {"table": "reviews", "create": False}


class Review(msgspec.Struct):
    id: int
    embedding: list[float] | None


class Frozen(msgspec.Struct):
    id: int
    embedding: tuple[float, ...]


class OfNumbers(msgspec.Struct):
    id: int
    embedding: set[float]


class OfText(msgspec.Struct):
    id: int
    embedding: str


def of(vectors: Database, column: str, type_: Any = Review, **arguments: Any) -> PostgresStore:
    """The store of a table whose embeddings are of the type *column*."""
    vectors.execute(f"CREATE TABLE reviews (id bigint PRIMARY KEY, embedding {column})")
    return vectors.ready(type_, **{**EXISTING, **arguments})


def stored(vectors: Database) -> list[tuple[int, Any]]:
    rows = vectors.execute("SELECT id, embedding::text FROM reviews ORDER BY id")
    return [(id, text and json.loads(text)) for id, text in rows]


def in_bytes(column: str, number: float) -> float:
    """The number as the column has it, which is rounded to four bytes first."""
    formats = ("f", "e") if column.startswith("halfvec") else ("f",)
    for format in formats:
        (number,) = struct.unpack(format, struct.pack(format, number))
    return number


@pytest.mark.parametrize("column", ["vector(3)", "vector", "vector(3) NOT NULL", "halfvec(3)"])
@pytest.mark.parametrize(
    "value",
    [
        [1.0, -2.5, 0.1], (1.0, -2.5, 0.1), [1, -2.5, 0.1], array("d", [1.0, -2.5, 0.1]), array("f", [1.0, -2.5, 0.1]),
        np.array([1.0, -2.5, 0.1]), np.array([1.0, -2.5, 0.1], dtype=np.float32),
    ],
    ids=["list", "tuple", "an int", "array of doubles", "array of floats", "float64", "float32"],
)  # fmt: skip
def test_a_vector_comes_in(vectors: Database, column: str, value: Any) -> None:
    store = of(vectors, column)
    assert store.apply(chunks(store, [Review(1, value)]), entry(1))
    ((id, embedding),) = stored(vectors)
    rounded = in_bytes(column, 0.1)
    assert (id, [in_bytes(column, number) for number in embedding]) == (1, [1.0, -2.5, rounded])


@pytest.mark.parametrize("type_", [Review, Frozen])
def test_upserts_of_vectors(vectors: Database, type_: Any) -> None:
    """The last vector of a key counts, and can be searched."""
    store = of(vectors, "vector(2)", type_, mode="upsert", key="id")
    assert store.apply(chunks(store, [type_(1, (1.0, 2.0)), type_(2, (5.0, 5.0)), type_(1, (3.0, 4.0))]), entry(1))
    assert store.apply(chunks(store, [type_(2, (6.0, 8.0))]), entry(2))
    assert stored(vectors) == [(1, [3, 4]), (2, [6, 8])]
    assert vectors.execute("SELECT id, embedding <-> '[0,0]' FROM reviews ORDER BY 2") == [(1, 5.0), (2, 10.0)]


def test_none_is_null_and_a_domain_is_its_type(vectors: Database) -> None:
    vectors.execute("CREATE DOMAIN embedding AS vector(2) CHECK (vector_dims(VALUE) = 2)")
    store = of(vectors, "embedding")
    assert store.apply(chunks(store, [Review(1, None), Review(2, [1.0, 2.0])]), entry(1))
    assert stored(vectors) == [(1, None), (2, [1, 2])]


IN = '(the column of table "public"."reviews" is vector(3))'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.0, 2.0], f"embedding: [1.0, 2.0] has 2 dimensions, and 3 fit {IN}"),
        (np.zeros(4), "has 4 dimensions, and 3 fit"), ([], "[] has 0 dimensions"),
        ([1.0, math.nan, 2.0], f"embedding: nan is in it, at place 1, which a vector does not hold {IN}"),
        ([1.0, 2.0, -math.inf], "-inf is in it, at place 2"), ([None, 1.0, 2.0], "None is in it, at place 0"),
        (np.array([np.inf, 0, 0], dtype=np.float32), "inf is in it, at place 0"),
        ([0.0, 3.5e38, 0.0], "a number of the size 3.5e+38 is in it, which is out of the column's range"),
        (np.zeros((1, 3)), "embedding: array([[0., 0., 0.]]) is ndarray, not a list"),
        (["a", "b", "c"], "embedding: 'a' is str, not float"), ("abc", "'abc' is str, not a list"),
    ],
)  # fmt: skip
def test_other_records_are_refused_when_they_are_encoded(vectors: Database, value: Any, text: str) -> None:
    store = of(vectors, "vector(3)")
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        store.encoder().encode([Review(0, [1.0, 2.0, 3.0]), Review(1, value)])


@pytest.mark.parametrize(("dimensions", "fits"), [(0, False), (1, True), (16_000, True), (16_001, False)])
def test_a_column_without_dimensions_has_those_of_pgvector(vectors: Database, dimensions: int, fits: bool) -> None:
    store, review = of(vectors, "vector"), Review(1, [0.5] * dimensions)
    if fits:
        assert store.apply(chunks(store, [review]), entry(1))
        assert stored(vectors) == [(1, [0.5] * dimensions)]
    else:
        with pytest.raises(ValueError, match=f"has {dimensions:,} dimensions, and 1 to 16,000 fit"):
            store.encoder().encode([review])


@pytest.mark.parametrize(("type_", "kind"), [(OfText, "str"), (OfNumbers, "list")])
def test_a_type_that_is_no_vector_is_refused_at_the_start(vectors: Database, type_: Any, kind: str) -> None:
    vectors.execute("CREATE TABLE reviews (id bigint, embedding vector(3))")
    with pytest.raises(StoreError, match=rf"its column 'embedding' is vector\(3\), and the field is {kind}"):
        vectors.store(type_, **EXISTING).check()


@pytest.mark.parametrize("column", ["double precision[]", "real[]", "jsonb"])
def test_arrays_go_into_other_columns_of_lists(database: Database, column: str) -> None:
    store = of(database, column)
    given: list[Any] = [np.array([0.5, 2.0], dtype=np.float32), array("d", [1.5])]
    reviews = [Review(id, value) for id, value in enumerate(given, 1)]
    assert store.apply(chunks(store, reviews), entry(1))
    assert database.execute("SELECT * FROM reviews ORDER BY 1") == [(1, [0.5, 2.0]), (2, [1.5])]


def test_a_table_of_the_name_vector_is_no_vector(database: Database) -> None:
    """A composite type may have the name; the rows of `vector` are not those of pgvector."""
    database.execute("CREATE TABLE vector (x real, y real)")
    database.execute("CREATE TABLE reviews (id bigint, embedding vector)")
    with pytest.raises(StoreError, match="its column 'embedding' is vector, and the field is list"):
        database.store(Review, **EXISTING).check()


LARGEST = {
    "vector(3)": math.nextafter(3.4028235677973366e38, 0),
    "halfvec(3)": math.nextafter(65519.998046875, 0),
}
"""The numbers before those that are infinite in four bytes, and in two."""
FLOATS = st.floats() | st.floats(65500, 65540) | st.floats(-1e39, 1e39)


@pytest.mark.parametrize("column", LARGEST)
def test_the_largest_numbers_fit(vectors: Database, column: str) -> None:
    store, largest = of(vectors, column), LARGEST[column]
    store.write(chunks(store, [Review(1, [largest, -largest, 5e-324])]))
    with pytest.raises(ValueError, match="out of the column's range"):
        store.encoder().encode([Review(2, [0.0, 0.0, math.nextafter(largest, math.inf)])])


@pytest.mark.parametrize("column", LARGEST)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(values=st.lists(st.lists(FLOATS, min_size=2, max_size=4), min_size=1, max_size=20))
def test_every_vector_comes_back_or_is_refused(vectors: Database, column: str, values: list[list[float]]) -> None:
    if not vectors.execute("SELECT 1 FROM pg_tables WHERE tablename = 'reviews'"):
        vectors.execute(f"CREATE TABLE reviews (id bigint PRIMARY KEY, embedding {column})")
    vectors.execute("TRUNCATE reviews")
    store = vectors.store(Review, **EXISTING)
    store.check()
    lines, expected = [], []
    for id, value in enumerate(values):
        try:
            lines += store.encoder().encode([Review(id, value)])
            expected.append((id, [in_bytes(column, number) for number in value]))
        except ValueError:
            fits = len(value) == 3 and all(map(math.isfinite, value)) and max(map(abs, value)) <= LARGEST[column]
            assert not fits, value
    store.write([b"".join(lines)])
    store.close()
    found = vectors.execute("SELECT id, embedding::real[] FROM reviews ORDER BY id")
    assert [(id, [in_bytes(column, number) for number in value]) for id, value in found] == expected
