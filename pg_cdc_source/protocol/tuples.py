"""Find the values in messages of rows (Insert, Update, Delete), a column at a time for all messages.

:func:`walk` takes thousands of messages of one relation and finds where each value lies, so that no value costs a
Python step. The format is in the manual under "Logical Replication Message Formats", "TupleData", and in
src/backend/replication/logical/proto.c (logicalrep_write_tuple).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pg_cdc_source.errors import WireError
from pg_cdc_source.protocol.pgoutput import DELETE, INSERT, NAMES, UPDATE
from pg_cdc_source.values import native
from pg_cdc_source.values.decoder import Field
from pg_cdc_source.values.ndarrays import Bytes, Flags, Ints
from pg_cdc_source.values.wire import Messages, WireBuffer

_NEW, _KEY, _OLD = b"NKO"
_NULL, _UNCHANGED, _TEXT = b"nut"


@dataclass(frozen=True, slots=True)
class Tuples:
    """Images of rows of one relation: for each column where its values lie, and which did not travel (TOAST)."""

    fields: list[Field]
    unchanged: list[Flags | None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Inserts, Updates and Deletes of one relation.

    ``new`` has an image for each message in ``has_new``, ``old`` for each in ``has_old`` (boolean, one per message);
    ``old_is_full`` tells a whole old row (replica identity FULL) from a key. ``kind`` is each message's tag.
    """

    buffer: WireBuffer
    kind: Bytes
    has_old: Flags
    has_new: Flags
    old_is_full: Flags
    old: Tuples | None
    new: Tuples | None


def walk(buffer: WireBuffer, starts: Ints, ends: Ints, columns: int) -> Rows:
    """Find the values in Inserts, Updates and Deletes, at least one, of a relation with ``columns`` columns.

    Each message lies in ``buffer`` from its tag at ``starts`` to ``ends``; one of a streamed transaction lies there
    without its xid. Raises WireError for a malformed message.
    """
    octet = buffer.at_any_byte("u1")
    kind = octet[starts]
    # Tag, oid of the relation, tag of the image, number of columns.
    at = starts + 5
    _expect(kind, at + 3 <= ends, "a longer message")
    image = octet[at]
    has_old = image != _NEW
    old_is_full = image == _OLD
    insert, delete = kind == INSERT, kind == DELETE
    _expect(kind, insert | delete | (kind == UPDATE), "Insert, Update or Delete")
    _expect(kind, np.where(has_old, ~insert & (old_is_full | (image == _KEY)), ~delete), "the tag of a row's image")
    old = None
    if has_old.any():
        rows = np.flatnonzero(has_old)
        old, after = _walk_tuples(buffer, kind[rows], at[rows] + 1, ends[rows], columns)
        at[rows] = after
    has_new = ~delete
    new = None
    rows = np.flatnonzero(has_new)
    if len(rows):
        _expect(kind[rows], (at[rows] + 3 <= ends[rows]), "a new row")
        _expect(kind[rows], octet[at[rows]] == _NEW, "a new row")
        new, after = _walk_tuples(buffer, kind[rows], at[rows] + 1, ends[rows], columns)
        at[rows] = after
    _expect(kind, at == ends, "to end after its last column")
    return Rows(buffer, kind, has_old, has_new, old_is_full, old, new)


def _walk_tuples(buffer: WireBuffer, kind: Bytes, at: Ints, ends: Ints, columns: int) -> tuple[Tuples, Ints]:
    walked = native.walk_tuples(buffer.address, at, ends, columns)
    if walked is not None:
        found, after = walked
        values = [Field(buffer, start, length, valid) for start, length, valid, _ in found]
        return Tuples(values, [unchanged for *_, unchanged in found]), after
    octet, length_at = buffer.at_any_byte("u1"), buffer.at_any_byte(">i4")
    count = buffer.at_any_byte(">u2")[at]
    _expect(kind, count == columns, f"{columns} columns, as its Relation message says")
    at = at + 2
    fields: list[Field] = []
    unchanged: list[Flags | None] = []
    for _ in range(columns):
        _expect(kind, at < ends, "a longer message")
        form = octet[at]
        is_text = form == _TEXT
        if is_text.all():
            length = length_at[at + 1].astype(np.int64)
            valid = toast = None
        else:
            is_unchanged = form == _UNCHANGED
            _expect(kind, is_text | is_unchanged | (form == _NULL), "a column's form t, n or u")
            length = np.where(is_text, length_at[at + 1], 0).astype(np.int64)
            valid, toast = is_text, is_unchanged if is_unchanged.any() else None
        _expect(kind, length >= 0, "a length of 0 or more")
        start = at + 5 if valid is None else at + np.where(valid, 5, 1)
        at = start + length
        _expect(kind, at <= ends, "a value that ends with its message")
        fields.append(Field(buffer, start, length, valid))
        unchanged.append(toast)
    return Tuples(fields, unchanged), at


def _expect(kind: Bytes, holds: Flags, expected: str) -> None:
    if not holds.all():
        tag = int(kind[holds.argmin()])
        raise WireError(f"pgoutput: {NAMES.get(tag, repr(bytes([tag])))}: expected {expected}, got other bytes")


def tags_and_oids(messages: Messages, header_bytes: int) -> tuple[Ints, Bytes, Ints]:
    """Return where messages begin behind their headers, their tags, and the oids of their relations."""
    starts = messages.starts + header_bytes
    tags = messages.buffer.at_any_byte("u1")[starts]
    oids = messages.buffer.at_any_byte(">u4")[starts + 1].astype(np.int64)
    return starts, tags, oids
