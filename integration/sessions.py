"""One Spark session at a time, in a JVM that the tests can end."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from pg_cdc_source import register

_JVM_END_SECONDS = 20

CONF = {
    "spark.driver.memory": "1g",
    "spark.executor.memory": "1g",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class SparkSessions:
    """Starts sessions in one JVM, whose files and working directory are ``scratch``.

    Workers import from the JVM's working directory: they must find the installed wheel, never the source tree.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._running: tuple[str, dict[str, str], SparkSession] | None = None

    def get(self, master: str = "local[2]", **conf: str) -> SparkSession:
        """Return the running session when it is of this kind; stop it and start another when it is not."""
        if self._running is not None:
            if self._running[:2] == (master, conf):
                return self._running[2]
            self.stop()
        builder = SparkSession.builder.master(master).appName("pg_cdc_source tests")
        for name, value in {**CONF, "spark.local.dir": str(self.scratch), **conf}.items():
            builder = builder.config(name, value)
        with _started_in(self.scratch):
            spark = builder.getOrCreate()
        self._running = (master, conf, spark)
        register(spark)
        return spark

    def stop(self) -> None:
        if self._running is None:
            return
        spark = self._running[2]
        # Executors of local-cluster work in Spark's installation, whatever its settings.
        work = Path(pyspark.__file__).parent / "work"
        application = spark.sparkContext.applicationId
        spark.stop()
        self._running = None
        shutil.rmtree(work / application, ignore_errors=True)
        if work.is_dir() and not any(work.iterdir()):
            work.rmdir()

    def end_jvm(self) -> None:
        """Stop the session and wait until its JVM is gone; the next ``get`` starts a new one."""
        self.stop()
        gateway = SparkContext._gateway
        if gateway is None:
            return
        SparkContext._gateway = SparkContext._jvm = None
        gateway.shutdown()
        # The JVM ends when its standard input does.
        gateway.proc.stdin.close()
        gateway.proc.wait(_JVM_END_SECONDS)


@contextmanager
def _started_in(scratch: Path) -> Iterator[None]:
    """Set what a JVM takes over when it starts: its working directory and its environment."""
    environment = {"TMPDIR": str(scratch), "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    before, directory = {name: os.environ.get(name) for name in environment}, Path.cwd()
    os.environ.update(environment)
    os.chdir(scratch)
    try:
        yield
    finally:
        os.chdir(directory)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
