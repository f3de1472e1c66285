"""The address of a server, as it may be written."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

_SERVER = re.compile(r"/?\d*")


def url_problem(url: str) -> str | None:
    """What is wrong with a URL; without the URL, which may hold a password.

    >>> url_problem("redis://cache:6379/0"), url_problem("redis://cache:6379/orders")
    (None, 'it ends with a database that is no number')
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "it has a port or a host that is none"
    if parts.scheme not in ("redis", "rediss", "unix"):
        return "it begins with none of redis://, rediss:// and unix://"
    if parts.scheme == "unix":
        return None if parts.path else "it names no socket"
    if not parts.hostname:
        return "it names no host"
    if "@" in parts.path + parts.query + parts.fragment:
        return "it has an @ behind its host: in a password a / is written %2F, a ? %3F, a # %23 and an @ %40"
    return None if _SERVER.fullmatch(parts.path) else "it ends with a database that is no number"


def has_password(url: str) -> bool:
    """Whether a URL that has no problem has a password in it.

    >>> has_password("redis://:hunter2@cache:6379/0"), has_password("redis://ann@cache:6379/0")
    (True, False)
    """
    parts = urlsplit(url)
    return bool(parts.password) or any("password" in name for name, _ in parse_qsl(parts.query))
