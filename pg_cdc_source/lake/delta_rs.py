"""A table of the lake by delta-rs (the wheel ``deltalake``), which needs neither a jar nor Spark.

Every commit carries the mirror's query and the batch as application transactions, one for each step of a batch and one
for the whole. So what a crash has left half done is found, and done once. Columns carry PostgreSQL's numbers in their
metadata: a column with another name is the same one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

try:
    from deltalake import CommitProperties, DeltaTable, Field, Transaction, write_deltalake
    from deltalake import Schema as DeltaSchema
    from deltalake.transaction import AddAction, RemoveAction
except ImportError as error:
    raise ImportError(f'{error}: pip install "pg-cdc-source[mirror]", on executors as well') from None

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake.columns import MirroredLayout
from pg_cdc_source.lake.states import IS_DELETE, Key, States, kept_name

ATTNUM, OF_TABLE = "pgcdc.attnum", "pgcdc.table"
# What may be done to a mirrored table by others: its rows stay the same.
_HOUSEKEEPING = ("OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES")


class ForeignWriterError(Exception):
    """Somebody else has changed a table of the mirror."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Whose batch a commit is of."""

    query: str
    batch: int

    def whole(self) -> Transaction:
        return Transaction(self.query, self.batch)

    def step(self, name: str) -> Transaction:
        return Transaction(f"{self.query}/{name}", self.batch)

    def commit(self, *transactions: Transaction) -> CommitProperties:
        metadata = {"pgcdc_query": self.query, "pgcdc_batch": str(self.batch)}
        return CommitProperties(custom_metadata=metadata, app_transactions=list(transactions))


class DeltaRsTable:
    """One table, at ``path``. It may be created by :meth:`prepare`."""

    def __init__(self, path: str, table: str) -> None:
        self.path = path
        self._name = table
        self._table = DeltaTable(path) if DeltaTable.is_deltatable(path) else None

    @property
    def table(self) -> DeltaTable:
        assert self._table is not None
        return self._table

    @property
    def version(self) -> int:
        return -1 if self._table is None else self._table.version()

    def has(self, transaction: Transaction) -> bool:
        """Whether a commit with this mark, or a later one, is there."""
        if self._table is None:
            return False
        found = self._table.transaction_version(transaction.app_id)
        return found is not None and found >= transaction.version

    def require_ours(self, expected: int | None, mark: Mark, *, again: bool) -> None:
        """Raise ForeignWriterError if anybody else has committed behind version ``expected`` (None: at all).

        With ``again``, all rows are replaced, so that it does not matter what others did to those that are there.
        """
        if self._table is None:
            if expected is not None and not again:
                raise ForeignWriterError(f"{self.path} is gone")
            return
        if again and self._table.metadata().configuration.get(OF_TABLE) == self._name:
            return
        if expected is not None and self.version < expected:
            raise ForeignWriterError(f"{self.path} is at version {self.version}, and was at {expected}")
        of_table = self._table.metadata().configuration.get(OF_TABLE)
        if of_table != self._name:
            raise ForeignWriterError(f"{self.path} is not a mirror of {self._name}")
        behind = self.version - (-1 if expected is None else expected)
        for commit in self._table.history(behind) if behind else ():
            if commit.get("pgcdc_query") != mark.query and commit["operation"] not in _HOUSEKEEPING:
                raise ForeignWriterError(
                    f"{self.path} was changed by somebody else: version {commit.get('version')}, {commit['operation']}"
                )

    # --- columns ------------------------------------------------------------------------------------------------------

    def prepare(self, layout: MirroredLayout, fills: Mapping[int, str | None], mark: Mark, *, anew: bool) -> None:
        """Give the table these columns; create it if there is none. With ``anew``, nothing of its rows stays.

        Raises SchemaChangedError where the rows that it has cannot stay.
        """
        wanted = _schema(layout)
        if self._table is None:
            self._table = DeltaTable.create(
                self.path,
                wanted,
                configuration={OF_TABLE: self._name},
                commit_properties=mark.commit(),
                raise_if_key_not_exists=False,
            )
            return
        present = pa.schema(self.table.schema().to_arrow())
        if _told(present) == _told(wanted):
            return
        if anew:
            self._overwrite(wanted.empty_table(), mark.commit())
            return
        places = {_number(field): i for i, field in enumerate(present)}
        for field in wanted:
            place = places.get(_number(field))
            if place is not None and present.field(place).type != field.type:
                raise SchemaChangedError(
                    f"{self._name}: the type of column {field.name} was changed from {present.field(place).type} to "
                    f"{field.type}, which the lake's table cannot take over",
                    remedy="have its rows come again: pg-cdc resnapshot. The stream does that by itself where "
                    "PostgreSQL has rewritten the table",
                )
        if _told(wanted)[: len(present)] == _told(present):
            self._add(wanted, len(present), layout, fills, mark)
        else:
            self._rewrite(wanted, places, layout, fills, mark)

    def _add(
        self, wanted: pa.Schema, first: int, layout: MirroredLayout, fills: Mapping[int, str | None], mark: Mark
    ) -> None:
        new = [wanted.field(i) for i in range(first, len(wanted))]
        if any(fills.get(_number(field)) is not None for field in new):
            # In one commit, so that no crash can leave the column without its values.
            places = {_number(wanted.field(i)): i for i in range(first)}
            self._rewrite(wanted, places, layout, fills, mark)
            return
        fields: Sequence[Field] = [DeltaSchema.from_arrow(pa.schema([field])).fields[0] for field in new]
        self.table.alter.add_columns(list(fields), commit_properties=mark.commit())

    def _rewrite(
        self,
        wanted: pa.Schema,
        places: Mapping[int, int],
        layout: MirroredLayout,
        fills: Mapping[int, str | None],
        mark: Mark,
    ) -> None:
        """Write the table's own rows with other columns."""
        dataset = self.table.to_pyarrow_dataset()
        filled = {
            column.attnum: column.value_of(text)
            for column in layout.columns
            if column.attnum is not None and (text := fills.get(column.attnum)) is not None
        }

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in dataset.to_batches():
                arrays = []
                for field in wanted:
                    number = _number(field)
                    if number in places:
                        arrays.append(batch.column(places[number]).cast(field.type))
                    elif number in filled:
                        arrays.append(pa.array([filled[number]] * batch.num_rows, field.type))
                    else:
                        arrays.append(pa.nulls(batch.num_rows, field.type))
                yield pa.RecordBatch.from_arrays(arrays, schema=wanted)

        self._overwrite(pa.RecordBatchReader.from_batches(wanted, batches()), mark.commit())

    def _overwrite(self, rows: pa.Table | pa.RecordBatchReader, commit: CommitProperties) -> None:
        write_deltalake(self.table, rows, mode="overwrite", schema_mode="overwrite", commit_properties=commit)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def add_files(self, files: Sequence[Mapping[str, Any]], *, anew: bool, commit: CommitProperties) -> None:
        """Take files over that tasks have written."""
        actions: list[AddAction | RemoveAction] = [
            AddAction(file["path"], file["size"], {}, file["modified_ms"], True, json.dumps(file["stats"]))
            for file in files
        ]
        self.table.create_write_transaction(
            actions, "overwrite" if anew else "append", self.table.schema(), commit_properties=commit
        )
        self.table.update_incremental()

    def empty(self, commit: CommitProperties) -> None:
        self._overwrite(pa.schema(self.table.schema().to_arrow()).empty_table(), commit)

    def apply(self, states: States, commit: CommitProperties) -> None:
        """Apply final rows by key."""
        schema = pa.schema(self.table.schema().to_arrow())
        if states.emptied:
            rows = states.upserted
            self._overwrite(rows.select(schema.names).cast(schema), commit)
            return
        names = schema.names
        on = " AND ".join([*(f"t.{_sql(name)} = s.{_sql(name)}" for name in states.key), *_range(states)])
        places = {name: i for i, name in enumerate(states.rows.column_names)}

        def value(name: str) -> str:
            if places[name] in states.kept:
                return f"CASE WHEN s.{_sql(kept_name(places[name]))} THEN t.{_sql(name)} ELSE s.{_sql(name)} END"
            return f"s.{_sql(name)}"

        is_delete = f"s.{_sql(IS_DELETE)}"
        (
            self.table.merge(states.rows, on, source_alias="s", target_alias="t", commit_properties=commit)
            .when_matched_delete(is_delete)
            .when_matched_update({_sql(name): value(name) for name in names}, f"NOT {is_delete}")
            .when_not_matched_insert({_sql(name): f"s.{_sql(name)}" for name in names}, f"NOT {is_delete}")
            .execute()
        )

    def fetch(self, key: Sequence[str], keys: Sequence[Key]) -> pa.Table:
        """The rows that have these keys."""
        dataset = self.table.to_pyarrow_dataset()
        wanted = None
        for name, values in zip(key, zip(*keys, strict=True), strict=True):
            found_type = dataset.schema.field(name).type
            if pa.types.is_floating(found_type):
                # Statistics of files do not have NaN.
                continue
            # Statistics of texts that a merge wrote cannot be compared (string_view); nor are they, of no plain column.
            place = pc.field(name) if pa.types.is_integer(found_type) else pc.coalesce(pc.field(name), pc.field(name))
            found = place.isin(pa.array(values, found_type))
            wanted = found if wanted is None else wanted & found
        # Of several columns, and of floats, more rows than were asked for.
        return dataset.to_table(filter=wanted)


def _schema(layout: MirroredLayout) -> pa.Schema:
    return pa.schema(
        [pa.field(column.name, column.type, metadata={ATTNUM: str(column.attnum or 0)}) for column in layout.columns]
    )


def _number(field: pa.Field) -> int:
    return int((field.metadata or {}).get(ATTNUM.encode(), b"0"))


def _told(schema: pa.Schema) -> list[tuple[int, str, pa.DataType]]:
    return [(_number(field), field.name, field.type) for field in schema]


def _sql(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _range(states: States) -> Iterator[str]:
    """The range of the keys, as literals: files without it are not read."""
    for name in states.key:
        keys = states.rows[name]
        if pa.types.is_integer(keys.type) and len(keys):
            bounds = pc.min_max(keys).as_py()
            yield f"t.{_sql(name)} >= {bounds['min']} AND t.{_sql(name)} <= {bounds['max']}"


def read_at(path: str, version: int) -> tuple[list[str], pa.Schema]:
    """The files of a table at a version, and its columns."""
    table = DeltaTable(path, version=version)
    return table.file_uris(), pa.schema(table.schema().to_arrow())
