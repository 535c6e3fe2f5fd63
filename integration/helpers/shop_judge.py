"""What PostgreSQL shows of its tables, and whether tables of a lake have just that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg2
import pyarrow as pa
from psycopg2 import sql
from psycopg2.errors import LockNotAvailable
from psycopg2.extensions import connection as Session
from shop_modes import Merged

Rows = Counter[tuple[Any, ...]]
_ARRAY = psycopg2.extensions.new_array_type((1009,), "TEXTS", psycopg2.STRING)

_TABLES = """
SELECT 'public.' || quote_ident(c.relname), c.relkind = 'p', coalesce(obj_description(c.oid, 'pg_class'), 'said'),
       ARRAY(SELECT ARRAY[a.attname::text, a.attnum::text || ' ' || format_type(a.atttypid, a.atttypmod)]
             FROM pg_attribute AS a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND (a.attgenerated = '' OR %s)
             ORDER BY a.attnum),
       ARRAY(SELECT a.attname::text FROM pg_attribute AS a
             WHERE a.attrelid = c.oid
               AND a.attnum = ANY (SELECT unnest(i.indkey) FROM pg_index AS i WHERE i.indrelid = c.oid
                                   AND (i.indisprimary OR i.indisreplident))
             ORDER BY a.attnum)
FROM pg_class AS c
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
  AND NOT c.relispartition
"""


# What the type's own output is; a cast would take a char(n)'s spaces away.
_TEXT = "CASE WHEN num_nonnulls({0}) = 1 THEN format('%s', {0}) END"


@dataclass(frozen=True)
class Seen:
    """A table of PostgreSQL. ``columns`` are names, with what tells a column and its type from others."""

    is_root: bool
    comment: str
    columns: Mapping[str, str]
    key: Sequence[str]


def seen_by(pg: Session) -> dict[str, Seen]:
    """The tables that a session sees."""
    with pg.cursor() as cursor:
        cursor.execute(_TABLES, (pg.server_version >= 180000,))
        return {name: Seen(is_root, comment, dict(columns), key) for name, is_root, comment, columns, key in cursor}


@dataclass
class Judge:
    """Compares tables with those of a session. ``compared`` counts tables, ``passed_over`` those of which it cannot.

    ``differences`` are in words.
    """

    mode: Merged
    compared: int = 0
    rows: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def say(self) -> None:
        """Print what was compared."""
        print(f"{self.compared} tables with {self.rows} rows; passed over {self.passed_over}")

    def compare(
        self,
        pg: Session,
        where: str,
        lsn: int,
        tables: Mapping[str, Callable[[], pa.Table]],
        gone: set[str],
        absent: set[str],
    ) -> None:
        """``absent``: tables of PostgreSQL that may be lacking; ``gone``: some that may be in the lake only."""
        there = seen_by(pg)
        for name in tables.keys() - there.keys() - gone:
            self.differences.append(f"{where}: the lake has {name}, which PostgreSQL has not")
        for name, seen in there.items():
            if name not in tables:
                if name not in absent:
                    self.differences.append(f"{where}: the lake lacks {name}")
                self.passed_over["not there"] += 1
            elif seen.comment == "rewritten":
                self.passed_over[seen.comment] += 1
            else:
                self._compare_present(pg, f"{where}, {name}", name, seen, tables[name](), lsn)

    def compare_past(
        self,
        pg: Session,
        where: str,
        lsn: int,
        tables: Mapping[str, Callable[[], pa.Table]],
        last: Mapping[str, Seen],
    ) -> None:
        """What tables of a later LSN say of this one. ``last``: what they are there."""
        for name, seen in seen_by(pg).items():
            if name not in tables or name not in last or seen.comment == "rewritten":
                continue
            if seen.comment == "silent":
                # What old rows got in a new column may have come with the batch that set the table aside.
                self.passed_over["silent, by the last version"] += 1
                continue
            found = tables[name]()
            called = {column: other for other, column in last[name].columns.items() if other in found.column_names}
            names = {name: called[column] for name, column in seen.columns.items() if column in called}
            self.passed_over["columns that are not there any more"] += len(seen.columns) - len(names)
            if set(seen.key) <= names.keys():
                rows = self.mode.rows_at(found, [names[name] for name in seen.key], lsn)
                self._compare_rows(pg, f"{where} by the last version, {name}", name, seen, names, rows)
            else:
                self.passed_over["another key since"] += 1

    def _compare_present(self, pg: Session, where: str, name: str, seen: Seen, found: pa.Table, lsn: int) -> None:
        columns = {name for name in found.column_names if name not in self.mode.own}
        lacking, surplus = seen.columns.keys() - columns, columns - seen.columns.keys()
        if seen.comment == "said" and (lacking or (surplus and not self.mode.keeps_columns)):
            self.differences.append(f"{where}: columns {found.column_names} instead of {list(seen.columns)}")
            return
        self.passed_over[f"columns of {seen.comment}"] += len(lacking | surplus)
        if not set(seen.key) <= columns:
            self.passed_over["another key"] += 1
            return
        self.differences += [f"{where}: {fault}" for fault in self.mode.faults(found, seen.key, lsn)]
        rows = self.mode.rows_at(found, seen.key, lsn)
        self._compare_rows(pg, where, name, seen, {name: name for name in seen.columns if name in columns}, rows)

    def _compare_rows(
        self, pg: Session, where: str, name: str, seen: Seen, columns: Mapping[str, str], found: pa.Table
    ) -> None:
        """``columns`` are those of PostgreSQL, with their names in the lake."""
        if not seen.key and self.mode.has_past:
            # Nobody can tell its rows apart.
            self.passed_over["no key"] += 1
            return
        try:
            self._compare_values(pg, where, name if seen.is_root else f"ONLY {name}", columns, found)
        except LockNotAvailable:
            # Its alteration is under way at this point, and goes on when nobody waits for it.
            self.passed_over["locked"] += 1

    def _compare_values(self, pg: Session, where: str, table: str, columns: Mapping[str, str], found: pa.Table) -> None:
        names = list(columns.values())
        with pg.cursor() as cursor:
            cursor.execute("SET TIME ZONE 'UTC'; SET IntervalStyle = 'iso_8601'; SET lock_timeout = '1s'")
            texts = sql.SQL(", ").join(sql.SQL(_TEXT).format(sql.Identifier(name)) for name in columns)
            cursor.execute(sql.SQL("SELECT {} FROM {}").format(texts, sql.SQL(table)))
            types = [found.schema.field(name).type for name in names]
            wanted = Counter(
                tuple(of_text(text, of, cursor) for text, of in zip(row, types, strict=True))
                for row in cursor.fetchall()
            )
        values = [
            [of_lake(value, of) for value in found[name].to_pylist()] for name, of in zip(names, types, strict=True)
        ]
        has = Counter(zip(*values, strict=True)) if names else Counter()
        self.compared += 1
        self.rows += wanted.total()
        if has != wanted:
            lacks, surplus = list((wanted - has).items()), list((has - wanted).items())
            self.differences.append(
                f"{where}: lacks {len(lacks)} rows and has {len(surplus)} others, of {wanted.total()}; columns {names};"
                f" lacks {_short(lacks[:2])}, has {_short(surplus[:2])}"
            )


def _short(rows: list[Any]) -> str:
    return str([[(str(value)[:40] + "…" if len(str(value)) > 40 else value) for value in row] for row, _ in rows])


def of_text(text: str | None, of: pa.DataType, cursor: Any) -> Any:
    """What PostgreSQL's text is as a value of an Arrow type, so that it can be compared."""
    if text is None:
        return None
    if pa.types.is_list(of):
        return tuple(of_text(item, of.value_type, cursor) for item in _ARRAY(text, cursor))
    if pa.types.is_integer(of):
        return int(text)
    if pa.types.is_floating(of):
        return _float(float(text), of)
    if pa.types.is_decimal(of):
        return f"{Decimal(text):f}"
    if pa.types.is_boolean(of):
        return text == "t"
    if pa.types.is_date(of):
        return date.fromisoformat(text)
    if pa.types.is_timestamp(of):
        return datetime.fromisoformat(text)
    if pa.types.is_binary(of):
        return bytes.fromhex(text.removeprefix("\\x"))
    assert pa.types.is_string(of), of
    return text


def of_lake(value: Any, of: pa.DataType) -> Any:
    """What a value of the lake is, so that it can be compared."""
    if value is None:
        return None
    if pa.types.is_list(of):
        return tuple(of_lake(item, of.value_type) for item in value)
    if pa.types.is_floating(of):
        return _float(value, of)
    if pa.types.is_decimal(of):
        return f"{value:f}"
    return value


def _float(value: float, of: pa.DataType) -> str:
    """NaN is itself, and 0.0 is not -0.0."""
    return repr(np.float32(value) if pa.types.is_float32(of) else value)
