"""A table of the lake by Spark's SQL: what Delta and Iceberg have in common.

PostgreSQL's numbers of the columns are in the table's property ``pgcdc.columns``.
"""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import pyarrow as pa
from pyspark.sql import DataFrame, DataFrameWriterV2, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pg_cdc_source.errors import RESNAPSHOT, ForeignWriterError
from pg_cdc_source.lake.bring import Mark, Step, foreign_writer_error
from pg_cdc_source.lake.columns import MirroredLayout, read_layout
from pg_cdc_source.lake.kept_columns import require_allowed
from pg_cdc_source.lake.parts import Emptied, Files, Rekeyed
from pg_cdc_source.lake.shape import DELETED_LSN, VALID_TO, VALID_TO_TS
from pg_cdc_source.lake.shape_of_table import OF_TABLE, properties_of, require_table
from pg_cdc_source.lake.states import IS_DELETE
from pg_cdc_source.mirrors.catalog_names import backquoted
from pg_cdc_source.mirrors.catalog_tables import create_namespace, veiled
from pg_cdc_source.mirrors.column_changes import Columns, with_columns
from pg_cdc_source.mirrors.fetching import in_a_task
from pg_cdc_source.mirrors.merge_sql import CUT, literal, merged, same
from pg_cdc_source.mirrors.spark_commits import (
    ANEW_STEP,
    COLUMNS_STEP,
    COMPACT_STEP,
    KEYS_SUFFIX,
    SparkCommits,
)
from pg_cdc_source.mirrors.staging import StagedSegment
from pg_cdc_source.options.names import listed
from pg_cdc_source.spark.edge import spark_schema

COLUMNS = "pgcdc.columns"


class SparkTable(SparkCommits):
    """One table, for one batch, in a session of its own. ``name`` is as SQL has it."""

    provider: ClassVar[str]
    properties: ClassVar[Mapping[str, str]]
    upkeep: ClassVar[Mapping[str, str]] = {}  # those of them that the ledger has as well
    properties_of_logs: ClassVar[Mapping[str, str]] = {}  # besides, of a table in mode append
    properties_of_variants: ClassVar[Mapping[str, str]] = {}  # besides, of a table that may have VARIANT

    @classmethod
    @abstractmethod
    def configure(cls, session: SparkSession, template: str) -> None:
        """Set what a session needs that writes tables of ``template``."""

    @classmethod
    @abstractmethod
    def write_together(cls, session: SparkSession, name: str, text: str) -> None:
        """Write a table's small files together, in commits that say ``text``."""

    @classmethod
    def create(cls, spark: SparkSession, writer: DataFrameWriterV2, has_begun: Callable[[str], bool]) -> None:
        """Create a table. ``has_begun`` says of a place with files whether a kill has left them there of just this."""
        writer.create()

    @classmethod
    @abstractmethod
    def is_of(cls, spark: SparkSession, name: str, version: int, mark: Mark) -> bool:
        """Whether a version of the table is of this batch, or of one before."""

    # --- columns ------------------------------------------------------------------------------------------------------

    def prepare(self, layout: MirroredLayout, fills: Mapping[int, str | None], *, anew: bool) -> None:
        wanted = Columns.of(layout, self._shape)
        if self._said is None:
            create_namespace(self._spark, self._name, self.provider)
            self._create(wanted, layout)
            return
        require_table(self._table, self._said, layout)
        said = self._columns
        present = said.renumbered(wanted) if self._shape.is_log else said
        if self._shape.keeps_columns:
            wanted = wanted.with_kept(present, self._table, self._shape)
        # Somebody else may have altered the table and not what it says; all rows come, and nothing of that stays.
        is_altered = (
            anew
            and not self.has_begun()
            and not present.are_those_of(self._spark.table(self._name).schema, is_iceberg=self.provider == "iceberg")
        )
        if said == wanted and not is_altered:
            return
        require_allowed(self._table, self._shape, wanted.described(), present.described())
        if anew and (is_altered or not self._shape.keeps_columns):
            self._create(wanted, layout)
            return
        self._signed(COLUMNS_STEP)
        changes = list(present.changes_to(wanted, self._spark.table(self._name).columns, self._table, self._shape))
        # It tells these changes from what somebody else has altered before.
        self._commit_columns()
        for i, (clause, behind) in enumerate(changes):
            if clause is not None:
                self._spark.sql(f"ALTER TABLE {self._name} {clause}")
            # Each is a commit. Behind a crash names alone do not say of several which have been made.
            if i + 1 < len(changes):
                self._say(behind)
        filled = {
            column.name: text
            for column in layout.columns
            if column.attnum is not None
            and column.attnum not in present.numbers
            and (text := fills.get(column.attnum)) is not None
        }
        # Again after a crash: the columns are not those wanted before the property says so.
        if filled:
            self._fill(layout, filled, wanted)
        self._commit_columns()
        self._say(wanted)
        self._note_commit()

    def require_columns(self) -> None:
        """Raise ForeignWriterError where the table lacks a column that it says it has."""
        if self._said is None:
            return
        lacking = set(self._columns.schema.names) - set(self._spark.table(self._name).columns)
        if lacking:
            raise foreign_writer_error(
                f"{self._name} was changed by somebody else: it has no column {listed(sorted(lacking))}"
            )

    def _commit_columns(self) -> None:
        """Make a version of the table that has its present columns, where altering them makes none."""

    @property
    def _columns(self) -> Columns:
        """The table's columns, as its property has them. Raises ForeignWriterError."""
        assert self._said is not None
        try:
            return Columns.read(self._said[COLUMNS])
        except (KeyError, ValueError) as error:
            raise ForeignWriterError(
                f"{self._name} does not say any more which columns of {self._table} it has",
                remedy=f"move the lake's table away; then {RESNAPSHOT}",
            ) from error

    def _say(self, columns: Columns) -> None:
        """Have the table's property say which columns it has."""
        assert self._said is not None
        said = f"{literal(COLUMNS)} = {literal(veiled(columns.text))}"
        self._spark.sql(f"ALTER TABLE {self._name} SET TBLPROPERTIES ({said})")
        self._said = {**self._said, COLUMNS: columns.text}

    def _create(self, columns: Columns, layout: MirroredLayout) -> None:
        """Create the table, or write it anew without rows, in one commit."""
        self._signed(ANEW_STEP)
        said = {OF_TABLE: self._table, COLUMNS: columns.text}
        given = {**self.properties, **properties_of(self._shape, layout)}
        given |= self.properties_of_logs if self._shape.is_log else {}
        given |= self.properties_of_variants if self._shape.has_variants else {}
        veils = {key: veiled(text) for key, text in said.items()}
        self._write_empty(columns.schema, given | veils, replaces=self._said is not None)
        self._said = given | said
        self._note_commit()

    def _write_empty(self, schema: StructType, properties: Mapping[str, str], *, replaces: bool) -> None:
        writer = self._spark.createDataFrame([], schema).writeTo(self._name).using(self.provider)
        for key, value in properties.items():
            writer = writer.tableProperty(key, value)
        if replaces:
            writer.createOrReplace()
        else:
            self.create(self._spark, writer, self._has_begun)

    def _has_begun(self, location: str) -> bool:
        """Whether files at a place, for which the catalog has no entry, are what a kill has left of this table."""
        name = f"{self.provider}.{backquoted(location)}"
        commits = type(self)(self._spark, name, self._table, self._mark, None, self._shape).commits(None)
        return [(c.said.get("query"), c.said.get("step")) for c in commits] == [(self._mark.query, ANEW_STEP)]

    def _fill(self, layout: MirroredLayout, filled: Mapping[str, str], columns: Columns) -> None:
        values = {column.name: column for column in layout.columns if column.name in filled}
        schema = pa.schema([pa.field(name, column.type) for name, column in values.items()])
        row = {name: column.value_of(filled[name]) for name, column in values.items()}
        # As Arrow: of a MAP, Spark's own rows have other values.
        found = self._spark.createDataFrame(pa.Table.from_pylist([row], schema), spark_schema(schema))
        columns.parsed(found).createOrReplaceTempView(_VIEW)
        settings = ", ".join(f"{backquoted(name)} = (SELECT {backquoted(name)} FROM {_VIEW})" for name in row)
        self._spark.sql(f"UPDATE {self._name} SET {settings}").collect()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def add_files(self, step: Step, part: Files) -> None:
        columns = self._columns
        found: DataFrame | None = None
        for layout in dict.fromkeys(file["layout"] for file in part.files):
            written = Columns.of(read_layout(layout), self._shape.staged)
            paths = [file["place"] for file in part.files if file["layout"] == layout]
            rows = columns.projected(self._spark.read.schema(written.schema).parquet(*paths), written)
            found = rows if found is None else found.unionByName(rows)
        assert found is not None
        if part.again and self._shape.is_soft:
            # Rows that have these keys go first, also those that somebody else has made of them.
            on = " AND ".join(map(same, read_layout(part.files[0]["layout"]).key))
            self._run(Step(step.name + KEYS_SUFFIX, is_last=False), found, f"ON {on} WHEN MATCHED THEN DELETE")
        self._insert(found, step, anew=part.again and not self._shape.keeps)

    def empty(self, step: Step, part: Emptied) -> None:
        if not self._shape.keeps:
            self._insert(self._spark.table(self._name).limit(0), step, anew=True)
            return
        if self._shape.has_versions:
            at = self._spark.createDataFrame([(part.lsn, part.at)], f"{VALID_TO} bigint, {VALID_TO_TS} timestamp")
            self._run(step, at, CUT)
            return
        self._signed(step.name, is_last=step.is_last)
        gone = f"{backquoted(self._shape.deleted)} = true, {backquoted(DELETED_LSN)} = {part.lsn}"
        self._spark.sql(f"UPDATE {self._name} SET {gone} WHERE NOT {backquoted(self._shape.deleted)}").collect()
        self._note_step(step)

    def tell_apart(self, step: Step, part: Rekeyed) -> None:
        names = list(map(backquoted, part.key))
        order = f"ORDER BY {backquoted(self._shape.deleted)}, {DELETED_LSN} DESC"
        place = f"row_number() OVER (PARTITION BY {', '.join(names)} {order})"
        rows = self._spark.table(self._name).withColumn(_PLACE, F.expr(place))
        is_other = f"{_PLACE} > 1 AND {backquoted(self._shape.deleted)}"
        is_other += "".join(f" AND {name} IS NOT NULL" for name in names)
        if rows.where(is_other).isEmpty():
            # A commit says that the step is done: later it would find other rows.
            self._insert(rows.limit(0).drop(_PLACE), step, anew=False)
        else:
            self._insert(rows.where(f"NOT ({is_other})").drop(_PLACE), step, anew=True)

    def apply(self, step: Step, segment: StagedSegment) -> None:
        if segment.asks is not None:
            segment = self._with_fetched(segment, segment.asks)
        rows = self._staged(segment.path, segment.schema)
        if self._shape.is_log:
            self._insert(rows, step, anew=False)
        elif segment.emptied:
            self._insert(rows.where(f"NOT {backquoted(IS_DELETE)}"), step, anew=True)
        else:
            self._run(step, rows, merged(segment, rows.columns, self._columns.schema.names, self._shape))

    def compact(self) -> None:
        # None, one or two commits: the table's history says what has been done.
        self._version = None
        self.write_together(self._spark, self._name, self._signed(COMPACT_STEP))

    def _staged(self, path: str, schema: str) -> DataFrame:
        return self._spark.read.schema(StructType.fromJson(json.loads(schema))).parquet(path)

    def _with_fetched(self, segment: StagedSegment, keys: str) -> StagedSegment:
        """Have final rows staged with the values that the lake's table has."""
        # An attempt before this one may have written some.
        to = f"{segment.path}-fetched-{uuid.uuid4()}"
        rows = self._spark.table(self._name)
        if self._shape.has_versions:
            rows = rows.where(f"{VALID_TO} IS NULL")
        found = rows.join(self._staged(keys, segment.schema), list(segment.key), "left_semi")
        texts = {name: F.to_json(F.col(backquoted(name))) for name in self._columns.variants}
        with_columns(found, texts).write.parquet(to)
        return in_a_task(self._spark, segment, to, self._shape)

    def _run(self, step: Step, rows: DataFrame, how: str) -> None:
        """Merge rows, which are called ``s``, into the table, which is ``t``."""
        self._columns.parsed(rows).createOrReplaceTempView(_VIEW)
        self._signed(step.name, is_last=step.is_last)
        self._spark.sql(f"MERGE INTO {self._name} AS t USING {_VIEW} AS s {how}").collect()
        self._note_step(step)

    def _insert(self, rows: DataFrame, step: Step, *, anew: bool) -> None:
        columns = self._columns
        fields = columns.schema.fields
        names = ", ".join(backquoted(field.name) for field in fields)
        # A column that was dropped in PostgreSQL may have stayed.
        lacking = {field.name: F.lit(None).cast(field.dataType) for field in fields if field.name not in rows.columns}
        with_columns(columns.parsed(rows), lacking).createOrReplaceTempView(_VIEW)
        self._signed(step.name, is_last=step.is_last)
        how = "OVERWRITE" if anew else "INTO"
        self._spark.sql(f"INSERT {how} {self._name} ({names}) SELECT {names} FROM {_VIEW}").collect()
        self._note_step(step)


_VIEW = "pgcdc_rows"
_PLACE = "place".ljust(64, "_")  # no column of PostgreSQL can have the name
