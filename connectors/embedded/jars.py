"""The broker's jars: downloaded once per user, by jgo, which needs no Java.

The folder of `kafka_jars` has exactly the files of the list beside this module, with their sizes and, after the
download, their SHA-256. It appears by one rename, so a killed download leaves no incomplete folder. The download is a
process of its own, this module as a program. It uses jgo's own registry, or the configured one.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from exactlyonce.connectors.embedded.programs import dying_with_parent
from exactlyonce.connectors.embedded.progress import Passing, Progress
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError
from exactlyonce.pipeline.extras import install

KAFKA_VERSION = "4.3.1"

_SIDE_BY_SIDE = 4
_LOOK_INTERVAL_S = 0.5
_LINES_OF_ERROR = 15
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
)


class Jar(NamedTuple):
    sha256: str
    size: int
    group: str
    artifact: str
    version: str

    @property
    def name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


def kafka_jars(progress: Progress) -> Path:
    """The folder with all jars of the broker, downloaded unless it exists.

    Raises `ConfigError` without jgo, `BrokerUnavailable` if the download fails.
    """
    folder = cache_dir() / f"kafka-{KAFKA_VERSION}"
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        _lock(lock.fileno(), progress)
        if not is_complete(folder):
            _download(folder, progress)
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


def _download(folder: Path, progress: Progress) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.part-*"):
        shutil.rmtree(leftover)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        progress(f"Downloading Kafka {KAFKA_VERSION} ({_megabytes(listed_jars())} MB, once).")
        _run(_command(part), part, progress)
        _check(part / "jars")
        shutil.rmtree(folder, ignore_errors=True)
        (part / "jars").rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    progress(f"Kafka {KAFKA_VERSION} is in {folder}.")


def _command(part: Path) -> list[str]:
    """The command that downloads the listed jars to *part*/jars."""
    if not importlib.util.find_spec("jgo"):
        raise ConfigError(
            f"The embedded broker is downloaded by jgo, which is not installed: run {install('broker')}, or use a "
            f"broker of your own: pass --bootstrap-servers."
        )
    return [sys.executable, "-m", "exactlyonce.connectors.embedded.jars", str(part / "jars")]


def _environment() -> dict[str, str]:
    """The environment, in which Python trusts the system's certificate authorities: a company's proxy has its own."""
    bundle = next((path for path in _BUNDLES if Path(path).is_file()), None)
    return {**({"REQUESTS_CA_BUNDLE": bundle} if bundle else {}), **os.environ}


def _run(command: list[str], part: Path, progress: Progress) -> None:
    """Run *command* and report the bytes.

    Its output goes to a file: it has addresses of registries, which only explain a failure.
    """
    began_s, whole, log = time.monotonic(), _megabytes(listed_jars()), part / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(dying_with_parent(command), env=_environment(), stdout=output, stderr=output)
    try:
        while process.poll() is None:
            progress(Passing(f"  {_megabytes(_arrived(part))} of {whole} MB, {time.monotonic() - began_s:.0f} s"))
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_INTERVAL_S)
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES_OF_ERROR:])
            raise BrokerUnavailable(
                f"Kafka {KAFKA_VERSION} could not be downloaded: jgo ended with {process.returncode}. Check the "
                f"network and the proxy settings, then start again. Its last lines:\n{tail}"
            )
    finally:
        process.kill()
        process.wait()


def _arrived(part: Path) -> list[Jar]:
    """The jars with their present sizes in *part*."""
    sizes: dict[str, int] = {}
    for path in part.rglob("*.jar"):
        with suppress(FileNotFoundError):  # it was just renamed
            sizes[path.name] = max(sizes.get(path.name, 0), path.stat().st_size)
    return [jar._replace(size=min(jar.size, sizes.get(jar.name, 0))) for jar in listed_jars()]


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


def _fetch(folder: Path) -> None:
    """Download the listed jars to *folder*."""
    from jgo.maven import MavenContext

    context = MavenContext(repo_cache=folder.parent / "repository")
    folder.mkdir()

    def fetch_one(jar: Jar) -> None:
        path = context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve()
        path.rename(folder / jar.name)

    with ThreadPoolExecutor(_SIDE_BY_SIDE) as threads:
        list(threads.map(fetch_one, listed_jars()))


if __name__ == "__main__":
    _fetch(Path(sys.argv[1]))
