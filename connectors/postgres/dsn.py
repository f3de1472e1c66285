"""Connection strings of libpq, as far as descriptions look at them."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"password\s*=|://[^/@]*:[^@]*@", re.IGNORECASE)
"""Also one with a / that is not escaped."""


def has_password(dsn: str) -> bool:
    """Whether a password is written out in *dsn*.

    >>> has_password("postgresql://ann:secret@db/shop"), has_password("host=db user=ann")
    (True, False)
    """
    return _PASSWORD.search(dsn) is not None
