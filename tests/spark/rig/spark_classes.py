"""The archive of the classes of Spark's drivers, which nearly halves the processor time of their start.

It works as the broker's (`tests/connectors/embedded/rig/broker_classes.py`): the runtime uses an archive made of the
same jars and ignores any other; it appears by one rename, and only a run of this module waits for it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from exactlyonce.connectors.embedded.jars import cache_dir

SHORT_LIFE = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""How drivers are compiled of which each test has a few for seconds."""
SESSION = """\
from pyspark.sql import SparkSession
session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
rows = session.createDataFrame([(1, "a"), (2, "b")], "id long, name string")
assert rows.groupBy("name").count().count() == 2
gateway = session.sparkContext._gateway
session.stop()
gateway.shutdown()
gateway.proc.stdin.close()
gateway.proc.wait()
"""
"""A driver as tests have them, and its JVM's end, with which the archive is whole."""


def class_archive() -> Path | None:
    """The path of the archive that this Java can use with this Spark, if there is one; None without Java or Spark."""
    try:
        import pyspark
    except ImportError:
        return None
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home, "bin", "java")) if home else "java")
    if java is None:
        return None
    made_of = [
        (path, path.stat().st_mtime_ns) for path in (Path(java).resolve(), Path(pyspark.__file__).parent / "jars")
    ]
    return cache_dir() / f"spark-{pyspark.__version__}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}.jsa"


def options() -> str:
    archive = class_archive()
    return f"{SHORT_LIFE} -XX:SharedArchiveFile={archive}" if archive and archive.exists() else SHORT_LIFE


def ensure_class_archive() -> None:
    archive = class_archive()
    if archive is None or archive.exists():
        return
    print("Archiving the classes of Spark (some seconds, once).", file=sys.stderr)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{archive.name}.part-", dir=archive.parent) as folder:
        draft = Path(folder, archive.name)
        archiving = f"{SHORT_LIFE} -XX:ArchiveClassesAtExit={draft}"
        environment = {**os.environ, "SPARK_SUBMIT_OPTS": archiving, "SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run([sys.executable, "-c", SESSION], cwd=folder, env=environment, capture_output=True)
        if done.returncode == 0 and draft.exists():
            draft.rename(archive)
        else:
            print("This Java makes no archive of classes: drivers start as they did.", file=sys.stderr)


if __name__ == "__main__":
    ensure_class_archive()
