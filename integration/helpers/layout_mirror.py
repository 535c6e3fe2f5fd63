"""A copy of one table, made from its rows and its rows ``schema`` alone, by the numbers of its columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Values = dict[int, Any]  # by the columns' numbers


class Mirror:
    """What a sink knows after each row."""

    def __init__(self) -> None:
        self.columns: dict[str, int] = {}
        self.rows: dict[int, Values] = {}
        self.stale: set[int] = set()
        self.changes: list[str] = []

    def apply(self, row: Mapping[str, Any]) -> None:
        kind = row["_change_type"]
        if kind == "schema":
            self._alter(json.loads(row["after"]))
        elif kind == "truncate":
            self.rows.clear()
            self.stale.clear()
        else:
            ident = json.loads(row["key"])["id"]
            self.stale.discard(ident)
            if kind == "delete":
                self.rows.pop(ident, None)
            else:
                after = json.loads(row["after"])
                assert set(after) == set(self.columns), (after, self.columns)
                self.rows[ident] = {self.columns[name]: value for name, value in after.items()}

    def _alter(self, layout: dict[str, Any]) -> None:
        self.columns = {column["name"]: column["attnum"] for column in layout["columns"]}
        for change in layout["changes"]:
            self.changes.append(change["change"])
            if change["change"] == "rewritten":
                self.stale = set(self.rows)
            for values in self.rows.values():
                if change["change"] == "dropped":
                    values.pop(change["attnum"], None)
                elif change["change"] == "added":
                    values[change["attnum"]] = change["fill"]
