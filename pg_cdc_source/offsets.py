"""Positions in the write-ahead log, and the offsets that a stream's checkpoint keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsInt

from pg_cdc_source.errors import DefiniteError

_LSN_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_LSN_END_EXCLUSIVE = 1 << 64

ALL = (1 << 63) - 1
XIDS = 1 << 32  # transaction ids, as pgoutput sends them


def precedes(xid: int, other: int) -> bool:
    """Whether a transaction is older than another: up to 2 billion before it, because ids wrap around.

    As TransactionIdPrecedes() in PostgreSQL.
    """
    return 0 < (other - xid) % XIDS < XIDS // 2


class Lsn(int):
    """A WAL position: an ``int`` of 64 bits that prints as PostgreSQL prints ``pg_lsn``."""

    __slots__ = ()

    def __new__(cls, position: SupportsInt) -> Lsn:
        value = int(position)
        if not 0 <= value < _LSN_END_EXCLUSIVE:
            raise ValueError(f"{value} is not a WAL position: those are unsigned integers of 64 bits")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read ``16/B374D848``: two hexadecimal numbers of up to eight digits, as ``pg_lsn_in`` takes them."""
        match = _LSN_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an LSN such as '16/B374D848'")
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn('{self}')"


class Position(NamedTuple):
    """How far a stream has read: all commits before ``lsn``, and the changes up to ``seq`` of the commit at ``lsn``.

    ``seq`` is the ``_seq`` of the last of them, and ``ALL`` when the whole commit has been read, or when there is no
    commit at ``lsn``.
    """

    lsn: Lsn
    seq: int = ALL

    @classmethod
    def before(cls, lsn: int) -> Position:
        """Return the position that has everything before ``lsn``."""
        return cls(Lsn(lsn - 1))

    @property
    def is_whole(self) -> bool:
        """Whether it does not lie within a commit."""
        return self.seq == ALL

    @property
    def next_lsn(self) -> Lsn:
        """The least LSN whose commit may have unread changes: reading starts here again, and the slot may move here."""
        return Lsn(self.lsn + 1) if self.seq == ALL else self.lsn

    def __str__(self) -> str:
        return str(self.lsn) if self.seq == ALL else f"{self.lsn}, change at {Lsn(self.seq)}"


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """The slot, and the server it is on, that an offset belongs to."""

    system: str
    timeline: int
    database: str
    slot: str


def end_of_timeline(history: str, timeline: int) -> Lsn | None:
    """Return where a timeline ended, from the history file of a later one; None if it is not an ancestor of that.

    A line has the ancestor's number, the LSN at which the next timeline branched off, and a reason. # begins a comment
    (timeline.c: readTimeLineHistory).
    """
    for line in history.splitlines():
        words = line.split("#", 1)[0].split(None, 2)
        if len(words) > 1 and int(words[0]) == timeline:
            return Lsn.parse(words[1])
    return None


@dataclass(frozen=True, slots=True)
class Member:
    """A table that belongs to a stream.

    Every commit at or after ``since`` is in the stream with all changes of this table. ``entry`` says by which entries
    the publication lists it; see :func:`pg_cdc_source.postgres.publication.entry_of`. ``key`` are the columns that tell
    rows apart under REPLICA IDENTITY FULL, where the stream does not say them.
    """

    oid: int
    name: str
    since: Lsn
    entry: str
    key: tuple[str, ...] = ()

    def to_json(self) -> list[Any]:
        listed: list[Any] = [self.oid, self.name, str(self.since), self.entry]
        return [*listed, list(self.key)] if self.key else listed

    @classmethod
    def from_json(cls, listed: Sequence[Any]) -> Member:
        oid, name, since, entry, *key = listed
        return cls(int(oid), str(name), Lsn.parse(since), str(entry), tuple(map(str, *key)) if key else ())


@dataclass(frozen=True, slots=True)
class Horizon:
    """What a session knows that reads the catalog behind it.

    ``lsn``: the WAL was on disk up to there. ``next_xid`` and those after it, and those ``in_progress``, could not be
    seen then; they have 32 bits, as pgoutput sends them.
    """

    lsn: Lsn
    next_xid: int = 0
    in_progress: frozenset[int] = frozenset()

    def has(self, lsn: Lsn, xid: int) -> bool:
        """Whether the transaction that was committed at ``lsn`` had been seen for sure."""
        return lsn < self.lsn and self.can_see(xid)

    def can_see(self, xid: int) -> bool:
        """Whether a transaction that is known to have been committed could be seen."""
        return precedes(xid, self.next_xid) and xid not in self.in_progress

    def to_json(self) -> dict[str, Any]:
        return {"lsn": str(self.lsn), "xid": self.next_xid, "open": sorted(self.in_progress)}

    @classmethod
    def from_json(cls, horizon: Mapping[str, Any]) -> Horizon:
        return cls(Lsn.parse(horizon["lsn"]), int(horizon["xid"]), frozenset(map(int, horizon["open"])))


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """One offset of a stream.

    ``origin`` is where the stream began: the slot's consistent point. ``tables`` lists the tables of a snapshot in the
    order they are read, and ``done`` says how many of them have been read. ``tables`` is empty once the offset before
    this one had them all. ``at`` is the consistent point of that snapshot, None for ``origin``. ``position`` is how far
    the changes have been read. ``publication`` tells the stream's publication from a later one of the same name; it is
    empty when that is not known. ``members`` are the tables of the stream; None in offsets of release 0.1.0. ``due``
    names tables whose rows were asked for again and have not come yet, ``gaps`` those whose changes may be missing
    until their rows have come. ``layouts`` are those of the batch's rows (``onSchemaChange=emit``); see
    :mod:`pg_cdc_source.protocol.table_layout`. ``seen``: ``members`` were found behind it, and the batch's changes had
    not been read; a table that it has not is new within the batch.
    """

    identity: SlotIdentity
    origin: Lsn
    tables: tuple[str, ...]
    done: int
    position: Position
    publication: str = ""
    members: tuple[Member, ...] | None = None
    at: Lsn | None = None
    due: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    layouts: str = ""
    seen: Horizon | None = None

    @property
    def point(self) -> Lsn:
        """The consistent point of the snapshot that ``tables`` are read from."""
        return self.origin if self.at is None else self.at

    @property
    def due_oids(self) -> frozenset[int]:
        """The oids of the tables that are ``due``: one may have another name by now."""
        return self._oids_of(self.due)

    @property
    def gap_oids(self) -> frozenset[int]:
        """The oids of the tables that have ``gaps``."""
        return self._oids_of(self.gaps)

    def _oids_of(self, names: Sequence[str]) -> frozenset[int]:
        return frozenset(member.oid for member in self.members or () if member.name in names)

    @property
    def is_reading(self) -> bool:
        """Whether the initial snapshot goes on after this offset."""
        return self.done < len(self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return what Spark writes to its log. The order of keys is fixed, because Spark compares texts."""
        offset: dict[str, Any] = {
            "version": _VERSION_WITHOUT_MEMBERS if self.members is None else _VERSION,
            "system": self.identity.system,
            "timeline": self.identity.timeline,
            "database": self.identity.database,
            "slot": self.identity.slot,
            "origin": str(self.origin),
        }
        if self.publication:
            offset["publication"] = self.publication
        if self.members is not None:
            offset["tables"] = [member.to_json() for member in self.members]
        if self.tables:
            offset["snapshot"] = {"tables": ",".join(self.tables), "done": self.done}
            if self.at is not None:
                offset["snapshot"]["at"] = str(self.at)
        if self.due:
            offset["due"] = ",".join(self.due)
        if self.gaps:
            offset["gaps"] = ",".join(self.gaps)
        offset["lsn"] = str(self.position.lsn)
        if self.position.seq != ALL:
            offset["change"] = str(Lsn(self.position.seq))
        if self.layouts:
            offset["layouts"] = self.layouts
        if self.seen is not None:
            offset["seen"] = self.seen.to_json()
        return offset

    @classmethod
    def from_json(cls, offset: Mapping[str, Any]) -> StreamOffset | None:
        """Read an offset; the initial one is None. Raises DefiniteError for what ``to_json`` does not write."""
        if offset.get("version") not in (_VERSION_WITHOUT_MEMBERS, _VERSION):
            raise DefiniteError(
                f"the checkpoint's offset has version {offset.get('version')!r}, this release reads "
                f"{_VERSION_WITHOUT_MEMBERS} and {_VERSION}",
                remedy="continue with the release that wrote the checkpoint, or start with a new checkpoint and slot",
            )
        if offset == INITIAL:
            return None
        if "seq" in offset:
            # Of release 0.1.0, which counted the changes of a commit that a batch could not hold.
            raise DefiniteError(
                f"the checkpoint's last batch ended within the commit at {offset.get('lsn')}, by a number of changes "
                "that this release cannot find again",
                remedy="run the release that wrote the checkpoint until a batch ends with its commit; or start with a "
                "new checkpoint and slot",
            )
        if strange := sorted(offset.keys() - _KEYS):
            raise DefiniteError(
                f"the checkpoint's offset says {', '.join(strange)}, which this release does not know",
                remedy="continue with the release that wrote the checkpoint, or start with a new checkpoint and slot",
            )
        try:
            snapshot = offset.get("snapshot") or {"tables": "", "done": 0}
            found = cls(
                SlotIdentity(
                    str(offset["system"]), int(offset["timeline"]), str(offset["database"]), str(offset["slot"])
                ),
                Lsn.parse(offset["origin"]),
                tuple(split_names(snapshot["tables"])),
                int(snapshot["done"]),
                Position(Lsn.parse(offset["lsn"]), Lsn.parse(offset["change"]) if "change" in offset else ALL),
                str(offset.get("publication", "")),
                tuple(map(Member.from_json, offset["tables"])) if "tables" in offset else None,
                None if snapshot.get("at") is None else Lsn.parse(snapshot["at"]),
                tuple(split_names(offset.get("due", ""))),
                tuple(split_names(offset.get("gaps", ""))),
                str(offset.get("layouts", "")),
                Horizon.from_json(offset["seen"]) if "seen" in offset else None,
            )
            if not (0 <= found.done <= len(found.tables) and 0 <= found.position.seq <= ALL):
                raise ValueError("a number is out of its range")
            return found
        except (KeyError, ValueError, TypeError) as error:
            raise DefiniteError(
                f"the checkpoint's offset is not one that pgcdc wrote ({type(error).__name__}: {error})",
                remedy="use the checkpoint of this query, or start with a new checkpoint and slot",
            ) from None


_KEYS = frozenset((
    *("version", "system", "timeline", "database", "slot", "origin", "publication", "tables", "snapshot", "due"),
    *("gaps", "lsn", "change", "layouts", "seen"),
))  # fmt: skip
_VERSION = 2
_VERSION_WITHOUT_MEMBERS = 1  # of release 0.1.0

# A constant, because Spark asks for it before batch 0 and again when batch 0 is replayed. Whatever is found out by then
# goes into end offsets.
INITIAL: dict[str, Any] = {"version": _VERSION_WITHOUT_MEMBERS, "lsn": "initial"}

_NAME = re.compile(r'(?:"(?:[^"]|"")*"|[^",])+')


def split_names(text: str) -> list[str]:
    """Split a comma-separated list of names at the commas outside quotes; each name keeps its quotes."""
    return _NAME.findall(text)
