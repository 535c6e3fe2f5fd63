"""A table of the lake by Spark's SQL: what Delta and Iceberg have in common.

Every commit says the query, the batch and the step it is of, so what a crash has left half done is found in the table's
history, and done once. PostgreSQL's numbers of the columns are in the table's property ``pgcdc.columns``.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any, ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pg_cdc_source.errors import ForeignWriterError
from pg_cdc_source.lake.bring import Mark, Step, foreign, newest_of_ours
from pg_cdc_source.lake.columns import MirroredLayout, read_layout
from pg_cdc_source.lake.kept_columns import require_allowed
from pg_cdc_source.lake.parts import Emptied, Files
from pg_cdc_source.lake.shape import DELETED_LSN, REPLACED, VALID_FROM, VALID_TO, VALID_TO_TS, Shape
from pg_cdc_source.lake.shape_of_table import properties_of, require_shape, require_table
from pg_cdc_source.lake.states import IS_DELETE, kept_name
from pg_cdc_source.mirrors.catalog_names import namespace_of, quoted
from pg_cdc_source.mirrors.catalog_tables import read_properties, veiled
from pg_cdc_source.mirrors.column_changes import Columns, with_columns
from pg_cdc_source.mirrors.fetching import in_a_task
from pg_cdc_source.mirrors.staging import StagedSegment
from pg_cdc_source.spark.edge import spark_schema

OF_TABLE, COLUMNS = "pgcdc.table", "pgcdc.columns"
# Steps that are not of the batch's changes: columns that change, a table that begins anew, and small files that are
# written together.
COLUMNS_STEP, ANEW_STEP, COMPACT_STEP = "columns", "anew", "compact"
# Behind the name of a step: its keys are deleted before its rows come.
KEYS_SUFFIX = ", keys"
# A batch has few steps; whoever wants more of a table's history asks for all of it.
RECENT = 30


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of the table, with what it says of the batch that it is of, and the version that it was made of."""

    version: int
    parent: int | None
    operation: str
    said: Mapping[str, Any]


class SparkTable(ABC):
    """One table, for one batch, in a session of its own. ``name`` is as SQL has it."""

    provider: ClassVar[str]
    properties: ClassVar[Mapping[str, str]]
    properties_of_variants: ClassVar[Mapping[str, str]] = {}  # besides, of a table that may have VARIANT
    # What may be done to a mirrored table by others: its rows stay the same.
    housekeeping: ClassVar[frozenset[str]]

    @classmethod
    @abstractmethod
    def configure(cls, session: SparkSession, template: str) -> None:
        """Set what a session needs that writes tables of ``template``."""

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        table: str,
        mark: Mark,
        expected: int | None,
        shape: Shape = REPLACED,
    ) -> None:
        """``expected`` is the version that the ledger knows."""
        self._spark = spark
        self._name = name
        self._table = table
        self._mark = mark
        self._shape = shape
        self._said = read_properties(spark, name)
        self._text = ""  # what the session's next commits say
        # Where nobody has committed since the ledger's row, nothing of this batch is done, and nothing is foreign.
        is_as_left = expected is not None and self._said is not None and self.present(self._said) == expected
        self._found: list[Commit] | None = [] if is_as_left or self._said is None else None
        self._version = expected if is_as_left else None
        self._expected = expected
        self._may_have_others = not is_as_left  # between the commits of this batch

    # --- what a format has of its own ---------------------------------------------------------------------------------

    @abstractmethod
    def present(self, properties: Mapping[str, str]) -> int | None:
        """The table's present version, with as little work as there is."""

    @abstractmethod
    def commits(self, limit: int | None) -> list[Commit]:
        """The table's commits, the present one first, at most ``limit`` of them."""

    @abstractmethod
    def committed(self) -> int | None:
        """The version of the session's last commit, where that can be told with little work."""

    @abstractmethod
    def follows(self, version: int, before: int) -> bool:
        """Whether nothing was committed between two versions, where that can be told with little work."""

    @abstractmethod
    def sign(self, text: str, step: str) -> None:
        """Have the session's next commits say ``text``."""

    @abstractmethod
    def age(self, version: int | None) -> int:
        """How many commits the table had at a version; 0 where that is not known."""

    @classmethod
    @abstractmethod
    def write_together(cls, session: SparkSession, name: str, text: str) -> None:
        """Write a table's small files together, in commits that say ``text``."""

    # --- what has been done -------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        return self._said is not None

    @property
    def version(self) -> int | None:
        if self._version is None:
            # Not the present one: what somebody else has committed behind it is foreign to the next batch.
            commits = (commit for limit in (RECENT, None) for commit in self.commits(limit))
            self._version = newest_of_ours(
                (commit.version, self._is_ours(commit), commit.operation in self.housekeeping) for commit in commits
            )
        return self._version

    @property
    def _commits(self) -> list[Commit]:
        """The recent commits when the batch began: at least those since the version that the ledger knows."""
        if self._found is None:
            self._found = self.commits(RECENT)
            if len(self._found) == RECENT and all(commit.version != self._expected for commit in self._found):
                self._found = self.commits(None)
        return self._found

    def is_done(self) -> bool:
        return any(
            commit.said["last"] and commit.said["batch"] >= self._mark.batch for commit in self._of_query(self._commits)
        )

    def has(self, step: Step) -> bool:
        return any(
            commit.said["step"] == step.name and commit.said["batch"] == self._mark.batch
            for commit in self._of_query(self._commits)
        )

    def _of_query(self, commits: Iterable[Commit]) -> Iterable[Commit]:
        return filter(self._is_ours, commits)

    def _is_ours(self, commit: Commit) -> bool:
        return commit.said.get("query") == self._mark.query

    def require_ours(self, expected: int | None, *, again: bool) -> None:
        if self._said is None:
            if expected is not None and not again:
                raise foreign(f"{self._name} is gone")
            return
        if self._said.get(OF_TABLE) != self._table:
            raise foreign(f"{self._name} is not a mirror of {self._table}")
        require_shape(self._name, self._said, self._shape)
        if again:
            return
        if self._version is not None:
            return
        # Where the recent commits do not lead there, all of them may.
        if not self._leads_to(self._commits, expected) and not self._leads_to(self.commits(None), expected):
            raise self._restored()

    def require_alone(self, expected: int | None, *, again: bool) -> None:
        if not self._may_have_others or again:
            return
        for limit in (RECENT, None):
            # What came behind the last one is foreign to the next batch.
            commits = list(dropwhile(lambda commit: not self._is_ours(commit), self.commits(limit)))
            if self._leads_to(commits, expected):
                return
        raise self._restored()

    def _restored(self) -> ForeignWriterError:
        return foreign(f"{self._name} was restored, or written anew by somebody else, or its history has expired")

    def _leads_to(self, commits: Sequence[Commit], expected: int | None) -> bool:
        for commit in commits:
            if commit.version == expected:
                return True
            if self._is_ours(commit):
                if commit.said["step"] == ANEW_STEP:
                    return True
            elif commit.operation not in self.housekeeping:
                raise foreign(
                    f"{self._name} was changed by somebody else: version {commit.version}, {commit.operation}"
                )
            # It may have expired itself.
            if expected is not None and commit.parent == expected:
                return True
        # What was done would be among them.
        return expected is None and (not commits or any(self._of_query(commits)))

    def _note_commit(self) -> None:
        """Take in the session's last commit."""
        before, self._version = self._version, self.committed()
        if before is None or self._version is None or not self.follows(self._version, before):
            self._may_have_others = True

    def _signed(self, step: str, *, is_last: bool = False) -> str:
        said = {"query": self._mark.query, "batch": self._mark.batch, "step": step, "last": is_last}
        text = json.dumps(said, separators=(",", ":"))
        self.sign(text, step)
        self._text = text
        return text

    # --- columns ------------------------------------------------------------------------------------------------------

    def prepare(self, layout: MirroredLayout, fills: Mapping[int, str | None], *, anew: bool) -> None:
        wanted = Columns.of(layout, self._shape)
        if self._said is None:
            namespace = namespace_of(self._name)
            if namespace is not None and namespace != self.provider:
                self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")
            self._create(wanted, layout)
            return
        require_table(self._table, self._said, layout)
        present = self._columns
        if self._shape.keeps_columns:
            wanted = wanted.with_kept(present, self._table, self._shape)
        if present == wanted:
            return
        require_allowed(self._table, self._shape, wanted.described(), present.described())
        if anew and not self._shape.keeps_columns:
            self._create(wanted, layout)
            return
        self._signed(COLUMNS_STEP)
        changes = list(present.changes_to(wanted, self._spark.table(self._name).columns, self._table, self._shape))
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
        self._say(wanted)
        self._note_commit()

    @property
    def _columns(self) -> Columns:
        """The table's columns, as its property has them. Raises ForeignWriterError."""
        assert self._said is not None
        try:
            return Columns.read(self._said[COLUMNS])
        except (KeyError, ValueError) as error:
            raise ForeignWriterError(
                f"{self._name} does not say any more which columns of {self._table} it has",
                remedy="move the lake's table away; then have its rows come again: pg-cdc resnapshot",
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
            writer.create()

    def _fill(self, layout: MirroredLayout, filled: Mapping[str, str], columns: Columns) -> None:
        values = {column.name: column for column in layout.columns}
        schema = spark_schema(layout.arrow_schema())
        row = {name: values[name].value_of(text) for name, text in filled.items()}
        wanted = StructType([schema[name] for name in row])
        found = columns.parsed(self._spark.createDataFrame([tuple(row.values())], wanted))
        found.createOrReplaceTempView(_VIEW)
        settings = ", ".join(f"{quoted(name)} = (SELECT {quoted(name)} FROM {_VIEW})" for name in row)
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
            on = " AND ".join(map(_same, read_layout(part.files[0]["layout"]).key))
            self._run(Step(step.name + KEYS_SUFFIX, is_last=False), found, f"ON {on} WHEN MATCHED THEN DELETE")
        self._insert(found, step, anew=part.again and not self._shape.keeps)

    def empty(self, step: Step, part: Emptied) -> None:
        if not self._shape.keeps:
            self._insert(self._spark.table(self._name).limit(0), step, anew=True)
            return
        if self._shape.has_versions:
            at = self._spark.createDataFrame([(part.lsn, part.at)], f"{VALID_TO} bigint, {VALID_TO_TS} timestamp")
            self._run(step, at, _CUT)
            return
        self._signed(step.name, is_last=step.is_last)
        gone = f"{quoted(self._shape.deleted)} = true, {quoted(DELETED_LSN)} = {part.lsn}"
        self._spark.sql(f"UPDATE {self._name} SET {gone} WHERE NOT {quoted(self._shape.deleted)}").collect()
        self._note_commit()

    def apply(self, step: Step, segment: StagedSegment) -> None:
        if segment.asks is not None:
            segment = self._with_fetched(segment, segment.asks)
        rows = self._staged(segment.path, segment.schema)
        if self._shape.is_log:
            self._insert(rows, step, anew=False)
        elif segment.emptied:
            self._insert(rows.where(f"NOT {quoted(IS_DELETE)}"), step, anew=True)
        else:
            self._run(step, rows, self._merge(segment, rows.columns))

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
        texts = {name: F.to_json(F.col(quoted(name))) for name in self._columns.variants}
        with_columns(found, texts).write.parquet(to)
        return in_a_task(self._spark, segment, to, self._shape)

    def _run(self, step: Step, rows: DataFrame, how: str) -> None:
        """Merge rows, which are called ``s``, into the table, which is ``t``."""
        self._columns.parsed(rows).createOrReplaceTempView(_VIEW)
        self._signed(step.name, is_last=step.is_last)
        self._spark.sql(f"MERGE INTO {self._name} AS t USING {_VIEW} AS s {how}").collect()
        self._note_commit()

    def _insert(self, rows: DataFrame, step: Step, *, anew: bool) -> None:
        columns = self._columns
        fields = columns.schema.fields
        names = ", ".join(quoted(field.name) for field in fields)
        # A column that was dropped in PostgreSQL may have stayed.
        lacking = {field.name: F.lit(None).cast(field.dataType) for field in fields if field.name not in rows.columns}
        with_columns(columns.parsed(rows), lacking).createOrReplaceTempView(_VIEW)
        self._signed(step.name, is_last=step.is_last)
        how = "OVERWRITE" if anew else "INTO"
        self._spark.sql(f"INSERT {how} {self._name} ({names}) SELECT {names} FROM {_VIEW}").collect()
        self._note_commit()

    def _merge(self, segment: StagedSegment, in_file: Sequence[str]) -> str:
        names = [name for name in self._columns.schema.names if name in in_file]
        is_delete = f"s.{quoted(IS_DELETE)}"

        def value(name: str) -> str:
            ours, theirs = f"t.{quoted(name)}", f"s.{quoted(name)}"
            place = in_file.index(name)
            if place in segment.kept:
                return f"CASE WHEN s.{quoted(kept_name(place))} THEN {ours} ELSE {theirs} END"
            return theirs

        on = [_same(name) for name in segment.key]
        on += [bounds.condition(f"t.{quoted(bounds.column)}", literal) for bounds in segment.bounds]
        inserted = f"""
            WHEN NOT MATCHED AND NOT {is_delete} THEN INSERT ({", ".join(map(quoted, names))})
                VALUES ({", ".join(f"s.{quoted(name)}" for name in names)})
        """
        if self._shape.has_versions:
            return f"ON {' AND '.join(on)} AND t.{quoted(VALID_TO)} IS NULL AND {is_delete} {_ENDS} {inserted}"
        return f"""
            ON {" AND ".join(on)}
            {"" if self._shape.is_soft else f"WHEN MATCHED AND {is_delete} THEN DELETE"}
            WHEN MATCHED THEN UPDATE SET {", ".join(f"t.{quoted(name)} = {value(name)}" for name in names)}
            {inserted}
        """


_VIEW = "pgcdc_rows"
# A state that was never there from one commit to the next goes, as where a large commit is cut.
_ENDS = f"""
    WHEN MATCHED AND t.{VALID_FROM} = s.{VALID_TO} THEN DELETE
    WHEN MATCHED THEN UPDATE SET t.{VALID_TO} = s.{VALID_TO}, t.{VALID_TO_TS} = s.{VALID_TO_TS}
"""
# What begins later comes again, where rows came again as of a point that the table was past.
_CUT = f"""
    ON t.{VALID_TO} IS NULL OR t.{VALID_TO} > s.{VALID_TO}
    WHEN MATCHED AND t.{VALID_FROM} >= s.{VALID_TO} THEN DELETE
    WHEN MATCHED THEN UPDATE SET t.{VALID_TO} = s.{VALID_TO}, t.{VALID_TO_TS} = s.{VALID_TO_TS}
"""


def _same(name: str) -> str:
    return f"t.{quoted(name)} = s.{quoted(name)}"


def literal(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def read_said(text: str | None) -> Mapping[str, Any]:
    """Read what a commit says of the batch that it is of; nothing where it is not of a mirror."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.keys() >= {"query", "batch", "step", "last"} else {}
