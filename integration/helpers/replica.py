"""Copies of tables that are made from nothing but a stream's rows, and that take no row which does not fit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from psycopg2 import sql
from psycopg2.extensions import connection as Session

Row = tuple[tuple[str, str | None], ...]  # by column; PostgreSQL's texts

_BOOLEAN = 16  # pg_type.oid


class Replica:
    """Tables by name, filled from rows of the envelope in their order.

    A row that was inserted before, or changed or deleted without being there, is an error: so what comes twice, or not
    at all, or out of order is found, and not only where it shows in the end. Where rows say the columns
    (``onSchemaChange=emit``), every other row has just these, and rows from before are brought to them.

    With ``heals``, a row that does not fit is no error if the table's rows come again: where changes were missed, those
    after them may come first. ``misfits`` are such rows by table, ``healed`` those from before the rows came again.
    """

    def __init__(self, *, heals: bool = False) -> None:
        self.left: list[str] = []  # of which tables a row has said so
        self.misfits: dict[str, str] = {}
        self.healed: dict[str, str] = {}
        self._heals = heals
        self._tables: dict[str, _Copy] = {}
        self._positions: dict[tuple[int, int], str] = {}
        self._states_through: dict[str, int] = {}

    @property
    def filled(self) -> set[str]:
        """The tables that have rows."""
        return {name for name, table in self._tables.items() if table.rows()}

    def apply(self, changes: Iterable[Mapping[str, Any]], states_through: int = 0) -> None:
        """Apply one batch: its rows of the snapshot in any order, then its changes by their positions.

        Where a process has read rows in place of another, they may have the state of a change up to the LSN
        ``states_through``. Until then, changes of rows with a key are upserts.
        """
        changes = list(changes)
        for name in {change["_table"] for change in changes if change["_change_type"] == "snapshot"}:
            self._states_through[name] = states_through

        def place(change: Mapping[str, Any]) -> tuple[int, int, bool]:
            return change["_commit_lsn"], change["_seq"], change["_change_type"] != "schema"

        for change in sorted(changes, key=place):
            try:
                self._apply(change)
            except AssertionError as error:
                if not self._heals:
                    raise
                self.misfits.setdefault(change["_table"], str(error))

    def rows(self, table: str) -> Counter[Row]:
        """All rows, as ``rows_of`` gives them."""
        found = self._tables.get(table)
        return Counter() if found is None else found.rows()

    def drop(self, table: str) -> None:
        """Give up a table."""
        self._tables.pop(table, None)
        self._empty(table)

    def rename(self, table: str, name: str) -> None:
        if table in self._tables:
            self._tables[name] = self._tables.pop(table)

    def _apply(self, change: Mapping[str, Any]) -> None:
        name = change["_table"]
        if change["_change_type"] == "schema":
            self._alter(name, json.loads(change["after"]))
            return
        table = self._tables.setdefault(name, _Copy())
        # Rows of a snapshot, and those that empty a table before them, are numbered 0.
        if change["_seq"] > 0:
            position = (change["_commit_lsn"], change["_seq"])
            assert position not in self._positions, f"twice: {change}"
            self._positions[position] = name
        elif change["_change_type"] == "truncate":
            self._empty(name)
        if change["_change_type"] == "truncate":
            table.empty()
        else:
            table.change(change, upserts=change["_commit_lsn"] <= self._states_through.get(name, 0))

    def _empty(self, name: str) -> None:
        """Forget what came of a table: its rows come again, with the changes since."""
        self._positions = {position: table for position, table in self._positions.items() if table != name}
        if name in self.misfits:
            self.healed[name] = self.misfits.pop(name)

    def _alter(self, name: str, layout: Mapping[str, Any]) -> None:
        for change in layout["changes"]:
            if change["change"] == "left":
                assert layout["columns"] == []
                self.left.append(name)
                self.drop(name)
                return
            if change["change"] == "renamed" and change["attnum"] is None:
                self.rename(change["was"], name)
        self._tables.setdefault(name, _Copy()).alter(layout)


class _Copy:
    """The rows of a table. ``key``: the columns that tell them apart, none where only whole rows do."""

    def __init__(self) -> None:
        self.key: tuple[str, ...] = ()
        self._columns: set[str] | None = None  # once a row has said them
        self._keyed: dict[Row, Row] = {}
        self._keyless: Counter[Row] = Counter()
        self._is_stale = False  # rows from before have other values at the source: all come again

    def rows(self) -> Counter[Row]:
        return +Counter(self._keyed.values()) + self._keyless

    def empty(self) -> None:
        self._keyed, self._keyless, self._is_stale = {}, Counter(), False

    def change(self, change: Mapping[str, Any], *, upserts: bool) -> None:
        kind, key = change["_change_type"], None if change["key"] is None else _row(change["key"])
        self._tell_apart_by(() if key is None else tuple(name for name, _ in key), change)
        if self._columns is not None and kind != "delete":
            sent = set(json.loads(change["after"]))
            assert sent <= self._columns <= sent | set(change["_unchanged"]), f"not {self._columns}: {change}"
        if key is None:
            self._change_keyless(kind, change)
            return
        fits = (key in self._keyed) == (kind in ("update", "delete"))
        assert fits or upserts, f"{key} there: {key in self._keyed}; {change}"
        if kind == "delete":
            self._keyed.pop(key, None)
        else:
            known = self._keyed.get(key, ())
            unchanged = {name: value for name, value in known if name in change["_unchanged"]}
            self._keyed[key] = tuple(sorted({**dict(_row(change["after"])), **unchanged}.items()))

    def _change_keyless(self, kind: str, change: Mapping[str, Any]) -> None:
        if kind in ("update", "delete"):
            before = _row(change["before"])
            assert self._is_stale or self._keyless[before] > 0, f"not there: {change}"
            self._keyless[before] -= 1
        if kind != "delete":
            self._keyless[_row(change["after"])] += 1

    def _tell_apart_by(self, key: tuple[str, ...], change: Mapping[str, Any]) -> None:
        """Find rows by these columns from now on."""
        if key == self.key:
            return
        assert self._columns is None or not self.rows(), f"nothing has said that {self.key} is not the key: {change}"
        self._rekey(key, self.rows())

    def _rekey(self, key: tuple[str, ...], rows: Counter[Row]) -> None:
        self.key = key
        if key:
            self._keyed = {tuple((name, dict(row)[name]) for name in key): row for row in rows}
            self._keyless = Counter()
            assert len(self._keyed) == rows.total(), f"{key} does not tell apart {rows}"
        else:
            self._keyed, self._keyless = {}, rows

    def alter(self, layout: Mapping[str, Any]) -> None:
        """Bring the rows to other columns, as the row says that tells them."""
        changes = layout["changes"]
        dropped = {change["name"] for change in changes if change["change"] == "dropped"}
        renamed = {c["was"]: c["name"] for c in changes if c["change"] == "renamed" and c["attnum"] is not None}
        filled = {change["name"]: change["fill"] for change in changes if change["change"] == "added"}
        rows: Counter[Row] = Counter()
        for row, count in self.rows().items():
            kept = {renamed.get(name, name): value for name, value in row if name not in dropped}
            rows[tuple(sorted({**kept, **filled}.items()))] += count
        self._is_stale = self._is_stale or any(change["change"] == "rewritten" for change in changes)
        self._columns = {column["name"] for column in layout["columns"]}
        self._rekey(tuple(sorted(column["name"] for column in layout["columns"] if column["key"])), rows)


def _row(text: str) -> Row:
    return tuple(sorted((name, _text(value)) for name, value in json.loads(text).items()))


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "t" if value else "f"
    return None if value is None else str(value)


def rows_of(pg: Session, table: str) -> Counter[Row]:
    """All rows of a table of the source, or of a query in parentheses with an alias: names and PostgreSQL's texts."""
    with pg.cursor() as cursor:
        cursor.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(sql.SQL(table)))
        columns = [(column.name, "" if column.type_code == _BOOLEAN else "::text") for column in cursor.description]
        names = [name for name, _ in columns]
        texts = sql.SQL(", ").join(sql.SQL("{}" + cast).format(sql.Identifier(name)) for name, cast in columns)
        cursor.execute(sql.SQL("SELECT {} FROM {}").format(texts, sql.SQL(table)))
        return Counter(tuple(sorted(zip(names, map(_text, row), strict=True))) for row in cursor)


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
            elif row["_change_type"] != "schema":
                after = json.loads(row["after"])
                table[after["id"]] = after["v"]
    return tables
