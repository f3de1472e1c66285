"""JSON Schemas of types."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exactlyonce import JsonSchemaCodec
from exactlyonce.pipeline.shape import UnsupportedType


class Item(msgspec.Struct):
    sku: str


class Order(msgspec.Struct):
    id: int
    items: list[Item] = []


class Tree(msgspec.Struct):
    children: list[Tree] = []


class Unwritable:
    pass


ITEM = {"title": "Item", "type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]}
CHILDREN = {"children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "default": []}}


@pytest.mark.parametrize(
    ("type_", "title", "properties", "definitions"),
    [
        (Item, "Item", ITEM["properties"], None),
        (
            Order,
            "Order",
            {"id": {"type": "integer"}, "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "default": []}},
            {"Item": ITEM},
        ),
        (Tree, "Tree", CHILDREN, {"Tree": {"title": "Tree", "type": "object", "properties": CHILDREN, "required": []}}),
    ],
)
def test_a_record_is_at_the_top_of_its_schema(type_: Any, title: str, properties: Any, definitions: Any) -> None:
    schema = JsonSchemaCodec(type_).schema
    assert (schema["title"], schema["properties"], schema.get("$defs")) == (title, properties, definitions)


def test_values_are_plain_json_without_a_registry() -> None:
    codec = JsonSchemaCodec(Order)
    assert codec.encode(Order(7)) == b'{"id":7,"items":[]}'
    assert codec.decode(b'{"id":7}') == Order(7)
    assert codec.record_name == "Order"
    assert JsonSchemaCodec(int).record_name == "int"
    assert codec.describe() == {"codec": "json-schema", "schema": codec.schema}


def test_a_type_without_a_schema_needs_one() -> None:
    with pytest.raises(UnsupportedType, match="Unwritable"):
        JsonSchemaCodec(Unwritable)
    assert JsonSchemaCodec(dict[str, int], {"title": "shop.Counts"}).record_name == "shop.Counts"
