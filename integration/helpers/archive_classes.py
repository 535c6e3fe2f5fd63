"""Keep classes as the JVM has read and verified them, in files that later JVMs map (AppCDS).

    python integration/helpers/archive_classes.py

A driver spends most of its start with loading some ten thousand classes. ``make integration`` makes the archives once
in a virtual environment: one of Spark's classes, and one for drivers with the jars of lake formats, which stand before
Spark's on the class path. Nothing depends on them: a JVM that has other classes, or is another JVM, passes over them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lake_jars
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from sessions import CLASSES, QUICK

from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session

# The file is written when the JVM ends, and is large; other tests may run beside.
_WRITTEN_WITHIN_SECONDS = 600


def use_spark(spark: SparkSession, checkpoint: Path) -> None:
    """Load the classes that most drivers need: of a query, a micro-batch and a checkpoint."""
    spark.range(10).join(spark.range(5), "id").groupBy("id").count().collect()

    def sink(batch: DataFrame, _: int) -> None:
        batch.collect()

    writer = spark.readStream.format("rate").load().writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(once=True).start()
    query.awaitTermination()


def use_lake(spark: SparkSession, delta: Path) -> None:
    """Load the classes of a table that is made, filled, merged into and read."""
    for format, table in (("delta", f"delta.`{delta}`"), ("iceberg", "lake.archived.t")):
        if lake_jars.lacking(format) is None:
            spark.sql(f"CREATE TABLE {table} (id INT, v STRING) USING {format}")
            spark.sql(f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')")
            spark.sql(
                f"MERGE INTO {table} AS t USING (SELECT 1 AS id) AS s ON t.id = s.id "
                "WHEN MATCHED THEN UPDATE SET v = 'c' WHEN NOT MATCHED THEN INSERT (id) VALUES (s.id)"
            )
            spark.table(table).collect()


@contextmanager
def archiving(classes: Path, scratch: Path, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Write the ``classes`` that a driver with these settings has loaded at the end of the block."""
    written = scratch / classes.name
    options = f"{QUICK} -XX:ArchiveClassesAtExit={written} -Xlog:disable"
    spark = start_session(
        "local[2]", {**conf, "spark.driver.extraJavaOptions": options, "spark.log.level": "ERROR"}, scratch
    )
    yield spark
    stop_session(spark)
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.proc.stdin.close()
    gateway.proc.wait(_WRITTEN_WITHIN_SECONDS)
    end_jvm()
    written.rename(classes)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=CLASSES.parent) as directory:
        scratch = Path(directory)
        with archiving(CLASSES, scratch, {}) as spark:
            use_spark(spark, scratch / "checkpoint")
        if lake_jars.present():
            with archiving(lake_jars.CLASSES, scratch, lake_jars.conf(scratch / "warehouse")) as spark:
                use_spark(spark, scratch / "lake-checkpoint")
                use_lake(spark, scratch / "table")


if __name__ == "__main__":
    main()
