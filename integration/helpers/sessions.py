"""One Spark session at a time, of the kind the test asks for."""

from __future__ import annotations

import sys
from pathlib import Path

from jdbc import JDBC_DRIVER
from pyspark.sql import SparkSession

from pg_cdc_source import register
from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session

# JVMs of tests live for seconds or minutes, have little to do, and share few cores: compiling for speed does not pay,
# and takes half of all that Spark takes.
# The 48 MB that such a JVM keeps for code are too few for Spark, which then compiles again what was thrown out.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m"


def archive_option(classes: Path) -> str:
    """Have a JVM use an archive that archive_classes.py has made; one that cannot would say so on standard output."""
    return f"-XX:SharedArchiveFile={classes} -Xlog:disable"


CLASSES = Path(sys.prefix, "spark-classes.jsa")
JVM_OPTIONS = f"{QUICK} {archive_option(CLASSES)}" if CLASSES.exists() else QUICK
CONF = {
    "spark.executor.extraJavaOptions": JVM_OPTIONS,
    "spark.executor.memory": "1g",
    "spark.log.level": "ERROR",
    # Plans are not written out for a UI that is off.
    "spark.sql.debug.maxToStringFields": "0",
    "spark.sql.ui.explainMode": "simple",
}
if JDBC_DRIVER.exists():
    # In every session, so that tests which compare with Spark's JDBC source start no JVM of their own. It is not on the
    # class path, which the archive of classes depends on.
    CONF["spark.jars"] = str(JDBC_DRIVER)


class SparkSessions:
    """Starts sessions in one JVM, whose files and working directory are ``scratch``."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._running: tuple[str, dict[str, str], SparkSession] | None = None
        self._class_path: str | None = None

    def get(self, master: str = "local[2]", **conf: str) -> SparkSession:
        """Return the running session when it is of this kind; stop it and start another when it is not."""
        if self._running is not None and self._running[:2] == (master, conf):
            return self._running[2]
        self.stop()
        if self._class_path != (class_path := conf.get("spark.driver.extraClassPath")):
            # A JVM keeps the jars with which it was started.
            self.end_jvm()
            self._class_path = class_path
        spark = start_session(master, {**CONF, **conf}, self.scratch)
        self._running = (master, conf, spark)
        register(spark)
        return spark

    def stop(self) -> None:
        if self._running is not None:
            stop_session(self._running[2])
            self._running = None

    def end_jvm(self) -> None:
        """Stop the session and end its JVM; the next ``get`` starts a new one."""
        self.stop()
        end_jvm()
