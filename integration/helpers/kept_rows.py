"""The rows that a lake's table has in each mode, by what triggers have seen of the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from audit import Noted, last_of_each, log, versions

# Of changes, the rows that were there before them, and the LSN of these.
Expected = Callable[[list[Noted], list[dict[str, Any]], int], Iterable[dict[str, Any]]]


def deleted(changes: list[Noted], first: list[dict[str, Any]], lsn: int) -> Iterable[dict[str, Any]]:
    for values, gone in last_of_each(changes, first):
        yield {**values, "_deleted": gone is not None, "_deleted_lsn": gone}


def stated(changes: list[Noted], first: list[dict[str, Any]], lsn: int) -> Iterable[dict[str, Any]]:
    for version in versions(changes, first, lsn):
        yield {**version.values, "_valid_from": version.begin, "_valid_to": version.end}


def logged(
    changes: list[Noted], first: list[dict[str, Any]], lsn: int, identity: Iterable[str] = ("id",)
) -> Iterable[dict[str, Any]]:
    for values in first:
        yield {**values, "_change_type": "snapshot", "_commit_lsn": lsn}
    for commit, kind, new in log(changes, ("id", "n", "v"), identity):
        yield {**new, "_change_type": kind, "_commit_lsn": commit}


def expect_rows(mode: str, found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Of a log, ``wanted`` is in the order of the stream, and first rows in that of their ``id``."""
    if mode == "history":
        assert all((row["_valid_to_ts"] is None) == (row["_valid_to"] is None) for row in found)
    if mode == "append":
        found.sort(key=lambda row: (row["_commit_lsn"], row["_seq"], row["id"] or 0))
        _require_places(found)
        for row, of_trigger in zip(found, wanted, strict=True):
            for name in row["_unchanged"]:
                assert row[name] is None
                row[name] = of_trigger[name]
    assert sorted(_shown(row, wanted[0]) for row in found) == sorted(_shown(row, wanted[0]) for row in wanted)


def _require_places(found: list[dict[str, Any]]) -> None:
    """Each row of a log says of which change it is."""
    changes = [row for row in found if row["_change_type"] != "snapshot"]
    assert len({(row["_commit_lsn"], row["_seq"]) for row in changes}) == len(changes)
    assert all(row["_xid"] and row["_commit_ts"] for row in changes)


def _shown(row: dict[str, Any], names: Iterable[str]) -> str:
    return json.dumps({name: row[name] for name in sorted(names)}, default=str)
