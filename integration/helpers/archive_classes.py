"""Keep Spark's classes as the JVM has read and verified them, in a file that every later JVM maps (AppCDS).

    python integration/helpers/archive_classes.py

A driver spends most of its start with loading some ten thousand classes. ``make integration`` makes the archive once in
a virtual environment. Nothing depends on it: a JVM that has other classes, or is another JVM, passes over the file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import DataFrame
from sessions import CLASSES, QUICK

from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session

# The file is written when the JVM ends, and is large.
_WRITTEN_WITHIN_SECONDS = 180


def use_spark(scratch: Path) -> None:
    """Load the classes that most drivers need: of a query, a micro-batch and a checkpoint."""
    options = f"{QUICK} -XX:ArchiveClassesAtExit={scratch / 'archive'} -Xlog:disable"
    conf = {"spark.driver.extraJavaOptions": options, "spark.log.level": "ERROR"}
    spark = start_session("local[2]", conf, scratch)
    spark.range(10).join(spark.range(5), "id").groupBy("id").count().collect()

    def sink(batch: DataFrame, _: int) -> None:
        batch.collect()

    writer = spark.readStream.format("rate").load().writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", str(scratch / "checkpoint")).trigger(once=True).start()
    query.awaitTermination()
    stop_session(spark)
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.proc.stdin.close()
    gateway.proc.wait(_WRITTEN_WITHIN_SECONDS)
    end_jvm()


def main() -> None:
    with tempfile.TemporaryDirectory(dir=CLASSES.parent) as scratch:
        use_spark(Path(scratch))
        Path(scratch, "archive").rename(CLASSES)


if __name__ == "__main__":
    main()
