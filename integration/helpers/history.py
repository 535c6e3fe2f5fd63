"""What a database's write-ahead log says happened, told by PostgreSQL's own plugin ``test_decoding``: the oracle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from psycopg2.extensions import connection as Session

Row = dict[str, Any]  # by column; integers and booleans as such, all else as text


@dataclass(frozen=True)
class Table:
    """What a change of a table means depends on. ``identity`` is pg_class.relreplident."""

    name: str
    columns: tuple[str, ...]
    primary_key: tuple[str, ...] = ()
    identity: str = "d"
    identity_columns: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that tell a row from others; none under FULL without a primary key."""
        return self.primary_key or self.identity_columns

    def key_of(self, row: Row) -> Row | None:
        return {name: row[name] for name in self.key} if self.key else None


class Change(NamedTuple):
    """A row of the stream as it has to come, in the envelope's terms."""

    table: str
    kind: str
    key: Row | None
    after: Row | None
    before: Row | None
    unchanged: tuple[str, ...]


@dataclass
class Transaction:
    """A commit: its LSN lies after ``last_lsn``, that of its last change, and before ``end_lsn``."""

    xid: int
    last_lsn: int
    end_lsn: int = 0
    commit_ts: datetime | None = None
    changes: list[Change] = field(default_factory=list)


def begin(pg: Session, slot: str) -> None:
    """Let a history begin here."""
    with pg.cursor() as cursor:
        cursor.execute("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", (slot,))


def end(pg: Session, slot: str, tables: Iterable[Table], leaves: Mapping[str, str]) -> list[Transaction]:
    """Every transaction since ``begin`` that changed one of ``tables``; ``leaves`` are partitions with their roots."""
    by_name = {table.name: table for table in tables}
    with pg.cursor() as cursor:
        # What its output functions depend on: the texts are to be those that the connector asks for.
        cursor.execute("SET datestyle = 'ISO, YMD'; SET timezone = 'UTC'; SET bytea_output = 'hex'")
        cursor.execute(
            "SELECT lsn - '0/0', xid::text::bigint, data FROM pg_logical_slot_get_changes(%s, NULL, NULL,"
            " 'include-timestamp', 'on', 'skip-empty-xacts', 'on')",
            (slot,),
        )
        transactions = list(_transactions(cursor, by_name, leaves))
        cursor.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    return [transaction for transaction in transactions if transaction.changes]


def _transactions(
    lines: Iterable[tuple[Any, int, str]], tables: Mapping[str, Table], leaves: Mapping[str, str]
) -> Iterator[Transaction]:
    transaction: Transaction | None = None
    for lsn, xid, line in lines:
        if line.startswith("BEGIN "):
            assert transaction is None
            transaction = Transaction(xid, int(lsn))
        elif line.startswith("COMMIT "):
            assert transaction is not None
            assert transaction.xid == xid
            transaction.end_lsn = int(lsn)
            transaction.commit_ts = moment(line.partition("(at ")[2].removesuffix(")"))
            yield transaction
            transaction = None
        elif line.startswith("table "):
            assert transaction is not None
            transaction.last_lsn = int(lsn)
            transaction.changes += _changes(line, tables, leaves)
        else:
            assert line.startswith("message: "), line
    assert transaction is None


def moment(text: str) -> datetime:
    """Read a ``timestamptz`` as PostgreSQL prints it in UTC."""
    seconds, _, fraction = text.removesuffix("+00").partition(".")
    microsecond = int(fraction.ljust(6, "0"))
    return datetime.fromisoformat(seconds).replace(microsecond=microsecond, tzinfo=timezone.utc)


# contrib/test_decoding/test_decoding.c: pg_decode_change, tuple_to_stringinfo, print_literal.
_NAME = r'(?:"(?:[^"]|"")*"|[^". \[,:]+)'
_LINE = re.compile(rf"table ({_NAME}\.{_NAME}(?:, {_NAME}\.{_NAME})*): (INSERT|UPDATE|DELETE|TRUNCATE):(.*)", re.DOTALL)
_TABLE = re.compile(rf"{_NAME}\.{_NAME}")
_COLUMN = re.compile(rf" ({_NAME})\[([^:]+)\]:(null|unchanged-toast-datum|'(?:[^']|'')*'|[^' ]+)")
_INTEGERS = frozenset(("bigint", "integer", "smallint", "oid"))
_UNCHANGED = object()


def _changes(line: str, tables: Mapping[str, Table], leaves: Mapping[str, str]) -> list[Change]:
    match = _LINE.fullmatch(line)
    assert match, line
    names, kind, rest = match.groups()
    if kind == "TRUNCATE":
        # Of a partitioned table, its root is listed as well.
        return [Change(name, "truncate", None, None, None, ()) for name in _TABLE.findall(names) if name in tables]
    table = tables.get(leaves.get(names, names))
    if table is None:
        return []
    if rest.startswith(" old-key:"):
        old: Row | None
        old_text, found, new_text = rest.removeprefix(" old-key:").partition(" new-tuple:")
        assert found, line
        old, new = _tuple(old_text), _tuple(new_text)
    elif kind == "DELETE":
        assert rest != " (no-tuple-data)", line
        old, new = _tuple(rest), {}
    else:
        old, new = None, _tuple(rest)
    return list(_meaning(table, kind, old, new))


def _tuple(text: str) -> Row:
    row, at = {}, 0
    while at < len(text):
        match = _COLUMN.match(text, at)
        assert match, text[at:]
        name, type_name, value = match.groups()
        row[name.strip('"').replace('""', '"')] = _value(type_name, value)
        at = match.end()
    return row


def _value(type_name: str, text: str) -> Any:
    if text == "null":
        return None
    if text == "unchanged-toast-datum":
        return _UNCHANGED
    if text.startswith("'"):
        return text[1:-1].replace("''", "'")
    if type_name == "boolean":
        return {"true": True, "false": False}[text]
    return int(text) if type_name in _INTEGERS else text


def _meaning(table: Table, kind: str, old: Row | None, new: Row) -> Iterator[Change]:
    full = table.identity == "f"
    before: Row | None = None
    if old is not None:
        # Of old rows, NULLs are not printed, and of one that is all NULL nothing; a key has none.
        before = {name: old.get(name) for name in (table.columns if full else table.identity_columns)}
        assert before.items() >= old.items(), (table.name, old)
    after = {name: value for name, value in new.items() if value is not _UNCHANGED}
    unchanged = tuple(name for name in table.columns if new.get(name) is _UNCHANGED)
    if full and before is not None:
        after.update({name: before[name] for name in unchanged})
        unchanged = ()
    if kind == "INSERT":
        yield Change(table.name, "insert", table.key_of(after), after, None, ())
    elif kind == "DELETE":
        assert before is not None
        yield Change(table.name, "delete", table.key_of(before), None, before, ())
    elif before is not None and table.key and table.key_of(before) != table.key_of(after):
        yield Change(table.name, "delete", table.key_of(before), None, before, ())
        yield Change(table.name, "insert", table.key_of(after), after, None, unchanged)
    else:
        yield Change(table.name, "update", table.key_of(after), after, before, unchanged)


class Contents:
    """The rows of tables, to which changes are applied one by one."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = {table.name: table for table in tables}
        self._keyed: dict[str, dict[str, Row]] = {name: {} for name in self._tables}
        self._counted: dict[str, Counter[str]] = {name: Counter() for name in self._tables}
        self._ended: dict[str, Row] = {}

    def apply(self, change: Change) -> None:
        rows, counts = self._keyed[change.table], self._counted[change.table]
        if change.kind == "truncate":
            rows.clear()
            counts.clear()
        elif change.key is None:
            if change.before is not None:
                assert counts[repr(change.before)] > 0, change
                counts[repr(change.before)] -= 1
            if change.after is not None:
                counts[self._text(change.table, change.after)] += 1
        elif change.kind == "delete":
            self._ended[change.table] = rows.pop(repr(change.key))
        else:
            assert (change.kind == "update") == (repr(change.key) in rows), change
            assert change.after is not None
            known = rows[repr(change.key)] if change.kind == "update" else self._ended.get(change.table, {})
            kept = {name: known[name] for name in change.unchanged}
            rows[repr(change.key)] = {**change.after, **kept}

    def _text(self, table: str, row: Row) -> str:
        return repr({name: row[name] for name in self._tables[table].columns})

    def rows(self) -> Counter[tuple[str, str]]:
        """How often each row is there, as (table, text)."""
        found: Counter[tuple[str, str]] = Counter()
        for name, rows in self._keyed.items():
            found.update((name, self._text(name, row)) for row in rows.values())
        for name, counts in self._counted.items():
            found.update({(name, text): count for text, count in counts.items() if count})
        return found

    def row(self, table: str, row: Row) -> tuple[str, str]:
        """A row as ``rows`` has it."""
        return table, self._text(table, row)
