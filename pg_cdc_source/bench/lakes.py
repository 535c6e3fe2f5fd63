"""Lakes that mirrors write: loaded once, and put back before each run. Jars of Spark's formats are found here."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyspark
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pg_cdc_source import mirror
from pg_cdc_source.bench.question import Missing
from pg_cdc_source.lake.sink import Applied
from pg_cdc_source.mirrors.query import Format

FORMATS: tuple[Format, ...] = ("deltalake", "iceberg", "delta")
JARS = Path(os.environ.get("PG_CDC_LAKE_JARS") or Path(sys.prefix, "lake-jars"))

_SPARK = ".".join(pyspark.__version__.split(".")[:2])
_NAMES: Mapping[str, Sequence[str]] = {
    "deltalake": (),
    "delta": (f"delta-spark_{_SPARK}_2.13-*.jar", "delta-storage-*.jar"),
    "iceberg": (f"iceberg-spark-runtime-{_SPARK}_2.13-*.jar",),
}
_CATALOG = "lake"


def _jars(format: Format) -> list[Path] | None:
    """The jars of a format, None where some are not there."""
    found = [sorted(JARS.rglob(name)) for name in _NAMES[format]]
    return [jars[-1] for jars in found] if all(found) else None


def missing_lake(format: Format, shown: str) -> Missing | None:
    if _jars(format) is not None:
        return None
    return Missing(shown, f"{JARS} has no jar of {format} for Spark {_SPARK}: say in PG_CDC_LAKE_JARS where one is")


def lake_conf(home: Path) -> dict[str, str]:
    """Settings of a session that has the formats whose jars are there."""
    jars = {format: found for format in ("delta", "iceberg") if (found := _jars(format))}
    extensions, conf = [], {}
    if "delta" in jars:
        extensions.append("io.delta.sql.DeltaSparkSessionExtension")
        conf["spark.sql.catalog.spark_catalog"] = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    if "iceberg" in jars:
        extensions.append("org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions")
        conf[f"spark.sql.catalog.{_CATALOG}"] = "org.apache.iceberg.spark.SparkCatalog"
        conf[f"spark.sql.catalog.{_CATALOG}.type"] = "hadoop"
        conf[f"spark.sql.catalog.{_CATALOG}.warehouse"] = str(_warehouse(home))
    if jars:
        conf["spark.sql.extensions"] = ",".join(extensions)
        conf["spark.driver.extraClassPath"] = os.pathsep.join(str(jar) for found in jars.values() for jar in found)
    return conf


@contextmanager
def scratch_namespace(home: Path) -> Iterator[str]:
    """A namespace of Iceberg's catalog, whose files go when the block ends."""
    name = f"scratch_{secrets.token_hex(6)}"
    try:
        yield f"{_CATALOG}.{name}"
    finally:
        shutil.rmtree(_warehouse(home) / name, ignore_errors=True)


def _warehouse(home: Path) -> Path:
    return home / "warehouse"


class Lake:
    """Tables of PostgreSQL as a mirror keeps them in one format. Its files are below the lab's ``home``."""

    def __init__(
        self, format: Format, home: Path, url: str, tables: Sequence[str], publication: str, slot: str
    ) -> None:
        self._format = format
        self._warehouse = _warehouse(home)
        self._url, self._tables, self._publication, self._slot = url, ",".join(tables), publication, slot
        self._at = self._place()
        self._loaded = self._place()

    def load(self, spark: SparkSession) -> None:
        """Bring the first rows, and remember the lake as it is then."""
        self.bring(spark)
        shutil.copytree(self._at, self._loaded)

    def put_back(self) -> None:
        """Let the lake be as it was loaded."""
        # Iceberg's metadata have whole paths, and Delta's jar remembers what was at a path.
        if self._format == "iceberg":
            shutil.rmtree(self._at)
        else:
            self._at = self._place()
        shutil.copytree(self._loaded, self._at)

    def remove(self) -> None:
        """Remove its files."""
        for place in (self._at, self._loaded):
            shutil.rmtree(place, ignore_errors=True)

    def bring(self, spark: SparkSession) -> int:
        """Bring what is there, and return how many rows that were."""
        came = 0

        def count(applied: Applied) -> None:
            nonlocal came
            came += sum(applied.rows.values())

        self.start(spark, count, once=True).awaitTermination()
        return came

    def start(self, spark: SparkSession, on_batch: Callable[[Applied], None], *, once: bool = False) -> StreamingQuery:
        """Start the mirror."""
        return mirror(
            spark,
            url=self._url,
            tables=self._tables,
            slot=self._slot,
            target=self._target,
            checkpoint=str(self._at / "checkpoint"),
            format=self._format,
            once=once,
            on_batch=on_batch,
            publication=self._publication,
        )

    def read(self, spark: SparkSession, table: str) -> None:
        """Read a table whole."""
        if self._format == "deltalake":
            self._delta_rs(table).to_pyarrow_table()
        else:
            # Delta 4.4 cannot read deletion vectors for a sink such as noop.
            self._frame(spark, table).selectExpr("sum(hash(*))").collect()

    def files(self, spark: SparkSession, table: str) -> int:
        """How many files of data a table has."""
        if self._format == "deltalake":
            return len(self._delta_rs(table).file_uris())
        if self._format == "iceberg":
            return spark.table(f"{self._target.format(table=table)}.files").count()
        return len(self._frame(spark, table).inputFiles())

    @property
    def _target(self) -> str:
        return f"{_CATALOG}.{self._at.name}.{{table}}" if self._format == "iceberg" else f"{self._at}/{{table}}"

    def _delta_rs(self, table: str) -> DeltaTable:
        return DeltaTable(self._target.format(table=table))

    def _frame(self, spark: SparkSession, table: str) -> DataFrame:
        target = self._target.format(table=table)
        return spark.read.format("delta").load(target) if self._format == "delta" else spark.table(target)

    def _place(self) -> Path:
        return self._warehouse / f"lake_{secrets.token_hex(6)}"
