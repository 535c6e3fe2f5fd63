"""A table of the lake by delta-rs (the wheel ``deltalake``), which needs neither a jar nor Spark.

What its commits say is found in :mod:`pg_cdc_source.mirrors.delta_rs_commits`. Columns carry PostgreSQL's numbers in
their metadata: a column with another name is the same one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import ColumnProperties, CommitProperties, DeltaTable, Field, WriterProperties, write_deltalake
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import DeltaError
from deltalake.table import TableMerger
from deltalake.transaction import AddAction
from pyarrow.fs import FileType

from pg_cdc_source.errors import RESNAPSHOT, SchemaChangedError, TransientError
from pg_cdc_source.lake.bring import Patience, Step, Work, bring, foreign_writer_error
from pg_cdc_source.lake.columns import MirroredLayout, read_layout
from pg_cdc_source.lake.compaction import SMALL_BYTES
from pg_cdc_source.lake.directories import open_directory
from pg_cdc_source.lake.final_rows import final_rows
from pg_cdc_source.lake.kept_columns import is_wider, other_type_remedy, require_allowed
from pg_cdc_source.lake.key_bounds import bounds_of
from pg_cdc_source.lake.parts import Emptied, Files, Rekeyed
from pg_cdc_source.lake.segment import Segment
from pg_cdc_source.lake.shape import DELETED_LSN, VALID_FROM, VALID_TO, VALID_TO_TS
from pg_cdc_source.lake.shape_of_table import OF_TABLE, properties_of, require_table
from pg_cdc_source.lake.states import DROPPED, IS_DELETE, Key, States, kept_name, rows_that_stay
from pg_cdc_source.lake.tasks import Task
from pg_cdc_source.mirrors.delta_rs_columns import (
    ATTNUM,
    described,
    kept_in,
    number_of,
    numbered_types,
    places_in,
    renumbered,
    schema_of,
    with_columns_of,
)
from pg_cdc_source.mirrors.delta_rs_commits import DeltaRsCommits
from pg_cdc_source.mirrors.delta_rs_log import LOG_PROPERTIES, clean_where_due
from pg_cdc_source.options.names import listed
from pg_cdc_source.values.arrow import from_numpy


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaRsTask(Task):
    """Applies the batch itself: all that it has of a table is in one task."""

    compacts: bool
    patience: Patience = dataclasses.field(default_factory=Patience)

    def _do(self, table: str, work: Work[Segment]) -> Mapping[str, Any]:
        return {"version": self.patience.retrying(lambda: self._bring(table, work))}

    def _bring(self, table: str, work: Work[Segment]) -> int | None:
        start = self.start
        try:
            lake = DeltaRsTable(self.targets[table], table, start.mark, self.shapes[table])
            again = table in start.set_aside
            before = start.versions.get(table)
            version = bring(table, lake, work, before, again=again, compacts=self.compacts)
            clean_where_due(self.targets[table], lake.age(before), lake.age(version))
            return version
        except MemoryError:
            # Arrow's is one of its exceptions as well, and no table's fault.
            raise
        except (DeltaError, OSError, pa.ArrowException) as error:
            # Whoever rewrites files at the same time makes a commit fail; object stores have bad moments. What is done
            # already is found by the next attempt.
            raise TransientError(
                f"{table} could not be written: {type(error).__name__}: {error}",
                remedy=f"see to the storage; then {RESNAPSHOT}",
            ) from error


class DeltaRsTable(DeltaRsCommits):
    """One table, at ``path``, for one batch. It may be created by :meth:`prepare`."""

    # --- columns ------------------------------------------------------------------------------------------------------

    def prepare(self, layout: MirroredLayout, fills: Mapping[int, str | None], *, anew: bool) -> None:
        wanted = schema_of(layout, self._shape)
        if self._table is None:
            self._table = DeltaTable.create(
                self.path,
                wanted,
                configuration={OF_TABLE: self._name, **properties_of(self._shape, layout), **LOG_PROPERTIES},
                commit_properties=self._commit(),
                raise_if_key_not_exists=False,
            )
            return
        present = pa.schema(self.table.schema().to_arrow())
        metadata = self.table.metadata()
        require_table(self._name, metadata.configuration, layout)
        # Only somebody else makes it so. Files with all columns are added to it, and rows with NULL.
        is_altered = bool(metadata.partition_columns) or not all(field.nullable for field in present)
        if numbered_types(present) == numbered_types(wanted) and not is_altered:
            return
        there = present
        if self._shape.is_log:
            present = renumbered(wanted, present)
        require_allowed(self._name, self._shape, described(wanted), described(present))
        if anew and not self._shape.keeps_columns:
            self._overwrite(wanted.empty_table())
            return
        if self._shape.keeps_columns:
            wanted = kept_in(self._name, self._shape, wanted, present)
        # Columns are added behind those that are there, the table's own ones included.
        told = sorted(
            zip(places_in(wanted, present), wanted, strict=True), key=lambda c: len(present) if c[0] is None else c[0]
        )
        places, wanted = [place for place, _ in told], pa.schema([field for _, field in told])
        for place, field in told:
            # Rows that are there are written anew with a wider type.
            if (
                place is not None
                and present.field(place).type != field.type
                and not is_wider(present.field(place).type, field.type)
            ):
                raise SchemaChangedError(
                    f"{self._name}: the type of column {field.name} was changed from {present.field(place).type} to "
                    f"{field.type}, which the lake's table cannot take over",
                    remedy=other_type_remedy(self._shape),
                )
        for was, field in zip(there, present, strict=True):
            if number_of(was) != number_of(field):
                said = {ATTNUM: str(number_of(field))}
                self.table.alter.set_column_metadata(field.name, said, commit_properties=self._commit())
        if numbered_types(present) == numbered_types(wanted) and not is_altered:
            return
        if numbered_types(wanted)[: len(present)] == numbered_types(present) and not is_altered:
            self._add(wanted, len(present), layout, fills)
        else:
            self._rewrite(wanted, places, layout, fills)

    def _add(self, wanted: pa.Schema, first: int, layout: MirroredLayout, fills: Mapping[int, str | None]) -> None:
        new = [wanted.field(i) for i in range(first, len(wanted))]
        if any(fills.get(number_of(field)) is not None for field in new):
            # In one commit, so that no crash can leave the column without its values.
            self._rewrite(wanted, [*range(first), *(None for _ in new)], layout, fills)
            return
        fields: Sequence[Field] = [DeltaSchema.from_arrow(pa.schema([field])).fields[0] for field in new]
        self.table.alter.add_columns(list(fields), commit_properties=self._commit())

    def _rewrite(
        self,
        wanted: pa.Schema,
        places: Sequence[int | None],
        layout: MirroredLayout,
        fills: Mapping[int, str | None],
    ) -> None:
        """Write the table's own rows with other columns."""
        dataset = self._dataset()
        filled = {
            column.attnum: column.value_of(text)
            for column in layout.columns
            if column.attnum is not None and (text := fills.get(column.attnum)) is not None
        }

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in dataset.to_batches():
                arrays = []
                for place, field in zip(places, wanted, strict=True):
                    if place is not None:
                        arrays.append(batch.column(place).cast(field.type))
                    elif (number := number_of(field)) in filled:
                        arrays.append(pa.array([filled[number]] * batch.num_rows, field.type))
                    else:
                        arrays.append(pa.nulls(batch.num_rows, field.type))
                yield pa.RecordBatch.from_arrays(arrays, schema=wanted)

        self._overwrite(pa.RecordBatchReader.from_batches(wanted, batches()))

    def _overwrite(self, rows: pa.Table | pa.RecordBatchReader, step: Step | None = None) -> None:
        write_deltalake(
            self.table,
            rows,
            mode="overwrite",
            schema_mode="overwrite",
            partition_by=[],
            writer_properties=writing(rows.schema),
            commit_properties=self._commit(step, behind_nobody=True),
        )

    # --- rows ---------------------------------------------------------------------------------------------------------

    def add_files(self, step: Step, part: Files) -> None:
        there = set(self.table.schema().to_arrow().names)
        written = {column.name for file in part.files for column in read_layout(file["layout"]).columns}
        if not written <= there:
            # Its values would be those of a column that gets the name later.
            raise SchemaChangedError(
                f"{self._name}: column {min(written - there)} was dropped right behind the rows that came anew",
                remedy=RESNAPSHOT,
            )
        self._require_files(part)
        if part.again and self._shape.is_soft:
            self._remove_rows_of(part)
        actions: list[Any] = [
            AddAction(file["name"], file["size"], {}, file["modified_ms"], True, json.dumps(file["stats"]))
            for file in part.files
        ]
        mode: Literal["overwrite", "append"] = "append" if self._shape.keeps or not part.again else "overwrite"
        commit = self._commit(step, behind_nobody=mode == "overwrite")
        self.table.create_write_transaction(actions, mode, self.table.schema(), commit_properties=commit)
        self.table.update_incremental()

    def _require_files(self, part: Files) -> None:
        """Raise ForeignWriterError where files are gone: a VACUUM removes those that no commit has."""
        filesystem, root = open_directory(self.path)
        infos = filesystem.get_file_info([f"{root}/{file['name']}" for file in part.files])
        if gone := [info.base_name for info in infos if info.type != FileType.File]:
            raise foreign_writer_error(
                f"files of rows that {self._name} was to get were removed by somebody else: {listed(gone)}"
            )

    def _remove_rows_of(self, part: Files) -> None:
        """Remove rows that have the keys of files."""
        key = read_layout(part.files[0]["layout"]).key
        filesystem, root = open_directory(self.path)
        paths = [f"{root}/{file['name']}" for file in part.files]
        keys = ds.dataset(paths, filesystem=filesystem, format="parquet").scanner(list(key)).to_reader()
        on = " AND ".join(f"t.{_sql(name)} = s.{_sql(name)}" for name in key)
        merge = self._merging(keys, on, self._commit())
        merge.when_matched_delete().execute()

    def empty(self, step: Step, part: Emptied) -> None:
        commit, before = self._commit(step), self.table.version()
        if self._shape.has_versions:
            # Of states that were never there from one commit to the next, and of those that come again.
            ours = writing(self.table.schema())
            self.table.delete(f"{_sql(VALID_FROM)} >= {part.lsn}", ours, commit_properties=self._commit())
            before = self.table.version()
            ends = {VALID_TO: str(part.lsn), VALID_TO_TS: _time(part.at)}
            is_open = f"{_sql(VALID_TO)} IS NULL OR {_sql(VALID_TO)} > {part.lsn}"
            self.table.update(ends, predicate=is_open, writer_properties=ours, commit_properties=commit)
        elif self._shape.is_soft:
            gone = {self._shape.deleted: "true", DELETED_LSN: str(part.lsn)}
            is_there, ours = f"NOT {_sql(self._shape.deleted)}", writing(self.table.schema())
            self.table.update(gone, predicate=is_there, writer_properties=ours, commit_properties=commit)
        else:
            self._overwrite(pa.schema(self.table.schema().to_arrow()).empty_table(), step)
        self._record(commit, before)

    def tell_apart(self, step: Step, part: Rekeyed) -> None:
        dataset = self._dataset()
        kept = rows_that_stay(dataset.to_table([*part.key, self._shape.deleted, DELETED_LSN]), part.key, self._shape)
        if kept.all():
            self._record(self._commit(step), self.table.version())
            return

        schema = pa.schema(self.table.schema().to_arrow())

        def batches() -> Iterator[pa.RecordBatch]:
            begin = 0
            for batch in dataset.to_batches():
                arrays = [batch.column(field.name).cast(field.type) for field in schema]
                found = pa.RecordBatch.from_arrays(arrays, schema=schema)
                yield found.filter(from_numpy(kept[begin : begin + batch.num_rows]))
                begin += batch.num_rows

        self._overwrite(pa.RecordBatchReader.from_batches(schema, batches()), step)

    def _record(self, commit: CommitProperties, before: int) -> None:
        """Make the commit of a step that has changed nothing, if the table is as it was ``before``.

        delta-rs makes none of an update, a delete or a merge that touches no row. When the batch comes again, the step
        would be done once more, on top of those that follow.
        """
        if self.table.version() == before:
            self.table.create_write_transaction([], "append", self.table.schema(), commit_properties=commit)
            self.table.update_incremental()

    def apply(self, step: Step, segment: Segment) -> None:
        states = final_rows(segment, partial(self._fetch, segment.key), self._shape)
        commit, before = self._commit(step), self.table.version()
        schema = pa.schema(self.table.schema().to_arrow())
        if self._shape.is_log:
            rows = with_columns_of(schema, states.rows)
            write_deltalake(
                self.table, rows, mode="append", writer_properties=writing(schema), commit_properties=commit
            )
            return
        if states.emptied:
            self._overwrite(with_columns_of(schema, states.upserted), step)
            return
        self._merge(states, schema, commit)
        self._record(commit, before)

    def _merge(self, states: States, schema: pa.Schema, commit: CommitProperties) -> None:
        names = [name for name in schema.names if name in states.rows.column_names]
        conditions = [*(f"t.{_sql(name)} = s.{_sql(name)}" for name in states.key), *_bounds(states)]
        if self._shape.has_versions:
            conditions += [f"t.{_sql(VALID_TO)} IS NULL", f"s.{_sql(IS_DELETE)}"]
        on = " AND ".join(conditions)
        places = {name: i for i, name in enumerate(states.rows.column_names)}

        def value(name: str) -> str:
            place, theirs = places.get(name, DROPPED), f"s.{_sql(name)}" if name in places else "NULL"
            if place in states.kept:
                return f"CASE WHEN s.{_sql(kept_name(place))} THEN t.{_sql(name)} ELSE {theirs} END"
            return theirs

        is_delete = f"s.{_sql(IS_DELETE)}"
        merge = self._merging(states.rows, on, commit)
        updates = {_sql(name): value(name) for name in (schema.names if DROPPED in states.kept else names)}
        if self._shape.has_versions:
            # Of a state that was never there from one commit to the next, as where a large commit is cut.
            merge = merge.when_matched_delete(f"t.{_sql(VALID_FROM)} = s.{_sql(VALID_TO)}")
            ends = {_sql(name): f"s.{_sql(name)}" for name in (VALID_TO, VALID_TO_TS)}
            merge = merge.when_matched_update(ends)
        elif self._shape.is_soft:
            # What it was last is not known where the row that is deleted has never come.
            merge = merge.when_matched_update(updates, f"NOT ({is_delete} AND t.{_sql(self._shape.deleted)})")
        else:
            merge = merge.when_matched_delete(is_delete).when_matched_update(updates, f"NOT {is_delete}")
        inserts = {_sql(name): f"s.{_sql(name)}" for name in names}
        merge.when_not_matched_insert(inserts, f"NOT {is_delete}").execute()

    def _merging(self, rows: pa.Table | pa.RecordBatchReader, on: str, commit: CommitProperties) -> TableMerger:
        ours = writing(self.table.schema())
        return self.table.merge(
            rows, on, source_alias="s", target_alias="t", writer_properties=ours, commit_properties=commit
        )

    def age(self, version: int | None) -> int:
        return version or 0

    def compact(self) -> None:
        compact(self.table, self._commit())

    def _dataset(self) -> ds.Dataset:
        # Files that Spark has written together have timestamps of another kind, which PyArrow takes for nanoseconds.
        options = ds.ParquetReadOptions(coerce_int96_timestamp_unit="us")
        return self.table.to_pyarrow_dataset(parquet_read_options=options)

    def _fetch(self, key: Sequence[str], keys: Sequence[Key]) -> pa.Table:
        """The rows that have these keys."""
        dataset = self._dataset()
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
        if self._shape.has_versions:
            is_open = pc.field(VALID_TO).is_null()
            wanted = is_open if wanted is None else wanted & is_open
        # Of several columns, and of floats, more rows than were asked for.
        return dataset.to_table(filter=wanted)


def _time(at: datetime | None) -> str:
    return "NULL" if at is None else f"arrow_cast('{at.isoformat()}', 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _sql(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _bounds(states: States) -> Iterator[str]:
    # Of texts that a merge wrote, files have no statistics that can be compared (string_view).
    return (bounds.condition(f"t.{_sql(bounds.column)}", str) for bounds in bounds_of(states, pa.types.is_integer))


def compact(table: DeltaTable, commit: CommitProperties) -> None:
    """Write a table's small files together."""
    # One after another: a task has the memory of one.
    # Compressed as delta-rs does it by itself.
    ours = writing(table.schema(), "ZSTD", 4)
    table.optimize.compact(
        target_size=SMALL_BYTES, max_concurrent_tasks=1, writer_properties=ours, commit_properties=commit
    )


def writing(
    schema: pa.Schema | DeltaSchema, compression: Literal["SNAPPY", "ZSTD"] = "SNAPPY", level: int | None = None
) -> WriterProperties:
    """Return how files with these columns are written: without the least and the greatest of floats.

    delta-rs leaves NaN out of these, and readers leave a file out by them. To Spark, as to PostgreSQL, NaN is the
    greatest.
    """
    floats = [field.name for field in pa.schema(schema) if pa.types.is_floating(field.type)]
    unknown = ColumnProperties(statistics_enabled="NONE")
    return WriterProperties(
        compression=compression, compression_level=level, column_properties=dict.fromkeys(floats, unknown)
    )


def read_at(path: str, version: int | None = None) -> tuple[list[str], pa.Schema]:
    """The files of a table, at a version if it is given, by the paths that Spark takes, and its columns."""
    table = DeltaTable(path, version=version)
    # Hadoop has no s3:// by itself. What delta-rs calls a path is one of this host, which Spark's may not be.
    uris = [re.sub("^(?=/(?!Volumes/))", "file://", re.sub("^s3://", "s3a://", unquote(u))) for u in table.file_uris()]
    return uris, pa.schema(table.schema().to_arrow())
