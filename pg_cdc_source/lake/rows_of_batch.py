"""The rows that a batch has of one table, as the stream gives them: what each one says, and which of them count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pg_cdc_source.lake.shape import Shape

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
Rows = list[Mapping[str, Any]]


def place_of(row: Mapping[str, Any]) -> Place:
    """Return where a row stands in the stream."""
    return row["_commit_lsn"], row["_seq"]


def comes_again(truncate: Mapping[str, Any]) -> bool:
    """Whether a ``truncate`` stands before rows that are read again. It is no transaction's."""
    return truncate["_xid"] is None


def taken(truncates: Rows, files: Rows, shape: Shape, *, stands_still: bool) -> tuple[Rows, Rows, Place]:
    """What the lake takes of a batch's truncates and files, and the place behind which it takes changes."""
    again = [row for row in truncates if comes_again(row)]
    if not shape.keeps or stands_still:
        # Where rows stay, a TRUNCATE behind those that have come again is one more event for them.
        void = max(map(place_of, again if again and shape.keeps else truncates), default=BEGINNING)
        files = [row for row in files if place_of(row) > void]
        truncates = [row for row in truncates if place_of(row) >= void] if shape.keeps else truncates[-1:]
        return truncates, files, max([void, *map(place_of, files)])
    if not shape.is_log:
        return truncates, files, BEGINNING
    # Rows came again as of a point that the log was past: changes since are there.
    had = max((_had(row) for row in truncates if row["after"] is not None), default=BEGINNING)
    return [row for row in truncates if comes_again(row) or place_of(row) > had], files, had


def _had(truncate: Mapping[str, Any]) -> Place:
    said = json.loads(truncate["after"])
    return said["lsn"], said["seq"]
