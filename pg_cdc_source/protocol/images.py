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


@dataclass(frozen=True, slots=True)
class Image:
    """Where each row takes one column's value from. ``unchanged``: it did not travel; None where all did."""

    values: Field
    unchanged: Flags | None


@dataclass(frozen=True, slots=True)
class RowsOfMessages:
    """The rows that messages of one relation make, in order: one value in each array for each row."""

    rows: Rows
    source: Ints  # the place of its message in ``rows``
    kind: Ints  # its place in CHANGE_TYPES
    is_first_half: Flags  # it is a delete, and its insert is the next row
    is_delete: Flags
    has_old: Flags  # its message has an old image, which belongs to this row
    old: Ints  # the place of its message's old image among the old ones; of any where it has none
    image_of: Ints  # the place of the image that it is, among all new ones followed by all old ones

    @classmethod
    def of(cls, rows: Rows, relation: RelationMessage, key: Sequence[str]) -> RowsOfMessages:
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
        has_old = rows.has_old[source] & ~is_second_half
        old = np.maximum(_ranks(rows.has_old), 0)[source]
        image_of = np.where(is_delete, np.count_nonzero(rows.has_new) + old, _ranks(rows.has_new)[source])
        return cls(rows, source, kind, is_first_half, is_delete, has_old, old, image_of)

    def __len__(self) -> int:
        return len(self.source)

    def image(self, column: int) -> Image:
        """Return where each row's value of one of the relation's columns lies."""
        rows, image_of = self.rows, self.image_of
        both = [images for images in (rows.new, rows.old) if images is not None]
        if rows.old is None:
            # Inserts, and updates that left the key alone.
            return Image(both[0].fields[column], both[0].unchanged[column])
        fields = [images.fields[column] for images in both]
        unchanged = _joined(fields, [images.unchanged[column] for images in both], otherwise=False)
        if unchanged is not None:
            # A value that did not travel may stand in the old row; its NULLs may be what was not sent.
            field = fields[-1]
            stands = rows.has_old[self.source] & (True if field.valid is None else field.valid[self.old])
            from_old = unchanged[image_of] & stands
            image_of = np.where(from_old, len(unchanged) - len(field.start) + self.old, image_of)
            unchanged = unchanged[image_of]
        start = np.concatenate([field.start for field in fields])[image_of]
        length = np.concatenate([field.length for field in fields])[image_of]
        valid = _joined(fields, [field.valid for field in fields], otherwise=True)
        values = Field(rows.buffer, start, length, None if valid is None else valid[image_of])
        return Image(values, unchanged if unchanged is not None and unchanged.any() else None)

    def old_image(self, column: int) -> Field | None:
        """Return where each row's old value of one of the relation's columns lies; None where no row has an old one."""
        if self.rows.old is None:
            return None
        field = self.rows.old.fields[column]
        valid = self.has_old if field.valid is None else self.has_old & field.valid[self.old]
        return Field(field.buffer, field.start[self.old], np.where(valid, field.length[self.old], 0), valid)


def _joined(fields: Sequence[Field], flags: Sequence[Flags | None], *, otherwise: bool) -> Flags | None:
    """Join flags of images, those of ``fields``; None where all are ``otherwise``."""
    if all(some is None for some in flags):
        return None
    pairs = zip(fields, flags, strict=True)
    return np.concatenate([np.full(len(field.start), otherwise) if some is None else some for field, some in pairs])


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
