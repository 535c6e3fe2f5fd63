"""The options of the formats, parsed once into frozen dataclasses.

Nothing below this module sees the dict of strings that Spark hands over. ``OPTIONS`` is the one table of what can be
set: reading, error texts and the README's tables come from it. Everything is checked before a connection is opened, and
everything that is wrong is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.conninfo import (
    LIBPQ_KEYWORDS,
    OWN_KEYWORDS,
    ConnectionOptions,
    Url,
    check_settings,
    parse_url,
)
from pg_cdc_source.options.names import (
    MAX_NAME_BYTES,
    QualifiedName,
    TablePattern,
    check_characters,
    in_words,
    nearest,
    parse_columns,
    parse_tables,
    quoted,
)

ConsistentPoint = Literal["auto", "require", "off"]
Unrepresentable = Literal["error", "null"]
PublicationMode = Literal["create", "require"]
StartFrom = Literal["snapshot", "slot", "now"]
OnSchemaChange = Literal["fail", "ignore"]
OnTruncate = Literal["emit", "fail", "ignore"]
Group = Literal["connection", "pgsnapshot", "pgcdc"]

# --- values ----------------------------------------------------------------------------------------------------------

# Binary units, as in postgresql.conf: 1kB is 1024 bytes.
_SIZE_UNITS = {unit: 1 << 10 * power for power, unit in enumerate(("", "k", "m", "g", "t"))}
# The number of digits is bounded because int() refuses thousands of them with an error of its own.
_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?)"
_SIZE = re.compile(_NUMBER + r"\s*(?:([kmgt])i?)?b?", re.IGNORECASE | re.ASCII)
_DURATION_UNITS = {
    "": Fraction(1),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_DURATION = re.compile(_NUMBER + r"\s*(ms|s|min|m|h|d|)", re.IGNORECASE | re.ASCII)
_DECIMAL = re.compile(r"decimal\s*\(\s*(\d{1,4})\s*,\s*(\d{1,4})\s*\)", re.IGNORECASE | re.ASCII)
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}", re.ASCII)
_SNAPSHOT_ID = re.compile(r"[0-9A-F]+(?:-[0-9A-F]+)+", re.ASCII)


@dataclass(frozen=True, slots=True)
class NumericAs:
    """What a ``numeric`` that its declaration does not fit into a DECIMAL is read as."""

    kind: Literal["string", "double", "decimal"]
    precision: int = 0
    scale: int = 0

    @classmethod
    def parse(cls, text: str) -> NumericAs:
        """Read ``string``, ``double`` or ``decimal(p,s)`` within Spark's bounds."""
        word = text.strip().lower()
        if word == "string":
            return cls("string")
        if word == "double":
            return cls("double")
        match = _DECIMAL.fullmatch(word)
        if match is None:
            raise OptionError(
                f"{text!r} is not a type for numeric", remedy="use string, double or decimal(p,s) such as decimal(38,9)"
            )
        precision, scale = int(match[1]), int(match[2])
        if not (1 <= precision <= 38 and scale <= precision):
            raise OptionError(
                f"decimal({precision},{scale}) does not exist in Spark",
                remedy="choose a precision from 1 to 38, and a scale that is not greater",
            )
        return cls("decimal", precision, scale)


def _size(least: str, most: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = _bytes(text)
        if not _bytes(least) <= value <= _bytes(most):
            raise OptionError(f"{text.strip()} is out of bounds", remedy=f"choose a size from {least} to {most}")
        return value

    return parse


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{text!r} is not a size", remedy="write bytes as a number, or with a unit: 512kB, 64MB, 1GB (1kB is 1024)"
        )
    return int(Fraction(match[1]) * _SIZE_UNITS[(match[2] or "").lower()])


def _duration(least: str, most: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = _seconds(text)
        if not _seconds(least) <= value <= _seconds(most):
            raise OptionError(f"{text.strip()} is out of bounds", remedy=f"choose a time from {least} to {most}")
        return value

    return parse


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{text!r} is not a time", remedy="write seconds as a number, or with a unit: 500ms, 10s, 2min, 1h"
        )
    return float(Fraction(match[1]) * _DURATION_UNITS[match[2].lower()])


def _whole_number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.strip()
        if not (re.fullmatch(r"\d{1,18}", digits, re.ASCII) and least <= int(digits) <= most):
            raise OptionError(f"{text!r} is not a whole number from {least} to {most}", remedy="choose one")
        return int(digits)

    return parse


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in choices:
            raise OptionError(f"{text!r} is not a choice", remedy=f"use {in_words(choices)}")
        return word

    return parse


def _boolean(text: str) -> bool:
    return _one_of(("true", "false"))(text) == "true"


def _not_blank(text: str) -> str:
    if not text.strip():
        raise OptionError("it is empty", remedy="give it a value or leave the option out")
    return text


def _condition(text: str) -> str:
    return _not_blank(text).strip()


def _query(text: str) -> str:
    return _condition(text.strip().removesuffix(";"))


def _slot(text: str) -> str:
    if not _SLOT_NAME.fullmatch(text):
        raise OptionError(
            f"{text!r} is not a name for a replication slot",
            remedy="use 1 to 63 lower-case letters, digits and underscores",
        )
    return text


def _publication(text: str) -> str:
    _not_blank(text)
    if len(text) > 1 and text[0] == text[-1] == '"':
        raise OptionError(f"{text} is in quotes", remedy="write the publication's name without quotes, as it is stored")
    length = len(text.encode())
    if length > MAX_NAME_BYTES:
        raise OptionError(
            f"{text!r} has {length} bytes, PostgreSQL's names have {MAX_NAME_BYTES} at most",
            remedy="write the publication's name as the catalog holds it",
        )
    return text


def _streamed_table(text: str) -> QualifiedName:
    return QualifiedName.parse(
        text, for_query="name the table it reads: streams take no query", for_several="use the option tables"
    )


def _snapshot_id(text: str) -> str:
    if not _SNAPSHOT_ID.fullmatch(text.strip()):
        raise OptionError(
            f"{text!r} is not the id of an exported snapshot",
            remedy="pass what pg_export_snapshot() returned, such as 00000003-0000001B-1",
        )
    return text.strip()


def _password(text: str) -> str:
    return text


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how it is named, explained and read.

    ``default`` is read as if the user had written it; where there is none the value is None and the documentation
    shows ``without``.
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
    Option("host", "connection", "server, or a comma-separated list of servers", _not_blank, without="libpq's"),
    Option("port", "connection", "port, or one for each host", _not_blank, without="libpq's"),
    Option("database", "connection", "database (libpq's `dbname` is taken too)", _not_blank, without="libpq's"),
    Option("user", "connection", "role to connect as", _not_blank, without="libpq's"),
    Option("password", "connection", "its password; libpq's `passfile` works too", _password),
)

_SNAPSHOT_OPTIONS = (
    Option(
        "dbtable",
        "pgsnapshot",
        "`schema.table`, parts quoted as in SQL where needed: plain, partitioned and inherited tables, views, "
        "materialized views, foreign tables",
        QualifiedName.parse,
    ),
    Option("query", "pgsnapshot", "a SELECT instead of `dbtable`; read as one partition", _query),
    Option(
        "columns",
        "pgsnapshot",
        "columns to read, separated by commas and quoted as in SQL where needed",
        parse_columns,
        without="all",
    ),
    Option("where", "pgsnapshot", "condition that PostgreSQL applies to the rows", _condition),
    Option(
        "partitionBytes", "pgsnapshot", "size of the part of a table that one task reads", _size("8kB", "32TB"), "64MB"
    ),
    Option("numPartitions", "pgsnapshot", "number of parts, instead of their size", _whole_number(1, 100_000)),
    Option(
        "consistentPoint",
        "pgsnapshot",
        "`auto`: know the snapshot's LSN, by way of a temporary slot, if role and `wal_level` allow it within "
        "`slotTimeout`, else do without; `require`: or fail; `off`: do without",
        _one_of(get_args(ConsistentPoint)),
        "auto",
    ),
    Option(
        "slot",
        "pgsnapshot",
        "create this durable replication slot with the snapshot and leave it, for a stream that starts where the "
        "snapshot ends; an error if it exists",
        _slot,
    ),
    Option("snapshot", "pgsnapshot", "read this exported snapshot instead of making one", _snapshot_id),
    Option(
        "lsnColumn",
        "pgsnapshot",
        "add a BIGINT column of this name with the snapshot's LSN (null where it is not known)",
        _not_blank,
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
        "what becomes of a value that its Spark type cannot hold (infinity, NaN in a DECIMAL, a date out of range, an "
        "array of other dimensions): `error` or `null`",
        _one_of(get_args(Unrepresentable)),
        "error",
    ),
    Option("batchBytes", "pgsnapshot", "size of the Arrow batches handed to Spark", _size("64kB", "512MB"), "4MB"),
    Option("slotTimeout", "pgsnapshot", "longest wait for a slot", _duration("100ms", "1d"), "10s"),
    Option(
        "snapshotIdle",
        "pgsnapshot",
        "how long a snapshot stays open after its last reader",
        _duration("1s", "1d"),
        "60s",
    ),
)


_OF_SNAPSHOTS = {option.name: replace(option, group="pgcdc") for option in _SNAPSHOT_OPTIONS}
_STREAM_OPTIONS = (
    Option(
        "dbtable",
        "pgcdc",
        "one table, `schema.table`, parts quoted as in SQL where needed: its columns and the change columns",
        _streamed_table,
    ),
    Option(
        "tables",
        "pgcdc",
        "several tables instead, separated by commas, `schema.*` for what the publication has of a schema: the "
        "envelope's columns",
        parse_tables,
    ),
    Option(
        "slot",
        "pgcdc",
        "replication slot of the stream; created when missing, kept when the query stops",
        _slot,
        without="required",
    ),
    Option(
        "failover",
        "pgcdc",
        "make a slot that standbys keep a copy of (PostgreSQL 17 and later), from which the stream goes on when one of "
        "them takes over",
        _boolean,
        "false",
    ),
    Option(
        "publication",
        "pgcdc",
        "publication of the tables; created when missing, kept when the query stops",
        _publication,
        without="the slot's name",
    ),
    Option(
        "publicationMode",
        "pgcdc",
        "`create`: create a publication that is missing; `require`: only check it",
        _one_of(get_args(PublicationMode)),
        "create",
    ),
    Option(
        "startFrom",
        "pgcdc",
        "`snapshot`: first the rows of the tables, then every change after them; `slot`: the changes from where the "
        "existing slot stands; `now`: the changes from now on",
        _one_of(get_args(StartFrom)),
        "snapshot",
    ),
    Option(
        "maxRowsPerBatch",
        "pgcdc",
        "most rows of changes in a micro-batch, which ends at a commit unless one transaction is larger than that",
        _whole_number(1, 1_000_000_000),
        "1000000",
    ),
    Option(
        "maxBytesPerBatch", "pgcdc", "most bytes of changes in a micro-batch, likewise", _size("64kB", "16GB"), "128MB"
    ),
    Option("beforeImage", "pgcdc", "add `_before`, a struct of the old values that PostgreSQL sent", _boolean, "false"),
    Option(
        "onSchemaChange",
        "pgcdc",
        "when a table's columns change: `fail`, or `ignore` columns that were added",
        _one_of(get_args(OnSchemaChange)),
        "fail",
    ),
    Option(
        "onTruncate",
        "pgcdc",
        "when a table is truncated: `emit` a row that says so, `fail`, or `ignore` it",
        _one_of(get_args(OnTruncate)),
        "emit",
    ),
    _OF_SNAPSHOTS["asString"],
    _OF_SNAPSHOTS["numericAs"],
    _OF_SNAPSHOTS["unrepresentable"],
    replace(_OF_SNAPSHOTS["partitionBytes"], meaning="size of the part of a table that one task of the snapshot reads"),
    replace(_OF_SNAPSHOTS["slotTimeout"], meaning="longest wait for the slot's creation"),
)

OPTIONS: tuple[Option, ...] = _CONNECTION_OPTIONS + _SNAPSHOT_OPTIONS + _STREAM_OPTIONS


def option_table_markdown(group: Group) -> str:
    """Give the README's table of one group of options."""
    rows = [("option", "meaning", "default"), ("---", "---", "---")]
    for option in OPTIONS:
        if option.group == group:
            default = option.without if option.default is None else f"`{option.default}`"
            rows.append((f"`{option.name}`", option.meaning, default))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# Names that users bring from elsewhere, in lower case, and what replaces them, by where they are written.
_FROM_LOAD = "load() takes no path here: name the table in the option dbtable"
_RANGES = "nothing to choose: tables are split by physical ranges; partitionBytes or numPartitions sets how many"
_PUSH_DOWN = "leave it out: use columns, where or query for what PostgreSQL shall do"
_WRITING = "leave it out: this format only reads"
_KERBEROS = "leave it out: libpq takes Kerberos credentials from the ticket cache, and krbsrvname as an option"
_IN_SPARK = "leave it out: a stream has whole tables; select and filter the DataFrame"
_START = "use startFrom: snapshot, slot or now; after that the query's checkpoint says where to go on"
_TABLES = "use dbtable for one table, or tables for several: schema.table, schema.*"
_TRIGGER = "leave it out: the query's trigger sets how often, maxRowsPerBatch how much"
_HABITS: dict[Group, dict[str, str]] = {
    "connection": {
        "dsn": "use url: Spark hides that one in its plans",
        **dict.fromkeys(("username", "database.user"), "use user"),
        "database.hostname": "use host",
        "database.port": "use port",
        "database.password": "use password",
        **dict.fromkeys(("database.dbname", "databasename"), "use database"),
        "driver": "nothing is needed: no JDBC driver takes part",
        "sessioninitstatement": "set parameters in the option options: '-c name=value'",
        **dict.fromkeys(("keytab", "principal", "refreshkrb5config", "connectionprovider"), _KERBEROS),
        **dict.fromkeys(("ssl", "database.sslmode"), "use sslmode"),
        "sslfactory": "use sslmode and sslrootcert",
        "currentschema": "qualify the table: schema.table; or set options to '-c search_path=...'",
        "sockettimeout": "leave it out; tcp_user_timeout bounds the wait for a dead server",
        **dict.fromkeys(("connecttimeout", "logintimeout"), "use connect_timeout"),
    },
    "pgsnapshot": {
        "path": _FROM_LOAD,
        "paths": _FROM_LOAD,
        "table": "use dbtable",
        "tables": "load each table on its own, in dbtable: those of one action share its snapshot",
        "fetchsize": "nothing is needed: rows are streamed; batchBytes sets the size of a batch",
        "partitioncolumn": _RANGES,
        "lowerbound": _RANGES,
        "upperbound": _RANGES,
        "predicates": _RANGES,
        **dict.fromkeys(
            ("pushdownpredicate", "pushdownaggregate", "pushdownlimit", "pushdownoffset", "pushdowntablesample"),
            _PUSH_DOWN,
        ),
        "preparequery": "write it into query: WITH ... SELECT ...",
        "customschema": "use asString or numericAs, or cast in query",
        "prefertimestampntz": "nothing is needed: types follow PostgreSQL's",
        "querytimeout": "leave it out: cancelling the Spark job ends its queries",
        "hint": "leave it out: PostgreSQL has no hints",
        "isolationlevel": "nothing is needed: an action reads one snapshot",
        **dict.fromkeys(
            ("batchsize", "truncate", "cascadetruncate", "createtableoptions", "createtablecolumntypes"), _WRITING
        ),
    },
    "pgcdc": {
        **dict.fromkeys(
            ("path", "paths"), "load() takes no path here: name the table in dbtable, or several in tables"
        ),
        **dict.fromkeys(("slot.name", "slotname", "slot_name", "replicationslot", "replication_slot"), "use slot"),
        **dict.fromkeys(("publication.name", "publicationname", "publication_name"), "use publication"),
        **dict.fromkeys(("publication_names", "publications"), "use publication: a stream reads one"),
        "publication.autocreate.mode": "use publicationMode: create or require",
        **dict.fromkeys(
            ("plugin.name", "plugin", "proto_version"), "nothing is needed: streams read PostgreSQL's own pgoutput"
        ),
        "slot.drop.on.stop": "leave it out: the slot is kept; drop it with SELECT pg_drop_replication_slot(...)",
        **dict.fromkeys(
            (
                *("snapshot.mode", "startingoffsets", "startingversion", "startingtimestamp", "startinglsn"),
                *("initialsnapshot", "withinitialsnapshot", "startfromlatest"),
            ),
            _START,
        ),
        **dict.fromkeys(
            ("endingoffsets", "endingversion", "endingtimestamp"),
            "leave it out: a stream has no end; Trigger.AvailableNow stops where the server stands now",
        ),
        **dict.fromkeys(
            ("table", "subscribe", "table.include.list", "table.whitelist", "schema.include.list", "subscribepattern"),
            _TABLES,
        ),
        **dict.fromkeys(
            ("table.exclude.list", "schema.exclude.list"),
            "list what is wanted in tables, or leave the others out of the publication: schema.* takes what it has",
        ),
        **dict.fromkeys(
            ("query", "where", "columns", "column.include.list", "column.exclude.list", "predicates"), _IN_SPARK
        ),
        **dict.fromkeys(
            (
                "maxoffsetspertrigger",
                "maxrowspertrigger",
                "maxrecordsperbatch",
                "max.batch.size",
                "maxrowsperpartition",
            ),
            "use maxRowsPerBatch",
        ),
        "maxbytespertrigger": "use maxBytesPerBatch",
        **dict.fromkeys(
            ("minoffsetspertrigger", "maxtriggerdelay", "maxfilespertrigger", "poll.interval.ms", "triggerinterval"),
            _TRIGGER,
        ),
        "checkpointlocation": "set it where the query starts: df.writeStream.option('checkpointLocation', ...)",
        "failondataloss": "leave it out: what is lost is always an error",
        **dict.fromkeys(
            ("ignoredeletes", "ignorechanges", "skipchangecommits", "skipped.operations"),
            "leave it out: filter the stream by _change_type",
        ),
        **dict.fromkeys(("readchangefeed", "readchangedata"), "nothing is needed: every row of the stream is a change"),
        "truncate.handling.mode": "use onTruncate: emit, fail or ignore",
        "decimal.handling.mode": "use numericAs: string, double or decimal(p,s)",
        **dict.fromkeys(("include.before", "before", "includebefore"), "use beforeImage"),
        "unavailable.value.placeholder": "nothing is needed: _unchanged lists the columns whose values did not travel",
        **dict.fromkeys(
            ("heartbeat.interval.ms", "heartbeat.action.query"),
            "nothing is needed: the slot of quiet tables moves with the server's keepalives",
        ),
        "consistentpoint": "nothing is needed: a stream's snapshot is always at the point where its slot starts",
        "snapshot": "use startFrom: a stream makes the snapshot that belongs to its slot",
        "numpartitions": "use partitionBytes for the first snapshot; changes come as one sequence",
        "lsncolumn": "nothing is needed: _commit_lsn is there",
    },
}

# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """The options of ``spark.read.format("pgsnapshot")``. With ``snapshot``, ``consistent_point`` has no meaning."""

    connection: ConnectionOptions
    dbtable: QualifiedName | None
    query: str | None
    columns: tuple[str, ...] | None
    where: str | None
    partition_bytes: int
    num_partitions: int | None
    consistent_point: ConsistentPoint
    slot: str | None
    snapshot: str | None
    lsn_column: str | None
    as_string: tuple[str, ...]
    numeric_as: NumericAs
    unrepresentable: Unrepresentable
    batch_bytes: int
    slot_timeout_seconds: float
    snapshot_idle_seconds: float


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of ``spark.readStream.format("pgcdc")``. ``tables`` is empty where ``dbtable`` names the one."""

    connection: ConnectionOptions
    dbtable: QualifiedName | None
    tables: tuple[TablePattern, ...]
    slot: str
    failover: bool
    publication: str
    publication_mode: PublicationMode
    start_from: StartFrom
    max_rows_per_batch: int
    max_bytes_per_batch: int
    before_image: bool
    on_schema_change: OnSchemaChange
    on_truncate: OnTruncate
    as_string: tuple[str, ...]
    numeric_as: NumericAs
    unrepresentable: Unrepresentable
    partition_bytes: int
    slot_timeout_seconds: float


def parse_connection_options(options: Mapping[str, str]) -> ConnectionOptions:
    """Read options that are all of the connection; raises OptionError with everything that is wrong."""
    given = _read(options, ("connection",))
    connection = given.connection()
    given.raise_problems()
    return connection


def parse_snapshot_options(options: Mapping[str, str]) -> SnapshotOptions:
    """Read the options of ``pgsnapshot``; raises OptionError with everything that is wrong."""
    given = _read(options, ("connection", "pgsnapshot"))
    connection = given.connection()
    given.problems.extend(_snapshot_contradictions(given))
    given.raise_problems()
    values = given.values
    return SnapshotOptions(
        connection=connection,
        dbtable=values["dbtable"],
        query=values["query"],
        columns=values["columns"],
        where=values["where"],
        partition_bytes=values["partitionBytes"],
        num_partitions=values["numPartitions"],
        consistent_point="require" if values["slot"] else values["consistentPoint"],
        slot=values["slot"],
        snapshot=values["snapshot"],
        lsn_column=values["lsnColumn"],
        as_string=values["asString"] or (),
        numeric_as=values["numericAs"],
        unrepresentable=values["unrepresentable"],
        batch_bytes=values["batchBytes"],
        slot_timeout_seconds=values["slotTimeout"],
        snapshot_idle_seconds=values["snapshotIdle"],
    )


def parse_stream_options(options: Mapping[str, str]) -> StreamOptions:
    """Read the options of ``pgcdc``; raises OptionError with everything that is wrong."""
    given = _read(options, ("connection", "pgcdc"))
    connection = given.connection()
    given.problems.extend(_stream_contradictions(given))
    given.raise_problems()
    values = given.values
    return StreamOptions(
        connection=connection,
        dbtable=values["dbtable"],
        tables=values["tables"] or (),
        slot=values["slot"],
        failover=values["failover"],
        publication=values["publication"] or values["slot"],
        publication_mode=values["publicationMode"],
        start_from=values["startFrom"],
        max_rows_per_batch=values["maxRowsPerBatch"],
        max_bytes_per_batch=values["maxBytesPerBatch"],
        before_image=values["beforeImage"],
        on_schema_change=values["onSchemaChange"],
        on_truncate=values["onTruncate"],
        as_string=values["asString"] or (),
        numeric_as=values["numericAs"],
        unrepresentable=values["unrepresentable"],
        partition_bytes=values["partitionBytes"],
        slot_timeout_seconds=values["slotTimeout"],
    )


def _stream_contradictions(given: _Given) -> Iterator[OptionError]:
    names, values = given.names, given.values
    if "dbtable" not in names and "tables" not in names:
        yield OptionError("neither dbtable nor tables is given", remedy=_TABLES)
    if "tables" in names:
        if "dbtable" in names:
            yield OptionError("both dbtable and tables are given", remedy="remove one of them")
        for name in ("beforeImage", "asString", "numericAs", "unrepresentable"):
            if name in names:
                yield OptionError(
                    f"{name} is not used with tables, whose rows hold PostgreSQL's own text in JSON",
                    remedy=f"remove {name} here and pass it to project(), which gives the typed rows of one table",
                )
    if "slot" not in names:
        yield OptionError(
            "no slot is given",
            remedy="choose a name for the stream's replication slot in the option slot; it is created when missing, "
            "and no other stream may use it",
        )
    for name in ("failover", "partitionBytes", "slotTimeout"):
        if name in names and values["startFrom"] == "slot":
            yield OptionError(
                f"{name} is not used with startFrom=slot",
                remedy=f"remove {name}: it belongs to making a slot and reading the snapshot there",
            )
    if "partitionBytes" in names and values["startFrom"] == "now":
        yield OptionError(
            "partitionBytes is not used with startFrom=now",
            remedy="remove partitionBytes: no snapshot of the tables is read",
        )


def _snapshot_contradictions(given: _Given) -> Iterator[OptionError]:
    names, values = given.names, given.values
    if "dbtable" not in names and "query" not in names:
        yield OptionError("neither dbtable nor query is given", remedy="name a table in dbtable, or write a query")
    if "query" in names:
        if "dbtable" in names:
            yield OptionError("both dbtable and query are given", remedy="remove one of them")
        for name in ("columns", "where", "partitionBytes", "numPartitions"):
            if name in names:
                use = "write it into the query" if name in ("columns", "where") else "a query is read as one partition"
                yield OptionError(f"{name} is not used with query", remedy=f"remove {name}: {use}")
    if {"partitionBytes", "numPartitions"} <= names:
        yield OptionError("partitionBytes and numPartitions both say how a table is split", remedy="remove one of them")
    if "snapshot" in names:
        for name in ("slot", "consistentPoint", "slotTimeout", "snapshotIdle"):
            if name in names:
                yield OptionError(
                    f"{name} is not used with snapshot",
                    remedy=f"remove {name}: it belongs to making a snapshot, and this one exists",
                )
    elif values["consistentPoint"] == "off":
        for name in ("slot", "slotTimeout"):
            if name in names:
                yield OptionError(
                    f"{name} contradicts consistentPoint=off",
                    remedy="remove one of them: a slot is what gives a snapshot its consistent point",
                )
    columns, lsn_column = values["columns"], values["lsnColumn"]
    if columns is not None:
        for column in values["asString"] or ():
            if column not in columns:
                yield OptionError(
                    f"asString names the column {quoted(column)}, which columns leaves out",
                    remedy="add it to columns, or remove it from asString",
                )
        # Spark's columns have no case.
        if lsn_column is not None and lsn_column.lower() in map(str.lower, columns):
            yield OptionError(f"lsnColumn {lsn_column!r} is also one of columns", remedy="choose another name for it")


@dataclass(frozen=True, slots=True)
class _Given:
    """What was read: ``values`` of every option of the groups, ``names`` of those that the user wrote."""

    values: dict[str, Any]
    names: set[str]
    libpq: dict[str, str]
    problems: list[OptionError]

    def connection(self) -> ConnectionOptions:
        """Bring the options of the connection together; adds what contradicts to ``problems``."""
        url: Url = self.values["url"] or Url("", {})
        settings = dict(self.libpq)
        for name in ("host", "port", "database", "user", "password"):
            if self.values[name] is not None:
                settings["dbname" if name == "database" else name] = self.values[name]
        if "database" in self.names and "dbname" in self.libpq:
            self.problems.append(OptionError("database and dbname are the same", remedy="remove one of them"))
        for keyword in sorted(settings.keys() & url.settings.keys()):
            name = "database" if keyword == "dbname" and "database" in self.names else keyword
            self.problems.append(
                OptionError(f"both url and the option {name} say {keyword}", remedy="remove one of them")
            )
        try:
            check_settings(settings)
        except OptionError as error:
            self.problems.append(error)
        if not url.conninfo:
            settings = {**url.settings, **settings}
        return ConnectionOptions(url.conninfo, tuple(sorted(settings.items())))

    def raise_problems(self) -> None:
        """Raise one OptionError for all that was found."""
        if len(self.problems) == 1:
            raise self.problems[0]
        if self.problems:
            lines = "".join(f"\n- {problem}" for problem in self.problems)
            raise OptionError(f"{len(self.problems)} things are wrong with the options:{lines}")


def _read(options: Mapping[str, str], groups: tuple[Group, ...]) -> _Given:
    """Read every option of ``groups`` on its own; what is between them is the caller's to check."""
    rows = {option.name.lower(): option for option in OPTIONS if option.group in groups}
    defaults = {row.name: None if row.default is None else row.parse(row.default) for row in rows.values()}
    given = _Given(defaults, set(), {}, [])
    texts: dict[str, str] = {}
    for key, text in options.items():
        # Spark hands over lower-case keys; a caller in Python may write both.
        if key.lower() in texts:
            given.problems.append(OptionError(f"the option {key} is given twice", remedy="names have no case"))
        texts[key.lower()] = text
    for key, text in texts.items():
        option = rows.get(key)
        if option is not None:
            given.names.add(option.name)
        try:
            check_characters(text)
            if option is not None:
                given.values[option.name] = option.parse(text)
            elif key in LIBPQ_KEYWORDS and key not in OWN_KEYWORDS:
                given.libpq[key] = text
            else:
                given.problems.append(_unknown_option(key, groups))
        except OptionError as error:
            given.problems.append(
                OptionError(f"option {option.name if option else key}: {error.what}", remedy=error.remedy)
            )
    return given


def _unknown_option(key: str, groups: tuple[Group, ...]) -> OptionError:
    if key in OWN_KEYWORDS:
        return OptionError(f"the option {key} cannot be chosen", remedy=f"remove it: {OWN_KEYWORDS[key]}")
    for group in groups:
        if key in _HABITS[group]:
            return OptionError(f"the option {key} is not known here", remedy=_HABITS[group][key])
    formats = dict.fromkeys(option.group for option in OPTIONS if option.name.lower() == key)
    if formats:
        return OptionError(
            f"the option {key} is not known here", remedy=f"remove it: it belongs to {' and '.join(formats)}"
        )
    names = [option.name for option in OPTIONS if option.group in groups]
    near = nearest(key, frozenset((*names, *LIBPQ_KEYWORDS)) - OWN_KEYWORDS.keys())
    remedy = f"did you mean {near}?" if near else f"the options are {', '.join(names)} and libpq's keywords"
    return OptionError(f"the option {key} is not known", remedy=remedy)
