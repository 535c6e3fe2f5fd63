"""Find out which rows messages of changes make, and where each row's values lie: old image, new image, or neither.

An Insert or Delete makes one row. So does an Update, unless it changed the row's key: then it makes a delete of the old
key and an insert of the new one::

    message   Insert   Update             Update of the key    Delete
    rows      insert   update             delete   insert      delete
    values    new      new, else old      old      new, else   old
                                                   old

"New, else old": a value that did not travel (TOAST) is taken from the old image where that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.protocol.layout import DELETED, INSERTED, UPDATED
from pg_cdc_source.protocol.pgoutput import DELETE, INSERT, UPDATE, RelationMessage
from pg_cdc_source.protocol.tuples import Rows
from pg_cdc_source.values.arrow import byte_strings, to_numpy
from pg_cdc_source.values.decoder import Field
from pg_cdc_source.values.ndarrays import Flags, Ints
from pg_cdc_source.values.wire import WireBuffer


@dataclass(frozen=True, slots=True)
class Image:
    """Where each row takes one column's value from. ``unchanged``: it did not travel; None where all did."""

    values: Field
    unchanged: Flags | None


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """The rows that messages of one relation make, in order: one value in each array for each row."""

    rows: Rows
    source: Ints  # the place of its message in ``rows``
    kind: Ints  # its place in CHANGE_TYPES
    is_first_half: Flags  # it is a delete, and its insert is the next row
    is_delete: Flags
    has_old: Flags  # its message has an old image, which belongs to this row

    @classmethod
    def of(cls, rows: Rows, relation: RelationMessage, key: Sequence[str]) -> ChangedRows:
        """Take messages of ``relation``, whose rows are told apart by the columns ``key`` under FULL."""
        split = _changed_keys(rows, relation, key)
        n = len(rows.kind)
        source = np.repeat(np.arange(n), 1 + split) if split.any() else np.arange(n)
        is_first_half = np.zeros(len(source), np.bool_)
        is_delete = rows.kind[source] == DELETE
        if split.any():
            is_first_half[np.cumsum(1 + split)[split] - 2] = True
            is_delete |= is_first_half
        is_second_half = split[source] & ~is_delete
        kind = np.where(is_delete, DELETED, np.where(rows.kind[source] == INSERT, INSERTED, UPDATED))
        kind[is_second_half] = INSERTED
        # Of the two rows of an update that changed the key, the old image belongs to the delete.
        return cls(rows, source, kind, is_first_half, is_delete, rows.has_old[source] & ~is_second_half)

    def __len__(self) -> int:
        return len(self.source)

    def image(self, column: int) -> Image:
        """Return where each row's value of one of the relation's columns lies."""
        rows = self.rows
        new = None if rows.new is None else rows.new.fields[column]
        toast = None if rows.new is None else rows.new.unchanged[column]
        if rows.old is None and new is not None:
            # Inserts, and updates that left the key alone.
            return Image(new, toast)
        found = _Gathered(len(self))
        unchanged = np.zeros(len(self), np.bool_)
        if new is not None:
            to = np.flatnonzero(~self.is_delete)
            take = _ranks(rows.has_new)[self.source[to]]
            found.put(to, new, take)
            if toast is not None:
                unchanged[to] = toast[take]
        if rows.old is not None:
            # Deletes, and values that did not travel but stand in the old row; its NULLs may be what was not sent.
            old, old_toast = rows.old.fields[column], rows.old.unchanged[column]
            in_old = np.where(rows.has_old, _ranks(rows.has_old), 0)[self.source]
            sent = rows.has_old[self.source] if old.valid is None else rows.has_old[self.source] & old.valid[in_old]
            to = np.flatnonzero(self.is_delete | (unchanged & sent))
            take = in_old[to]
            found.put(to, old, take)
            unchanged[to] = False if old_toast is None else old_toast[take]
        return Image(found.field(rows.buffer), unchanged if unchanged.any() else None)

    def old_image(self, column: int) -> Field | None:
        """Return where each row's old value of one of the relation's columns lies; None where no row has an old one."""
        if self.rows.old is None:
            return None
        found = _Gathered(len(self))
        to = np.flatnonzero(self.has_old)
        found.put(to, self.rows.old.fields[column], _ranks(self.rows.has_old)[self.source[to]])
        return found.field(self.rows.buffer)


class _Gathered:
    """Places of values, NULL until they are put. They keep the order of the rows, and NULLs may lie anywhere."""

    __slots__ = ("_length", "_start", "_valid")

    def __init__(self, n: int) -> None:
        self._start, self._length, self._valid = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.bool_)

    def put(self, to: Ints, field: Field, take: Ints) -> None:
        self._start[to], self._length[to] = field.start[take], field.length[take]
        self._valid[to] = True if field.valid is None else field.valid[take]

    def field(self, buffer: WireBuffer) -> Field:
        return Field(buffer, self._start, self._length, self._valid)


def _changed_keys(rows: Rows, relation: RelationMessage, key: Sequence[str]) -> Flags:
    """Return which updates changed the row's key: that of the replica identity, or under FULL the primary key.

    That an old key was sent does not tell: it also comes where a value of the key is TOASTed (heapam.c:
    HeapDetermineColumnsInfo), and with every update of a partition that is FULL under a root that is not.
    """
    split = np.zeros(len(rows.kind), np.bool_)
    if rows.old is None or rows.new is None:
        return split
    of_identity = [i for i, column in enumerate(relation.columns) if column.is_key]
    primary = [i for i, column in enumerate(relation.columns) if column.name in key]
    for full, keyed in ((False, of_identity or range(len(relation.columns))), (True, primary)):
        which = np.flatnonzero((rows.kind == UPDATE) & rows.has_old & (rows.old_is_full == full))
        in_old, in_new = _ranks(rows.has_old)[which], _ranks(rows.has_new)[which]
        for i in keyed if len(which) else ():
            old, new = _octets(rows.old.fields[i], in_old), _octets(rows.new.fields[i], in_new)
            differs = pc.not_equal(old, new)
            # What did not travel is NULL here, and has not changed.
            split[which] |= to_numpy(pc.if_else(pc.is_valid(differs), differs, pc.is_valid(differs)))
    return split


def _ranks(flags: Flags) -> Ints:
    """Return for each message the place of its image among those that have one."""
    ranks: Ints = np.cumsum(flags) - 1
    return ranks


def _octets(field: Field, rows: Ints) -> pa.Array:
    valid = None if field.valid is None else field.valid[rows]
    start, length = field.start[rows], field.length[rows]
    return byte_strings(Field(field.buffer, start, length, valid), start, length)
