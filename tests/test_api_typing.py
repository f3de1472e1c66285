"""The public API as a type checker sees it."""

from __future__ import annotations

from pathlib import Path

from mypy import api

HERE = Path(__file__).parent


def test_strict_mypy_accepts_what_it_must_and_refuses_what_it_must() -> None:
    """mypy --strict infers the types of typed_accepted.py, and refuses each marked line of typed_refused.py."""
    files = [str(HERE / "pipeline" / name) for name in ("typed_accepted.py", "typed_refused.py")]
    output, errors, code = api.run(["--config-file", str(HERE.parent / "pyproject.toml"), "--strict", *files])
    assert code == 0, output + errors
