"""The description of a MySQL sink: what is wrong with it, what it is, and that no secret shows."""

from __future__ import annotations

from typing import Any

import pytest
from table_rows import Total

from exactlyonce.connectors.mysql.address import MySQLAddress
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.sinks import MySQLSink

SECRET = "hunter2"
DSN = f"mysql://shop:{SECRET}@db:3306/shop"


def problems(type_: Any = Total, table: Any = "totals", **arguments: Any) -> str:
    return "; ".join(MySQLSink(table, **{"dsn": "env:ORDERS_DSN", **arguments}).problems(type_))


def test_what_is_right_has_no_problems() -> None:
    assert problems() + problems(mode="upsert", key=("customer",)) + problems(mode="delete", key=("customer",)) == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"table": ""}, "table='' must be a name"),
        ({"table": "a.b"}, "must not have a dot"),
        ({"table": "x" * 65}, "is longer than MySQL's names, of 64 characters"),
        ({"table": "a\0b"}, "has characters that MySQL's names cannot have"),
        ({"dsn": ""}, "dsn= is not set"),
        ({"dsn": "postgresql://a:b@c/d"}, "The dsn is not of the form mysql://"),
        ({"dsn": DSN}, "dsn= has a password written out: put all of it into a variable, dsn='env:NAME'"),
        ({"mode": "merge"}, "mode='merge' must be one of 'append', 'upsert', 'delete'"),
        ({"key": ("customer",)}, "mode='append' inserts every record"),
        ({"mode": "upsert"}, "needs the columns by which it finds a row"),
        ({"mode": "upsert", "key": ("name",)}, "key= names 'name', and Total has customer, cents"),
        ({"create": 1}, "create=1 must be True or False"),
        ({"commit": "xa"}, "commit='xa' must be 'write_ahead', as it is by itself: rows wait in the checkpoint topic"),
        ({"type_": int}, "int has no fields to be columns"),
    ],
)
def test_problems_say_what_to_do(arguments: dict[str, Any], said: str) -> None:
    assert said in problems(**arguments)


def test_it_is_its_table_and_columns() -> None:
    """Neither the server nor the password belongs to the description."""
    sink = MySQLSink[Total]("totals", dsn=DSN, mode="upsert", key=("customer",))
    columns = [["customer", "str"], ["cents", "int"]]
    described = {"sink": "mysql", "table": "totals", "mode": "upsert", "key": ["customer"], "columns": columns}
    assert sink.describe(Total) == described


def test_no_secret_shows() -> None:
    assert SECRET not in repr(MySQLSink("totals", dsn=DSN)) + repr(MySQLAddress.parse(DSN))
    assert "dsn='env:ORDERS_DSN'" in repr(MySQLSink("totals", dsn="env:ORDERS_DSN"))


def test_a_dsn_is_looked_up_when_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    sink = MySQLSink[Total]("totals", dsn="env:ORDERS_DSN")
    monkeypatch.delenv("ORDERS_DSN", raising=False)
    with pytest.raises(ConfigError, match="dsn is env:ORDERS_DSN, but the environment has no variable ORDERS_DSN"):
        sink.address()
    monkeypatch.setenv("ORDERS_DSN", DSN)
    assert sink.address().password == SECRET
    (tmp_path / "dsn").write_text("mysql://u:p%40%2F%C3%A9@[::1]:33/my%20shop\n")
    found = MySQLSink[Total]("totals", dsn=f"file:{tmp_path / 'dsn'}").address()
    assert (found.host, found.port, found.password, found.database) == ("::1", 33, "p@/é", "my shop")
    assert found.arguments()["password"] == "p@/é".encode()


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("mysql://u:hunter2@db:x1/shop", "is no URL"),
        ("mysql://u:hunt/er2@db/shop", "is no URL"),
        ("mysql://u:hunt#hunter2@db/shop", "is no URL"),
        ("mysql://u:hunter2@db", "names no database"),
        ("mysql://u:hunter2@db/a/b", "names no database"),
        ("mysql://:hunter2@db/shop", "is not of the form"),
        ("mysql://u:hunter2@db/shop?hunter2=1", "has 1 option(s) that are not known. Known are ssl_mode"),
        ("mysql://u:hunter2@db/shop?ssl_mode=maybe", "must be one of disabled, preferred, required"),
        ("mysql://u:hunter2@db/shop?ssl_key=k", "Add ssl_cert"),
        ("mysql://u:hunter2@db/shop?ssl_ca=c&ssl_mode=disabled", "Use verify_identity"),
    ],
)
def test_a_wrong_dsn_is_not_repeated(dsn: str, said: str) -> None:
    """A password may be anywhere in it."""
    with pytest.raises(ConfigError) as raised:
        MySQLAddress.parse(dsn)
    assert said in str(raised.value)
    assert "hunt" not in str(raised.value) + repr(raised.value.__cause__)


def test_tls_is_verified_where_an_authority_is_named(tmp_path: Any) -> None:
    """The default with ssl_ca is verify_identity; a certificate that cannot be read is a wrong setting."""
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        MySQLAddress.parse(f"{DSN}?ssl_ca={tmp_path}/none.pem").arguments()
    context = MySQLAddress.parse(f"{DSN}?ssl_mode=verify_identity").arguments()["ssl"]
    assert context.check_hostname
    assert not MySQLAddress.parse(f"{DSN}?ssl_mode=required").arguments()["ssl"].check_hostname
    assert MySQLAddress.parse(f"{DSN}?ssl_mode=disabled").arguments()["ssl_disabled"]
