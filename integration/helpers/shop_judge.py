"""What PostgreSQL shows of its tables, and whether tables of a lake have just that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
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

Rows = Counter[tuple[Any, ...]]
_ARRAY = psycopg2.extensions.new_array_type((1009,), "TEXTS", psycopg2.STRING)

_TABLES = """
SELECT 'public.' || quote_ident(c.relname), c.relkind = 'p', coalesce(obj_description(c.oid, 'pg_class'), 'said'),
       ARRAY(SELECT a.attname::text FROM pg_attribute AS a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND (a.attgenerated = '' OR %s)
             ORDER BY a.attnum)
FROM pg_class AS c
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
  AND NOT c.relispartition
"""


# What the type's own output is; a cast would take a char(n)'s spaces away.
_TEXT = "CASE WHEN num_nonnulls({0}) = 1 THEN format('%s', {0}) END"


@dataclass
class Judge:
    """Compares tables with those of a session. ``compared`` counts tables, ``passed_over`` those of which it cannot.

    ``differences`` are in words.
    """

    compared: int = 0
    rows: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def compare(
        self, pg: Session, where: str, tables: Mapping[str, Callable[[], pa.Table]], gone: set[str], absent: set[str]
    ) -> None:
        """``absent``: tables of PostgreSQL that may be lacking; ``gone``: some that may be in the lake only."""
        with pg.cursor() as cursor:
            cursor.execute("SET TIME ZONE 'UTC'; SET IntervalStyle = 'iso_8601'; SET lock_timeout = '1s'")
            cursor.execute(_TABLES, (pg.server_version >= 180000,))
            there = {name: rest for name, *rest in cursor}
        for name in tables.keys() - there.keys() - gone:
            self.differences.append(f"{where}: the lake has {name}, which PostgreSQL has not")
        for name, (is_root, comment, columns) in there.items():
            if name not in tables:
                if name not in absent:
                    self.differences.append(f"{where}: the lake lacks {name}")
                self.passed_over["not there"] += 1
            elif comment == "rewritten":
                self.passed_over[comment] += 1
            else:
                table = name if is_root else f"ONLY {name}"
                try:
                    self._compare(pg, f"{where}, {name}", table, columns, comment, tables[name]())
                except LockNotAvailable:
                    # Its alteration is under way at this point, and goes on when nobody waits for it.
                    self.passed_over["locked"] += 1

    def _compare(self, pg: Session, where: str, table: str, columns: list[str], comment: str, found: pa.Table) -> None:
        names = [name for name in columns if name in found.column_names]
        if comment == "said" and set(columns) != set(found.column_names):
            self.differences.append(f"{where}: columns {found.column_names} instead of {columns}")
            return
        self.passed_over[f"columns of {comment}"] += len(set(columns) ^ set(found.column_names))
        with pg.cursor() as cursor:
            texts = sql.SQL(", ").join(sql.SQL(_TEXT).format(sql.Identifier(name)) for name in names)
            cursor.execute(sql.SQL("SELECT {} FROM {}").format(texts, sql.SQL(table)))
            types = [found.schema.field(name).type for name in names]
            wanted = Counter(
                tuple(_of_text(text, of, cursor) for text, of in zip(row, types, strict=True))
                for row in cursor.fetchall()
            )
        values = [
            [_of_lake(value, of) for value in found[name].to_pylist()] for name, of in zip(names, types, strict=True)
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


def _of_text(text: str | None, of: pa.DataType, cursor: Any) -> Any:
    """What PostgreSQL's text is as a value of an Arrow type, so that it can be compared."""
    if text is None:
        return None
    if pa.types.is_list(of):
        return tuple(_of_text(item, of.value_type, cursor) for item in _ARRAY(text, cursor))
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


def _of_lake(value: Any, of: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_list(of):
        return tuple(_of_lake(item, of.value_type) for item in value)
    if pa.types.is_floating(of):
        return _float(value, of)
    if pa.types.is_decimal(of):
        return f"{value:f}"
    return value


def _float(value: float, of: pa.DataType) -> str:
    """NaN is itself, and 0.0 is not -0.0."""
    return repr(np.float32(value) if pa.types.is_float32(of) else value)
