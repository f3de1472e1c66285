"""The repository tests its own text: names, links, sizes, and what must not stand in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SELF = Path(__file__).relative_to(ROOT)
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))

BANNED_MODULES = {
    **dict.fromkeys(["util", "utils", "helper", "helpers", "common", "misc"], "name what is in it"),
    **dict.fromkeys(["manager", "managers"], "name what it does"),
}
BANNED_TEXT = {
    r"/(root|home/\w+|Users/\w+|work)/": "a path of one machine; make it relative, or take it from the environment",
    r"repo1?\.maven|registry-\d|docker\.io/|quay\.io|ghcr\.io|pypi\.org|pythonhosted": "a registry; tools know theirs",
    r"\b(TODO|FIXME|XXX|HACK)\b": "do it, or say in an issue what is left",
    r"(?i)\b(claude|anthropic|openai|chatgpt|copilot|llms?|ai (tool|assistant|agent)s?)\b": "not of the project",
    r"\S[ \t]+$": "no blanks at the end of a line",
}
HOMELY_TEXT = {
    r"(?i)(?<![a-z_])misfortunes?\b": "a fault",
    r"(?i)(?<![a-z])(im)?patien(t|ce)": "a timeout, a limit, or how often something is retried",
    r"(?i)(?<![a-z])strays?(?![a-z])": "an orphan",
    r"(?i)(?<![a-z])losers?(?![a-z])": "a failed attempt, or the other one",
    r"(?i)(?<![a-z])obituar(y|ies)": "how a process ended",
    r"(?i)(?<![a-z])mend(s|ed|ing)?(?![a-z])": "fix, or repair",
    r"(?i)\b(dealt|deal|deals|dealing) (\w+ )?out\b": "distribute",
    r"(?i)\bpass(ed|es|ing)? over\b": "skip",
    r"(?i)\bfor ever\b": "permanently, always, or without end",
}
"""The field's word is meant: by what is homely, what to write."""
NOT_WORDED_HERE = {Path("LICENSE"), SELF}
REFUSED = Path("tests/pipeline/typed_refused.py")
"""Every line of it is one that the type checker must refuse."""
TWO_OF_ONE_NAME = {
    "End": "a decision of the coordinator; in a history a step, which reads like a script",
    "Hold": "the coordinator's effect, and the message that carries it to a worker",
    "Input": "what a node of the graph reads, and what a subtask takes it from",
    "Job": "one incarnation's run; a job of Spark, in the words of its sink",
    "NoAnswer": "of a socket, and of the interface that model and real broker share",
    "Producers": "a step of a history, which reads like a script; the maker of a sink's producers",
    "Record": "a name of the API; the broker's record, whose interface is public too",
    "Trigger": "the coordinator's effect, and the message that carries it to a worker",
    "Writer": "a protocol of those who are written to: the seams of two packages",
}
"""Why two classes of packages may have this name."""
INDIRECT = ("What", "Whose", "Which", "How", "Whether", "Where", "Why", "Who")
"""Words with which a question begins, and no name of a thing."""
BANNED_CALLS = {"eval": "parse it", "exec": "compose functions", "__import__": "use importlib.import_module"}
BANNED_IMPORTS = ["pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "yaml"]
LINES_OF_FILE_MAX = 500
LINES_OF_FUNCTION_MAX = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module")
def texts(repository: list[Path]) -> dict[Path, str]:
    """Every text file of the repository."""
    return {path: (ROOT / path).read_text() for path in repository if (ROOT / path).is_file()}


@pytest.fixture(scope="module")
def code(texts: dict[Path, str]) -> dict[Path, ast.Module]:
    """Every Python file of the repository, parsed."""
    return {path: ast.parse(text) for path, text in texts.items() if path.suffix == ".py"}


def test_modules_are_named_after_what_is_in_them(repository: list[Path]) -> None:
    """No module or folder has a name that could hold anything."""
    wrong = [
        f"{path}: {BANNED_MODULES[part]}"
        for path in repository
        for part in [*path.parent.parts, path.stem]
        if part in BANNED_MODULES
    ]
    assert wrong == []


def test_nothing_banned_stands_in_the_text(texts: dict[Path, str]) -> None:
    """No machine's paths, no registries, nothing put off, nothing about how the project came to be."""
    wrong = [
        f"{path}:{number}: {match[0]!r}: {reason}"
        for path, text in texts.items()
        if path not in NOT_WORDED_HERE
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, reason in BANNED_TEXT.items()
        if (match := re.search(pattern, line))
    ]
    assert wrong == []


def test_the_words_are_those_of_the_field(texts: dict[Path, str]) -> None:
    """Where the field has a word it is used, and not a homely one: in code, tests and pages."""
    wrong = [
        f"{path}:{number}: {match[0]!r}: write {better}"
        for path, text in texts.items()
        if path not in NOT_WORDED_HERE
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, better in HOMELY_TEXT.items()
        if (match := re.search(pattern, line))
    ]
    assert wrong == []


def test_modules_name_what_they_hold(code: dict[Path, ast.Module]) -> None:
    """The first line of a module names the thing, with the subject first; it is no indirect question."""
    first = {path: (ast.get_docstring(tree) or "").split(" ")[0] for path, tree in code.items()}
    wrong = [f'{path}: not "{word} ...": name it' for path, word in first.items() if word in INDIRECT]
    assert wrong == []


def test_nothing_runs_what_it_reads(code: dict[Path, ast.Module]) -> None:
    """Outside of tests data cannot become code: no pickle or its kin, no eval, no exec."""
    shipped = {path: tree for path, tree in code.items() if path.parts[0] != "tests"}
    wrong = [f"{path}:{line}: {what}" for path, tree in shipped.items() for line, what in _dangers(tree)]
    assert wrong == []


def test_an_exception_from_a_rule_has_its_reason(texts: dict[Path, str]) -> None:
    """Whoever silences a linter or the type checker says why on the same line."""
    silent = re.compile(r"# (noqa(?!: [A-Z0-9, ]+\S* - \S)|type: ignore(?!\[[\w, -]+\]  # \S))")
    code = {path: text for path, text in texts.items() if path.suffix == ".py" and path not in (SELF, REFUSED)}
    wrong = [
        f"{path}:{number}: {line.strip()}"
        for path, text in code.items()
        for number, line in enumerate(text.splitlines(), 1)
        if silent.search(line)
    ]
    assert wrong == []


def test_files_and_functions_fit(texts: dict[Path, str], code: dict[Path, ast.Module]) -> None:
    """A function fits a screen, and a file can be read in one go."""
    long = [
        f"{path}: {count} lines"
        for path, text in texts.items()
        if path.suffix == ".py" and (count := len(text.splitlines())) > LINES_OF_FILE_MAX
    ]
    long += [
        f"{path}:{function.lineno}: {function.name} has {count} lines"
        for path, function in _functions(code)
        if (count := (function.end_lineno or 0) - function.lineno + 1) > LINES_OF_FUNCTION_MAX
    ]
    assert long == []


def test_modules_say_what_they_are(code: dict[Path, ast.Module]) -> None:
    """Every module that has anything in it starts with a docstring."""
    assert [str(path) for path, tree in code.items() if tree.body and not ast.get_docstring(tree)] == []


def test_a_name_means_one_class(code: dict[Path, ast.Module]) -> None:
    """No two classes of the packages have one name, but for those that are listed, and the simulator's."""
    places: dict[str, list[str]] = {}
    for path, tree in code.items():
        if path.parts[0] in PACKAGES and "simulat" not in path.name:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in TWO_OF_ONE_NAME} == {}


def test_every_test_is_a_sentence(code: dict[Path, ast.Module]) -> None:
    """Every test says in a sentence what is true when it passes."""
    tests = [(path, function) for path, function in _functions(code) if path.name.startswith("test_")]
    wrong = [
        f"{path}:{function.lineno}: {function.name}"
        for path, function in tests
        if function.name.startswith("test") and not re.search(r"\.$", ast.get_docstring(function) or "")
    ]
    assert wrong == []


def test_links_are_alive(texts: dict[Path, str]) -> None:
    """Every link of a page to a file, a folder or a heading leads there."""
    pages = {path: text for path, text in texts.items() if path.suffix == ".md"}
    wrong = [
        f"{path}: {link}"
        for path, text in pages.items()
        for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", _without_code(text))
        if not re.match(r"https?:|mailto:", link) and not _leads_somewhere(path, link)
    ]
    assert wrong == []


def test_every_root_folder_is_on_the_map() -> None:
    """ARCHITECTURE.md names every folder at the root."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert [name for name in folders if f"{name}/" not in page and f"{name}/" not in ignored] == []


def _functions(code: dict[Path, ast.Module]) -> Iterator[tuple[Path, Function]]:
    for path, tree in code.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, Function))


def _dangers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            yield node.lineno, f"{node.func.id}: {BANNED_CALLS[node.func.id]}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, module) for module in modules if module.split(".")[0] in BANNED_IMPORTS)


def _without_code(page: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", page, flags=re.DOTALL)


def _leads_somewhere(page: Path, link: str) -> bool:
    place, _, anchor = link.partition("#")
    target = ROOT / page.parent / place if place else ROOT / page
    if not anchor or target.suffix != ".md" or not target.exists():
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", target.read_text(), flags=re.DOTALL), re.MULTILINE)
    return anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
