"""The options of the format ``pgsnapshot``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.declared import ConsistentPoint, Unrepresentable
from pg_cdc_source.options.given import Given, read_given
from pg_cdc_source.options.names import QualifiedName, quoted
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.query import Query
from pg_cdc_source.options.spark_jdbc import warning_of


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """The options of ``spark.read.format("pgsnapshot")``. With ``snapshot``, ``consistent_point`` has no meaning.

    ``without_effect`` says which options of Spark's JDBC source were given, and what happens instead.
    """

    connection: ConnectionOptions
    dbtable: QualifiedName | None
    query: Query | None
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
    max_connections: int | None
    without_effect: str = ""


def parse_snapshot_options(options: Mapping[str, str]) -> SnapshotOptions:
    """Read the options of ``pgsnapshot``; raises OptionError with everything that is wrong."""
    given = read_given(options, ("connection", "pgsnapshot"))
    connection = given.connection()
    given.problems.extend(_snapshot_contradictions(given))
    given.raise_problems()
    values = given.values
    query = _query(values)
    return SnapshotOptions(
        connection=connection,
        dbtable=None if query else values["dbtable"],
        query=query,
        columns=values["columns"],
        where=values["where"],
        partition_bytes=values["partitionBytes"],
        num_partitions=None if query else values["numPartitions"],
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
        max_connections=values["maxConnections"],
        without_effect=warning_of(given.taken, one_partition=query is not None and "numPartitions" in given.names),
    )


def _query(values: Mapping[str, Any]) -> Query | None:
    query: Query | None = values["dbtable"] if isinstance(values["dbtable"], Query) else values["query"]
    return query


def _snapshot_contradictions(given: Given) -> Iterator[OptionError]:
    names, values = given.names, given.values
    if "dbtable" not in names and "query" not in names:
        remedy = "name a table in dbtable, or write a query"
        if not names | given.libpq.keys():
            # Spark 4.0 to 4.3 keeps such a table, with columns that the statement lists, without asking the source.
            remedy += (
                "; a table of CREATE TABLE … USING pgsnapshot cannot be read, as Spark gives its source no options: "
                "use CREATE TEMPORARY VIEW"
            )
        yield OptionError("neither dbtable nor query is given", remedy=remedy)
    if {"dbtable", "query"} <= names:
        yield OptionError("both dbtable and query are given", remedy="remove one of them")
    if "query" in names or _query(values) is not None:
        what = "query" if "query" in names else "a sub-select in dbtable"
        for name in ("columns", "where", "partitionBytes"):
            if name in names:
                use = "a query is read as one partition" if name == "partitionBytes" else "write it into the query"
                yield OptionError(f"{name} is not used with {what}", remedy=f"remove {name}: {use}")
    if {"partitionBytes", "numPartitions"} <= names:
        yield OptionError("partitionBytes and numPartitions both say how a table is split", remedy="remove one of them")
    if "snapshot" in names:
        for name in ("slot", "consistentPoint", "slotTimeout", "snapshotIdle"):
            if name in names:
                yield OptionError(
                    f"{name} is not used with snapshot",
                    remedy=f"remove {name}: it is for making a snapshot, and this one exists",
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
