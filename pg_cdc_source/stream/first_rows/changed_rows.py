"""What was changed of one table between two points: its changes, folded into what turns the later rows back.

Each change comes with the row before and the row after it. Of a key, the first of them says what was there at the
earlier point. Where no key tells rows apart, as many copies of a row are added as were removed, or the reverse::

    changes of one row      insert a    update a → b    update b → c    delete c
    by key                  nothing     a               a               a
    by whole rows           -1 a        +a -1 b         +a -1 c         +a

So memory grows with the rows that were changed, and not with their changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.protocol.layout import BEFORE, StreamedTable

# A name that no column of PostgreSQL can have: it is longer than 63 bytes.
ORDER = "order" * 13

# Of a digest and its count in a dict.
_BYTES_PER_DIGEST = 160
# Rows become lists of Python's for it, which take many times the room.
_ROWS_AT_ONCE = 8192
DIGEST = pa.binary(16)


class AmbiguousKeyError(Exception):
    """The key of the table with this oid does not tell all of its rows apart, whatever was said of it."""

    def __init__(self, oid: int) -> None:
        super().__init__(oid)
        self.oid = oid


class ChangedRows:
    """The changes of one table; none where ``missing`` says why they turn nothing back.

    ``keys`` are columns that have told its rows apart all the time, if any have. :meth:`fold` raises AmbiguousKeyError
    where some values of them do not.
    """

    def __init__(self, table: StreamedTable, keys: Sequence[str]) -> None:
        self.missing: str | None = None
        self._oid = table.oid
        self._columns = pa.schema([pa.field(codec.column.name, codec.arrow_type) for codec in table.codecs])
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._number = 0
        ordered = self._columns.append(pa.field(ORDER, pa.int64())).empty_table()
        self._folded: _ByKey | _ByRow = _ByKey(keys, ordered) if _may_tell(keys, self._columns) else _ByRow(ordered)

    @property
    def whole(self) -> bool:
        """Whether whole rows are left out, and not those of a key."""
        return isinstance(self._folded, _ByRow)

    @property
    def nbytes(self) -> int:
        return self._pending_bytes + self._folded.nbytes

    def add(self, batch: pa.RecordBatch, identity: str) -> None:
        """Add changes that follow the others, with old rows of this replica identity."""
        kinds = pc.unique(batch.column("_change_type")).to_pylist()
        if "truncate" in kinds:
            self.end("it was truncated in between")
        elif identity != "f" and ("update" in kinds or "delete" in kinds):
            self.end("changes in between did not say what rows were before: its replica identity was not FULL")
        elif _lacks_old_rows(batch):
            # They are labelled by the root.
            self.end("changes in between did not say what rows were before: a partition was not FULL, as its root is")
        elif self.missing is None:
            self._pending.append(batch)
            self._pending_bytes += batch.nbytes

    def end(self, missing: str) -> None:
        """Give up: the table is taken as it is."""
        self.missing = missing
        self._pending, self._pending_bytes = [], 0
        self._folded.clear()

    def fold(self) -> None:
        """Take in what was added, and let go what later changes of the same rows have made needless."""
        if not self._pending:
            return
        befores, afters = self._before_and_after()
        self._pending, self._pending_bytes = [], 0
        if not self._folded.take(befores, afters):
            raise AmbiguousKeyError(self._oid)

    def left_out(self) -> pa.RecordBatch:
        """The keys whose rows are left out; where ``whole``, digests of rows, each as often as one is left out."""
        return self._folded.left_out()

    def old_rows(self) -> pa.Table:
        """The rows of the earlier point that are added."""
        return self._folded.olds.select(self._columns.names)

    def _before_and_after(self) -> tuple[pa.Table, pa.Table]:
        """Old and new rows with the order of their changes: an update's old one comes right before its new one."""
        befores, afters = [], []
        names = self._columns.names
        for batch in self._pending:
            order = np.arange(self._number, self._number + 2 * batch.num_rows, 2)
            self._number += 2 * batch.num_rows
            old = batch.column(BEFORE)
            old_arrays = [pc.struct_field(old, [i]) for i in range(len(names))]
            old_rows = pa.table([*old_arrays, pa.array(order)], names=[*names, ORDER])
            befores.append(old_rows.filter(pc.is_valid(old)))
            is_new = pc.is_in(batch.column("_change_type"), pa.array(["insert", "update"]))
            new_arrays = [batch.column(i) for i in range(len(names))]
            afters.append(pa.table([*new_arrays, pa.array(order + 1)], names=[*names, ORDER]).filter(is_new))
        return pa.concat_tables(befores), pa.concat_tables(afters)


def _lacks_old_rows(batch: pa.RecordBatch) -> bool:
    is_update = pc.equal(batch.column("_change_type"), "update")
    return bool(pc.any(pc.and_(is_update, batch.column(BEFORE).is_null())).as_py())


def _may_tell(keys: Sequence[str], columns: pa.Schema) -> bool:
    """Whether rows are found by the keys.

    Arrow joins by no list, a key that is not sent tells nothing, and a floating one stands for several: of numeric
    (numericAs=double), or of the bits of NaN.
    """

    def may(kind: pa.DataType) -> bool:
        return not (pa.types.is_nested(kind) or pa.types.is_floating(kind))

    return bool(keys) and all(key in columns.names and may(columns.field(key).type) for key in keys)


class _ByKey:
    """For each key that was changed, when it was first; ``olds`` are the old rows of then, if there were any."""

    def __init__(self, keys: Sequence[str], empty: pa.Table) -> None:
        self.olds = empty
        self._keys = list(keys)
        self._firsts = empty.select([*self._keys, ORDER])

    @property
    def nbytes(self) -> int:
        return int(self.olds.nbytes + self._firsts.nbytes)

    def take(self, befores: pa.Table, afters: pa.Table) -> bool:
        """Return False where a key is NULL: that stands for each value that its type cannot hold."""
        if any(rows.column(key).null_count for rows in (befores, afters) for key in self._keys):
            return False
        names = [*self._keys, ORDER]
        changes = pa.concat_tables([self._firsts, befores.select(names), afters.select(names)])
        firsts = changes.group_by(self._keys, use_threads=False).aggregate([(ORDER, "min")])
        self._firsts = firsts.select([*self._keys, f"{ORDER}_min"]).rename_columns(names).combine_chunks()
        olds = pa.concat_tables([self.olds, befores])
        are_first = pc.is_in(olds.column(ORDER), self._firsts.column(ORDER).combine_chunks())
        self.olds = olds.filter(are_first)
        return True

    def left_out(self) -> pa.RecordBatch:
        return batch_of(self._firsts.select(self._keys))

    def clear(self) -> None:
        # A slice would keep all of it in memory.
        self.olds, self._firsts = self.olds.schema.empty_table(), self._firsts.schema.empty_table()


class _ByRow:
    """How many copies of a row came to be, less those that are gone; ``olds`` are the ones that are gone."""

    def __init__(self, empty: pa.Table) -> None:
        self.olds = empty
        self._digests: list[bytes] = []  # of ``olds``
        self._surplus: Counter[bytes] = Counter()

    @property
    def nbytes(self) -> int:
        return int(self.olds.nbytes) + _BYTES_PER_DIGEST * (len(self._digests) + len(self._surplus))

    def take(self, befores: pa.Table, afters: pa.Table) -> bool:
        """Return True: whole rows are always told apart."""
        digests = [*self._digests, *digests_of(befores.drop_columns([ORDER]))]
        self._surplus.update(digests_of(afters.drop_columns([ORDER])))
        self._surplus.subtract(digests[len(self._digests) :])
        self._surplus = Counter({digest: count for digest, count in self._surplus.items() if count})
        olds = pa.concat_tables([self.olds, befores])
        missing = -self._surplus
        chosen = []
        for i, digest in enumerate(digests):
            if missing[digest]:
                missing[digest] -= 1
                chosen.append(i)
        self.olds, self._digests = olds.take(pa.array(chosen, pa.int64())), [digests[i] for i in chosen]
        return True

    def left_out(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array((+self._surplus).elements(), DIGEST)], names=["row"])

    def clear(self) -> None:
        self.olds, self._digests = self.olds.schema.empty_table(), []
        self._surplus.clear()


def digests_of(rows: pa.Table) -> Iterator[bytes]:
    """A digest of each row, which is the same for rows that are."""
    for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
        for row in batch.to_pylist():
            yield blake2b(repr(tuple(row.values())).encode(), digest_size=DIGEST.byte_width).digest()


def batch_of(table: pa.Table) -> pa.RecordBatch:
    arrays = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)
