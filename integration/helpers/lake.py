"""A mirror that runs batch by batch, in each of the lake's formats, and what its tables have."""

from __future__ import annotations

import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from driving import Driver, Row
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession

from pg_cdc_source.lake.bring import Mark, Step
from pg_cdc_source.lake.files import FileWriter
from pg_cdc_source.lake.first_files import FIRST_FILES, FirstFiles
from pg_cdc_source.lake.ledger import Ledger, LedgerRow
from pg_cdc_source.lake.shape import REPLACED, Shape, Shapes
from pg_cdc_source.lake.sink import Sink
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import Start
from pg_cdc_source.mirrors import delta
from pg_cdc_source.mirrors.catalog_tables import refresh
from pg_cdc_source.mirrors.delta_rs import DeltaRsTable, DeltaRsTask
from pg_cdc_source.mirrors.delta_rs_commits import is_of
from pg_cdc_source.mirrors.delta_rs_ledger import DeltaRsLedger
from pg_cdc_source.mirrors.iceberg_of_jvm import IcebergTableOfJvm
from pg_cdc_source.mirrors.spark_commits import COMPACT_STEP, KEYS_SUFFIX, Commit
from pg_cdc_source.mirrors.spark_lake import SparkLake
from pg_cdc_source.mirrors.spark_table import SparkTable
from pg_cdc_source.protocol.layout import RUNS_SCHEMA

QUERY = "q"
Rows = Counter[tuple[str | None, ...]]
Begin = Callable[..., "Lake"]  # the fixture ``begin``
Drive = Callable[[FirstFiles], Driver]


class Lake(ABC):
    """Tables of one format, and the driver whose batches they take."""

    kind: type[Any]  # of a table

    def __init__(self, drive: Drive, files: FirstFiles, targets: Targets, ledger: Ledger, shapes: Shapes) -> None:
        self.driver = drive(files)
        self._files = files
        self.shapes = shapes
        self.targets = targets
        self.ledger = ledger
        self._sink = Sink(targets, ledger, read=self._look)
        self._batch: list[Row] | None = None  # one that was not applied to its end
        self.compacts = True

    def step(self) -> LedgerRow | None:
        """Run one batch, or the one again that was not applied to its end; its row of the ledger."""
        number = self.driver.batches
        if self._batch is None:
            batch = self.driver.batch()
            if self.driver.batches == number:
                return None
            self._batch = batch
        rows = pa.Table.from_pylist(self._batch, schema=RUNS_SCHEMA)

        def is_past(lsn: int) -> bool:
            return bool(pc.any(pc.greater(rows["_commit_lsn"], lsn)).as_py())

        row = self._sink.apply(QUERY, self.driver.batches - 1, lambda start: self._run(rows, start), is_past)
        self._batch = None
        return row

    def restart(self) -> None:
        """Forget what the process knows, as one that was killed."""
        self._sink = Sink(self.targets, self.ledger, read=self._look)

    def begin_as(self, shapes: Shapes, *, compacts: bool = True) -> None:
        """Start again, with tables of other shapes."""
        self.shapes = shapes
        self.compacts = compacts
        self.driver.restart(**{FIRST_FILES: replace(self._files, shapes=shapes).text})
        self.restart()

    @abstractmethod
    def _run(self, rows: pa.Table, start: Start) -> Iterable[Mapping[str, Any]]:
        """Apply a batch."""

    def found(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table, with their values."""
        found = self._read(table, None)
        # Iceberg has its own column _deleted.
        names = [{"_is_deleted": "_deleted"}.get(name, name) for name in found.column_names]
        rows: list[dict[str, Any]] = found.rename_columns(names).to_pylist()
        return rows

    def rows(self, table: str, version: int | None = None, names: Sequence[str] | None = None) -> Rows:
        """PostgreSQL's present rows of a table, every value as text; columns in the order of their names.

        ``names`` are PostgreSQL's columns, where the lake has others as well.
        """
        found = present_rows(self._read(table, version), self.shapes[f"public.{table}"])
        return rows_of_arrow(found if names is None or not {*names} <= {*found.column_names} else found.select(names))

    @abstractmethod
    def _read(self, table: str, version: int | None) -> pa.Table:
        """The rows of a table."""

    def is_of(self, table: str, row: LedgerRow) -> bool:
        """Whether the version of a table that a row of the ledger has is still that one."""
        return self._is_of(f"public.{table}", row.tables[f"public.{table}"], Mark(row.query, row.batch_id))

    @abstractmethod
    def _is_of(self, table: str, version: int, mark: Mark) -> bool:
        """As :meth:`pg_cdc_source.mirrors.lakes.Lake.is_of`."""

    @abstractmethod
    def move_away(self, table: str) -> None:
        """Have a table no more."""

    def _look(self, table: str) -> object:
        return self._read(table.removeprefix("public."), None)

    @abstractmethod
    def ledger_rows(self) -> list[dict[str, Any]]:
        """All of the ledger, in its order."""

    @abstractmethod
    def write_as_somebody_else(self, table: str) -> None:
        """Append the row with the greatest ``id`` to its table once more."""

    @abstractmethod
    def keep_house_as_somebody_else(self, table: str) -> None:
        """Commit to a table, whose rows stay the same."""

    @abstractmethod
    def roll_back_as_somebody_else(self, table: str, version: int) -> None:
        """Have a table be what it was at a version, with as little sign of it as its format leaves."""

    @abstractmethod
    def merged_batches(self, table: str) -> list[int]:
        """The batches of a table's merges."""

    @abstractmethod
    def files(self, table: str, version: int | None = None) -> int:
        """How many files a table has."""

    @abstractmethod
    def compactions(self, table: str) -> set[int]:
        """The batches behind which a table's small files were written together."""


class DeltaRsLake(Lake):
    """Tables below a directory, without Spark."""

    kind = DeltaRsTable

    def __init__(self, drive: Drive, directory: Path, shapes: Shapes) -> None:
        targets = Targets.of(f"{directory}/{{table}}", None)
        files = FirstFiles(targets=targets, shapes=shapes)
        super().__init__(drive, files, targets, DeltaRsLedger(targets.ledger, compacts=True), shapes)

    def _run(self, rows: pa.Table, start: Start) -> Iterable[Mapping[str, Any]]:
        batches = iter(rows.to_batches())
        written = [
            row
            for out in FileWriter(FirstFiles(targets=self.targets, shapes=self.shapes)).take(batches)
            for row in out.to_pylist()
        ]
        return DeltaRsTask(self.targets, start, self.shapes, self.compacts).outcomes(written)

    def _read(self, table: str, version: int | None) -> pa.Table:
        return DeltaTable(self.targets[f"public.{table}"], version=version).to_pyarrow_table()

    def _is_of(self, table: str, version: int, mark: Mark) -> bool:
        return is_of(self.targets[table], version, mark)

    def move_away(self, table: str) -> None:
        shutil.rmtree(self.targets[f"public.{table}"])

    def ledger_rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = DeltaTable(self.targets.ledger).to_pyarrow_table().sort_by("batch_id").to_pylist()
        return found

    def write_as_somebody_else(self, table: str) -> None:
        path = self.targets[f"public.{table}"]
        rows = DeltaTable(path).to_pyarrow_table().sort_by([("id", "descending")])
        write_deltalake(path, rows.slice(0, 1), mode="append")

    def keep_house_as_somebody_else(self, table: str) -> None:
        DeltaTable(self.targets[f"public.{table}"]).optimize.z_order(["id"])

    def roll_back_as_somebody_else(self, table: str, version: int) -> None:
        DeltaTable(self.targets[f"public.{table}"]).restore(version)

    def merged_batches(self, table: str) -> list[int]:
        history = DeltaTable(self.targets[f"public.{table}"]).history()
        return [commit["pgcdc_batch"] for commit in history if commit["operation"] == "MERGE"]

    def files(self, table: str, version: int | None = None) -> int:
        return len(DeltaTable(self.targets[f"public.{table}"], version=version).file_uris())

    def compactions(self, table: str) -> set[int]:
        history = DeltaTable(self.targets[f"public.{table}"]).history()
        return {int(commit["pgcdc_batch"]) for commit in history if commit["operation"] == "OPTIMIZE"}


class CatalogLake(Lake):
    """Tables in a namespace of their own of one of Spark's catalogs."""

    kind = SparkTable
    _KINDS: Mapping[str, tuple[type[SparkTable], str]] = {
        "delta": (delta.DeltaTable, "spark_catalog."),
        "iceberg": (IcebergTableOfJvm, "lake."),
    }

    def __init__(self, drive: Drive, spark: SparkSession, format: str, directory: Path, shapes: Shapes) -> None:
        kind, catalog = self._KINDS[format]
        self._spark = spark
        self._namespace = f"{catalog}n{secrets.token_hex(4)}"
        targets = Targets.of(f"{self._namespace}.{{table}}", None)
        self._lake = SparkLake(spark, targets, kind, f"{directory}/staging", shapes, compacts=True)
        # A batch is read before it is run here, and what is staged goes when one begins.
        files = FirstFiles(directory=f"{directory}/first", shapes=shapes)
        super().__init__(drive, files, targets, self._lake.ledger, shapes)

    def begin_as(self, shapes: Shapes, *, compacts: bool = True) -> None:
        before = self._lake
        self._lake = SparkLake(self._spark, self.targets, before._kind, before._staging, shapes, compacts=compacts)
        super().begin_as(shapes, compacts=compacts)

    def _run(self, rows: pa.Table, start: Start) -> Iterable[Mapping[str, Any]]:
        return self._lake.run(self._spark.createDataFrame(rows), start)

    def _look(self, table: str) -> object:
        self._lake.try_to_read(table)
        return None

    def _read(self, table: str, version: int | None) -> pa.Table:
        if version is not None:
            return self._lake.read(f"public.{table}", version).toArrow()
        refresh(self._spark, f"{self._namespace}.{table}", self._lake._kind.provider)
        return self._spark.table(f"{self._namespace}.{table}").toArrow()

    def _is_of(self, table: str, version: int, mark: Mark) -> bool:
        return self._lake.is_of(table, version, mark)

    def move_away(self, table: str) -> None:
        self._spark.sql(f"DROP TABLE {self._namespace}.{table}")

    def ledger_rows(self) -> list[dict[str, Any]]:
        refresh(self._spark, self.targets.ledger, self._lake._kind.provider)
        found: list[dict[str, Any]] = self._spark.table(self.targets.ledger).orderBy("batch_id").toArrow().to_pylist()
        return found

    def write_as_somebody_else(self, table: str) -> None:
        name = f"{self._namespace}.{table}"
        self._spark.sql(f"INSERT INTO {name} SELECT * FROM {name} ORDER BY id DESC LIMIT 1").collect()

    def keep_house_as_somebody_else(self, table: str) -> None:
        if self._lake._kind.provider == "delta":
            comment = secrets.token_hex(4)
            self._spark.sql(f"ALTER TABLE {self._namespace}.{table} SET TBLPROPERTIES (seen = '{comment}')")
        else:
            self.rewrite_files(table)

    def roll_back_as_somebody_else(self, table: str, version: int) -> None:
        name = f"{self._namespace}.{table}"
        if self._lake._kind.provider == "delta":
            self._spark.sql(f"RESTORE TABLE {name} TO VERSION AS OF {version}").collect()
        else:
            catalog, _, rest = name.partition(".")
            self._spark.sql(f"CALL {catalog}.system.rollback_to_snapshot('{rest}', {version})").collect()

    def delete_keys(self, table: str, key: int) -> None:
        """Delete the row with this ``id``, in a process of its own, as the same step of the same batch each time."""
        name, mark = f"{self._namespace}.{table}", Mark(QUERY, 10**6)
        found = self._lake._kind(self._lake._session(), name, f"public.{table}", mark, None, REPLACED)
        rows = found._spark.createDataFrame([(key,)], "id int")
        found._run(Step(f"files 0{KEYS_SUFFIX}", is_last=False), rows, "ON t.id = s.id WHEN MATCHED THEN DELETE")

    def lose_entry(self, table: str, kept: Path) -> None:
        """Take a Delta table out of the catalog. Its files, which go with it, come back from ``kept``."""
        name = f"{self._namespace}.{table}"
        [(location,)] = self._spark.sql(f"DESCRIBE DETAIL {name}").select("location").collect()
        path = location.removeprefix("file:")
        shutil.copytree(path, kept)
        self._spark.sql(f"DROP TABLE {name}")
        shutil.copytree(kept, path, dirs_exist_ok=True)

    def rewrite_files(self, table: str) -> None:
        """Write all files of a table together, as somebody else."""
        name = f"{self._namespace}.{table}"
        if self._lake._kind.provider == "delta":
            self._spark.sql(f"OPTIMIZE {name}").collect()
            return
        refresh(self._spark, name, "iceberg")
        options = "options => map('rewrite-all', 'true')"
        self._spark.sql(f"CALL lake.system.rewrite_data_files(table => '{name}', {options})").collect()

    def merged_batches(self, table: str) -> list[int]:
        merges = ("MERGE", "overwrite")
        return [commit.said["batch"] for commit in self._commits(table) if commit.operation in merges]

    def are_taken_over(self, table: str) -> bool:
        """Whether the files of Iceberg's table are those that tasks had staged; Spark's names begin with a number."""
        [taken] = {
            re.fullmatch(".*/part-[0-9a-f-]{36}.parquet", row.file_path) is not None
            for row in self._spark.table(f"{self._namespace}.{table}.files").collect()
        }
        return taken

    def files(self, table: str, version: int | None = None) -> int:
        name = f"{self._namespace}.{table}"
        refresh(self._spark, name, self._lake._kind.provider)
        at = "" if version is None else f" VERSION AS OF {version}"
        if self._lake._kind is IcebergTableOfJvm:
            return self._spark.sql(f"SELECT * FROM {name}.files{at}").count()
        return len(self._spark.sql(f"SELECT * FROM {name}{at}").inputFiles())

    def compactions(self, table: str) -> set[int]:
        return {commit.said["batch"] for commit in self._commits(table) if commit.said.get("step") == COMPACT_STEP}

    def _commits(self, table: str) -> list[Commit]:
        kind, _ = self._KINDS[self._lake._kind.provider]
        name, mark = f"{self._namespace}.{table}", Mark(QUERY, 0)
        return kind(self._spark, name, f"public.{table}", mark, None, REPLACED).commits(None)


def present_rows(found: pa.Table, shape: Shape) -> pa.Table:
    """PostgreSQL's present rows, by what a table of this shape keeps."""
    if shape.is_soft:
        found = found.filter(pc.invert(found[shape.deleted]))
    if shape.has_versions:
        found = found.filter(pc.is_null(found["_valid_to"]))
    if shape.is_log:
        found = pa.Table.from_pylist(_replayed(found), found.schema)
    return found.drop_columns(list(shape.columns))


_RENAMED = {"v": "w"}


def _replayed(log: pa.Table) -> list[dict[str, Any]]:
    """The rows that are there at the end of a log."""
    rows: dict[Any, dict[str, Any]] = {}
    before: dict[str, Any] = {}  # the row that the last change has removed
    for row in log.sort_by([("_commit_lsn", "ascending"), ("_seq", "ascending")]).to_pylist():
        kind = row["_change_type"]
        if kind == "truncate":
            rows.clear()
        elif kind == "delete":
            # Somebody else may have added a row of the log again.
            before = rows.pop(row["id"], before)
        else:
            was = rows.get(row["id"], before)
            # Names are those of their time.
            names = [name if name in row else _RENAMED[name] for name in row["_unchanged"]]
            rows[row["id"]] = row | {name: was[name] for name in names}
    return list(rows.values())


def rows_of_arrow(found: pa.Table) -> Rows:
    """The rows of a table, every value as text; columns in the order of their names."""
    names = sorted(found.column_names)
    return Counter(tuple(map(_text, row)) for row in zip(*(found[name].to_pylist() for name in names), strict=True))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def rows_of(pg: Session, table: str) -> Rows:
    """As ``Lake.rows``, of the source. It has numbers and texts."""
    with pg.cursor() as cursor:
        cursor.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(sql.Identifier(table)))
        names = sorted(column.name for column in cursor.description)
        columns = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in names)
        cursor.execute(sql.SQL("SELECT {} FROM {}").format(columns, sql.Identifier(table)))
        return Counter(cursor.fetchall())


def set_aside(lake: Lake) -> dict[str, str]:
    """Run one batch; the tables that are set aside then, and why."""
    lake.step()
    last = lake.ledger.last()
    assert last is not None
    return dict(last.set_aside)


def is_same(lake: Lake, pg: Session, *tables: str) -> Callable[[], bool]:
    """A look for ``wait_until``: run a batch, and compare."""

    def look() -> bool:
        lake.step()
        last = lake.ledger.last()
        there = set() if last is None else set(last.tables)
        return {f"public.{table}" for table in tables} <= there and all(
            lake.rows(table) == rows_of(pg, table) for table in tables
        )

    return look


def rows_of_lake(path: str, version: int | None = None) -> Rows:
    """As ``Lake.rows``, of a table that delta-rs has written at ``path``."""
    return rows_of_arrow(DeltaTable(path, version=version).to_pyarrow_table())
