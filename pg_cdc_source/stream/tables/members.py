"""Which tables belong to a stream, and which have joined or left it since an offset was written.

::

    member of the offset      in the publication now
    ────────────────────      ──────────────────────
    yes                       yes, by the same entry      kept: no change of it is missing
    yes                       yes, by another entry       joined: it was out for a while, so changes are missing
    yes                       yes, with more rows        joined: a partition that had rows was attached to it
    yes                       yes, and a name of two      joined: where no row says a new name, rows would be mixed up
    yes                       no                          left: dropped, or taken out
    no                        yes                         joined: it is new, or another table under an old name

A table is told by its oid: a table that was dropped and created again under its name is one that left and one that
joined.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Lsn, Member, StreamOffset
from pg_cdc_source.options.names import listed, quoted
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.attached import LONGEST_READ_SECONDS, find_filled_partition
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.publication import Entry, Publication
from pg_cdc_source.postgres.server_errors import translated


@dataclass(frozen=True, slots=True)
class Joined:
    """A table that the stream would read now. ``why`` says by what its changes are missing; empty if it is new.

    ``is_lasting``: to look again finds the same.
    """

    member: Member
    why: str
    is_lasting: bool = True


@dataclass(frozen=True, slots=True)
class Difference:
    """What became of a stream's tables. ``kept`` have their present names and entries."""

    kept: tuple[Member, ...]
    joined: tuple[Joined, ...]
    left: tuple[Member, ...]


def members_of(published: Publication, relations: Collection[Relation], since: Lsn) -> tuple[Member, ...]:
    """Members that are published as ``published`` says, in the order of ``relations``."""
    tables = {table.relation.oid: table for table in published.tables}
    return tuple(
        Member(relation.oid, str(relation), since, publication.entry_of(tables[relation.oid])) for relation in relations
    )


def members_at(offset: StreamOffset, now: Sequence[Member], session: Session) -> tuple[Member, ...]:
    """The members at an offset. Those of release 0.1.0 have oids and entries in the publication's mark, if any."""
    if offset.members is not None:
        return offset.members
    _, entries = publication.split_mark(offset.publication)
    if not entries:
        return tuple(replace(member, since=offset.origin) for member in now)
    names = {member.oid: member.name for member in now} | _read_names(session, entries)
    return tuple(
        Member(oid, names.get(oid, f"the table with oid {oid}"), offset.origin, entry) for oid, entry in entries.items()
    )


def compare(
    then: Sequence[Member],
    mark: str,
    now: Sequence[Member],
    mark_now: str,
    publication_name: str,
    *,
    says_names: bool = False,
) -> Difference:
    """What became of the tables ``then``. Both marks are those of the whole publication.

    ``says_names``: the stream says by itself when a table is renamed.
    """
    mark, _ = publication.split_mark(mark)
    changed = publication.find_change(mark, mark_now) if mark else ""
    before = {member.oid: member for member in then}
    names = {member.name: member.oid for member in then}
    names_now, oids_now = {member.name: member.oid for member in now}, {member.oid for member in now}
    kept, joined = [], []
    for member in now:
        known = before.get(member.oid)
        if known is None:
            # One that was renamed is another table still.
            is_anew = member.name in names and not (says_names and names[member.name] in oids_now)
            anew = f"{member.name} was dropped and created again" if is_anew else ""
            joined.append(Joined(member, anew))
        elif why := changed or publication.find_table_change(known.entry, member.entry, member.name):
            joined.append(Joined(member, f"publication {quoted(publication_name)} {why}"))
        elif not says_names and _took_over(known, member, names, names_now):
            joined.append(Joined(member, f"{known.name} was renamed to {member.name}, and one is another table's name"))
        else:
            entry = publication.renewed(known.entry, member.entry)
            kept.append(replace(member, since=known.since, entry=entry))
    return Difference(tuple(kept), tuple(joined), tuple(member for member in then if member.oid not in oids_now))


_HAD_ROWS = {
    "filled": "and had rows",
    "locked": "and may have had rows: somebody has locked it",
    "long": "and may have had rows: it takes too long to find out",
}


def with_filled_partitions(
    session: Session, difference: Difference, then: Sequence[Member], known: Mapping[tuple[int, Entry], str]
) -> Difference:
    """Take for joined also those tables to which a partition was attached that had rows: the stream lacks these.

    ``known`` has why tables joined when that was found before, by their oids and present entries: it may take long to
    find out.
    """
    entries = {member.oid: member.entry for member in then}
    filled = []
    until = time.monotonic() + LONGEST_READ_SECONDS
    for member in difference.kept:
        earlier = publication.attached_before(entries[member.oid], member.entry)
        if earlier is None:
            continue
        if why := known.get((member.oid, Entry.parse(member.entry))):
            filled.append(Joined(member, why))
        elif found := find_filled_partition(session, member.oid, earlier, until - time.monotonic()):
            had = _HAD_ROWS[found.how]
            why = f"{found.partition} was attached to {member.name}, {had}"
            filled.append(Joined(member, why, found.how != "locked"))
    oids = {joined.member.oid for joined in filled}
    kept = tuple(member for member in difference.kept if member.oid not in oids)
    return replace(difference, kept=kept, joined=(*difference.joined, *filled))


def _took_over(known: Member, member: Member, names: Mapping[str, int], names_now: Mapping[str, int]) -> bool:
    """Whether a table's new name was that of another one, or its old name is: then their rows would be mixed up."""
    return {names.get(member.name, member.oid), names_now.get(known.name, member.oid)} != {member.oid}


def find_renamed(then: Sequence[Member], now: Sequence[Member]) -> list[tuple[str, str]]:
    """The tables that have another name now: that of ``then``, and the present one."""
    names = {member.oid: member.name for member in now}
    return [(m.name, names[m.oid]) for m in then if names.get(m.oid, m.name) != m.name]


_READ_NAMES = """
SELECT c.oid::bigint, n.nspname, c.relname, c.relkind
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%s::oid[])
"""


def _read_names(session: Session, oids: Collection[int]) -> dict[int, str]:
    with translated("looking for the stream's tables"), session.cursor() as cursor:
        cursor.execute(_READ_NAMES, (list(oids),))
        return {row[0]: str(Relation(*row)) for row in cursor}


def find_dropped(session: Session, oids: Collection[int]) -> set[int]:
    """Those of the tables that do not exist any more."""
    return set(oids) - _read_names(session, oids).keys()


def describe_left(session: Session, left: Sequence[Member], publication_name: str) -> str:
    """Say of tables that have left a stream what became of them."""
    there = _read_names(session, [member.oid for member in left])

    def became(member: Member) -> str:
        if member.oid not in there:
            return f"{member.name}, which was dropped"
        now = there[member.oid]
        return member.name if now == member.name else f"{member.name}, which is called {now} now"

    gone = map(became, left)
    return f"publication {quoted(publication_name)} has lost {listed(gone, '; ')}"
