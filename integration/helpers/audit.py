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


# Behind TRIGGERS: a slot from which the LSNs of all commits are read, and by nothing of the connector's.
JUDGE = (
    "CREATE PUBLICATION judge FOR TABLE audit.log",
    "SELECT pg_create_logical_replication_slot('judge', 'pgoutput')",
)


def lsns_by_judge(pg: Session) -> dict[int, int]:
    """The LSN of each commit, by its transaction's number: the slot's messages Begin have both."""
    return dict(run(pg, """
        SELECT ('x' || encode(substr(data, 18, 4), 'hex'))::bit(32)::bigint,
               ('x' || encode(substr(data, 2, 8), 'hex'))::bit(64)::bigint
        FROM pg_logical_slot_peek_binary_changes(
            'judge', NULL, NULL, 'proto_version', '1', 'publication_names', 'judge'
        )
        WHERE substr(data, 1, 1) = 'B'
    """))  # fmt: skip


def lsns_of(stream: Iterable[Row]) -> dict[int, int]:
    """As ``lsns_by_judge``, of rows of the envelope."""
    lsn: dict[int, int] = {}
    for row in stream:
        if row["_change_type"] == "changes":
            found = read_run(row["data"])
            lsn |= dict(zip(found["_xid"].to_pylist(), found["_commit_lsn"].to_pylist(), strict=True))
        elif row["_change_type"] == "truncate":
            lsn[row["_xid"]] = row["_commit_lsn"]
    return lsn


def noted(pg: Session, lsn: Mapping[int, int]) -> list[Noted]:
    """All changes; ``lsn`` is that of each transaction's commit."""
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


def log(
    changes: Iterable[Noted], names: Iterable[str], identity: Iterable[str] = ("id",)
) -> Iterator[tuple[int, str, Values]]:
    """The rows of a log: the commit, the kind and the values of each. A delete has the columns ``identity``."""
    nothing: Values = dict.fromkeys(names)
    for change in changes:
        old, new, kind = change.old, change.new, change.kind
        if old is not None and (new is None or new["id"] != old["id"]):
            # PostgreSQL sends another key as two changes.
            kind = "insert"
            yield change.lsn, "delete", {**nothing, **{name: old[name] for name in identity}}
        if new is not None or change.kind == "truncate":
            yield change.lsn, kind, new or nothing
