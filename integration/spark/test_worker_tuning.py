"""Spark's own workers: their connection to the JVM is tuned, and nothing else that they have open."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import pyspark
import pytest
from pyspark.sql import SparkSession

from pg_cdc_source.spark.worker_tuning import ENVIRONMENT

UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def seen_by_tasks(spark: SparkSession) -> list[list[tuple[bool, bool]]]:
    """Of some tasks: of each TCP connection of their worker, whether it is the task's own and whether it is tuned."""

    def task(rows: Iterable[int]) -> Iterable[list[tuple[bool, bool]]]:
        import os
        import socket

        from pg_cdc_source.spark.worker_tuning import small_task

        with socket.create_server(("127.0.0.1", 0)) as listening:
            mine = [socket.create_connection(listening.getsockname()), listening.accept()[0]]
        with small_task():
            list(rows)
        found = {}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                copy = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            with copy:
                if copy.family == socket.AF_INET:
                    nodelay = bool(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                    found[copy.getsockname()] = (copy.getsockname() in [sock.getsockname() for sock in mine], nodelay)
        for sock in mine:
            sock.close()
        yield sorted(found.values())

    found: list[list[tuple[bool, bool]]] = spark.sparkContext.parallelize(range(4), 4).mapPartitions(task).collect()
    return found


def test_the_connection_to_the_jvm_is_tuned_and_no_other(spark: SparkSession) -> None:
    assert seen_by_tasks(spark) == [[(False, True), (True, False), (True, False)]] * 4


def test_nothing_is_tuned_where_that_is_turned_off(spark_session: Callable[..., SparkSession]) -> None:
    spark = spark_session(**{f"spark.executorEnv.{ENVIRONMENT}": "off"})
    assert seen_by_tasks(spark) == [[(False, False), (True, False), (True, False)]] * 4


@pytest.mark.skipif(pyspark.__version__ < "4.1", reason="Spark 4.0 has TCP only")
def test_unix_sockets_need_no_tuning(spark_session: Callable[..., SparkSession]) -> None:
    spark = spark_session(**{UNIX_SOCKETS: "true"})
    assert seen_by_tasks(spark) == [[(True, False), (True, False)]] * 4
