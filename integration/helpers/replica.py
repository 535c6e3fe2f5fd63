"""Copies of tables that are made from nothing but a stream's rows, and that take no row which does not fit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from psycopg2 import sql
from psycopg2.extensions import connection as Session

Row = tuple[tuple[str, str | None], ...]


class Replica:
    """Tables by name, filled from rows of the envelope in their order.

    A row that was inserted before, or changed or deleted without being there, is an error: so what comes twice, or not
    at all, or out of order is found, and not only where it shows in the end.
    """

    def __init__(self) -> None:
        self._keyed: dict[str, dict[str, Row]] = {}
        self._keyless: dict[str, Counter[Row]] = {}
        self._positions: set[tuple[int, int]] = set()

    def apply(self, changes: Iterable[Mapping[str, Any]]) -> None:
        """Apply one batch: its rows of the snapshot in any order, then its changes by their positions."""
        for change in sorted(changes, key=lambda change: (change["_commit_lsn"], change["_seq"])):
            if change["_change_type"] != "snapshot":
                position = (change["_commit_lsn"], change["_seq"])
                assert position not in self._positions, f"twice: {change}"
                self._positions.add(position)
            self._apply(change)

    def _apply(self, change: Mapping[str, Any]) -> None:
        kind, table = change["_change_type"], change["_table"]
        if kind == "truncate":
            self._keyed.pop(table, None)
            self._keyless.pop(table, None)
        elif change["key"] is None:
            rows = self._keyless.setdefault(table, Counter())
            if kind in ("update", "delete"):
                before = _row(change["before"])
                assert rows[before] > 0, f"not there: {change}"
                rows[before] -= 1
            if kind != "delete":
                rows[_row(change["after"])] += 1
        else:
            keyed, key = self._keyed.setdefault(table, {}), change["key"]
            assert (key in keyed) == (kind in ("update", "delete")), f"{key} there: {key in keyed}; {change}"
            if kind == "delete":
                del keyed[key]
            else:
                unchanged = {name: value for name, value in keyed.get(key, ()) if name in change["_unchanged"]}
                keyed[key] = tuple(sorted({**dict(_row(change["after"])), **unchanged}.items()))

    def rows(self, table: str) -> Counter[Row]:
        """All rows, as ``rows_of`` gives them."""
        return +Counter(self._keyed.get(table, {}).values()) + self._keyless.get(table, Counter())


def _row(text: str) -> Row:
    values = json.loads(text)
    return tuple(sorted((name, None if value is None else str(value)) for name, value in values.items()))


def rows_of(pg: Session, table: str) -> Counter[Row]:
    """All rows of a table of the source: names and PostgreSQL's texts. It has no booleans."""
    with pg.cursor() as cursor:
        cursor.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(sql.SQL(table)))
        names = [column.name for column in cursor.description]
        texts = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in names)
        cursor.execute(sql.SQL("SELECT {} FROM {}").format(texts, sql.SQL(table)))
        return Counter(tuple(sorted(zip(names, row, strict=True))) for row in cursor)


def upserted(batches: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, dict[int, str]]:
    """What a sink has of tables ``(id int, v text)`` that upserts each batch by key, in the order of its positions."""
    tables: dict[str, dict[int, str]] = {}
    for batch in batches:
        for row in sorted(batch, key=lambda row: (row["_commit_lsn"], row["_seq"])):
            table = tables.setdefault(row["_table"], {})
            if row["_change_type"] == "truncate":
                table.clear()
            elif row["_change_type"] == "delete":
                table.pop(json.loads(row["key"])["id"], None)
            else:
                after = json.loads(row["after"])
                table[after["id"]] = after["v"]
    return tables
