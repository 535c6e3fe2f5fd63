"""What was committed, by table, as a second slot tells it: read with SQL and by nothing of the connector's.

The slot decodes with pgoutput, through a publication of all tables. The messages are those of version 1 of the protocol
("Logical Replication Message Formats" in PostgreSQL's manual). Tables have columns ``id`` and ``v``, among others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from psycopg2.extensions import connection as Session

NAME = "judge"


class Change(NamedTuple):
    """One change as a stream has to tell it: an update of the key is a delete and an insert."""

    lsn: int
    kind: str
    key: int | None
    value: str | None

    def __str__(self) -> str:
        return f"{self.lsn:X} {self.kind} {'' if self.key is None else self.key} {self.value or ''}".rstrip()


class Told(NamedTuple):
    """A change, and the table's oid and its name at that time."""

    oid: int
    table: str
    change: Change


def begin(pg: Session) -> None:
    """Let the slot begin here."""
    with pg.cursor() as cursor:
        cursor.execute(f"CREATE PUBLICATION {NAME} FOR ALL TABLES")
        cursor.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (NAME,))


def end(pg: Session) -> list[Told]:
    """Every change since ``begin``, in the order of commits; the slot is dropped."""
    with pg.cursor() as cursor:
        cursor.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
            " 'publication_names', %s)",
            (NAME, NAME),
        )
        told = list(_changes(bytes(data) for (data,) in cursor))
        cursor.execute("SELECT pg_drop_replication_slot(%s)", (NAME,))
    return told


class _Relation(NamedTuple):
    name: str
    columns: list[str]


def _changes(messages: Iterable[bytes]) -> Iterator[Told]:
    relations: dict[int, _Relation] = {}
    lsn = 0
    for message in messages:
        kind, body = message[:1], message[1:]
        if kind == b"B":
            (lsn,) = struct.unpack_from(">Q", body)
        elif kind == b"R":
            (oid,) = struct.unpack_from(">I", body)
            relations[oid] = _relation(body)
        elif kind == b"T":
            count, _ = struct.unpack_from(">IB", body)
            for oid in struct.unpack_from(f">{count}I", body, 5):
                yield Told(oid, relations[oid].name, Change(lsn, "truncate", None, None))
        elif kind in b"IUD":
            (oid,) = struct.unpack_from(">I", body)
            for change in _meaning(kind, body, relations[oid].columns, lsn):
                yield Told(oid, relations[oid].name, change)
        else:
            # Commit, Origin, Type, Message.
            assert kind in b"COYM", message


def _meaning(kind: bytes, body: bytes, columns: list[str], lsn: int) -> Iterator[Change]:
    images, at = {}, 4
    while at < len(body):
        image = body[at : at + 1]
        images[image], at = _tuple(body, at + 1, columns)
    old = images.get(b"K") or images.get(b"O") or {}
    new = images.get(b"N", {})
    if kind == b"D":
        yield Change(lsn, "delete", int(str(old["id"])), None)
        return
    key, value = int(str(new["id"])), new["v"]
    if kind == b"U" and old and int(str(old["id"])) != key:
        yield Change(lsn, "delete", int(str(old["id"])), None)
        yield Change(lsn, "insert", key, value)
    else:
        yield Change(lsn, "insert" if kind == b"I" else "update", key, value)


def _tuple(body: bytes, at: int, columns: list[str]) -> tuple[dict[str, str | None], int]:
    """The values of a TupleData, and where it ends."""
    (count,) = struct.unpack_from(">H", body, at)
    assert count == len(columns)
    at += 2
    values: dict[str, str | None] = {}
    for name in columns:
        kind, at = body[at : at + 1], at + 1
        if kind == b"t":
            (length,) = struct.unpack_from(">I", body, at)
            values[name] = body[at + 4 : at + 4 + length].decode()
            at += 4 + length
        else:
            assert kind == b"n", kind
            values[name] = None
    return values, at


def _relation(body: bytes) -> _Relation:
    schema, name, rest = body[4:].split(b"\0", 2)
    (count,) = struct.unpack_from(">H", rest, 1)
    columns, rest = [], rest[3:]
    for _ in range(count):
        column, rest = rest[1:].split(b"\0", 1)
        columns.append(column.decode())
        rest = rest[8:]
    return _Relation(f"{schema.decode()}.{name.decode()}", columns)
