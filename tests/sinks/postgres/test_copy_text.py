"""Marks of lines, without a server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.sinks.postgres.copy_text import unmarked

MARK = b"ab01ab01"


def counted(chunk: bytes) -> bool:
    lines = chunk.splitlines(keepends=True)
    return all(line.startswith(MARK) and line.endswith(b"\n") for line in lines)


@given(st.lists(st.sampled_from([b"", b"\n", b"1\t2", MARK, b"ab01", b"\n" + MARK, MARK + b"x\n"]), max_size=12))
def test_a_chunk_gives_its_lines_if_all_are_marked(parts: list[bytes]) -> None:
    """Each line loses one mark, however much its text looks like one; a line without a mark, or an end, is refused."""
    chunk = b"".join(parts)
    expected = b"".join(line.removeprefix(MARK) for line in chunk.splitlines(keepends=True)) if counted(chunk) else None
    assert unmarked(chunk, MARK) == expected
