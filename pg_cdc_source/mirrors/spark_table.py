"""A table of the lake by Spark's SQL: what Delta and Iceberg have in common.

Every commit says the query, the batch and the step it is of, so what a crash has left half done is found in the table's
history, and done once. PostgreSQL's numbers of the columns are in the table's property ``pgcdc.columns``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake.bring import Mark, Step, foreign
from pg_cdc_source.lake.columns import MirroredLayout, read_layout
from pg_cdc_source.lake.states import IS_DELETE, kept_name
from pg_cdc_source.mirrors.catalog_names import namespace_of, quoted
from pg_cdc_source.mirrors.column_changes import Columns
from pg_cdc_source.mirrors.spark_ledger import is_missing
from pg_cdc_source.mirrors.staging import StagedSegment
from pg_cdc_source.spark.edge import spark_schema

OF_TABLE, COLUMNS = "pgcdc.table", "pgcdc.columns"
# Steps that are not of the batch's changes: columns that change, and a table that begins anew.
COLUMNS_STEP, ANEW_STEP = "columns", "anew"
# A batch has few steps; whoever wants more of a table's history asks for all of it.
RECENT = 30


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of the table, with what it says of the batch that it is of."""

    version: int
    operation: str
    said: Mapping[str, Any]


class SparkTable(ABC):
    """One table, for one batch, in a session of its own. ``name`` is as SQL has it."""

    provider: ClassVar[str]
    properties: ClassVar[Mapping[str, str]]
    # What may be done to a mirrored table by others: its rows stay the same.
    housekeeping: ClassVar[frozenset[str]]

    @classmethod
    @abstractmethod
    def configure(cls, session: SparkSession, template: str) -> None:
        """Set what a session needs that writes tables of ``template``."""

    def __init__(self, spark: SparkSession, name: str, table: str, mark: Mark, expected: int | None) -> None:
        """``expected`` is the version that the ledger knows."""
        self._spark = spark
        self._name = name
        self._table = table
        self._mark = mark
        self._said = self.read_properties()
        # Where nobody has committed since the ledger's row, nothing of this batch is done, and nothing is foreign.
        is_as_left = expected is not None and self._said is not None and self.present(self._said) == expected
        self._found: list[Commit] | None = [] if is_as_left or self._said is None else None
        self._version = expected if is_as_left else None

    # --- what a format has of its own ---------------------------------------------------------------------------------

    @abstractmethod
    def present(self, properties: Mapping[str, str]) -> int | None:
        """The table's present version, with as little work as there is."""

    @abstractmethod
    def commits(self, limit: int | None) -> list[Commit]:
        """The table's commits, the present one first, at most ``limit`` of them."""

    def committed(self) -> int | None:
        """The version of the session's last commit, where the session knows it."""
        return None

    @abstractmethod
    def sign(self, text: str, step: str) -> None:
        """Have the session's next commits say ``text``."""

    # --- what has been done -------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        return self._said is not None

    @property
    def version(self) -> int | None:
        if self._version is None:
            # Not the present one: what somebody else has committed behind it is foreign to the next batch.
            commits = (commit for limit in (RECENT, None) for commit in self._of_query(self.commits(limit)))
            self._version = next((commit.version for commit in commits), None)
        return self._version

    @property
    def _commits(self) -> list[Commit]:
        """The recent commits when the batch began."""
        if self._found is None:
            self._found = self.commits(RECENT)
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
        return (commit for commit in commits if commit.said.get("query") == self._mark.query)

    def require_ours(self, expected: int | None, *, again: bool) -> None:
        if self._said is None:
            if expected is not None and not again:
                raise foreign(f"{self._name} is gone")
            return
        is_ours = self._said.get(OF_TABLE) == self._table
        if again and is_ours:
            return
        if not is_ours:
            raise foreign(f"{self._name} is not a mirror of {self._table}")
        if self._version is not None:
            return
        # Where the recent commits do not lead there, all of them may.
        if not self._leads_to(self._commits, expected) and not self._leads_to(self.commits(None), expected):
            raise foreign(f"{self._name} was restored, or written anew by somebody else")

    def _leads_to(self, commits: Sequence[Commit], expected: int | None) -> bool:
        for commit in commits:
            if commit.version == expected:
                return True
            if commit.said.get("query") == self._mark.query:
                if commit.said["step"] == ANEW_STEP:
                    return True
            elif commit.operation not in self.housekeeping:
                raise foreign(
                    f"{self._name} was changed by somebody else: version {commit.version}, {commit.operation}"
                )
        return expected is None

    def _signed(self, step: str, *, is_last: bool = False) -> None:
        said = {"query": self._mark.query, "batch": self._mark.batch, "step": step, "last": is_last}
        self.sign(json.dumps(said, separators=(",", ":")), step)

    def read_properties(self) -> Mapping[str, str] | None:
        """The table's properties; None where there is no table."""
        try:
            return {row["key"]: row["value"] for row in self._spark.sql(f"SHOW TBLPROPERTIES {self._name}").collect()}
        except AnalysisException as error:
            if not is_missing(error):
                raise
            return None

    # --- columns ------------------------------------------------------------------------------------------------------

    def prepare(self, layout: MirroredLayout, fills: Mapping[int, str | None], *, anew: bool) -> None:
        wanted = Columns.of(layout)
        if self._said is None:
            namespace = namespace_of(self._name)
            if namespace is not None and namespace != self.provider:
                self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")
            self._create(wanted)
            return
        present = Columns.read(self._said[COLUMNS])
        if present == wanted:
            return
        if anew:
            self._create(wanted)
            return
        self._signed(COLUMNS_STEP)
        names = self._spark.table(self._name).columns
        for clause in present.changes_to(wanted, names, self._table):
            self._spark.sql(f"ALTER TABLE {self._name} {clause}")
        filled = {
            column.name: text
            for column in layout.columns
            if column.attnum is not None
            and column.attnum not in present.numbers
            and (text := fills.get(column.attnum)) is not None
        }
        # Again after a crash: the columns are not those wanted before the property says so.
        if filled:
            self._fill(layout, filled)
        self._spark.sql(f"ALTER TABLE {self._name} SET TBLPROPERTIES ({_literal(COLUMNS)} = {_literal(wanted.text)})")
        self._said = {**self._said, COLUMNS: wanted.text}
        self._version = self.committed()

    def _create(self, columns: Columns) -> None:
        """Create the table, or write it anew without rows, in one commit."""
        self._signed(ANEW_STEP)
        writer = self._spark.createDataFrame([], columns.schema).writeTo(self._name).using(self.provider)
        given = {**self.properties, OF_TABLE: self._table, COLUMNS: columns.text}
        for key, value in given.items():
            writer = writer.tableProperty(key, value)
        if self._said is None:
            writer.create()
        else:
            writer.createOrReplace()
        self._said = given
        self._version = self.committed()

    def _fill(self, layout: MirroredLayout, filled: Mapping[str, str]) -> None:
        values = {column.name: column for column in layout.columns}
        schema = spark_schema(layout.arrow_schema())
        row = {name: values[name].value_of(text) for name, text in filled.items()}
        wanted = StructType([schema[name] for name in row])
        self._spark.createDataFrame([tuple(row.values())], wanted).createOrReplaceTempView(_VIEW)
        settings = ", ".join(f"{quoted(name)} = (SELECT {quoted(name)} FROM {_VIEW})" for name in row)
        self._spark.sql(f"UPDATE {self._name} SET {settings}").collect()

    def write_rows(self, layout: MirroredLayout, key: Sequence[str], keys: str, to: str) -> bool:
        """Write the rows whose keys a file has into a directory; False where the table has not these columns."""
        if self._said is None or self._said.get(COLUMNS) != Columns.of(layout).text:
            return False
        found = self._spark.table(self._name).join(self._spark.read.parquet(keys), list(key), "left_semi")
        found.write.parquet(to)
        return True

    # --- rows ---------------------------------------------------------------------------------------------------------

    def add_files(self, step: Step, files: Sequence[Mapping[str, Any]], *, anew: bool) -> None:
        assert self._said is not None
        columns = Columns.read(self._said[COLUMNS])
        found: DataFrame | None = None
        for layout in dict.fromkeys(file["layout"] for file in files):
            written = read_layout(layout)
            schema = spark_schema(written.arrow_schema())
            paths = [file["place"] for file in files if file["layout"] == layout]
            rows = columns.projected(self._spark.read.schema(schema).parquet(*paths), Columns.of(written))
            found = rows if found is None else found.unionByName(rows)
        assert found is not None
        self._insert(found, step, anew=anew)

    def empty(self, step: Step) -> None:
        self._insert(self._spark.table(self._name).limit(0), step, anew=True)

    def apply(self, step: Step, segment: StagedSegment) -> None:
        if segment.needs:
            raise SchemaChangedError(
                f"{self._table}: rows changed their keys while the table or its key changed, within one batch",
                remedy="have its rows come again: pg-cdc resnapshot",
            )
        if segment.emptied:
            rows = self._staged(segment).where(f"NOT {quoted(IS_DELETE)}")
            self._insert(rows, step, anew=True)
            return
        self._staged(segment).createOrReplaceTempView(_VIEW)
        self._signed(step.name, is_last=step.is_last)
        self._spark.sql(self._merge(segment)).collect()
        self._version = self.committed()

    def _staged(self, segment: StagedSegment) -> DataFrame:
        return self._spark.read.parquet(segment.path)

    def _insert(self, rows: DataFrame, step: Step, *, anew: bool) -> None:
        names = ", ".join(map(quoted, self._names()))
        rows.createOrReplaceTempView(_VIEW)
        self._signed(step.name, is_last=step.is_last)
        how = "OVERWRITE" if anew else "INTO"
        self._spark.sql(f"INSERT {how} {self._name} ({names}) SELECT {names} FROM {_VIEW}").collect()
        self._version = self.committed()

    def _names(self) -> list[str]:
        assert self._said is not None
        return list(Columns.read(self._said[COLUMNS]).schema.names)

    def _merge(self, segment: StagedSegment) -> str:
        names = self._names()
        in_file = self._staged(segment).columns
        is_delete = f"s.{quoted(IS_DELETE)}"

        def value(name: str) -> str:
            ours, theirs = f"t.{quoted(name)}", f"s.{quoted(name)}"
            place = in_file.index(name)
            if place in segment.kept:
                return f"CASE WHEN s.{quoted(kept_name(place))} THEN {ours} ELSE {theirs} END"
            return theirs

        on = [f"t.{quoted(name)} = s.{quoted(name)}" for name in segment.key]
        for name, least, greatest in segment.bounds:
            on.append(f"t.{quoted(name)} BETWEEN {_literal(least)} AND {_literal(greatest)}")
        return f"""
            MERGE INTO {self._name} AS t USING {_VIEW} AS s ON {" AND ".join(on)}
            WHEN MATCHED AND {is_delete} THEN DELETE
            WHEN MATCHED THEN UPDATE SET {", ".join(f"t.{quoted(name)} = {value(name)}" for name in names)}
            WHEN NOT MATCHED AND NOT {is_delete} THEN INSERT ({", ".join(map(quoted, names))})
                VALUES ({", ".join(f"s.{quoted(name)}" for name in names)})
        """


_VIEW = "pgcdc_rows"


def _literal(value: str | int) -> str:
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
