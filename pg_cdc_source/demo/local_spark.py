"""Start Spark on this machine in a JVM of its own, for the demo, the benchmark and the tests, and end that JVM."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
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
    """Start a session whose files and working directory are ``directory``, in a new JVM if there is none.

    Spark's workers import from the JVM's working directory first. In ``directory`` they find the installed package,
    whatever the user's working directory holds. A new JVM and its workers print to ``log``, if it is given.
    """
    settings = {**_CONF, "spark.local.dir": str(directory), **conf, "spark.master": master}
    # Workers run this interpreter, not the first python3 on the PATH.
    python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    with _environment({"TMPDIR": str(directory), **python}):
        if SparkContext._gateway is None:
            _start_jvm(settings, directory, log)
        spark = SparkSession.builder.config(map=dict(settings)).appName("pg_cdc_source").getOrCreate()
    # Spark's own handler would call the JVM during the call that Ctrl-C interrupts, and may never return.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return spark


def _start_jvm(settings: Mapping[str, str], directory: Path, log: Path | None) -> None:
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("ab")) if log else None
        # An interrupted launch forgets its JVM, which would then run on for ever.
        stack.enter_context(_signals_deferred())
        gateway = launch_gateway(conf, {"cwd": directory, "stderr": errors})  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway)


def stop_session(spark: SparkSession) -> None:
    # Executors of local-cluster write into Spark's installation, whatever its settings.
    work = Path(pyspark.__file__).parent / "work"
    application = spark.sparkContext.applicationId
    spark.stop()
    shutil.rmtree(work / application, ignore_errors=True)
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()


def end_jvm() -> None:
    """End the JVM, whatever it is doing, and wait until it is gone. The next session starts a new one."""
    gateway = SparkContext._gateway
    if gateway is None:
        return
    context = SparkContext._active_spark_context
    if context is not None and context._accumulatorServer is not None:
        # It would print a traceback when the JVM ends.
        context._accumulatorServer.handle_error = lambda *_: None  # type: ignore[method-assign]
    SparkContext._gateway = SparkContext._jvm = None
    # When its standard input ends, the JVM stops Spark and ends. A request through the gateway could wait for ever.
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(_JVM_END_SECONDS)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()
    gateway.close()


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
def _signals_deferred() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block has ended."""
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for deferred in came:
            signal.raise_signal(deferred)
