"""Marks of a publication, which checkpoints keep, and what happened to a publication between two of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from psycopg2.extensions import connection as Session

from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.stream_options import Publications
from pg_cdc_source.postgres.publication.listing import MOST_NAMED
from pg_cdc_source.postgres.publication.read import Publication, read_publication
from pg_cdc_source.postgres.server_errors import translated


def mark_of(publication: Publication, oids: Collection[int]) -> str:
    """The mark that tells a publication from a later one of the same name, and says what it sends of these tables.

    It is kept in checkpoints: ``16390 iudt 16384:16391 16387:16392+16394rc`` is the oid, a letter for each kind of
    change (insert, update, delete, truncate), and for each table its entries, r for a row filter, c for a column list,
    @ and the transaction of ``PublishedTable.attached``. A table keeps its entry when names change, and gets another
    one with another filter or list (pg_publication_rel).
    """
    kinds = {"i": publication.inserts, "u": publication.updates, "d": publication.deletes, "t": publication.truncates}
    listed = [
        f" {table.relation.oid}:{'+'.join(map(str, table.entries))}"
        + ("r" if table.row_filter is not None else "")
        + ("c" if table.columns is not None else "")
        + (f"@{table.attached}" if table.attached is not None else "")
        for table in publication.tables
        if (table.entries or table.attached is not None) and table.relation.oid in oids
    ]
    return f"{publication.oid} {''.join(letter for letter, sent in kinds.items() if sent)}{''.join(listed)}"


def find_change(mark: str, now: str, names: Mapping[int, str]) -> str:
    """Say what happened to a publication between two marks; empty where it still sends everything that it did.

    ``names`` are those of the stream's tables by oid. A table that only one of the marks has is ignored.
    """
    (oid, sent, *listed), (oid_now, sent_now, *listed_now) = (f"{text} ".split(" ") for text in (mark, now))
    if oid != oid_now:
        return "was dropped and created again"
    kinds = {"i": "inserts", "u": "updates", "d": "deletes", "t": "truncates"}
    lost = [what for letter, what in kinds.items() if letter in sent and letter not in sent_now]
    if lost:
        return f"leaves out {', '.join(lost)} now"
    before = dict(_parsed_entries(listed))
    for table, (entries_now, flags_now, attached_now) in _parsed_entries(listed_now):
        entries, flags, attached = before.get(table, (entries_now, flags_now, attached_now))
        for letter, what in (("r", "row filter"), ("c", "column list")):
            if (letter in flags) != (letter in flags_now):
                return f"has {'a' if letter in flags_now else 'no'} {what} for {names[table]} now"
        if entries.isdisjoint(entries_now):
            otherwise = ", or given another row filter or column list" if flags else ""
            return f"has {names[table]} anew: it was dropped from it and added again{otherwise}"
        # Transaction ids wrap around. An older one remains when the newest partition is detached.
        if attached_now and (not attached or 0 < (attached_now - attached) % 2**32 < 2**31):
            return (
                f"has a partition that was attached to {names[table]} while it has another layout or the publication "
                "was not altered in the same transaction, as PostgreSQL before 15 needs it (ALTER PUBLICATION ... SET "
                "(publish_via_partition_root = true))"
            )
    return ""


def _parsed_entries(listed: Sequence[str]) -> Iterator[tuple[int, tuple[set[str], str, int]]]:
    for text in filter(None, listed):
        table, _, rest = text.partition(":")
        rest, _, attached = rest.partition("@")
        entries = rest.rstrip("rc")
        yield int(table), (set(entries.split("+")), rest[len(entries) :], int(attached or 0))


def find_lost(session: Session, publications: Publications, mark: str, names: Mapping[int, str]) -> str:
    """Say what a publication no longer sends of a stream's tables (names by oid); empty where it sends everything."""
    publication = read_publication(session, publications)
    if publication is None:
        return "was dropped"
    if changed := find_change(mark, mark_of(publication, names), names):
        return changed
    published = {table.relation.oid for table in publication.tables}
    lost = [oid for oid in names if oid not in published]
    if not lost:
        return ""
    with translated(f"reading publication {quoted(publications.name)}"), session.cursor() as cursor:
        cursor.execute("SELECT oid::bigint FROM pg_catalog.pg_class WHERE oid = ANY (%s::oid[])", (lost,))
        there = {oid for (oid,) in cursor}
    gone = [f"{names[oid]}{'' if oid in there else ', which was dropped'}" for oid in sorted(lost)[:MOST_NAMED]]
    return f"has lost {'; '.join(gone)}"
