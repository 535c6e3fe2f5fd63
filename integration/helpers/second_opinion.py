"""Compare what a stream has given with what a second slot tells (``second_slot``), change by change.

A table's stay in the stream begins at the point at which it joined, and ends where it joins again or leaves. Between,
the stream has exactly the changes that were committed, in the order of their commits::

    joins at L        taken out of the publication      joins again at M
    ──┬───────────────────────┬──────────────────────────────┬────────►
      exactly these changes   nothing that is not there      exactly these changes

- Rows that were asked for come with the changes since; those of them that came before come again, in the new stay.
- The batch in which a table joins again leaves out the table's changes before the point: the rows have them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dying_source import Files
from second_slot import Change, Told

from pg_cdc_source.offsets import Lsn, Member, Position, StreamOffset
from pg_cdc_source.spark.pgcdc import HAS_LIMITS

Row = Mapping[str, Any]


class Gap(NamedTuple):
    """Between these, changes of a table, None for all, may not be sent; a stay that was there goes on without them."""

    begin: int
    end: int
    oid: int | None


_NOWHERE = Position(Lsn(0))
# What the log says where the rows of a table cannot be turned back.
_READ_AGAIN = re.compile(r"rows of (\S+) are read as of \S+, because a snapshot of (\S+) is not there any more")


@dataclass
class Stay:
    """A table in the stream, from ``point`` on. ``is_exact``: its rows were read as of the point by one process."""

    oid: int
    name: str
    point: int
    is_exact: bool
    rows: dict[int, str] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    through: Position = _NOWHERE


class SecondOpinion:
    """What the second slot has told. ``joins`` counts stays of tables, ``compared`` changes that were looked at."""

    def __init__(self, told: Sequence[Told], gaps: Sequence[Gap]) -> None:
        self.joins = 0
        self.compared = 0
        self._gaps = gaps
        self._by_oid: dict[int, list[Change]] = defaultdict(list)
        self._by_lsn: dict[int, list[Told]] = defaultdict(list)
        self._names: dict[int, set[str]] = defaultdict(set)
        for one in told:
            self._names[one.oid].add(one.table)
            self._by_oid[one.oid].append(one.change)
            self._by_lsn[one.change.lsn].append(one)

    def differences(self, files: Files) -> list[str]:
        """Say which changes the batches lack, and which they have and should not."""
        found = []
        last = StreamOffset.from_json(files.offset(files.newest)) if files.newest >= 0 else None
        at_last = {member.oid for member in _members(last)}
        for part in self._stays(files):
            if isinstance(part, str):
                found.append(part)
            else:
                self.joins += 1
                # One that was dropped before its rows were read has none.
                part.is_exact &= bool(part.rows) or part.oid in at_last
                found += [f"{part.name} (oid {part.oid}, joined at {part.point:X}): {d}" for d in self._compare(part)]
        return found

    # --- what the stream has ------------------------------------------------------------------------------------------

    def _stays(self, files: Files) -> Iterator[Stay | str]:
        """Every stay, once it is over, and what is wrong without one."""
        stays: dict[int, Stay] = {}
        before: StreamOffset | None = None
        # Also of the initial rows: the process that made the slot may have died before it wrote an offset.
        said = {(name, Lsn.parse(at) + 1) for name, at in _READ_AGAIN.findall(files.log())}
        for number in range(files.newest + 1):
            if not files.is_committed(number):
                break
            end = StreamOffset.from_json(files.offset(number))
            assert end is not None
            if before is None:
                exact = _is_read_by_one_process(files)
                stays = {
                    member.oid: Stay(
                        member.oid, member.name, end.origin, exact and (member.name, end.origin) not in said
                    )
                    for member in _members(end)
                }
            position = end.position if before is None else before.position
            known = (*_members(before), *_members(end))
            for member in _members(end):
                # Another table may have joined under the name that it had.
                if member.oid in stays:
                    stays[member.oid].name = member.name
            for row in sorted(files.rows(number), key=lambda row: (row["_commit_lsn"], row["_seq"])):
                if row["_change_type"] == "truncate" and row["_commit_lsn"] not in self._by_lsn:
                    joined = next((member for member in _members(end) if member.name == row["_table"]), None)
                    oids = {stay.oid for stay in stays.values() if stay.name == row["_table"]}
                    for oid in oids | ({joined.oid} & stays.keys() if joined else set()):
                        yield _over(stays.pop(oid), position)
                    if joined is not None:
                        # Before Spark 4.2, rows are also read as of a point that was there before the snapshot.
                        point = row["_commit_lsn"] + 2
                        exact = HAS_LIMITS and not files.was_repeated(number) and (joined.name, point) not in said
                        stays[joined.oid] = Stay(joined.oid, joined.name, point, exact)
                elif row["_change_type"] not in ("schema", "message"):
                    wrong = self._take(row, stays, known)
                    if wrong:
                        yield f"batch {number}: {wrong}"
            for oid in stays.keys() - {member.oid for member in _members(end)}:
                yield _over(stays.pop(oid), position)
            before = end
        for stay in stays.values():
            assert before is not None
            yield _over(stay, before.position)

    def _take(self, row: Row, stays: Mapping[int, Stay], known: Sequence[Member]) -> str:
        """Note a row in its table's stay; what is wrong with it."""
        name, change = row["_table"], change_of(row)
        if change.kind == "snapshot":
            # A table that took another's name may have its old one in the offset before.
            of_name = {member.name: member.oid for member in known}
            stay = stays.get(of_name.get(name, 0))
            if stay is None or stay.point != change.lsn + 1:
                return f"{name} has a row as of {change.lsn:X}, where it did not join: {change}"
            assert change.key is not None
            if change.key in stay.rows:
                return f"{name} has a row twice: {change}"
            stay.rows[change.key] = str(change.value)
            return ""
        tellers = [told for told in self._by_lsn[change.lsn] if told.change == change]
        if not tellers:
            return f"too much is {name} {change}: nothing like it was committed there"
        # Several tables may have the same change in one commit. After a rename, changes from before may come under the
        # new name, and where a batch comes again those of after it under the old one.
        named = [told.oid for told in tellers if told.table == name]
        at_the_offsets = {(member.oid, member.name) for member in known}
        named += [t.oid for t in tellers if name in self._names[t.oid] or (t.oid, name) in at_the_offsets]
        if not named:
            return f"{name} {change} is one of {', '.join({told.table for told in tellers})}"
        oid = next((oid for oid in named if oid in stays), None)
        if oid is None:
            return f"too much is {name} {change}: the table is not in the stream"
        stays[oid].changes.append(change)
        return ""

    # --- what it should have ------------------------------------------------------------------------------------------

    def _compare(self, stay: Stay) -> Iterator[str]:
        told = self._by_oid[stay.oid]
        if stay.is_exact and stay.rows != (there := _state(told, stay.point)):
            for key in sorted(stay.rows.keys() | there.keys()):
                if stay.rows.get(key) != there.get(key):
                    yield f"row {key} is {stay.rows.get(key)} as of the point, should be {there.get(key)}"
        ends = [gap.begin for gap in self._gaps if gap.oid in (None, stay.oid) and gap.end >= stay.point]
        sent_until = min(ends, default=1 << 64)
        at = next((i for i, change in enumerate(told) if change.lsn >= stay.point), len(told))
        for change in stay.changes:
            place = next((i for i in range(at, len(told)) if told[i] == change), None)
            if place is None:
                yield f"too much, twice or out of order is {change}"
                continue
            yield from _missing(told[at:place], stay, sent_until)
            at = place + 1
        self.compared += len(stay.changes)
        yield from _missing(told[at:], stay, sent_until)


def _missing(changes: Sequence[Change], stay: Stay, sent_until: int) -> Iterator[str]:
    for change in changes:
        if change.lsn < sent_until and Position(Lsn(change.lsn)) <= stay.through:
            yield f"missing is {change}; the stream is through with {stay.through}"


def _over(stay: Stay, through: Position) -> Stay:
    stay.through = through
    return stay


def _members(offset: StreamOffset | None) -> tuple[Member, ...]:
    return (offset and offset.members) or ()


def _is_read_by_one_process(files: Files) -> bool:
    """Whether one process has begun and ended all batches of the initial snapshot, so that none was turned back."""
    processes: set[str] = set()
    for number in range(files.newest + 1):
        end = StreamOffset.from_json(files.offset(number))
        if end is None or not end.tables or not files.is_committed(number) or end.at is not None:
            break
        processes |= files.processes(number)
    return len(processes) == 1


def change_of(row: Row) -> Change:
    """A row of the stream as the second slot tells it."""
    key, after = ({} if row[name] is None else json.loads(row[name]) for name in ("key", "after"))
    ident = (key or after).get("id")
    kind, lsn = row["_change_type"], row["_commit_lsn"]
    return Change(lsn, kind, ident, after.get("v") if kind != "delete" else None)


def _state(told: Sequence[Change], point: int) -> dict[int, str]:
    """A table's rows before ``point``."""
    rows: dict[int, str] = {}
    for change in told:
        if change.lsn >= point:
            break
        if change.kind == "truncate":
            rows.clear()
        elif change.kind == "delete":
            assert change.key is not None
            del rows[change.key]
        else:
            assert change.key is not None
            rows[change.key] = str(change.value)
    return rows
