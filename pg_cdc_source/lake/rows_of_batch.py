"""The rows that a batch has of one table, as the stream gives them: what each one says, and which of them count."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from pg_cdc_source.lake.columns import MirroredLayout, as_wanted, read_layout
from pg_cdc_source.lake.shape import Shape, Shapes
from pg_cdc_source.protocol.packed import CHANGES, read_run

# What ``_change_type`` says of a file that a task has written of rows of a snapshot.
FILE = "file"
# And of such rows that the lake cannot have: ``after`` says why.
REFUSED = "refused"
# And of a range that had no rows when it was read again after a crash: ``after`` says up to which position that is so.
INEXACT = "inexact"
# Of a row in the stream: its ``_commit_lsn`` and ``_seq``.
Place = tuple[int, int]
BEGINNING: Place = (-1, 0)
END: Place = (2**63 - 1, 0)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of ``RUNS_SCHEMA``: a run of changes, a file, or what is said of the table."""

    table: str | None
    kind: str
    place: Place
    commit_ts: datetime | None
    xid: int | None
    rows: int
    layout_text: str | None
    data: bytes | None
    after: str | None

    @classmethod
    def of(cls, row: Mapping[str, Any], shapes: Shapes) -> BatchRow:
        """Read a row with the columns of ``RUNS_SCHEMA``."""
        place = row["_commit_lsn"], row["_seq"]
        rows, layout, data, after = (row[name] for name in ("rows", "layout", "data", "after"))
        if layout is not None:
            layout = as_wanted(row["_table"], layout, shapes[row["_table"]])
        return cls(row["_table"], row["_change_type"], place, row["_commit_ts"], row["_xid"], rows, layout, data, after)

    @property
    def layout(self) -> MirroredLayout:
        """The table's columns, as the row says them."""
        assert self.layout_text is not None
        return read_layout(self.layout_text)

    @property
    def run(self) -> pa.RecordBatch:
        """The changes of a run."""
        assert self.data is not None
        return read_run(self.data)

    @property
    def comes_again(self) -> bool:
        """Whether a ``truncate`` stands before rows that are read again. It is no transaction's."""
        return self.kind == "truncate" and self.xid is None

    @property
    def is_counted(self) -> bool:
        """Whether ``rows`` are rows of the table."""
        return self.kind in (CHANGES, FILE)

    @property
    def schema_changes(self) -> Sequence[Mapping[str, Any]]:
        """What a row ``schema`` says, in the order in which it came to be."""
        found: Sequence[Mapping[str, Any]] = self._said()["changes"] if self.kind == "schema" else ()
        return found

    @property
    def file(self) -> Mapping[str, Any]:
        """What is said of a file, and the layout of its rows."""
        return {**self._said(), "layout": self.layout_text}

    @property
    def unsent(self) -> Sequence[str]:
        """The columns that a file's rows lack, because they were altered before these were read."""
        found: Sequence[str] = self._said().get("unsent", ())
        return found

    @property
    def through(self) -> int:
        """Up to which position rows of the snapshot may be; 0 for what is of its very point."""
        if self.kind == INEXACT:
            return int(self.after or 0)
        return int(self._said()["through"] or 0) if self.kind == FILE else 0

    @property
    def had(self) -> Place:
        """Up to where the stream had sent changes already, when a ``truncate`` announced rows that come again."""
        if self.after is None:
            return BEGINNING
        said = self._said()
        return said["lsn"], said["seq"]

    def _said(self) -> dict[str, Any]:
        assert self.after is not None
        found: dict[str, Any] = json.loads(self.after)
        return found


def taken(
    truncates: list[BatchRow], files: list[BatchRow], shape: Shape, *, stands_still: bool
) -> tuple[list[BatchRow], list[BatchRow], Place]:
    """What the lake takes of a batch's truncates and files, and the place behind which it takes changes."""
    again = [row for row in truncates if row.comes_again]
    if not shape.keeps or stands_still:
        # Where rows stay, a TRUNCATE behind those that have come again is one more event for them.
        void = max((row.place for row in (again if again and shape.keeps else truncates)), default=BEGINNING)
        files = [row for row in files if row.place > void]
        truncates = [row for row in truncates if row.place >= void] if shape.keeps else truncates[-1:]
        return truncates, files, max([void, *(row.place for row in files)])
    if not shape.is_log:
        return truncates, files, BEGINNING
    # Rows came again as of a point that the log was past: changes since are there.
    had = max((row.had for row in truncates), default=BEGINNING)
    return [row for row in truncates if row.comes_again or row.place > had], files, had
