"""Say what the rows of a stream look like: the change columns, typed rows of one table, the envelope of several.

The columns are the same for rows of the initial snapshot and for changes:

- ``_change_type`` is one of :data:`CHANGE_TYPES`.
- ``_commit_lsn`` is the LSN of the commit record; for rows of the snapshot the greatest LSN that it contains.
- ``_seq`` is the LSN of the change's WAL record; rows of the snapshot have 0. A row ``schema`` has the LSN and number
  of the row that it stands before. Messages count for themselves, behind all rows
  (see :mod:`~pg_cdc_source.protocol.decoding_messages`).
- ``_commit_ts`` and ``_xid`` are those of the commit; rows of the snapshot have none, nor have messages that are not
  transactional.
- ``_unchanged`` lists the columns whose value did not travel (TOAST).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.names import quoted
from pg_cdc_source.values.registry import Codec

# Not an Arrow array: making the first one imports pandas, which planning has no use for.
CHANGE_TYPES = ("snapshot", "insert", "update", "delete", "truncate", "schema", "message")
# Their places there.
OF_SNAPSHOT, INSERTED, UPDATED, DELETED, TRUNCATED, OF_SCHEMA, MESSAGE = range(7)

COMMIT_TS_TYPE = pa.timestamp("us", tz="UTC")
UNCHANGED_TYPE = pa.list_(pa.field("element", pa.string(), nullable=True))
CHANGE_FIELDS = (
    pa.field("_change_type", pa.string()),
    pa.field("_commit_lsn", pa.int64()),
    pa.field("_seq", pa.int64()),
    pa.field("_commit_ts", COMMIT_TS_TYPE),
    pa.field("_xid", pa.int64()),
    pa.field("_unchanged", UNCHANGED_TYPE),
)
BEFORE = "_before"
ENVELOPE_SCHEMA = pa.schema(
    [
        pa.field("_table", pa.string()),
        *CHANGE_FIELDS,
        *(pa.field(name, pa.string()) for name in ("key", "after", "before")),
    ]
)
# The envelope by columns (:mod:`~pg_cdc_source.protocol.packed`), a change as a row; and a run of changes as a row.
PACKED_SCHEMA = pa.schema(
    [
        pa.field("_table", pa.string()),
        *CHANGE_FIELDS,
        pa.field("layout", pa.dictionary(pa.int32(), pa.string())),
        pa.field("values", pa.list_(pa.string())),
        pa.field("before", pa.list_(pa.string())),
        pa.field("key", pa.string()),
        pa.field("after", pa.string()),
    ]
)
RUNS_SCHEMA = pa.schema(
    [
        pa.field("_table", pa.string()),
        *(field for field in CHANGE_FIELDS if field.name != "_unchanged"),
        pa.field("rows", pa.int64()),
        pa.field("layout", pa.string()),
        pa.field("data", pa.binary()),
        pa.field("key", pa.string()),
        pa.field("after", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class StreamedTable:
    """One table of the stream, as it was planned.

    ``oid`` is that of the relation under which changes arrive. ``key`` are the columns that tell rows apart in every
    change: those of the replica identity; under FULL, the primary key, if there is one. ``unsent`` are generated
    columns that changes may lack: they are NULL then, and listed in ``_unchanged``, as in all rows of the snapshot.
    """

    oid: int
    name: str
    codecs: tuple[Codec, ...]
    type_oids: tuple[tuple[int, int], ...]  # (type, modifier) of each column as pg_attribute has them
    key: tuple[str, ...]
    identity: str  # pg_class.relreplident
    unsent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """What rows of the stream look like, and what they may hold."""

    envelope: bool  # of several tables; else typed rows of one
    before_image: bool
    unrepresentable: Literal["error", "null"]
    on_truncate: Literal["emit", "fail", "ignore"]
    changelog: bool = False  # whole rows only, as a changelog is made of them
    packed: bool = False  # the envelope by columns

    def schema(self, tables: Sequence[StreamedTable]) -> pa.Schema:
        """Return the schema of the stream of ``tables``; typed rows are those of exactly one."""
        if self.envelope:
            return PACKED_SCHEMA if self.packed else ENVELOPE_SCHEMA
        (table,) = tables
        return typed_schema(table.name, table.codecs, before_image=self.before_image)


def typed_schema(table: str, codecs: Sequence[Codec], *, before_image: bool) -> pa.Schema:
    """Return the schema of one table's typed rows: its columns, the change columns, and ``_before`` if asked for.

    Raises OptionError where two columns would have one name. Spark does not tell upper from lower case.
    """
    taken = {*(field.name for field in CHANGE_FIELDS), BEFORE}
    columns = [pa.field(codec.column.name, codec.arrow_type) for codec in codecs]
    for column in columns:
        if column.name.lower() in taken:
            raise OptionError(
                f"{table} has a column {quoted(column.name)}, which is the name of one of the change columns",
                remedy="rename the column in PostgreSQL; or take the envelope (option tables) and its JSON",
            )
    before = [pa.field(BEFORE, pa.struct(columns))] if before_image else []
    return pa.schema([*columns, *CHANGE_FIELDS, *before])
