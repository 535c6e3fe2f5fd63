"""How a stream reads its tables, and what their columns are: looked up once, while the catalog stays as it is.

A stream plans all of its tables whenever it begins or goes on, a table joins, and before Spark 4.2 for each batch.
A stream may have thousands of tables, so they are asked for together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError
from pg_cdc_source.options.names import listed
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import catalog
from pg_cdc_source.postgres.catalog import Relation, Server
from pg_cdc_source.postgres.columns import TypedAttribute, read_columns, read_typed_attributes
from pg_cdc_source.postgres.publication import SentTable, Unpublished
from pg_cdc_source.snapshot import scan
from pg_cdc_source.snapshot.scan import Plan, ScanSpec
from pg_cdc_source.values.registry import Codec, Column


@dataclass(frozen=True, slots=True)
class Scanned:
    """How a table is read, and the columns that its rows have in the stream: also those that changes may lack.

    ``types`` are the columns' raw ones, by name: oid and modifier.
    """

    plan: Plan
    columns: tuple[Column, ...]
    codecs: tuple[Codec, ...]
    types: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """All in the catalog that a scan is planned from."""

    server: Server
    relation: Relation
    attributes: tuple[TypedAttribute, ...]
    unpublished: Unpublished
    row_filter: str | None


class TableScans:
    """Plans scans for one stream, and remembers them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[_Seen, Scanned]] = {}

    def keep(self, oids: Collection[int]) -> None:
        """Forget all other tables."""
        self._known = {oid: known for oid, known in self._known.items() if oid in oids}

    def plan(self, session: Session, options: StreamOptions, tables: Sequence[SentTable]) -> list[Scanned]:
        """Plan each table's scan. Raises TransientError where columns change meanwhile."""
        relations = [table.relation for table in tables]
        server, attributes = catalog.read_server(session), read_typed_attributes(session, relations)
        seen = {
            table.relation.oid: _Seen(
                *(server, table.relation, attributes[table.relation.oid]),
                *(Unpublished(table.unpublished, table.generated), table.row_filter),
            )
            for table in tables
        }
        new = [oid for oid, facts in seen.items() if oid not in self._known or self._known[oid][0] != facts]
        # PostgreSQL takes a row filter for what its functions and this role make of it.
        plain = {oid: attributes[oid] for oid in new if seen[oid].row_filter is None}
        columns = read_columns(session, plain, "reading the columns of tables") if plain else {}
        for oid in new:
            self._known[oid] = seen[oid], _plan_scan(session, options, seen[oid], columns.get(oid))
        if new and (now := read_typed_attributes(session, relations)) != attributes:
            names = listed(str(r) for r in relations if now.get(r.oid) != attributes[r.oid])
            raise TransientError(f"planning the stream's tables: columns of {names} are being changed")
        return [self._known[table.relation.oid][1] for table in tables]


def plan_scan(session: Session, options: StreamOptions, relation: Relation, unpublished: Unpublished) -> Scanned:
    """Plan the scan of one table, all rows of which are wanted."""
    attributes = read_typed_attributes(session, [relation])[relation.oid]
    seen = _Seen(catalog.read_server(session), relation, attributes, unpublished, None)
    return _plan_scan(session, options, seen, None)


def _plan_scan(session: Session, options: StreamOptions, seen: _Seen, columns: Mapping[str, Column] | None) -> Scanned:
    """Plan a scan, whose columns are asked for where they are not among ``columns``, which are by name."""
    # JSON leaves out what is not sent, and a changelog has no column to list it in.
    is_listed = options.dbtable is not None and options.change_format == "plain"
    unpublished = seen.unpublished
    left_out = set(unpublished.columns) - set(unpublished.generated if is_listed else ())
    attributes = [column.attribute for column in seen.attributes]
    names = tuple(attribute.name for attribute in attributes if attribute.name not in left_out)
    spec = ScanSpec(
        connection=options.connection,
        relation=seen.relation,
        query=None,
        columns=names,
        where=seen.row_filter,
        range_bytes=options.partition_bytes,
        ranges=None,
        lsn_column=_counting_column(names),
        as_string=names if options.dbtable is None else options.as_string,
        numeric_as=options.numeric_as,
        unrepresentable=options.unrepresentable,
        batch_bytes=4 << 20,
        # Rows of tables that inherit come under their names, if those are published.
        only=seen.relation.kind == "r",
    )
    found = None if columns is None else [columns[name] for name in names]
    whole = scan.plan_in(session, seen.server, spec, attributes, columns=found)
    sent = narrowed(whole, [column for column in whole.columns if column.name not in unpublished.columns])
    types = {column.attribute.name: column.type for column in seen.attributes}
    return Scanned(sent, whole.columns, tuple(whole.codecs), types)


def narrowed(whole: Plan, columns: Sequence[Column]) -> Plan:
    """The scan of these columns alone."""
    names = tuple(column.name for column in columns)
    spec = replace(whole.spec, columns=names, lsn_column=_counting_column(names))
    return replace(whole, spec=spec, columns=tuple(columns))


def _counting_column(columns: Sequence[str]) -> str | None:
    """What rows of a table without columns are counted by."""
    return None if columns else "lsn"
