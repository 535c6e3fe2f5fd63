"""The options that can be set: one table, used for reading, for error texts and for the documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pg_cdc_source.options.conninfo import parse_url
from pg_cdc_source.options.names import parse_columns, parse_tables
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.query import select, table_or_subselect
from pg_cdc_source.options.value_parsers import (
    boolean,
    condition,
    duration,
    importable_function,
    message_prefixes,
    not_blank,
    one_of,
    password,
    publication_name,
    size,
    slot_name,
    snapshot_id,
    streamed_table,
    whole_number,
)

ConsistentPoint = Literal["auto", "require", "off"]
Unrepresentable = Literal["error", "null"]
PublicationMode = Literal["create", "require"]
StartFrom = Literal["snapshot", "slot", "now"]
OnSchemaChange = Literal["fail", "ignore", "emit"]
Keyless = Literal["fail", "insertOnly"]
OnTruncate = Literal["emit", "fail", "ignore"]
ChangeFormat = Literal["plain", "changelog"]
Envelope = Literal["json", "arrow"]
OnNewTable = Literal["snapshot", "changes", "fail"]
OnSlotLost = Literal["fail", "resnapshot"]
Group = Literal["connection", "pgsnapshot", "pgcdc"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    ``default`` is parsed as if the user had written it. Without one the value is None, and the documentation shows
    ``without``.
    """

    name: str
    group: Group
    meaning: str
    parse: Callable[[str], Any]
    default: str | None = None
    without: str = "none"


_CONNECTION_OPTIONS = (
    Option(
        "url",
        "connection",
        "libpq URI (`postgresql://…`), libpq connection string (`host=… dbname=…`) or `jdbc:postgresql://…`",
        parse_url,
    ),
    Option("host", "connection", "server, or a comma-separated list of servers", not_blank, without="libpq's"),
    Option("port", "connection", "port, or one for each host", not_blank, without="libpq's"),
    Option("database", "connection", "database; libpq's `dbname` works too", not_blank, without="libpq's"),
    Option("user", "connection", "role to connect as", not_blank, without="libpq's"),
    Option("password", "connection", "its password; libpq's `passfile` works too", password),
    Option(
        "passwordCommand",
        "connection",
        "instead of `password`: a shell command that prints it; run before each connection, in the process that makes "
        "the connection",
        not_blank,
    ),
    Option(
        "passwordProvider",
        "connection",
        "instead of `password`: a Python function that returns it, `module:function`; called in the same way",
        importable_function,
    ),
)

_SNAPSHOT_OPTIONS = (
    Option(
        "dbtable",
        "pgsnapshot",
        "`schema.table`, parts quoted as in SQL where needed: plain, partitioned and inherited tables, views, "
        "materialized views, foreign tables; or `(SELECT …) AS t`, which is a query",
        table_or_subselect,
    ),
    Option("query", "pgsnapshot", "a SELECT instead of `dbtable`; read as one partition", select),
    Option(
        "columns",
        "pgsnapshot",
        "columns to read, separated by commas and quoted as in SQL where needed; not with a query",
        parse_columns,
        without="all",
    ),
    Option("where", "pgsnapshot", "condition that PostgreSQL applies to the rows; not with a query", condition),
    Option(
        "partitionBytes",
        "pgsnapshot",
        "size of the part of a table that one task reads, 8kB to 32TB; larger if the table would have more than "
        "100,000 parts; not with a query",
        size("8kB", "32TB"),
        "64MB",
    ),
    Option(
        "numPartitions",
        "pgsnapshot",
        "instead of `partitionBytes`: number of parts, 1 to 100,000; no effect on a query",
        whole_number(1, 100_000),
    ),
    Option(
        "consistentPoint",
        "pgsnapshot",
        "`auto`: if `lsnColumn` or `open_snapshot()` shows the LSN, find it through a temporary slot; read without an "
        "LSN if role or `wal_level` do not allow the slot or it is not there within `slotTimeout`; `require`: fail "
        "without an LSN; `off`: never look for it; not with `snapshot`",
        one_of(get_args(ConsistentPoint)),
        "auto",
    ),
    Option(
        "slot",
        "pgsnapshot",
        "create this durable replication slot with the snapshot and keep it, for a stream that starts where the "
        "snapshot ends; an error if it exists; not with `snapshot` or `consistentPoint=off`",
        slot_name,
    ),
    Option("snapshot", "pgsnapshot", "read this exported snapshot instead of making one", snapshot_id),
    Option(
        "lsnColumn",
        "pgsnapshot",
        "add a BIGINT column of this name with the snapshot's LSN (null if it is not known)",
        not_blank,
    ),
    Option("asString", "pgsnapshot", "columns to read as PostgreSQL's own text", parse_columns),
    Option(
        "numericAs",
        "pgsnapshot",
        "type of a `numeric` whose declaration does not fit DECIMAL: `string`, `double` or `decimal(p,s)`",
        NumericAs.parse,
        "string",
    ),
    Option(
        "unrepresentable",
        "pgsnapshot",
        "what a value becomes that its Spark type cannot hold (infinity, NaN in a DECIMAL, a date out of range, an "
        "array of other dimensions): `error` or `null`",
        one_of(get_args(Unrepresentable)),
        "error",
    ),
    Option(
        "batchBytes",
        "pgsnapshot",
        "size of the Arrow batches handed to Spark, 64kB to 512MB",
        size("64kB", "512MB"),
        "4MB",
    ),
    Option(
        "slotTimeout",
        "pgsnapshot",
        "longest wait for a slot, 100ms to 1d; not with `snapshot` or `consistentPoint=off`",
        duration("100ms", "1d"),
        "10s",
    ),
    Option(
        "snapshotIdle",
        "pgsnapshot",
        "how long a snapshot stays open after its last reader, 1s to 1d; not with `snapshot`",
        duration("1s", "1d"),
        "60s",
    ),
    Option(
        "maxConnections",
        "pgsnapshot",
        "most sessions of one driver for planning and for holding snapshots, of all actions together, 4 to 100,000; "
        "further actions share a session or wait in line. Each running task has one more",
        whole_number(4, 100_000),
        without="a third of what the server has left",
    ),
)


_OF_SNAPSHOTS = {option.name: replace(option, group="pgcdc") for option in _SNAPSHOT_OPTIONS}
_STREAM_OPTIONS = (
    Option(
        "dbtable",
        "pgcdc",
        "one table, `schema.table`, parts quoted as in SQL where needed: its columns and the change columns",
        streamed_table,
    ),
    Option(
        "tables",
        "pgcdc",
        "instead of `dbtable`: several tables, separated by commas; `schema.*` means the tables of a schema that the "
        "publication has, and `-schema.table` leaves one of them out; rows have the columns of the envelope",
        parse_tables,
    ),
    Option(
        "slot",
        "pgcdc",
        "replication slot of the stream; created when missing, kept when the query stops",
        slot_name,
        without="required",
    ),
    Option(
        "failover",
        "pgcdc",
        "create a slot that standbys keep a copy of (PostgreSQL 17 and later); after a failover the stream continues "
        "from the copy. Not with `startFrom=slot`, unless `onSlotLost=resnapshot`",
        boolean,
        "false",
    ),
    Option(
        "publication",
        "pgcdc",
        "publication of the tables; created when missing, kept when the query stops",
        publication_name,
        without="the slot's name",
    ),
    Option(
        "publicationMode",
        "pgcdc",
        "`create`: create a publication that is missing; `require`: only check it",
        one_of(get_args(PublicationMode)),
        "create",
    ),
    Option(
        "keyless",
        "pgcdc",
        "when the publication is created and tables have no usable replica identity (primary key or `REPLICA IDENTITY "
        "FULL`): `fail`, or `insertOnly`: publish their inserts and truncates in a second publication, named with the "
        "suffix `_inserts`",
        one_of(get_args(Keyless)),
        "fail",
    ),
    Option(
        "startFrom",
        "pgcdc",
        "`snapshot`: first the rows of the tables, then every change after them; `slot`: the changes from the position "
        "of the existing slot; `now`: the changes from now on",
        one_of(get_args(StartFrom)),
        "snapshot",
    ),
    Option(
        "maxRowsPerBatch",
        "pgcdc",
        "most rows of changes in a micro-batch, 1 to 1,000,000,000; it ends at a commit unless one transaction is "
        "larger than the limit",
        whole_number(1, 1_000_000_000),
        "1000000",
    ),
    Option(
        "maxBytesPerBatch",
        "pgcdc",
        "most bytes of changes in a micro-batch, 64kB to 16GB, in the same way; tables of a snapshot share a "
        "micro-batch up to this size",
        size("64kB", "16GB"),
        "128MB",
    ),
    Option(
        "changeFormat",
        "pgcdc",
        "with `dbtable`: `plain`: each change is a row with the change columns; `changelog`: rows and columns are "
        "those of Spark's `CHANGES` and Delta's change data feed. `changelog` needs `REPLICA IDENTITY FULL`, and does "
        "not allow `beforeImage`, `onTruncate=emit`, `onNewTable=snapshot` and `onSlotLost=resnapshot`",
        one_of(get_args(ChangeFormat)),
        "plain",
    ),
    Option(
        "envelope",
        "pgcdc",
        "with `tables`: `json`: each change is a row; `arrow`: a row is a run of one table's changes, with its layout "
        "and Arrow IPC bytes",
        one_of(get_args(Envelope)),
        "json",
    ),
    Option(
        "beforeImage",
        "pgcdc",
        "with `dbtable`: add `_before`, a struct of the old values that PostgreSQL sent",
        boolean,
        "false",
    ),
    Option(
        "onSchemaChange",
        "pgcdc",
        "when a table's columns change: `fail`, or `ignore` columns that were added, or, only with `tables`, `emit` a "
        "row that describes the columns from there on",
        one_of(get_args(OnSchemaChange)),
        "fail",
    ),
    Option(
        "onTruncate",
        "pgcdc",
        "when a table is truncated: `emit` a row that says so, `fail`, or `ignore` it. The default of a changelog is "
        "`fail`",
        one_of(get_args(OnTruncate)),
        "emit",
    ),
    Option(
        "messagePrefixes",
        "pgcdc",
        "with `tables`: prefixes of logical decoding messages (`pg_logical_emit_message()`, PostgreSQL 14 and later), "
        "separated by commas, that come as rows with the change type `message`",
        message_prefixes,
    ),
    Option(
        "onNewTable",
        "pgcdc",
        "when a table joins the stream, or comes back: `snapshot` reads its rows and then its changes, `changes` "
        "reads a new table from its first change on, or `fail`",
        one_of(get_args(OnNewTable)),
        without="`snapshot` with `tables`, `fail` with `dbtable`",
    ),
    Option(
        "onSlotLost",
        "pgcdc",
        "when the slot is gone, or has lost changes: `fail`, or `resnapshot`: create a new slot and read all rows "
        "again",
        one_of(get_args(OnSlotLost)),
        "fail",
    ),
    *(
        replace(_OF_SNAPSHOTS[name], meaning=f"with `dbtable`: {_OF_SNAPSHOTS[name].meaning}")
        for name in ("asString", "numericAs", "unrepresentable")
    ),
    replace(
        _OF_SNAPSHOTS["partitionBytes"],
        meaning="size of the part of a table that one task of a snapshot reads, 8kB to 32TB. Only if rows of tables "
        "are read (`startFrom=snapshot`, `onNewTable=snapshot` or `onSlotLost=resnapshot`)",
    ),
    replace(
        _OF_SNAPSHOTS["slotTimeout"],
        meaning="longest wait for the creation of the stream's slot, 100ms to 1d; 600 s for tables that join. Not with "
        "`startFrom=slot`, unless `onNewTable=snapshot` or `onSlotLost=resnapshot`",
    ),
)

OPTIONS: tuple[Option, ...] = _CONNECTION_OPTIONS + _SNAPSHOT_OPTIONS + _STREAM_OPTIONS
