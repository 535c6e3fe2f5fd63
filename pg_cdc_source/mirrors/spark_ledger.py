"""A ledger in a table that Spark's SQL writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import DataFrameWriterV2, SparkSession
from pyspark.sql import functions as F

from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.compaction import compact_where_due
from pg_cdc_source.lake.ledger import LEDGER_SCHEMA, OF_BATCH, TEMPLATE, LedgerRow, newest_by
from pg_cdc_source.mirrors.catalog_names import backquoted
from pg_cdc_source.mirrors.catalog_tables import create_namespace, read_properties, refresh, veiled
from pg_cdc_source.spark.edge import spark_schema
from pg_cdc_source.values.arrow import in_utc

# With these Delta passes over a commit as one that was made before, and Iceberg does not publish it.
_NOT_PUBLISHED = ("spark.databricks.delta.write.txnAppId", "spark.wap.id", "spark.wap.branch")

# As SparkTable.create().
Create = Callable[[SparkSession, DataFrameWriterV2, Callable[[str], bool]], None]


class SparkLedger:
    """A ledger that SQL calls ``name``, in a table of the format ``provider``."""

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        provider: str,
        upkeep: Mapping[str, str],
        create: Create,
        compact: Callable[[], None] | None = None,
    ) -> None:
        """``upkeep`` are properties of the table. ``create`` creates it; ``compact`` writes small files together."""
        self._spark = spark
        self._name = name
        self._provider = provider
        self._upkeep = upkeep
        self._create = create
        self._compact = compact

    def create(self, said: Mapping[str, str]) -> None:
        self._require_published()
        if self._is_there():
            return
        create_namespace(self._spark, self._name, self._provider)
        empty = self._spark.createDataFrame([], spark_schema(LEDGER_SCHEMA))
        writer = empty.writeTo(self._name).using(self._provider)
        for key, value in {**_veiled(said), **self._upkeep}.items():
            writer = writer.tableProperty(key, value)
        self._create(self._spark, writer, self._has_begun)

    def note(self, said: Mapping[str, str]) -> None:
        # Texts of hexadecimal digits.
        properties = ", ".join(f"'{key}' = '{value}'" for key, value in _veiled(said).items())
        self._spark.sql(f"ALTER TABLE {self._name} SET TBLPROPERTIES ({properties})")

    def _has_begun(self, location: str) -> bool:
        """Whether files at a place, for which the catalog has no entry, are what a kill has left of a ledger."""
        name = f"{self._provider}.{backquoted(location)}"
        return TEMPLATE in (read_properties(self._spark, name) or {}) and self._spark.table(name).isEmpty()

    def last(self, lsn: int | None = None, query: str | None = None, since: int = 0) -> LedgerRow | None:
        if not self._is_there():
            return None
        refresh(self._spark, self._name, self._provider)
        rows = self._spark.table(self._name)
        if lsn is not None:
            rows = rows.where(F.col("lsn") <= lsn)
        if since:
            rows = rows.where(F.col("batch_id") >= since)
        rows = rows.where("is_whole" if query is None else F.col("query") == query)
        newest = [F.desc(name) for name in newest_by(query)]
        # Without the names of all tables in each of what may be millions of rows.
        batch = rows.select(*OF_BATCH).orderBy(*newest).limit(1).collect()
        if not batch:
            return None
        of_batch = rows.where((F.col("query") == batch[0].query) & (F.col("batch_id") == batch[0].batch_id))
        # Not collect(), whose times have lost their zone.
        return LedgerRow.of(in_utc(of_batch.orderBy(*newest).limit(1).toArrow()).to_pylist()[0])

    def queries(self) -> frozenset[str]:
        if not self._is_there():
            return frozenset()
        refresh(self._spark, self._name, self._provider)
        return frozenset(query for (query,) in self._spark.table(self._name).select("query").distinct().collect())

    @property
    def said(self) -> Mapping[str, str]:
        found = read_properties(self._spark, self._name) or {}
        if TEMPLATE not in found:
            raise OptionError(f"{self._name} is no ledger of a mirror", remedy="name the ledger that mirror() writes")
        return found

    def append(self, row: LedgerRow) -> None:
        self._require_published()
        self._spark.createDataFrame(row.to_arrow()).writeTo(self._name).append()
        if self._compact is not None:
            compact_where_due(self._name, row.batch_id, row.batch_id + 1, self._compact)

    def _require_published(self) -> None:
        for key in _NOT_PUBLISHED:
            if self._spark.conf.get(key, None):
                raise OptionError(
                    f"the session sets {key}, so rows of the ledger {self._name} would be lost without an error",
                    remedy="unset it, or start the mirror in a session of its own (spark.newSession())",
                )

    def _is_there(self) -> bool:
        return TEMPLATE in (read_properties(self._spark, self._name) or {})


def _veiled(said: Mapping[str, str]) -> dict[str, str]:
    return {key: veiled(value) for key, value in said.items()}
