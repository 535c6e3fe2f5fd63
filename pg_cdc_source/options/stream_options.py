"""The options of the format ``pgcdc``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.declared import (
    ChangeFormat,
    Envelope,
    Keyless,
    OnNewTable,
    OnSchemaChange,
    OnSlotLost,
    OnTruncate,
    PublicationMode,
    StartFrom,
    Unrepresentable,
)
from pg_cdc_source.options.given import Given, read_given
from pg_cdc_source.options.habits import ONE_OR_SEVERAL_TABLES
from pg_cdc_source.options.names import MAX_NAME_BYTES, QualifiedName, TablePattern
from pg_cdc_source.options.numeric_as import NumericAs


@dataclass(frozen=True, slots=True)
class Publications:
    """The names of a stream's publications: that of its tables, and that of those of which only inserts are sent.

    ``inserts`` is None where the stream has no such tables; where it has one, that publication may not exist.
    """

    name: str
    inserts: str | None = None


# What the name of the second one ends with.
INSERTS = "_inserts"


def _every_table(table: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of ``spark.readStream.format("pgcdc")``. ``tables`` is empty if ``dbtable`` is given.

    A changelog is made of rows with ``before_image``. ``may_lack_changes`` is no option of users: of which tables, by
    the names that the stream has for them, the publication may leave out a kind of change.
    """

    connection: ConnectionOptions
    dbtable: QualifiedName | None
    tables: tuple[TablePattern, ...]
    slot: str
    failover: bool
    publication: str
    publication_mode: PublicationMode
    keyless: Keyless
    start_from: StartFrom
    max_rows_per_batch: int
    max_bytes_per_batch: int
    change_format: ChangeFormat
    envelope: Envelope
    before_image: bool
    on_schema_change: OnSchemaChange
    on_truncate: OnTruncate
    message_prefixes: tuple[str, ...]
    on_new_table: OnNewTable
    on_slot_lost: OnSlotLost
    as_string: tuple[str, ...]
    numeric_as: NumericAs
    unrepresentable: Unrepresentable
    partition_bytes: int
    slot_timeout_seconds: float
    may_lack_changes: Callable[[str], bool] = field(default=_every_table, compare=False)

    @property
    def publications(self) -> Publications:
        return Publications(self.publication, self.publication + INSERTS if self.keyless == "insertOnly" else None)


def parse_stream_options(options: Mapping[str, str]) -> StreamOptions:
    """Read the options of ``pgcdc``; raises OptionError with everything that is wrong."""
    given = read_given(options, ("connection", "pgcdc"))
    connection = given.connection()
    given.problems.extend(_stream_contradictions(given))
    given.raise_problems()
    values = given.values
    is_changelog = values["changeFormat"] == "changelog"
    return StreamOptions(
        connection=connection,
        dbtable=values["dbtable"],
        tables=values["tables"] or (),
        slot=values["slot"],
        failover=values["failover"],
        publication=values["publication"] or values["slot"],
        publication_mode=values["publicationMode"],
        keyless=values["keyless"],
        start_from=values["startFrom"],
        max_rows_per_batch=values["maxRowsPerBatch"],
        max_bytes_per_batch=values["maxBytesPerBatch"],
        change_format=values["changeFormat"],
        envelope=values["envelope"],
        before_image=values["beforeImage"] or is_changelog,
        on_schema_change=values["onSchemaChange"],
        on_truncate="fail" if is_changelog and "onTruncate" not in given.names else values["onTruncate"],
        message_prefixes=values["messagePrefixes"] or (),
        on_new_table=_on_new_table(values),
        on_slot_lost=values["onSlotLost"],
        as_string=values["asString"] or (),
        numeric_as=values["numericAs"],
        unrepresentable=values["unrepresentable"],
        partition_bytes=values["partitionBytes"],
        slot_timeout_seconds=values["slotTimeout"],
    )


def _on_new_table(values: Mapping[str, Any]) -> OnNewTable:
    on_new_table: OnNewTable = values["onNewTable"] or ("snapshot" if values["tables"] else "fail")
    return on_new_table


def _stream_contradictions(given: Given) -> Iterator[OptionError]:
    names, values = given.names, given.values
    yield from _contradictions_of_rows(given)
    yield from _changelog_contradictions(given)
    if "slot" not in names:
        yield OptionError(
            "no slot is given",
            remedy="choose a name for the stream's replication slot in the option slot; it is created when missing, "
            "and no other stream may use it",
        )
    publication = values["publication"] or values["slot"] or ""
    if values["keyless"] == "insertOnly" and len((publication + INSERTS).encode()) > MAX_NAME_BYTES:
        yield OptionError(
            f"the publication's name is too long for keyless=insertOnly, which adds {INSERTS} to it",
            remedy=f"choose a publication with a name of {MAX_NAME_BYTES - len(INSERTS)} bytes at most",
        )
    yield from _unused_options(given)


def _contradictions_of_rows(given: Given) -> Iterator[OptionError]:
    """Which tables are read, and what does not go with the rows of one, or of several."""
    names, values = given.names, given.values
    if "dbtable" not in names and "tables" not in names:
        yield OptionError("neither dbtable nor tables is given", remedy=ONE_OR_SEVERAL_TABLES)
    if "tables" in names:
        if "dbtable" in names:
            yield OptionError("both dbtable and tables are given", remedy="remove one of them")
        for name in ("beforeImage", "asString", "numericAs", "unrepresentable"):
            if name in names:
                yield OptionError(
                    f"{name} is not used with tables, whose rows hold PostgreSQL's own text in JSON",
                    remedy=f"remove {name} here and pass it to project(), which gives the typed rows of one table"
                    + (" (mirror() has an argument of that name)" if name != "beforeImage" else ""),
                )
    elif "messagePrefixes" in names:
        yield OptionError(
            "messagePrefixes is not used with dbtable, whose rows have the table's columns",
            remedy="use tables, whose rows can also hold messages; or remove messagePrefixes",
        )
    if "envelope" in names and "tables" not in names:
        yield OptionError(
            "envelope is not used with dbtable, whose rows have the table's columns",
            remedy="use tables; or remove envelope",
        )
    if "dbtable" in names and values["onSchemaChange"] == "emit":
        yield OptionError(
            "onSchemaChange=emit is not used with dbtable, whose columns are those of the DataFrame",
            remedy="use onSchemaChange=fail or onSchemaChange=ignore; or take the envelope (option tables)",
        )


def _unused_options(given: Given) -> Iterator[OptionError]:
    names, values = given.names, given.values
    reads_rows = values["startFrom"] == "snapshot" or values["onSlotLost"] == "resnapshot"
    joins_read = _on_new_table(values) == "snapshot"
    makes_slot = values["startFrom"] != "slot" or values["onSlotLost"] == "resnapshot"
    unused = {
        "failover": None if makes_slot else "no slot is created",
        "slotTimeout": None if makes_slot or joins_read else "no slot is created",
        "partitionBytes": None if reads_rows or joins_read else "no rows of tables are read",
    }
    for name, why in unused.items():
        if name in names and why is not None:
            yield OptionError(
                f"{name} is not used with startFrom={values['startFrom']}", remedy=f"remove {name}: {why}"
            )


def _changelog_contradictions(given: Given) -> Iterator[OptionError]:
    names, values = given.names, given.values
    if "changeFormat" in names and "tables" in names:
        yield OptionError(
            "changeFormat is not used with tables, whose rows have the envelope's columns",
            remedy="remove changeFormat, or name one table in dbtable",
        )
    if values["changeFormat"] != "changelog":
        return
    if "beforeImage" in names:
        yield OptionError(
            "beforeImage is not used with changeFormat=changelog, whose old rows are rows of their own",
            remedy="remove beforeImage: the old row is the one with update_preimage",
        )
    for name, value in (("onNewTable", "snapshot"), ("onSlotLost", "resnapshot")):
        if values[name] == value:
            yield OptionError(
                f"{name}={value} is not used with changeFormat=changelog, which has no row for a table that is emptied",
                remedy=f"remove {name}",
            )
    if "onTruncate" in names and values["onTruncate"] == "emit":
        yield OptionError(
            "onTruncate=emit is not used with changeFormat=changelog, which has no row for a truncate",
            remedy="use onTruncate=fail or onTruncate=ignore",
        )
