"""Spark's own workers: their connection to the JVM is tuned, and what they import is found, where that helps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

import pyspark
import pytest
from pyspark.sql import SparkSession

from pg_cdc_source.spark.worker_tuning import ENVIRONMENT

UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has TCP_QUICKACK")


def acknowledging(spark: SparkSession) -> list[bool]:
    """Of some tasks: whether a thread of their worker acknowledges what Spark sends."""

    def task(rows: Iterable[int]) -> Iterable[bool]:
        import threading

        from pg_cdc_source.spark.worker_tuning import small_task

        with small_task():
            list(rows)
        yield any(thread.name == "pgcdc-acknowledge" for thread in threading.enumerate())

    found: list[bool] = spark.sparkContext.parallelize(range(4), 4).mapPartitions(task).collect()
    return found


@linux
def test_the_connection_to_the_jvm_is_tuned(spark: SparkSession) -> None:
    assert acknowledging(spark) == [True] * 4


@linux
def test_nothing_is_tuned_where_that_is_turned_off(spark_session: Callable[..., SparkSession]) -> None:
    spark = spark_session(**{f"spark.executorEnv.{ENVIRONMENT}": "off"})
    assert acknowledging(spark) == [False] * 4


@linux
@pytest.mark.skipif(pyspark.__version__ < "4.1", reason="Spark 4.0 has TCP only")
def test_unix_sockets_need_no_tuning(spark_session: Callable[..., SparkSession]) -> None:
    spark = spark_session(**{UNIX_SOCKETS: "true"})
    assert acknowledging(spark) == [False] * 4


@pytest.mark.corner
def test_no_archive_of_sparks_own_is_read_again(spark: SparkSession) -> None:
    """Spark names them all in its workers' PYTHONPATH."""

    def task(rows: Iterable[int]) -> Iterable[str]:
        import sys
        from zipimport import zipimporter

        from pg_cdc_source.spark.worker_tuning import small_task

        with small_task():
            list(rows)
        for finder in sys.path_importer_cache.values():
            if isinstance(finder, zipimporter):
                yield f"{finder.archive} {'invalidate_caches' in vars(finder)}"

    found = dict(line.split() for line in spark.sparkContext.parallelize(range(1), 1).mapPartitions(task).collect())
    home = os.environ.get("SPARK_HOME", os.path.dirname(pyspark.__file__))
    assert {archive: kept for archive, kept in found.items() if archive.startswith(home)}
    assert set(found.values()) == {"True"}, found
