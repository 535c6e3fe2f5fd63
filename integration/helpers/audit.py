"""What PostgreSQL's own triggers have seen of a table ``t``: each change in its order, and by which commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from driving import Row, run
from psycopg2.extensions import connection as Session

from pg_cdc_source.protocol.packed import read_run

# Behind CREATE TABLE t. A schema of its own is in no publication of ``public.*``.
TRIGGERS = (
    "CREATE SCHEMA audit",
    "CREATE TABLE audit.log (n bigserial, xid bigint, kind text, old jsonb, new jsonb)",
    """
    CREATE FUNCTION audit.note() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO audit.log (xid, kind, old, new)
        VALUES (pg_current_xact_id()::text::bigint, lower(TG_OP), to_jsonb(OLD), to_jsonb(NEW));
        RETURN NULL;
    END $$
    """,
    "CREATE TRIGGER rows AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION audit.note()",
    "CREATE TRIGGER truncates AFTER TRUNCATE ON t EXECUTE FUNCTION audit.note()",
)
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Noted:
    """A change. ``lsn`` is that of its commit."""

    lsn: int
    kind: str
    old: Values | None
    new: Values | None


def noted(pg: Session, stream: Iterable[Row]) -> list[Noted]:
    """All changes; ``stream`` are the rows of the envelope that have come of them."""
    lsn: dict[int, int] = {}
    for row in stream:
        if row["_change_type"] == "changes":
            found = read_run(row["data"])
            lsn |= dict(zip(found["_xid"].to_pylist(), found["_commit_lsn"].to_pylist(), strict=True))
        elif row["_change_type"] == "truncate":
            lsn[row["_xid"]] = row["_commit_lsn"]
    rows = run(pg, "SELECT xid, kind, old, new FROM audit.log ORDER BY n")
    # Of a transaction that changed nothing in the end, PostgreSQL may send nothing.
    return [Noted(lsn[xid], kind, old, new) for xid, kind, old, new in rows]


@dataclass
class Version:
    """A state of a row, from one commit to another."""

    values: Values
    begin: int
    end: int | None = None


def versions(changes: Iterable[Noted], first: Iterable[Values], lsn: int) -> list[Version]:
    """The states of all rows, of which ``first`` were there at ``lsn``: for each commit one state of a row at most."""
    present = {values["id"]: Version(values, lsn) for values in first}
    found = list(present.values())
    for commit, of_commit in groupby(changes, lambda change: change.lsn):
        after: dict[Any, Values | None] = {}
        for change in of_commit:
            if change.kind == "truncate":
                after = dict.fromkeys([*present, *after])
            if change.old is not None:
                after[change.old["id"]] = None
            if change.new is not None:
                after[change.new["id"]] = change.new
        for key, values in after.items():
            if (was := present.pop(key, None)) is not None:
                was.end = commit
            if values is not None:
                present[key] = Version(values, commit)
                found.append(present[key])
    return found


def last_of_each(changes: Iterable[Noted], first: Iterable[Values]) -> Iterator[tuple[Values, int | None]]:
    """The last values of every row that ever was, and by which commit it was deleted."""
    last: dict[Any, tuple[Values, int | None]] = {values["id"]: (values, None) for values in first}
    for change in changes:
        if change.kind == "truncate":
            last = {key: (values, gone or change.lsn) for key, (values, gone) in last.items()}
        if change.old is not None:
            last[change.old["id"]] = (change.old, change.lsn)
        if change.new is not None:
            last[change.new["id"]] = (change.new, None)
    yield from last.values()


def log(changes: Iterable[Noted], names: Iterable[str]) -> Iterator[tuple[int, str, Values]]:
    """The rows of a log: the commit, the kind and the values of each."""
    nothing: Values = dict.fromkeys(names)
    for change in changes:
        old, new, kind = change.old, change.new, change.kind
        if old is not None and (new is None or new["id"] != old["id"]):
            # PostgreSQL sends another key as two changes.
            kind = "insert"
            yield change.lsn, "delete", {**nothing, "id": old["id"]}
        if new is not None or change.kind == "truncate":
            yield change.lsn, kind, new or nothing
