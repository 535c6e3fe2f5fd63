"""Run the demo: read a shop that keeps writing, copy it, mirror it into a lake, and prove that both copies are right.

Sums and speed stand beside those of Spark's JDBC source, where its driver can be had.
Two things are proved of each copy. Every table equals what PostgreSQL itself shows, under the same snapshot or after
the last change, in row count and in a checksum over every value. And the copy agrees with itself: every transaction of
the shop keeps balances, order totals, stock and events in step, so a copy that held half of a transaction would show.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from rich.console import Console

from pg_cdc_source import register
from pg_cdc_source.demo.embedded_postgres import embedded_postgres
from pg_cdc_source.demo.jdbc import find_driver
from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session
from pg_cdc_source.demo.mirror import mirror_shop
from pg_cdc_source.demo.progress import shown
from pg_cdc_source.demo.report import Result
from pg_cdc_source.demo.shop import TABLES, Opened, open_shop
from pg_cdc_source.demo.side_by_side import add_readings, read_side_by_side
from pg_cdc_source.demo.snapshot import compare_copy, copy_shop
from pg_cdc_source.demo.throwaway import remove, throwaway_directory
from pg_cdc_source.errors import DefiniteError, OptionError


def run(orders: int, seconds: float, keep: Path | None = None) -> Result:
    """Run the demo with a shop of ``orders`` orders, mirrored for ``seconds``; progress goes to stderr.

    The lake's tables stay in ``keep``, if it is given. Raises OptionError where that has something in it already.
    """
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise OptionError(f"{keep} has something in it already", remedy="name a directory that is empty or not there")
    console = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(throwaway_directory("demo"))
        lake = home / "lake" if keep is None else keep.absolute()
        # Half of a lake would be there after an error or Ctrl-C.
        stack.push(lambda kind, *_: remove(lake) if kind is not None else None)
        try:
            return _run(orders, seconds, home, lake, stack, console)
        except KeyboardInterrupt:
            # Another one would leave behind what this one removes.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise


def _run(orders: int, seconds: float, home: Path, lake: Path, stack: contextlib.ExitStack, console: Console) -> Result:
    with console.status("Starting PostgreSQL"):
        url = stack.enter_context(embedded_postgres())
    with console.status(f"Filling a shop with {orders:,} orders, and starting Spark"):
        filled = _meanwhile(lambda: _fill(url, orders))
        driver = find_driver(home)
        spark = stack.enter_context(_spark(home, driver))
        opened, readings = filled()
    readers = read_side_by_side(spark, url, opened, readings, console, with_jdbc=driver is not None)
    with shown(console, spark, "Copying the shop to Parquet while it takes orders"):
        copied = copy_shop(spark, url, home / "copy")
    with console.status("Comparing the copy with the source"):
        snapshot = compare_copy(spark, home / "copy", copied, opened)
    return Result(readers, snapshot, mirror_shop(spark, url, home, lake, opened, seconds, console))


def _fill(url: str, orders: int) -> tuple[Opened, int]:
    return open_shop(url, orders), add_readings(url, orders)


_T = TypeVar("_T")


def _meanwhile(work: Callable[[], _T]) -> Callable[[], _T]:
    """Begin work in a thread that nothing waits for; returns what waits for its result, or raises its error."""
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    def result() -> _T:
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    thread = threading.Thread(target=run, name="filling", daemon=True)
    thread.start()
    return result


@contextmanager
def _spark(home: Path, driver: Path | None) -> Iterator[SparkSession]:
    """Run Spark in ``home``, with a JDBC driver. If Spark fails, the end of its log there goes into the error."""
    log = home / "spark.log"
    # Each task keeps one file open per table; without this, Spark first sorts each task's rows by the table's name.
    conf = {"spark.sql.maxConcurrentOutputFileWriters": str(len(TABLES))}
    if driver is not None:
        conf["spark.driver.extraClassPath"] = str(driver)
    try:
        spark = start_session("local[*]", conf, home, log=log)
        register(spark)
        yield spark
        # Not after an error or Ctrl-C, when a call into the JVM may wait for ever.
        stop_session(spark)
    except PySparkException as error:
        tail = log.read_text(errors="replace")[-3000:].strip()
        raise DefiniteError(f"Spark failed: {error}\nThe end of its log:\n{tail}") from error
    finally:
        end_jvm()
