"""Classes of messages as protoc generates them from money.proto and order.proto, which imports it."""

from __future__ import annotations

from typing import Any

from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass

_KINDS = {"int64": FieldDescriptorProto.TYPE_INT64, "string": FieldDescriptorProto.TYPE_STRING}


def _message(name: str, *fields: tuple[str, str], nested: tuple[DescriptorProto, ...] = ()) -> DescriptorProto:
    message = DescriptorProto(name=name, nested_type=nested)
    for number, (field, kind) in enumerate(fields, 1):
        described = {"type": _KINDS[kind]} if kind in _KINDS else {"type_name": kind}
        kind_of_message = {} if kind in _KINDS else {"type": FieldDescriptorProto.TYPE_MESSAGE}
        message.field.add(
            name=field, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL, **described, **kind_of_message
        )
    return message


def _file(name: str, imports: list[str], *messages: DescriptorProto) -> None:
    file = FileDescriptorProto(name=name, package="shop", syntax="proto3", dependency=imports, message_type=messages)
    Default().AddSerializedFile(file.SerializeToString())


_file("money.proto", [], _message("Money", ("cents", "int64"), ("currency", "string")))
_file(
    "order.proto",
    ["money.proto", timestamp_pb2.DESCRIPTOR.name],
    _message(
        "Customer",
        ("name", "string"),
        ("address", ".shop.Customer.Address"),
        nested=(_message("Street", ("name", "string")), _message("Address", ("city", "string"))),
    ),
    _message(
        "Order",
        ("id", "int64"),
        ("total", ".shop.Money"),
        ("customer", ".shop.Customer"),
        ("at", ".google.protobuf.Timestamp"),
    ),
)


def _class(name: str) -> Any:
    return GetMessageClass(Default().FindMessageTypeByName(name))


Money, Customer, Address, Order = map(_class, ("shop.Money", "shop.Customer", "shop.Customer.Address", "shop.Order"))
