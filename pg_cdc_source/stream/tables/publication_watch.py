"""What of a publication is not as a stream follows it, found by looking at the catalog every now and then."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import AccessError, OptionError, SchemaChangedError, ServerSetupError
from pg_cdc_source.offsets import Member
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.publication import Entry, Publication
from pg_cdc_source.stream.tables.members import Difference, compare, members_of, with_filled_partitions
from pg_cdc_source.stream.tables.published_tables import PublishedTables
from pg_cdc_source.stream.tables.stream_plan import StreamPlan


@dataclass(frozen=True, slots=True)
class Found:
    """The publication's mark, and the tables that are not followed as they are published, by oid and entry.

    Each with why, as far as another look need not ask again.
    """

    mark: str
    joined: Mapping[tuple[int, Entry], str]

    @classmethod
    def of(cls, mark: str, difference: Difference) -> Found:
        found = ((joined.member, joined.why if joined.is_lasting else "") for joined in difference.joined)
        return cls(mark, {(member.oid, Entry.parse(member.entry)): why for member, why in found})


NOTHING_FOUND = Found("", {})
# A partition may be created in one transaction, and published in the next one.
_UNPUBLISHED_SECONDS = 10.0


class PublicationWatch:
    """Compares a publication with what a stream follows."""

    def __init__(self, options: StreamOptions, published: PublishedTables) -> None:
        self._options = options
        self._published = published
        self._seen: object = None  # of the publication, when nothing was found
        # By oid, of tables that were looked at and have nothing new. The look is later than the offset's, which tells
        # better what is new since.
        self._entries: dict[int, str] = {}
        self._unpublished_since: dict[int, float] = {}  # partitions by oid, and when they were found: time.monotonic()

    def compare(
        self,
        session: Session,
        then: Sequence[Member],
        mark: str,
        now: Sequence[Member],
        mark_now: str,
        known: Found = NOTHING_FOUND,
    ) -> Difference:
        """What became of the tables ``then``; both marks are the publication's. ``known`` was found a while ago."""
        options = self._options
        says_names = options.on_schema_change == "emit"
        found = compare(then, mark, now, mark_now, options.publication, says_names=says_names)
        found = with_filled_partitions(session, found, [self._as_last_seen(member) for member in then], known.joined)
        kept, entries = {member.oid for member in found.kept}, {member.oid: member.entry for member in now}
        self._entries = {oid: entry for oid, entry in entries.items() if oid in kept}
        return found

    def look(self, session: Session, plan: StreamPlan, mark: str, known: Found) -> tuple[Found, Difference | None]:
        """What is not as it is followed; None where all is as it was when nothing was found.

        ``known`` was found by the last look. Raises SchemaChangedError where the publication is gone.
        """
        options = self._options
        published = publication.read_publication(session, options.publications)
        if published is None:
            raise SchemaChangedError(
                f"publication {quoted(options.publication)} was dropped, so changes may be missing",
                remedy=publication.CREATE_AGAIN,
            )
        refused = self._published.find_refused(session, published)
        self._require_sent(session, published, plan)
        followed = [planned.member for planned in plan.planned]
        seen = published, refused, followed, mark
        mark_now = publication.mark_of(published, session.server_version)
        entries = {t.relation.oid: publication.entry_of(t) for t in published.tables if t.partitions is not None}
        is_due = any(publication.renewed(m.entry, entries[m.oid]) != m.entry for m in followed if m.oid in entries)
        if seen == self._seen and not is_due:
            self._entries = entries
            return Found(mark_now, {}), None
        try:
            may_lack = functools.partial(self._published.may_lack, plan.members, published)
            relations = publication.stream_tables(session, options, published, may_lack, refused)
        except (OptionError, AccessError, ServerSetupError):
            # A table that was dropped is not found by its name. One that was renamed is, at its next change.
            if self._are_found(plan, published):
                raise
            oids = {member.oid for member in followed}
            relations = tuple(table.relation for table in published.tables if table.relation.oid in oids)
        now = members_of(published, relations, plan.horizon.lsn)
        difference = self.compare(session, followed, mark, now, mark_now, known)
        # Those that wait to join again are not compared: they wait also where all is as it was before.
        there = {table.relation.oid for table in published.tables}
        waited = tuple(member for member in plan.gone if member.oid not in there)
        difference = replace(difference, left=(*difference.left, *waited))
        if not difference.joined and not difference.left and not self._unpublished_since:
            self._seen = seen
        return Found.of(mark_now, difference), difference

    def _as_last_seen(self, member: Member) -> Member:
        entry = self._entries.get(member.oid, "")
        return replace(member, entry=entry) if entry and publication.is_same_entry(member.entry, entry) else member

    def forget(self) -> None:
        """Have the next look find anew what there is."""
        self._seen = None

    def _require_sent(self, session: Session, published: Publication, plan: StreamPlan) -> None:
        """Raise where a partition of what is followed sends nothing: the publication looks the same as without it.

        Where rows say what becomes of tables, partitions that cannot send anything are refused instead, with their
        roots.
        """
        if self._options.on_schema_change != "emit":
            followed = {planned.oid for planned in plan.planned}
            tables = (table.relation for table in published.tables)
            publication.require_streamable(session, [table for table in tables if table.oid in followed])
        now, found = time.monotonic(), publication.find_unpublished_parts(session, self._options, published)
        oids = [part.oid for parts in found.values() for part in parts]
        self._unpublished_since = {oid: self._unpublished_since.get(oid, now) for oid in oids}
        for root, parts in found.items():
            if any(now >= self._unpublished_since[part.oid] + _UNPUBLISHED_SECONDS for part in parts):
                raise publication.not_published_error(session, published, root)

    def _are_found(self, plan: StreamPlan, published: Publication) -> bool:
        """Whether all that is followed, and all that is listed, is published by its name."""
        relations = {table.relation.oid: table.relation for table in published.tables}
        listed = {pattern.name for pattern in self._options.tables if pattern.name is not None}
        return listed <= {relation.name for relation in relations.values()} and all(
            planned.oid in relations and str(relations[planned.oid]) == planned.name for planned in plan.planned
        )
