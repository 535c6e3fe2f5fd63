"""Changes of one table that a merge takes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pg_cdc_source.lake.rows_of_batch import END, Place
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.protocol.layout import CHANGE_FIELDS
from pg_cdc_source.values.arrow import from_numpy, to_numpy

# The change columns of a segment's rows. No column of PostgreSQL can have such a name: they are longer than 63 bytes.
CHANGE_NAMES = {field.name: field.name.ljust(64, "_") for field in CHANGE_FIELDS}
KIND, LSN, SEQ, COMMIT_TS, XID, UNCHANGED = CHANGE_NAMES.values()
# What a merge has no use for.
_OF_COMMITS = ("_commit_ts", "_xid")


def change_fields(shape: Shape) -> list[pa.Field]:
    """Return the change columns that a segment's rows have."""
    found = [field for field in CHANGE_FIELDS if not (shape.is_merge and field.name in _OF_COMMITS)]
    return [field.with_name(CHANGE_NAMES[field.name]) for field in found]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that are told apart by one ``key``, in the order of the stream, in the table's last layout.

    ``rows`` has the table's columns, then those of ``CHANGE_NAMES``; in a merge without ``COMMIT_TS`` and ``XID``, and
    without columns that were dropped before them. ``is_emptied``: the table is emptied first.
    """

    key: tuple[str, ...]
    rows: pa.Table
    is_emptied: bool = False

    @property
    def name(self) -> str:
        """Which rows of the batch these are: the same ones have it whenever the batch comes."""
        if not self.rows.num_rows:
            return "no changes"
        ends = (self.rows.slice(place, 1) for place in (0, self.rows.num_rows - 1))
        return "changes " + " to ".join(f"{row[LSN][0].as_py()}.{row[SEQ][0].as_py()}" for row in ends)

    def between(self, begin: Place, end: Place = END) -> Segment:
        """Return it with the rows behind one position and before another."""
        lsn, seq = numbers_of(self.rows[LSN]), numbers_of(self.rows[SEQ])
        wanted = (lsn > begin[0]) | ((lsn == begin[0]) & (seq > begin[1]))
        wanted &= (lsn < end[0]) | ((lsn == end[0]) & (seq < end[1]))
        rows = self.rows if wanted.all() else self.rows.filter(from_numpy(wanted))
        return Segment(self.key, rows, self.is_emptied)


def numbers_of(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return a column without NULLs, such as a segment's LSNs."""
    return np.concatenate([np.zeros(0, np.int64), *(to_numpy(chunk) for chunk in column.chunks)])
