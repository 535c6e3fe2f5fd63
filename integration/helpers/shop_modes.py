"""What tables of a lake that keep more than present rows say that PostgreSQL had at an LSN."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.lake.shape import Shapes

Row = dict[str, Any]


@dataclass(frozen=True)
class Merged:
    """Rows are the present ones. ``given`` is what mirror() gets for it.

    ``has_past``: the table has rows of other LSNs than its own. ``aside``: tables that cannot be in the lake.
    """

    format: str
    given: Mapping[str, str] = field(default_factory=dict)
    has_past: bool = False
    keeps_columns: bool = False
    aside: frozenset[str] = frozenset(("public.log",))

    @property
    def own(self) -> frozenset[str]:
        """The mirror's own columns."""
        given = {"mode": "merge", "deletes": "hard", **self.given}
        return frozenset(Shapes.of(given["mode"], given["deletes"], self.format).others.columns)

    @property
    def deleted(self) -> str:
        """The column that says of a row whether it is deleted, where deleted rows stay."""
        return "_is_deleted" if self.format == "iceberg" else "_deleted"

    def rows_at(self, found: pa.Table, key: Sequence[str], lsn: int) -> pa.Table:
        """PostgreSQL's rows."""
        return found

    def faults(self, found: pa.Table, key: Sequence[str], lsn: int) -> Iterator[str]:
        """What no table may have, whatever PostgreSQL has; ``lsn`` is that of the table."""
        yield from ()


class Soft(Merged):
    """Deleted rows stay."""

    def rows_at(self, found: pa.Table, key: Sequence[str], lsn: int) -> pa.Table:
        return found.filter(pc.invert(found[self.deleted]))

    def faults(self, found: pa.Table, key: Sequence[str], lsn: int) -> Iterator[str]:
        rows = found.select([*key, self.deleted, "_deleted_lsn"]).to_pylist()
        if any(row[self.deleted] != (row["_deleted_lsn"] is not None) for row in rows):
            yield "a deleted row without an LSN, or a present one with one"
        if any((row["_deleted_lsn"] or 0) > lsn for row in rows):
            yield "a row is deleted behind the table's LSN"
        if key and (twice := [one for one, n in Counter(_key(row, key) for row in rows).items() if n > 1]):
            yield f"{len(twice)} keys are there twice, such as {twice[0]}"


class History(Merged):
    """Every state of a row is one."""

    def rows_at(self, found: pa.Table, key: Sequence[str], lsn: int) -> pa.Table:
        is_begun = pc.less_equal(found["_valid_from"], lsn)
        is_open = pc.fill_null(pc.greater(found["_valid_to"], lsn), True)
        return found.filter(pc.and_(is_begun, is_open))

    def faults(self, found: pa.Table, key: Sequence[str], lsn: int) -> Iterator[str]:
        begins, ends = found["_valid_from"].to_numpy(), found["_valid_to"].fill_null(np.iinfo(np.int64).max).to_numpy()
        if (begins >= ends).any():
            yield f"{(begins >= ends).sum()} states end where they begin, or before"
        if (begins > lsn).any() or found["_valid_to"].drop_null().to_numpy().max(initial=0) > lsn:
            yield "a state begins or ends behind the table's LSN"
        for name in ("_valid_from", "_valid_to"):
            # A snapshot has no time, and a commit has one.
            if found.filter(pc.and_(pc.is_null(found[name]), pc.is_valid(found[f"{name}_ts"]))).num_rows:
                yield f"a time in {name}_ts, and none in {name}"


class Log(Merged):
    """Every change is a row. It is folded in the order of the stream."""

    def rows_at(self, found: pa.Table, key: Sequence[str], lsn: int) -> pa.Table:
        present: dict[tuple[Any, ...], Row] = {}
        gone: Row = {}
        for row in _in_order(found):
            if row["_commit_lsn"] > lsn:
                break
            if row["_change_type"] == "truncate":
                present.clear()
                continue
            place = row["_commit_lsn"], row["_seq"]
            if row["_change_type"] == "delete":
                gone = {"row": present.pop(_key(row, key), {}), "place": place}
                continue
            before = present.get(_key(row, key), {})
            if row["_change_type"] == "insert":
                # Behind the delete of a change of the key.
                is_pair = gone.get("place") == (place[0], place[1] - 1)
                before = gone["row"] if is_pair else {}
            kept = set(row["_unchanged"] or ())
            if kept - row.keys():
                # It keeps the names of its time: a column is called otherwise now.
                kept = {name for name, value in row.items() if value is None}
            present[_key(row, key)] = {**row, **{name: before.get(name) for name in kept}}
        return pa.Table.from_pylist(list(present.values()), found.schema)

    def faults(self, found: pa.Table, key: Sequence[str], lsn: int) -> Iterator[str]:
        changes = found.filter(pc.invert(pc.equal(found["_change_type"], "snapshot")))
        places = Counter(zip(*(changes[name].to_pylist() for name in ("_commit_lsn", "_seq")), strict=True))
        if twice := [place for place, n in places.items() if n > 1]:
            yield f"{len(twice)} changes are there twice, such as {twice[0]}"
        if (pc.max(found["_commit_lsn"]).as_py() or 0) > lsn:
            yield "a change behind the table's LSN"


def mode_of(name: str, format: str) -> Merged:
    """The mode that has a name."""
    if name == "soft":
        return Soft(format, {"deletes": "soft"})
    if name == "history":
        return History(format, {"mode": "history"}, has_past=True, keeps_columns=True)
    if name == "append":
        # A column of this one has the name of one of the mirror's.
        aside = frozenset(('public."Odd Näme ""x"" `y` 50"',))
        return Log(format, {"mode": "append"}, has_past=True, keeps_columns=True, aside=aside)
    assert name == "merge", name
    return Merged(format)


def _in_order(found: pa.Table) -> list[Row]:
    # Rows that come again are behind the TRUNCATE that has their LSN.
    return sorted(
        found.to_pylist(), key=lambda row: (row["_commit_lsn"], row["_seq"], row["_change_type"] != "truncate")
    )


def _key(row: Row, key: Sequence[str]) -> tuple[Any, ...]:
    return tuple(_told(row[name]) for name in key)


def _told(value: Any) -> Any:
    """As PostgreSQL tells rows apart: NaN is itself, and -0.0 is 0.0."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value
