"""Rows that a shop's tables have lost, as its own triggers saw them last, and whether a lake has them so."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from databases import connect
from driving import run
from shop_judge import Seen, of_lake, of_text
from shop_tables import Table, name_of

# A schema of its own is in no publication of ``public.*``. The slot tells by which commit a row was lost.
_SCHEMA = (
    "CREATE SCHEMA graves",
    "CREATE TABLE graves.rows (n bigserial, xid bigint, name text, columns text[], texts text[])",
    r"""
    CREATE FUNCTION graves.bury() RETURNS trigger LANGUAGE plpgsql
    SET timezone = 'UTC' SET intervalstyle = 'iso_8601' AS $$
    DECLARE
        statement text;
    BEGIN
        SELECT format(
            'INSERT INTO graves.rows (xid, name, columns, texts)'
            ' SELECT pg_current_xact_id()::text::bigint, %L, ARRAY[%s], ARRAY[%s] FROM %s AS o',
            TG_ARGV[0],
            string_agg(quote_literal(attnum || ' ' || format_type(atttypid, atttypmod)), ', ' ORDER BY attnum),
            string_agg(
                format('CASE WHEN num_nonnulls(o.%1$I) = 1 THEN format(''%%s'', o.%1$I) END', attname), ', '
                ORDER BY attnum
            ),
            CASE TG_OP WHEN 'TRUNCATE' THEN TG_ARGV[0] ELSE '(SELECT ($1).*)' END
        )
        INTO statement FROM pg_attribute
        WHERE attrelid = TG_ARGV[0]::regclass AND attnum > 0 AND NOT attisdropped;
        EXECUTE statement USING OLD;
        RETURN NULL;
    END $$
    """,
    "CREATE PUBLICATION graves FOR TABLE graves.rows",
    "SELECT pg_create_logical_replication_slot('graves', 'pgoutput')",
)
# Of the messages Begin.
_LSNS = """
    SELECT ('x' || encode(substr(data, 18, 4), 'hex'))::bit(32)::bigint,
           ('x' || encode(substr(data, 2, 8), 'hex'))::bit(64)::bigint
    FROM pg_logical_slot_peek_binary_changes('graves', NULL, NULL, 'proto_version', '1', 'publication_names', 'graves')
    WHERE substr(data, 1, 1) = 'B'
"""
# Rows of a table that gets other keys have another one when they are lost than when they are looked for.
_REKEYED = "public.pairs"


class _Lost(NamedTuple):
    lsn: int
    values: Mapping[str, str | None]  # texts, by what tells a column and its type from others


class Graves:
    """``known`` counts deleted rows that were compared, ``unknown`` those that no trigger saw: rows had come again."""

    def __init__(self, url: str, tables: Sequence[Table]) -> None:
        """Begin to note what tables lose."""
        self.known = self.unknown = 0
        self._url = url
        self._own = {f"public.{table.name}": len(table.columns) for table in tables}
        self._lost: dict[str, list[_Lost]] = defaultdict(list)
        with connect(url) as pg:
            run(pg, *_SCHEMA)
            for table in tables:
                given = f"EXECUTE FUNCTION graves.bury('{table.name}')"
                names = [name_of(column) for column, _ in table.columns[: table.key]]
                changed = " OR ".join(f"OLD.{name}::text IS DISTINCT FROM NEW.{name}::text" for name in names)
                run(
                    pg,
                    f"CREATE TRIGGER a AFTER DELETE ON {table.name} FOR EACH ROW {given}",
                    f"CREATE TRIGGER b AFTER UPDATE ON {table.name} FOR EACH ROW WHEN ({changed}) {given}",
                    f"CREATE TRIGGER c BEFORE TRUNCATE ON {table.name} {given}",
                )

    def read(self) -> None:
        """Read what was noted."""
        with connect(self._url) as pg:
            lsns = dict(run(pg, _LSNS))
            rows = run(pg, "SELECT xid, 'public.' || name, columns, texts FROM graves.rows ORDER BY n")
        for xid, name, columns, texts in rows:
            self._lost[name].append(_Lost(lsns[xid], dict(zip(columns, texts, strict=True))))

    def faults(self, name: str, seen: Seen, found: pa.Table, deleted: str, lsn: int, since: int) -> Iterator[str]:
        """What is wrong with a table's deleted rows; ``since`` is the LSN from which on the lake has seen all."""
        # Nothing tells the rows of a table without a key apart.
        if name == _REKEYED or not seen.key or not set(seen.key) <= set(found.column_names):
            return
        schema = found.schema
        columns = {other: of for other, of in seen.columns.items() if other in schema.names}
        key = [columns[other] for other in seen.key]
        types = {of: schema.field(other).type for other, of in columns.items()}
        lost: dict[tuple[Any, ...], _Lost] = {}
        for row in self._lost[name]:
            if row.lsn <= lsn and all(of in row.values for of in key):
                lost[tuple(_same(of_text(row.values[of], types[of], None)) for of in key)] = row
        own = self._own.get(name, 0)
        added = {other for other, of in columns.items() if int(of.split()[0]) > own}
        there = set()
        wrong = Counter[str]()
        example = ""
        for row in found.to_pylist():
            told = tuple(_same(of_lake(row[other], schema.field(other).type)) for other in seen.key)
            there.add(told)
            if not row[deleted]:
                continue
            last = lost.get(told)
            if last is None or last.lsn != row["_deleted_lsn"]:
                self.unknown += 1
                continue
            self.known += 1
            for other, of in columns.items():
                if of in last.values:
                    wanted, has = of_text(last.values[of], types[of], None), of_lake(row[other], types[of])
                    if has is None and other in added:
                        # What a rewrite gave it never travelled, where a TRUNCATE came before its rows were read.
                        continue
                    if wanted != has:
                        wrong[other] += 1
                        example = f"{told} has {str(has)[:60]!r} in {other}, and had {str(wanted)[:60]!r}"
        if wrong:
            yield f"deleted rows have other values, {dict(wrong)}: {example}"
        lacking = [told for told, row in lost.items() if row.lsn > since and told not in there]
        if lacking:
            yield f"{len(lacking)} rows were deleted, and are not there, such as {lacking[0]} at {lost[lacking[0]].lsn}"


def _same(value: Any) -> Any:
    """As a lake's merge tells keys apart: -0.0 is 0.0."""
    return "0.0" if value == "-0.0" else value
