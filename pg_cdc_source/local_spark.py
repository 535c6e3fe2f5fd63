"""Start Spark on this machine in a JVM of its own, for the demo and the tests, and end that JVM."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

_JVM_END_SECONDS = 20

_CONF = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def start_session(master: str, conf: Mapping[str, str], directory: Path, *, log: Path | None = None) -> SparkSession:
    """Start a session whose files and working directory are ``directory``.

    Workers import from the JVM's working directory: there they find what is installed, whatever lies where the user
    stands. What JVM and workers print goes to ``log`` where one is given. Both hold for a JVM that this call starts.
    """
    builder = SparkSession.builder.master(master).appName("pg_cdc_source")
    for name, value in {**_CONF, "spark.local.dir": str(directory), **conf}.items():
        builder = builder.config(name, value)
    # Workers must be this interpreter, not the first python3 on the path.
    environment = {"TMPDIR": str(directory), "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    redirected = _errors_to(log) if log else contextlib.nullcontext()
    with _environment(environment), _working_directory(directory), redirected:
        return builder.getOrCreate()


def stop_session(spark: SparkSession) -> None:
    # Executors of local-cluster work inside Spark's installation, whatever its settings.
    work = Path(pyspark.__file__).parent / "work"
    application = spark.sparkContext.applicationId
    spark.stop()
    shutil.rmtree(work / application, ignore_errors=True)
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()


def end_jvm() -> None:
    """End the JVM, whose session has stopped, and wait until it is gone; the next session starts a new one."""
    gateway = SparkContext._gateway
    if gateway is None:
        return
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    # The JVM ends when its standard input does.
    gateway.proc.stdin.close()
    gateway.proc.wait(_JVM_END_SECONDS)


@contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


@contextmanager
def _working_directory(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _errors_to(log: Path) -> Iterator[None]:
    """Let processes started in the block write their standard error to ``log``."""
    before = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
