"""The tables of a stream's publication, as the catalog has them now: which may be followed, and how."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import AccessError, SchemaChangedError, ServerSetupError
from pg_cdc_source.offsets import Horizon, Member
from pg_cdc_source.options.names import TablePattern, quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.horizon import read_horizon
from pg_cdc_source.postgres.publication import Publication
from pg_cdc_source.stream.tables.leaving import Refused
from pg_cdc_source.stream.tables.refused_tables import find_refused, require_complete
from pg_cdc_source.stream.tables.source_session import SourceSession
from pg_cdc_source.stream.tables.stream_plan import PlannedTable, StreamPlan, plan_stream, plan_tables
from pg_cdc_source.stream.tables.table_scans import TableScans

log = logging.getLogger(__name__)


class PublishedTables:
    """Reads a stream's publication. ``names`` are those of its tables at the last reading by oid, wanted or not."""

    def __init__(self, options: StreamOptions, schema: pa.Schema, source: SourceSession) -> None:
        self.names: dict[int, str] = {}
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
        # This is for tables that the publication does not have: they may be new. Columns are read behind another
        # horizon, because reading the publication may wait for DDL, and rows from before that are history.
        before = read_horizon(session)
        if create:
            published = publication.ensure_publication(session, options)
        else:
            published = publication.require_publication(session, options.publications)
        plan, mark = self.plan_of(session, known, published, read_horizon(session))
        return replace(plan, horizon=before), mark

    def plan_of(
        self, session: Session, known: Sequence[Member] | None, published: Publication, horizon: Horizon
    ) -> tuple[StreamPlan, str]:
        """Return the plan for all tables of a publication that was read, and its mark."""
        may_lack = functools.partial(self.may_lack, known, published)
        if known == ():
            # Where a stream begins, somebody is there to mend it.
            require_complete(session, self._options, published)
            refused: Collection[int] = ()
        else:
            refused = self.find_refused(session, published)
        plan = plan_stream(session, self._options, published, horizon, may_lack, refused, self._scans)
        if plan.schema != self._schema:
            raise SchemaChangedError(
                f"{plan.planned[0].name} has other columns than when the DataFrame was loaded",
                remedy="load the DataFrame again",
            )
        relations = [table.relation for table in published.tables if table.relation.oid not in refused]
        self.names = {relation.oid: str(relation) for relation in relations}
        self._scans.keep(self.names.keys())
        return plan, publication.mark_of(published, session.server_version)

    def find_refused(self, session: Session, published: Publication) -> Mapping[int, Refused]:
        """The tables that cannot be read rightly, by their oids; new ones are said in the log."""
        refused = find_refused(session, self._options, published)
        for oid, refusal in refused.items():
            if oid not in self.refused:
                log.warning("%s; the stream goes on without it. Remedy: %s", refusal.why, refusal.remedy)
        self.refused = refused
        return refused

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

    def as_they_are(self, tables: Sequence[PlannedTable], horizon: Horizon) -> tuple[PlannedTable, ...]:
        """Return tables as the catalog has them now, by the names that they have in the stream.

        Those that are not published any more, or cannot be read rightly, stay as they are: a look will find that.
        """
        oids = {planned.oid for planned in tables} - self.refused.keys()

        def read(session: Session) -> tuple[PlannedTable, ...]:
            published = publication.read_publication(session, self._options.publications)
            relations = [t.relation for t in published.tables if t.relation.oid in oids] if published else []
            if published is None or not relations:
                return ()
            return plan_tables(session, self._options, published, relations, horizon, self._scans)

        try:
            now = {planned.oid: planned for planned in self._source.ask(read)}
        except (AccessError, ServerSetupError):
            return tuple(tables)
        return tuple(now.get(p.oid, p).named(p.name, p.member.since) for p in tables)
