"""What a mirror asks of a session: one with a JVM of its own, or one of Spark Connect.

On Spark Connect, a process of the server's applies the batches. It has a session, which is the one that started the
query, and can begin others.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pg_cdc_source.errors import DefiniteError, OptionError

log = logging.getLogger(__name__)

# More rows than any cluster has cores.
_MANY = 1 << 20
# Whoever sets a shorter life for sessions than an hour may mean one of some minutes.
_TOUCH_SECONDS = 60.0
_found_parallelism: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()


def is_connect(spark: SparkSession) -> bool:
    """Whether a session is one of Spark Connect."""
    return not hasattr(spark, "_jvm")


def errors_of_jvm(spark: SparkSession) -> tuple[type[Any], ...]:
    """The errors of a session's JVM that PySpark passes on as they are."""
    if is_connect(spark):
        return ()
    # Spark's client alone has no Py4J.
    from py4j.protocol import Py4JJavaError

    return (Py4JJavaError,)


def parallelism(spark: SparkSession) -> int:
    """How many tasks Spark makes where nobody says how many: as many as run at once."""
    if not is_connect(spark):
        return spark.sparkContext.defaultParallelism
    if spark not in _found_parallelism:
        partitions = spark.range(_MANY).select(F.spark_partition_id().alias("id"))
        _found_parallelism[spark] = partitions.distinct().count()
    return _found_parallelism[spark]


def query_of(batch: DataFrame, checkpoint: str) -> str:
    """The id of the query that a batch is of, which has this checkpoint. Raises DefiniteError."""
    spark = batch.sparkSession
    found: str | None = None
    if not is_connect(spark):
        found = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    if found is None:
        # Spark Connect has no such properties, nor have Python's threads with PYSPARK_PIN_THREAD=false.
        said = "".join(row[0] for row in spark.read.text(f"{checkpoint}/metadata").collect())
        found = json.loads(said or "{}").get("id")
    if found is None:
        raise DefiniteError(
            "the batch does not say which query it is of",
            remedy="start the query by mirror(), and leave its batches to Spark's own thread",
        )
    return found


def absolute(spark: SparkSession, path: str) -> str:
    """A path as Spark understands it: a relative one is in the JVM's directory. Raises OptionError."""
    if "://" in path or path.startswith(("file:", "/")):
        return path
    if re.match("[A-Za-z][A-Za-z0-9+.-]*:", path):
        raise OptionError(
            f"{path} has a scheme without //, which only Hadoop understands",
            remedy="write scheme://…; on Databricks, /Volumes/… in place of dbfs:/Volumes/…",
        )
    if is_connect(spark):
        raise OptionError(
            f"{path} is a relative path, and Spark's directory is the server's", remedy="write an absolute path"
        )
    if not str(spark.sparkContext.master).startswith("local"):
        raise OptionError(
            f"{path} is a relative path, and each host of a cluster has a directory of its own",
            remedy="write a URI, or an absolute path, that the driver and all executors reach",
        )
    jvm: Any = spark.sparkContext._jvm
    return str(PurePath(jvm.java.lang.System.getProperty("user.dir"), path))


def require_one_place(spark: SparkSession, path: str) -> None:
    """Raise OptionError for a path without a scheme that is one place to Spark and another one to Arrow.

    Arrow and delta-rs take it for one of the host that they run on.
    """
    if is_connect(spark) or not path.startswith("/") or path.startswith("/Volumes/"):
        return
    session: Any = spark._jsparkSession
    jvm: Any = spark.sparkContext._jvm
    scheme = jvm.org.apache.hadoop.fs.FileSystem.getDefaultUri(session.sessionState().newHadoopConf()).getScheme()
    if scheme != "file":
        raise OptionError(
            f"{path} has no scheme: to Spark it is a path of {scheme}, to Arrow one of each host",
            remedy=f"write {scheme}://…, or file://{path} where the driver and all executors reach it; on Databricks, "
            "/Volumes/…",
        )


def keep_alive(spark: SparkSession) -> None:
    """Have Spark Connect's server keep a session that no batch may use for hours; it forgets one after an hour."""

    def touch() -> None:
        while True:
            time.sleep(_TOUCH_SECONDS)
            try:
                spark.conf.get("spark.sql.session.timeZone")
            except Exception as error:
                # The query has ended, or will: its batches say why.
                log.debug("the session is not kept any longer: %s", error)
                return

    threading.Thread(target=touch, name="pgcdc-keep-alive", daemon=True).start()


def another(spark: SparkSession) -> SparkSession:
    """A session beside this one, with settings of its own. Raises DefiniteError."""
    if not is_connect(spark):
        return spark.newSession()
    # What Spark's server tells the process that applies batches.
    url = os.environ.get("SPARK_CONNECT_LOCAL_URL")
    if url is None:
        raise DefiniteError(
            "Spark's server does not say where it is, and each table of a mirror is written in a session of its own",
            remedy="use a cluster that gives the driver a JVM of its own, or the format deltalake",
        )
    return SparkSession.builder.remote(url).create()


def end(spark: SparkSession) -> None:
    """End a session of Spark Connect, which its server would keep for an hour."""
    client: Any = spark.client  # stop() would also stop a server that was started in the same process
    client.release_session()
    client.close()
