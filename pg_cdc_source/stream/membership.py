"""What a stream follows: its plan, and the tables that wait to join it or are about to leave.

Newer servers pass over a publication that is gone, and a table that has left it only stops to send. So every offset
carries the stream's tables and its publication's mark. Both are compared with the catalog when a stream goes on, and
every few seconds while it runs.

- A table whose changes are complete is followed. ``plan.gone`` has those that are members and not followed: what the
  stream still has of them comes, and nothing after it.
- A table that waits to join is in neither. It joins at a consistent point of its own (``joining``).
- A member leaves only with an event: an error, the rows that it joins again with, a row ``schema`` where
  ``onSchemaChange`` is ``emit``, a word in the log where it is ``ignore``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import pyarrow as pa
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import SchemaChangedError, TransientError
from pg_cdc_source.offsets import Horizon, Lsn, Member, Position, StreamOffset
from pg_cdc_source.options.names import QualifiedName, listed, quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.horizon import read_horizon
from pg_cdc_source.postgres.minor_versions import has_stale_publications
from pg_cdc_source.postgres.snapshots import Held
from pg_cdc_source.stream.layouts.schema_history import FOLLOW, READ_AGAIN
from pg_cdc_source.stream.tables.leaving import Leaving
from pg_cdc_source.stream.tables.looks import Looks
from pg_cdc_source.stream.tables.members import Difference, find_renamed, members_at
from pg_cdc_source.stream.tables.publication_watch import NOTHING_FOUND, Found, PublicationWatch
from pg_cdc_source.stream.tables.published_tables import PublishedTables
from pg_cdc_source.stream.tables.source_session import SourceSession
from pg_cdc_source.stream.tables.stream_plan import PlannedTable, StreamPlan

log = logging.getLogger(__name__)


class Membership:
    """Knows the stream's tables. ``mark`` is the publication's, as offsets carry it."""

    def __init__(self, options: StreamOptions, schema: pa.Schema, source: SourceSession) -> None:
        self.mark = ""
        self.leaving: Leaving | None = None
        self.has_waiting = False  # whether a table waits to join
        self.gaps: dict[str, int] = {}  # tables whose changes may be missing: the oids that they join with
        self.published = PublishedTables(options, schema, source)
        self._options = options
        self._source = source
        self._plan: StreamPlan | None = None
        self._is_compared = False  # with the catalog, in this process
        self._watch = PublicationWatch(options, self.published)
        self._looks = Looks(options, source, self._watch)
        self._found_before = NOTHING_FOUND  # the snapshot for those that join was begun

    @property
    def plan(self) -> StreamPlan:
        """What is followed."""
        assert self._plan is not None
        return self._plan

    # --- where a stream begins or goes on -----------------------------------------------------------------------------

    def begin(self, *, create: bool = False, guessed: bool = False) -> StreamPlan:
        """Follow all tables that the publication has now. With ``create``, it is created where it is missing.

        ``guessed``: the stream may have begun long ago, so tables that are named may have left.
        """
        known = None if guessed else ()
        self._plan, self.mark = self._source.ask(lambda session: self.published.read(session, known, create=create))
        self._is_compared = True
        # All rows come, so nothing is missing.
        self.gaps, self.has_waiting = {}, False
        return self._plan

    def find_new(self, session: Session) -> tuple[PlannedTable, ...]:
        """The tables that ``session`` sees and that are not followed."""
        whole, _ = self.published.read(session, self.plan.members)
        known = _oids(self.plan.members)
        return tuple(planned for planned in whole.planned if planned.oid not in known)

    def resume(self, offset: StreamOffset) -> bool:
        """Go on from an offset. Return whether a table is new, or has another name, since the batch that was repeated.

        Raises SchemaChangedError where changes after the offset are missing and nobody reads anew.
        """
        if self._is_compared:
            return False
        before = self._plan
        # What is seen here need not be looked at again at once.
        self._looks.rest()
        whole, mark, difference = self._source.ask(lambda session: self._compare(session, offset))
        self._looks.found = Found.of(mark, difference)
        self._settle(whole, mark, difference, offset, is_present=True)
        self._is_compared = True
        if before is None:
            return False
        is_new = any(before.find(planned.oid) is None for planned in self.plan.planned)
        return is_new or bool(find_renamed(before.members, self.plan.members))

    def repeat(self, start: StreamOffset | None, end: StreamOffset, *, guessed: bool) -> tuple[Member, ...]:
        """Follow the tables of the batch from ``start`` to ``end``, and return those whose rows it ends with.

        Only a batch has such whose end was given before its start was known (``guessed``), or without a limit: it has
        the tables of that time. Those that the start does not have join at the end, and so do those whose rows are due,
        or that have a gap. Their ``since`` is the end where they join there; those that the stream had before also have
        their changes in the batch. Some may be gone by now.
        """
        if self._plan is not None and not guessed and _oids(self._plan.members) == _oids(end.members or ()):
            return ()
        known = (end if start is None else start).members
        whole, _ = self._source.ask(lambda session: self.published.read(session, known))
        if end.seen is not None:
            # What was new then is new however often the batch is asked for.
            whole = replace(whole, horizon=end.seen)
        self._is_compared = False
        if start is None or end.at is not None or end.members is None:
            members = self._source.ask(lambda session: members_at(end, whole.members, session))
            self._plan, self.mark = whole.following(members), end.publication
            return ()
        then = self._source.ask(lambda session: members_at(start, end.members or (), session))
        difference = self._source.ask(
            lambda session: self._watch.compare(session, then, start.publication, end.members or (), end.publication)
        )
        self._settle(whole, end.publication, difference, start, is_present=False)
        anew = {joined.member.oid for joined in difference.joined} if self.has_waiting else set()
        anew |= {planned.oid for planned in self.plan.with_oids(start.gap_oids - end.gap_oids)}
        if joining := whole.with_oids(anew):
            self._warn_of_stale(joining)
        # Those of an end that knew its start are still due there.
        oids = anew | {planned.oid for planned in self.plan.with_oids(start.due_oids - end.due_oids)}
        point = end.position.next_lsn

        def since(member: Member) -> Member:
            return replace(member, since=point) if member.oid in anew else member

        # By the names that the offset has, as when the batch comes again.
        named = whole.following(tuple(map(since, end.members or ())))
        self.join(named.with_oids(oids), end.publication, tuple(member for member in named.gone if member.oid in oids))
        if self.leaving is not None:
            self.leaving = replace(self.leaving, through=end.position)
            if self._options.on_schema_change == "fail":
                # The end does not have them any more: this is the last time that they are missed.
                self.leave()
        return tuple(member for member in map(since, end.members) if member.oid in oids)

    def _warn_of_stale(self, joining: Sequence[PlannedTable]) -> None:
        if self._source.ask(has_stale_publications):
            log.warning(
                "%s joins the stream at the end of a batch. This version of PostgreSQL may not send what transactions "
                "that are open now do to it later: %s",
                listed(planned.name for planned in joining),
                "update the server, or ask for its rows by pg-cdc resnapshot once they have ended",
            )

    def guess(self, since: Lsn) -> tuple[tuple[Member, ...], str, Horizon]:
        """All tables that the stream would have now, the publication's mark, and what both were found behind.

        They are for an end without a start.
        """
        whole, mark = self._source.ask(lambda session: self.published.read(session, self.plan.members))
        known = {planned.oid: planned.member for planned in self.plan.planned}
        members = tuple(known.get(member.oid, replace(member, since=since)) for member in whole.members)
        return members, mark, whole.horizon

    def _compare(self, session: Session, offset: StreamOffset) -> tuple[StreamPlan, str, Difference]:
        whole, mark = self.published.read(session, offset.members)
        then = members_at(offset, whole.members, session)
        return whole, mark, self._watch.compare(session, then, offset.publication, whole.members, mark)

    def _settle(
        self, whole: StreamPlan, mark: str, difference: Difference, offset: StreamOffset, *, is_present: bool
    ) -> None:
        """Follow what is complete, and take note of what waits and of what leaves.

        ``is_present``: the difference is to the publication that there is now.
        """
        self._refuse(difference)
        if self._options.on_schema_change != "emit":
            for was, name in find_renamed(offset.members or (), whole.members):
                log.warning("%s is called %s now, and its changes come under that name from here on", was, name)
        followed = list(difference.kept)
        anew = {joined.member.name for joined in difference.joined}
        if self._options.on_new_table == "changes":
            followed += [replace(joined.member, since=offset.position.next_lsn) for joined in difference.joined]
        else:
            self.has_waiting = bool(difference.joined)
            self._note_gaps(difference, offset.members or ())
        plan = whole.following(followed)
        there = {planned.oid for planned in plan.planned}
        # Somebody who names fewer tables than before knows what leaves. Who moves or renames one may not.
        unnamed = self._source.ask(lambda session: self._unnamed(session, difference.left, is_present=is_present))
        if unnamed:
            names = [member.name for member in difference.left if member.oid in unnamed]
            log.info("%s leaves the stream: the option tables does not name it any more", listed(names))
        then = {member.oid: member for member in (*plan.gone, *(offset.members or ()), *difference.left)}
        gone = tuple(member for oid, member in then.items() if oid not in there and oid not in unnamed)
        self._plan = replace(plan, gone=gone)
        self.mark = offset.publication if self.has_waiting and offset.members is not None else mark
        left = [member for member in difference.left if member.oid not in unnamed]
        self._note_left([member for member in left if member.name not in anew])

    def _unnamed(self, session: Session, left: Sequence[Member], *, is_present: bool) -> set[int]:
        """Those of the tables that have left which are published, and which the option ``tables`` does not name.

        ``is_present``: they have left as far as the publication is concerned that there is now.
        """
        names = self.published.names
        there = [member for member in left if member.oid in names]
        then = [_as_named(member) for member in there]
        meant = {relation.oid for relation in publication.meant_by(self._options.tables, session, then)}
        return {m.oid for m in there if m.oid not in meant or (is_present and names[m.oid] == m.name)}

    # --- while a stream runs ------------------------------------------------------------------------------------------

    def look_sometimes(self) -> bool:
        """Look at the publication, unless that was done within the last seconds. Return whether that was possible."""
        return self._looks.is_due and self.look()

    def look(self) -> bool:
        """Find out which tables have joined and left; return whether that was possible.

        Raises SchemaChangedError as :meth:`resume` does.
        """
        try:
            difference = self._looks.look(self.plan, self.mark)
        except TransientError:
            # The next look is soon enough.
            return False
        if difference is None:
            # What waited may be gone again.
            self.has_waiting = False
        else:
            self._refuse(difference)
            self._note_gaps(difference, self.plan.members)
            self._take_over(difference)
            self.has_waiting = bool(difference.joined) and self._options.on_new_table == "snapshot"
            anew = {joined.member.name for joined in difference.joined}
            self._note_left([member for member in difference.left if member.name not in anew])
        return True

    def _refuse(self, difference: Difference) -> None:
        if self._options.on_new_table == "snapshot":
            return
        for joined in difference.joined:
            if joined.why:
                raise SchemaChangedError(f"{joined.why}, so changes may be missing", remedy=READ_AGAIN)
        if difference.joined and self._options.on_new_table == "fail":
            names = listed(joined.member.name for joined in difference.joined)
            raise SchemaChangedError(f"{names} joined the stream's tables", remedy=FOLLOW)

    def _note_gaps(self, difference: Difference, known: Sequence[Member]) -> None:
        if self._options.on_schema_change != "emit":
            return
        names = {member.oid: member.name for member in known}
        for joined in difference.joined:
            if joined.why:
                # By the name that the stream's rows have had.
                name = names.get(joined.member.oid, joined.member.name)
                if name not in self.gaps:
                    log.warning("%s, so changes of %s may be missing: its rows come again", joined.why, name)
                self.gaps[name] = joined.member.oid

    def _note_left(self, left: Sequence[Member]) -> None:
        known = self.leaving.members if self.leaving is not None else ()
        if new := [member for member in left if member not in known]:
            self.leaving = Leaving((*known, *new), Position.before(self._source.wait_for_end_of_wal()))

    # --- tables that join and leave -----------------------------------------------------------------------------------

    def begin_join(self) -> None:
        """Note what is published before a snapshot is begun: what joins later has to wait for another one."""
        self._found_before = self._looks.found

    def plan_join(self, held: Held, due: Collection[int]) -> tuple[tuple[PlannedTable, ...], str]:
        """The tables that join at the point of ``held``, and the publication's mark there.

        These are those whose oids are ``due`` and, where new tables are read, all that wait. A table that was published
        while the snapshot was taken goes on waiting: a transaction that wrote to it before and ends after the point
        is neither in the snapshot nor sent. Raises TransientError where that may be so of every table.
        """
        point, session = held.point, held.first.session
        published = publication.require_publication(session, self._options.publications)
        whole, mark = self.published.plan_of(session, self.plan.members, published, read_horizon(session, point))
        followed = [planned.member for planned in self.plan.planned]
        difference = self._watch.compare(session, followed, self.mark, whole.members, mark, self._looks.found)
        self._refuse(difference)
        before, found = self._found_before, Found.of(mark, difference)
        late = {oid for oid, _ in found.joined.keys() - before.joined.keys()}
        if late or mark != before.mark:
            # The next one is begun behind another look.
            self._looks.hurry()
        if mark != before.mark:
            name = quoted(self._options.publication)
            raise TransientError(f"publication {name} was altered while a snapshot was taken for tables that join it")
        self._take_over(difference)
        oids = {planned.oid for planned in self.plan.with_oids(due)}
        if self._options.on_new_table == "snapshot":
            oids |= {oid for oid, _ in found.joined}
        tables = tuple(_since(planned, point) for planned in whole.planned if planned.oid in oids - late)
        return tables, mark

    def _take_over(self, difference: Difference) -> None:
        """Know followed tables by their present entries, and by their names where rows come under these."""
        kept = {member.oid: member for member in difference.kept}
        known = []
        for planned in self.plan.planned:
            if (now := kept.get(planned.oid)) is not None:
                name = now.name if self._options.on_schema_change == "emit" else planned.name
                planned = replace(planned, member=replace(planned.member, name=name, entry=now.entry))
            known.append(planned)
        self._plan = replace(self.plan, planned=tuple(known))

    def join(self, tables: Sequence[PlannedTable], mark: str, gone: Sequence[Member] = ()) -> None:
        """Follow tables from their points on, also those that are gone by now, of which there are only changes."""
        before = {member.oid: member.since for member in self.plan.members}
        self._plan, self.mark, self.has_waiting = self.plan.joined_by(tables, gone), mark, False
        self._watch.forget()
        names, oids = {p.name for p in tables}, {p.oid for p in tables}
        self.gaps = {name: oid for name, oid in self.gaps.items() if name not in names and oid not in oids}
        if new := [planned.member for planned in tables if planned.member.since != before.get(planned.oid)]:
            log.info("%s joins the stream at %s", listed(member.name for member in new), new[0].since)

    def follow_new(self, position: Position) -> bool:
        """Follow tables that are new with all changes after ``position`` (onNewTable=changes), if there are any."""
        new = [_since(planned, position.next_lsn) for planned in self._source.ask(self.find_new)]
        # The mark stays: whether the publication has left out anything since is for the next look to say.
        self.join(new, self.mark)
        return bool(new)

    def leave(self) -> None:
        """Let those that are leaving leave: raise, or say so in the log, as ``onSchemaChange`` says."""
        assert self.leaving is not None
        leaving, options = self.leaving, self._options
        self._source.ask(lambda session: leaving.tell(session, options, self.published.refused))
        oids = _oids(leaving.members)
        plan = self.plan
        self._plan = replace(
            plan,
            planned=tuple(planned for planned in plan.planned if planned.oid not in oids),
            gone=tuple(member for member in plan.gone if member.oid not in oids),
        )
        self.gaps = {name: oid for name, oid in self.gaps.items() if name not in {m.name for m in leaving.members}}
        self.leaving = None


def _as_named(member: Member) -> Relation:
    """A table by the name that it has in the stream."""
    schema, name = QualifiedName.parse(member.name).parts
    return Relation(member.oid, schema, name, "r")


def _oids(members: Sequence[Member]) -> set[int]:
    return {member.oid for member in members}


def _since(planned: PlannedTable, lsn: Lsn) -> PlannedTable:
    return replace(planned, member=replace(planned.member, since=lsn))
