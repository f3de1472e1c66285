"""The records of `orders.py` as messages of Protobuf, of classes as protoc generates them."""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from orders import Order, Total

_KINDS = {int: FieldDescriptorProto.TYPE_INT64, str: FieldDescriptorProto.TYPE_STRING}


def _message(struct: type[Any]) -> DescriptorProto:
    fields = [
        FieldDescriptorProto(
            name=field.name, number=number, type=_KINDS[field.type], label=FieldDescriptorProto.LABEL_OPTIONAL
        )
        for number, field in enumerate(msgspec.structs.fields(struct), 1)
    ]
    return DescriptorProto(name=f"{struct.__name__}Message", field=fields)


_FILE = FileDescriptorProto(
    name="orders.proto", package="bench", syntax="proto3", message_type=[_message(Order), _message(Total)]
)
Default().AddSerializedFile(_FILE.SerializeToString())

OrderMessage: Any = GetMessageClass(Default().FindMessageTypeByName("bench.OrderMessage"))
TotalMessage: Any = GetMessageClass(Default().FindMessageTypeByName("bench.TotalMessage"))


def order_of(message: Any) -> Order:
    """The order of a message, which can go to another process."""
    return Order(message.id, message.customer, message.total, message.ts)


def message_of(total: Total) -> Any:
    """The message of a total."""
    return TotalMessage(customer=total.customer, sum=total.sum, ts=total.ts)
