"""Give typed rows the shape of a changelog, as Spark's CHANGES and Delta's change data feed have it.

Inside the stream a changelog is the stream that it would be anyway: one row for each change, with ``_before``, and
positions that count changes. A task gives the rows their shape when it hands them to Spark. So an update, which becomes
two rows, can never be cut apart::

    stream      snapshot   insert   delete   update
    changelog   insert     insert   delete   update_preimage (its _before), update_postimage

- Names and order of the columns are those that Delta gives (``table_changes``) and Spark's Changelog.java asks for.
- Every row is a whole one: a stream of less is refused when it starts, and where its identity becomes less later
  (``require_whole_rows``).
- Spark's contract allows no row without a time, and drops late ones without a word where there is a watermark. Nobody
  knows when the rows of the snapshot were committed. Theirs is the first millisecond of 1970, before every commit; the
  beginning itself is late for Spark from the first batch on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import START_OVER, OptionError, SchemaChangedError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.names import quoted
from pg_cdc_source.protocol.images import Image, RowsOfMessages
from pg_cdc_source.protocol.layout import BEFORE, CHANGE_FIELDS, COMMIT_TS_TYPE
from pg_cdc_source.protocol.pgoutput import INSERT
from pg_cdc_source.values.arrow import from_numpy, from_texts, to_numpy
from pg_cdc_source.values.ndarrays import Ints

CHANGELOG_FIELDS = (
    pa.field("_change_type", pa.string()),
    pa.field("_commit_version", pa.int64()),
    pa.field("_commit_timestamp", COMMIT_TS_TYPE),
)
_UNKNOWN_MICROSECONDS = 1000
_GIVEN = ("snapshot", "insert", "update", "delete")
_TYPES = ("insert", "update_preimage", "update_postimage", "delete")
_INSERT, _PREIMAGE, _POSTIMAGE, _DELETE = range(4)


def changelog_schema(table: str, rows: pa.Schema) -> pa.Schema:
    """Return the schema of the changelog that is made of typed rows with ``_before``.

    Raises OptionError where a column has the name of one of the changelog's own.
    """
    columns = [rows.field(i) for i in range(len(rows) - len(CHANGE_FIELDS) - 1)]
    taken = {field.name for field in CHANGELOG_FIELDS}
    for column in columns:
        if column.name.lower() in taken:
            raise OptionError(
                f"{table} has a column {quoted(column.name)}, which is the name of one of the changelog's columns",
                remedy="rename the column in PostgreSQL; or leave changeFormat out",
            )
    return pa.schema([*columns, *CHANGELOG_FIELDS])


def changelog_rows(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return typed rows with ``_before`` as rows of a changelog's ``schema``, in the same order."""
    n = rows.num_rows
    given = rows.column("_change_type")
    if not pc.all(pc.is_in(given, from_texts(_GIVEN))).as_py() and n:
        raise SchemaChangedError(
            "the rows of the table come again, and a changelog has no row that tells a sink to give up those it has",
            remedy=f"{START_OVER}, into an empty sink",
        )
    is_update, is_delete = (to_numpy(pc.equal(given, kind)) for kind in ("update", "delete"))
    source = np.repeat(np.arange(n), 1 + is_update)
    is_preimage = np.zeros(len(source), np.bool_)
    is_preimage[np.cumsum(1 + is_update)[is_update] - 2] = True
    kind = np.where(is_update[source], np.where(is_preimage, _PREIMAGE, _POSTIMAGE), _INSERT)
    kind[is_delete[source]] = _DELETE
    taken = from_numpy(source + n * is_preimage)
    before = rows.column(BEFORE)
    columns = [
        pa.concat_arrays([rows.column(i), pc.struct_field(before, [i])]).take(taken)
        for i in range(len(schema) - len(CHANGELOG_FIELDS))
    ]
    source_rows = from_numpy(source)
    times = pc.fill_null(rows.column("_commit_ts"), pa.scalar(_UNKNOWN_MICROSECONDS, COMMIT_TS_TYPE))
    changes = [
        from_texts(_TYPES).take(from_numpy(kind)),
        rows.column("_commit_lsn").take(source_rows),
        times.take(source_rows),
    ]
    return pa.RecordBatch.from_arrays([*columns, *changes], schema=schema)


def require_whole_rows(table: str, changed: RowsOfMessages, images: Sequence[Image | None], lsn: Ints) -> None:
    """Raise SchemaChangedError where a row of ``changed`` is not known whole, or its old row is not.

    ``lsn`` has the commit of each row. A column that the relation did not have yet is no lack.
    """
    partial = (changed.rows.kind != INSERT) & ~changed.rows.old_is_full
    lacks = partial[changed.source]
    for image in images:
        if image is not None and image.unchanged is not None:
            lacks = lacks | image.unchanged
    if lacks.any():
        raise SchemaChangedError(
            f"{table}: the commit at {Lsn(lsn[lacks.argmax()])} has an update or delete without the whole old row, "
            "which a changelog has to give: the table's REPLICA IDENTITY was not FULL then",
            remedy=f"ALTER TABLE {table} REPLICA IDENTITY FULL, and {START_OVER}: nobody has the old rows of "
            "the changes that were made meanwhile",
        )
