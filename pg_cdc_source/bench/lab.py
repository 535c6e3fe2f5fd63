"""Where a run takes place: its server, whose tables are created when they are first needed, its Spark, its meter."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg2
from psycopg2.extensions import connection as Session
from psycopg2.extensions import parse_dsn
from pyspark.sql import SparkSession

from pg_cdc_source import register
from pg_cdc_source.bench import datasets
from pg_cdc_source.bench.datasets import Dataset
from pg_cdc_source.bench.lakes import lake_conf
from pg_cdc_source.bench.meter import Meter, timings
from pg_cdc_source.bench.question import Sample
from pg_cdc_source.demo.embedded_postgres import embedded_postgres
from pg_cdc_source.demo.jdbc import JDBC_DRIVER
from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session
from pg_cdc_source.demo.throwaway import throwaway_directory
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.slot_creation import drop_slot

# Settings of a small production server, without what would start at a time of its own (checkpoints, autovacuum).
_SERVER = {
    "autovacuum": "off",
    "checkpoint_timeout": "1d",
    "max_connections": "200",
    "max_replication_slots": "60",
    "max_wal_senders": "30",
    "max_wal_size": "20GB",
    "shared_buffers": "1GB",
}
# Tasks, backends and the JVM share the machine's cores.
CORES = os.cpu_count() or 1
# In how many partitions all contenders read a table.
PARTITIONS = 4 * CORES
_DROP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. ``rows`` are those of the wide table; other tables and the changes follow it."""

    rows: int
    rounds: int
    latency_seconds: float
    planned_tables: int
    planned_ranges: int
    warm_up: bool = True

    @property
    def changes(self) -> int:
        return max(1_000, self.rows * 3 // 10)


FULL = Scale(rows=4_000_000, rounds=5, latency_seconds=30, planned_tables=1_000, planned_ranges=10_000)
QUICK = Scale(rows=20_000, rounds=1, latency_seconds=3, planned_tables=20, planned_ranges=200, warm_up=False)


class Lab:
    """One server, one JVM, and what was created on them. ``home`` holds all files of the run's processes."""

    def __init__(self, url: str, home: Path, scale: Scale) -> None:
        self.url = url
        self.home = home
        self.scale = scale
        self.server = parse_dsn(url)
        self.admin = self.connect()
        self.meter = Meter(int(self.value("SELECT split_part(pg_read_file('postmaster.pid'), E'\\n', 1)::int")), home)
        self._spark: SparkSession | None = None
        self._tables: set[str] = set()

    # --- PostgreSQL ---------------------------------------------------------------------------------------------------

    def connect(self) -> Session:
        session = psycopg2.connect(self.url)
        session.autocommit = True
        return session

    def execute(self, statement: str, values: Sequence[Any] = ()) -> None:
        with self.admin.cursor() as cursor:
            cursor.execute(statement, values or None)

    def value(self, query: str, values: Sequence[Any] = ()) -> Any:
        with self.admin.cursor() as cursor:
            cursor.execute(query, values or None)
            return cursor.fetchone()[0]

    def table(self, dataset: Dataset, times: float = 1.0) -> tuple[str, int]:
        """Name and row count of a table that is ``times`` as large as the run's scale makes it."""
        rows = dataset.rows(int(self.scale.rows * times))
        name = f"{dataset.name}_{rows}"
        if name not in self._tables:
            datasets.create(self.admin, dataset, name, rows)
            self._tables.add(name)
        return name, rows

    def table_bytes(self) -> dict[str, int]:
        """The sizes of the tables that were created."""
        return {name: int(self.value("SELECT pg_table_size(%s::regclass)", (name,))) for name in sorted(self._tables)}

    # --- Spark --------------------------------------------------------------------------------------------------------

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            conf = {"spark.log.level": "ERROR", "spark.driver.memory": "2g", **lake_conf(self.home)}
            if JDBC_DRIVER.exists():
                jars = conf.get("spark.driver.extraClassPath")
                conf["spark.driver.extraClassPath"] = os.pathsep.join(filter(None, (str(JDBC_DRIVER), jars)))
            self._spark = start_session(f"local[{CORES}]", conf, self.home, log=self.home / "spark.log")
            register(self._spark)
        return self._spark

    def restart_spark(self) -> SparkSession:
        """Start a new session in the same JVM. Its Python workers have used no memory yet."""
        if self._spark is not None:
            stop_session(self._spark)
            self._spark = None
        return self.spark

    def spark_processes(self) -> Iterator[psutil.Process]:
        """The Python processes below the JVM: workers, their daemon, planners, sources of streams."""
        spark = self.spark
        gateway = spark.sparkContext._gateway
        assert gateway is not None
        return iter(psutil.Process(gateway.proc.pid).children(recursive=True))

    # --- other processes ----------------------------------------------------------------------------------------------

    def in_own_process(self, module: str, *arguments: str) -> Sample:
        """Run a module of this package that reads the server's URL from stdin and prints its measures as JSON.

        Its own measures, which leave its start and end out, replace those that are taken from here.
        """
        found: dict[str, float] = {}

        def work() -> int:
            with self.start(module, *arguments) as process:
                output, errors = process.communicate(self.url)
            if process.returncode != 0:
                raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{errors[-3000:]}")
            found.update(json.loads(output.splitlines()[-1]))
            return int(found["rows"])

        server_cpu_s = self.meter.measure(work).measures["server_cpu_s"]
        own = timings(int(found["rows"]), found["wall_s"], found["client_cpu_s"], server_cpu_s)
        return Sample({**found, **own})

    @contextmanager
    def start(self, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run a module of this package that reads the server's URL from stdin; kill it when the block ends."""
        command = [sys.executable, "-m", f"pg_cdc_source.bench.{module}", *arguments]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=self.home, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def drop_slot(self, slot: str) -> None:
        """Drop a slot that exists or not, also one whose reader has just gone."""
        # For a moment the server has not noticed yet that the reader is gone.
        backoff = Backoff(0.05, longest_seconds=1, within_seconds=_DROP_SECONDS)
        backoff.retrying(lambda: drop_slot(self.admin, slot))

    def program(self, command: Sequence[str | Path]) -> str:
        """Run a program that finds the server by libpq's environment variables, and return what it prints."""
        names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD", "dbname": "PGDATABASE"}
        settings = {names[key]: value for key, value in self.server.items()}
        result = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"{command[0]} failed:\n{result.stderr[-3000:]}")
        return result.stdout

    def scratch(self) -> Path:
        """The path of a directory that does not exist yet."""
        return self.home / secrets.token_hex(6)


@contextmanager
def open_lab(scale: Scale, bin_dir: Path | None) -> Iterator[Lab]:
    """Start a server, and Spark when it is first used; remove both when the block ends."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(throwaway_directory("bench"))
        url = stack.enter_context(embedded_postgres(_SERVER, bin_dir=bin_dir))
        lab = Lab(url, home, scale)
        stack.callback(lab.admin.close)
        # Spark's JVM, its workers, and the keepers with them.
        stack.callback(end_jvm)
        yield lab
        if lab._spark is not None:
            stop_session(lab._spark)
