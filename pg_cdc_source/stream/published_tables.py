"""The tables of a stream's publication, as the catalog has them now: which may be followed, and how.

A table that cannot be read rightly any more ends the stream; with ``onSchemaChange=emit`` it is ``refused``, which is
as if it were not published: it leaves, the others go on, and it joins again once that is mended.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import AccessError, SchemaChangedError, ServerSetupError
from pg_cdc_source.offsets import Lsn, Member
from pg_cdc_source.options.names import TablePattern, quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.lock_waits import read_locked
from pg_cdc_source.postgres.publication import Publication, PublishedTable
from pg_cdc_source.stream.leaving import Refused
from pg_cdc_source.stream.source_session import SourceSession
from pg_cdc_source.stream.stream_plan import PlannedTable, StreamPlan, plan_stream, plan_tables
from pg_cdc_source.stream.table_scans import TableScans

log = logging.getLogger(__name__)


class PublishedTables:
    """Reads a stream's publication. ``oids`` are those of its tables at the last reading, wanted or not."""

    def __init__(self, options: StreamOptions, schema: pa.Schema, source: SourceSession) -> None:
        self.oids: set[int] = set()
        self.refused: Mapping[int, Refused] = {}  # tables that are left out though they are published, by their oids
        self._options = options
        self._schema = schema
        self._source = source
        self._scans = TableScans()
        self._lacking: set[str] = set()  # named in the options, and not there

    def read(self, session: Session, known: Sequence[Member] | None, *, create: bool = False) -> tuple[StreamPlan, str]:
        """Return the plan for all tables that the publication has, and its mark; ``create`` it where it is missing.

        ``known`` is as in :meth:`may_lack`. Raises SchemaChangedError where a DataFrame's columns are others.
        """
        options = self._options
        if create:
            published = publication.ensure_publication(session, options)
        else:
            published = publication.require_publication(session, options.publications)
        lsn = self._source.read_end_of_wal()
        # In this order: who has committed before ``lsn`` and cannot be seen by now has them locked in between.
        return self.plan_of(session, known, published, lsn, read_locked(session))

    def plan_of(
        self,
        session: Session,
        known: Sequence[Member] | None,
        published: Publication,
        lsn: Lsn,
        locked: Collection[int] = (),
    ) -> tuple[StreamPlan, str]:
        """Return the plan for all tables of a publication that was read, and its mark.

        Of tables whose oids are ``locked``, changes before ``lsn`` may be unknown to the session.
        """
        may_lack = functools.partial(self.may_lack, known, published)
        if known == ():
            # Where a stream begins, somebody is there to mend it.
            self._require_complete(published)
            refused: Collection[int] = ()
        else:
            refused = self.find_refused(session, published)
        plan = plan_stream(session, self._options, published, lsn, may_lack, refused, self._scans)
        plan = replace(plan, planned=tuple(p.with_unknown_changes() if p.oid in locked else p for p in plan.planned))
        if plan.schema != self._schema:
            raise SchemaChangedError(
                f"{plan.planned[0].name} has other columns than when the DataFrame was loaded",
                remedy="load the DataFrame again",
            )
        self.oids = {table.relation.oid for table in published.tables}.difference(refused)
        self._scans.keep(self.oids)
        return plan, publication.mark_of(published, session.server_version)

    def find_refused(self, session: Session, published: Publication) -> Mapping[int, Refused]:
        """The tables that cannot be read rightly, by their oids."""
        options = self._options
        if options.on_schema_change != "emit":
            return {}
        wanted = self._wanted(published)
        found = publication.find_lesser_identities(session, published, [table.relation for table in wanted])
        found |= self._find_incomplete(published, wanted)
        refused = {oid: Refused(error.what, error.remedy) for oid, error in found.items()}
        for oid, refusal in refused.items():
            if oid not in self.refused:
                log.warning("%s; the stream goes on without it. Remedy: %s", refusal.why, refusal.remedy)
        self.refused = refused
        return refused

    def _require_complete(self, published: Publication) -> None:
        """Raise ServerSetupError where a kind of change is missing that a table needs.

        Those that ``keyless=insertOnly`` has let in are for a later look: they do not keep the others from beginning.
        """
        inserts_only = {table.relation.oid for table in published.tables if table.inserts_only}
        for oid, error in self._find_incomplete(published, self._wanted(published)).items():
            if oid not in inserts_only:
                raise error

    def _find_incomplete(self, published: Publication, wanted: Sequence[PublishedTable]) -> dict[int, ServerSetupError]:
        """The tables, by oid, of which a kind of change is not sent, though those who follow them need all kinds."""
        name = quoted(published.name)
        found = {}
        for table in wanted:
            lacking = ("updates", "deletes") if table.inserts_only else published.unsent
            if lacking and not self._options.may_lack_changes(str(table.relation)):
                found[table.relation.oid] = ServerSetupError(
                    f"{table.relation}: publication {name} does not send its {' and '.join(lacking)}, so rows that "
                    "follow its changes would not be PostgreSQL's",
                    remedy=f"give it a primary key or REPLICA IDENTITY FULL, and ALTER PUBLICATION {name} ADD TABLE "
                    f"{table.relation}"
                    if table.inserts_only
                    else f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate'); or have "
                    "mirror() keep a log of the table's changes (mode append)",
                )
        return found

    def _wanted(self, published: Publication) -> list[PublishedTable]:
        patterns = self._options.tables
        return [t for t in published.tables if any(p.matches(t.relation.schema, t.relation.name) for p in patterns)]

    def may_lack(self, known: Sequence[Member] | None, published: Publication, pattern: TablePattern) -> bool:
        """Whether a table that the option ``tables`` names may be missing: it leaves, or has left and may come back.

        ``known`` are the stream's tables, none where it begins, None where they are not known. One of them that is
        published under a name which the option does not have may be what is meant.
        """
        options = self._options
        if known is not None:
            there = {table.relation.oid: table.relation for table in published.tables}
            present = [there[member.oid] for member in known if member.oid in there]
            if not known or not all(any(each.matches(r.schema, r.name) for each in options.tables) for r in present):
                return False
            if options.on_schema_change == "fail" and not any(pattern.means(member.name) for member in known):
                return False
        if str(pattern) not in self._lacking:
            self._lacking.add(str(pattern))
            log.warning("publication %s does not have %s: it is not streamed", quoted(options.publication), pattern)
        return True

    def as_they_are(self, tables: Sequence[PlannedTable], lsn: Lsn) -> tuple[PlannedTable, ...]:
        """Return tables as the catalog has them now, by the names that they have in the stream.

        Those that are not published any more, or cannot be read rightly, stay as they are: a look will find that.
        """
        oids = {planned.oid for planned in tables} - self.refused.keys()

        def read(session: Session) -> tuple[PlannedTable, ...]:
            published = publication.read_publication(session, self._options.publications)
            relations = [t.relation for t in published.tables if t.relation.oid in oids] if published else []
            if published is None or not relations:
                return ()
            return plan_tables(session, self._options, published, relations, lsn, self._scans)

        try:
            now = {planned.oid: planned for planned in self._source.ask(read)}
        except (AccessError, ServerSetupError):
            return tuple(tables)
        return tuple(replace(now.get(p.oid, p).named(p.name, p.member.since), lsn=p.lsn) for p in tables)
