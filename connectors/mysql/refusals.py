"""The errors of the driver as ours. A number that is not listed is a `StoreError`."""

from __future__ import annotations

import ssl

import pymysql

from exactlyonce.connectors import refusals
from exactlyonce.connectors.mysql.address import MySQLAddress
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable

LOST = frozenset((0, 2006, 2013, 2055, 4031))
"""The connection is gone; 0 is the driver's own, for one that it has closed."""
CANNOT_CONNECT = frozenset((2002, 2003, 2005))
_AWAY = {
    **dict.fromkeys((1040, 1203, 1226), "has no connection left for this user; it takes more once others close theirs"),
    **dict.fromkeys((1053, 1079), "is shutting down"),
    **dict.fromkeys((1152, 1158, 1159, 1160, 1161, 1184, 1927), "has ended the connection"),
    1205: "waited too long for a lock; another transaction holds it, or an ALTER TABLE is under way",
    **dict.fromkeys((1206, 1213, 1020, 1637), "has chosen this transaction to break a deadlock, and rolled it back"),
    **dict.fromkeys((1317, 1969, 3024), "was told to end the statement, by KILL or by its max_statement_time"),
    **dict.fromkeys((1021, 1114), "has no room left: make some on its disk, or lift the limit of its tablespace"),
    **dict.fromkeys((1037, 1038, 1041, 1135, 5), "is out of memory"),
    **dict.fromkeys(
        (1290, 1836, 1792, 3707),
        "is read-only: a failover is under way, or the dsn names a replica, or somebody set it so",
    ),
    **dict.fromkeys((1043, 1047, 1156, 1180, 2012, 2027, 3100, 3101, 4024), "cannot answer at present"),
}
_NO_ROOM = ("errno: 28", "error 28", "No space left", "errno: 122", "error 122")
_HOW = {
    1044: "Grant the user its rights: GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON {database}.* TO ...",
    1045: "User or password of the dsn are wrong, or the user may not connect from this host. Correct one of them.",
    1049: "Create the database, or correct the dsn: CREATE DATABASE {database}",
    1054: "The table has been changed during the run. Add the column again, or run the pipeline again.",
    1062: "A unique key of the table forbids the row. Use mode='upsert' with that key, or remove the other row.",
    1129: "Too many failed connections from this host: FLUSH HOSTS on the server.",
    1130: "Let the user connect from this host: CREATE USER ... @'<this host>'",
    1142: "Grant the missing right: GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO ...",
    1143: "Grant the missing right: GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO ...",
    1146: "Create the table, or give the sink create=True.",
    1153: "Raise max_allowed_packet of the server: it is lower than when the rows were encoded.",
    1227: "Grant the user the right that is named.",
    1665: "READ COMMITTED needs binlog_format ROW or MIXED: set it in the server's configuration.",
    2026: "Use a server with TLS, or ssl_mode=disabled in the dsn.",
}
_VALUE = frozenset((1048, 1216, 1264, 1265, 1292, 1364, 1366, 1406, 1452, 1690, 3140, 3819, 4025))
_ALTER = "The table has changed since the rows were encoded, or a constraint forbids them: ALTER TABLE, then run again."


def number_of(error: pymysql.MySQLError) -> int:
    """The server's number of an error, the driver's without a server, else -1."""
    return error.args[0] if error.args and isinstance(error.args[0], int) else -1


def timed_out(error: pymysql.MySQLError) -> bool:
    """Whether our time limit ended the wait for an answer."""
    return isinstance(error.__context__, TimeoutError) or isinstance(
        getattr(error, "original_exception", None), TimeoutError
    )


def as_ours(error: pymysql.MySQLError, address: MySQLAddress, timeout_s: float) -> StoreError | StoreUnavailable:
    """The error to raise, with the server's words, without the password."""
    number, message = number_of(error), address.redact(str(error.args[-1] if error.args else error)).rstrip(".")
    server, message = f"MySQL at {address.place}", f"{message} ({number})"
    if number in LOST | CANNOT_CONNECT:
        return _without_answer(error, server, message, timeout_s)
    if any(sign in message for sign in _NO_ROOM):
        number = 1021
    if number in _AWAY:
        return refusals.passing(server, f"it {_AWAY[number]}", message)
    how = _HOW.get(number) or (_ALTER if number in _VALUE else "Correct it, then run again; nothing is lost.")
    return refusals.refused(server, message, how.format(database=address.database))


def _without_answer(
    error: pymysql.MySQLError, server: str, message: str, timeout_s: float
) -> StoreError | StoreUnavailable:
    cause = getattr(error, "original_exception", None)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return StoreError(
            f"The certificate of {server} is not trusted: {cause.verify_message}. "
            f"Name its authority by ssl_ca in the dsn."
        )
    if timed_out(error):
        return refusals.silent(server, timeout_s)
    return (refusals.unreachable if number_of(error) in CANNOT_CONNECT else refusals.cut_off)(server, message)
