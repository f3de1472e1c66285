"""The repository tests its own text: names, links, the map, and what must not stand in it. Arrows: `make lint`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))

BANNED_MODULES = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}
BANNED = {
    r"/(root|home/\w+|Users/\w+|work)/": "a path of one machine; make it relative, or take it from the environment",
    r"repo1?\.maven|registry-\d|docker\.io/|quay\.io|ghcr\.io|pypi\.org|pythonhosted": "a registry; tools know theirs",
    r"\b(TODO|FIXME|XXX|HACK)\b": "do it, or say in an issue what is left",
    r"(?i)\b(claude|anthropic|openai|chatgpt|copilot|llms?|ai (tool|assistant|agent)s?)\b": "not of the project",
    r"[ \t]$": "no blanks at the end of a line",
}
HOMELY = {
    r"misfortunes?": "a fault",
    r"(im)?patien(t|ce)": "a timeout, a limit, or how often something is retried",
    r"strays?": "an orphan",
    r"losers?": "a failed attempt, or the other one",
    r"obituar(y|ies)": "how a process ended",
    r"mend(s|ed|ing)?": "fix, or repair",
    r"deal(t|s|ing)? (\w+ )?out": "distribute",
    r"pass(ed|es|ing)? over": "skip",
    r"for ever": "permanently, always, or without end",
}
"""The field's words, by the homely one."""
BANNED_IN_PYTHON = {
    r"# noqa(?!: [A-Z0-9, ]+\S* - \S)": "say why, after the rule",
    r"# type: ignore(?!\[[\w, -]+\]  # \S)": "say why, in a comment after it",
}
BANNED_OUTSIDE_OF_TESTS = {
    r"(?<![\w.])(eval|exec|__import__)\(": "data cannot become code",
    r"^\s*(from|import) (\w+, )*(c?[Pp]ickle|dill|cloudpickle|marshal|shelve|jsonpickle|yaml)\b": "encode with msgspec",
}
COMPILES = Path("pipeline/avro.py")
"""It compiles templates; no name or value of a schema is in them."""
NOT_WORDED_HERE = {Path("LICENSE"), Path(__file__).relative_to(ROOT)}
REFUSED = Path("tests/pipeline/typed_refused.py")
"""Every ignored line of it is one that the type checker must refuse."""


@pytest.fixture(scope="module")
def texts(repository: list[Path]) -> dict[Path, str]:
    written = [path for path in repository if (ROOT / path).is_file() and path.suffix not in (".gif", ".png")]
    return {path: (ROOT / path).read_text() for path in written}


def test_modules_are_named_after_what_is_in_them(repository: list[Path]) -> None:
    assert [path for path in repository if BANNED_MODULES & {*path.parent.parts, path.stem}] == []


def test_nothing_banned_stands_in_the_text(texts: dict[Path, str]) -> None:
    everywhere = {path: text for path, text in texts.items() if path not in NOT_WORDED_HERE}
    python = {path: text for path, text in everywhere.items() if path.suffix == ".py" and path != REFUSED}
    shipped = {path: text for path, text in python.items() if path.parts[0] != "tests"}
    shipped[COMPILES] = shipped[COMPILES].replace('exec("\\n".join(lines), namespace)', "", 1)
    words = {rf"(?i)(?<![a-z])({'|'.join(HOMELY)})(?![a-z])": "a homely word: HOMELY has the field's"}
    assert found(BANNED | words, everywhere) == []
    assert found(BANNED_IN_PYTHON, python) == []
    assert found(BANNED_OUTSIDE_OF_TESTS, shipped) == []


def found(banned: dict[str, str], texts: dict[Path, str]) -> list[str]:
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0].strip()!r}: {reason}"
        for pattern, reason in banned.items()
        for path, text in texts.items()
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]


def test_modules_say_what_they_are(texts: dict[Path, str]) -> None:
    modules = {path: text for path, text in texts.items() if path.suffix == ".py"}
    assert [path for path, text in modules.items() if text and not re.match(r'(#.*\n)*r?"""\S', text)] == []


def test_every_package_has_a_door_plate(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        if path.name == "__init__.py" and path.parts[0] in PACKAGES:
            plate = text.split('"""')[1]
            rooms = [other.parent.name for other in (ROOT / path.parent).glob("*/__init__.py")]
            assert "import" in plate, path
            assert [room for room in rooms if not re.search(rf"\b{room}/", plate)] == [], path


def test_links_are_alive(texts: dict[Path, str]) -> None:
    wrong = [
        f"{path}: {link}"
        for path, text in texts.items()
        for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(text) if path.suffix == ".md" else "")
        if not re.match(r"https?:|mailto:", link) and not leads_somewhere(path, link)
    ]
    assert wrong == []


def without_code(page: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", page, flags=re.DOTALL)


def leads_somewhere(page: Path, link: str) -> bool:
    place, _, anchor = link.partition("#")
    target = ROOT / page.parent / place if place else ROOT / page
    if not anchor or target.suffix != ".md" or not target.exists():
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", target.read_text(), flags=re.DOTALL), re.MULTILINE)
    return anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_root_folder_is_on_the_map(repository: list[Path]) -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {path.parts[0] for path in repository if len(path.parts) > 1 and not path.parts[0].startswith(".")}
    assert [folder for folder in sorted(folders) if f"{folder}/" not in page] == []
