"""A stream goes on with the server that a major upgrade (pg_upgrade) has made of the one that it has read.

The new server has another system identifier, and its publication has other entries, so the stream would refuse it. All
else is the same: the tables' oids, their columns' numbers and their rows; and its WAL begins behind the old server's.
So the stream can go on where the new server's slot begins, if nothing was committed between the two. The old server can
tell that everything was read (``count_unread``), and the new one's statistics that nothing was written since. Both are
only as good as the word of whoever has stopped the writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import START_OVER, DefiniteError, OptionError
from pg_cdc_source.offsets import Lsn, Member, Position, SlotIdentity, StreamOffset
from pg_cdc_source.options.names import listed, quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.publication import Publication
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slot_checks import behind_now_error
from pg_cdc_source.protocol.table_layout import TableLayout, from_text, to_text, without_writers
from pg_cdc_source.stream.first_rows.held_snapshot import HeldSnapshot
from pg_cdc_source.stream.layouts.catalog_layouts import CatalogLayouts
from pg_cdc_source.stream.tables.members import compare, members_of, with_filled_partitions
from pg_cdc_source.stream.tables.slot_history import SlotHistory
from pg_cdc_source.stream.tables.source_session import SourceSession

_ANOTHER = f"this server is not the one that the checkpoint was made with, upgraded by pg_upgrade: {START_OVER}"


@dataclass(frozen=True, slots=True)
class Adopted:
    """What becomes of a stream's tables. ``offset`` is the new one; its slot may have to be created first.

    ``again`` are tables whose rows come again, because the server has others under their names or columns; ``gone``
    those that its publication does not have. ``written`` are tables with changes on this server, as far as its
    statistics know: those from before the slot are missing.
    """

    offset: StreamOffset
    again: tuple[str, ...]
    gone: tuple[str, ...]
    written: tuple[str, ...]


class Adoption:
    """Finds out how the stream that has read up to ``offset`` goes on with the server of ``options``."""

    def __init__(self, offset: StreamOffset, options: StreamOptions) -> None:
        self._offset = offset
        self._options = options
        self._source = SourceSession(options)
        self._history = SlotHistory(options, self._source)

    @property
    def is_of_this_server(self) -> bool:
        """Whether the stream needs no adoption."""
        return self._history.identify().system == self._offset.identity.system

    def is_refused(self, end: StreamOffset) -> bool:
        """Whether a batch that would end there on this server has no rows: the stream cannot have begun it."""
        return not self.is_of_this_server and end.identity.system == self._history.identify().system

    def count_unread(self) -> int:
        """How many transactions the slot has that the stream has not read.

        Raises SlotLostError where the stream could not go on either with this server and its slot.
        """
        self._require_database()
        _require_idle(self._offset)
        position = self._offset.position
        self._history.require_common(self._offset.identity, position)
        self._history.require_free(position)
        if position.next_lsn > (end := self._source.read_end_of_wal()):
            raise behind_now_error(self._source.open(), self._options.slot, position.next_lsn, end)
        published, mark = self._published()
        self._source.ask(lambda session: self._require_nothing_awaited(session, published, mark))
        return self._source.ask(self._count_unread, may_take_long=True)

    def find(self) -> Adopted:
        """What would become of the stream now. Changes nothing. Raises DefiniteError where it cannot go on."""
        self._require_database()
        _require_idle(self._offset)
        slot = self._history.find_slot()
        return self._adopted(self._history.identify(), None if slot is None else slot.confirmed_flush)

    def carry_out(self, found: Adopted) -> Adopted:
        """Create the slot, if there is none, and return what becomes of the stream; ``found`` was before that."""
        if self._history.find_slot() is None:
            HeldSnapshot(self._options, self._source, self._history, lambda: None).create_slot(())
        return replace(self.find(), written=found.written)

    def close(self) -> None:
        self._source.close()

    def _require_database(self) -> None:
        theirs, ours = self._history.as_named_now(self._offset.identity).database, self._history.identify().database
        if ours != theirs:
            raise DefiniteError(
                f"the checkpoint is of database {quoted(theirs)}, the connection leads to {quoted(ours)}",
                remedy="connect to the database of that name; one that was renamed needs it back, or its query started "
                "once under the new name before pg_upgrade",
            )

    def _published(self) -> tuple[Publication, str]:
        names = self._options.publications
        published = self._source.ask(lambda session: publication.read_publication(session, names))
        if published is None:
            raise OptionError(
                f"publication {quoted(names.name)} does not exist on this server, and pg_upgrade keeps publications",
                remedy="name the stream's publication by --publication (the option publication of its query)",
            )
        return published, self._source.ask(lambda session: publication.mark_of(published, session.server_version))

    def _require_nothing_awaited(self, session: Session, published: Publication, mark: str) -> None:
        """Raise DefiniteError for tables whose rows come again: what tells them does not outlast the upgrade."""
        known, relations = self._offset.members or (), [table.relation for table in published.tables]
        now = members_of(published, relations, self._offset.origin)
        name = self._options.publication
        difference = compare(known, self._offset.publication, now, mark, name, says_names=True)
        oids = {member.oid for member in known}
        for joined in with_filled_partitions(session, difference, known, {}).joined:
            if joined.member.oid in oids:
                raise DefiniteError(
                    f"{joined.why}, and the stream has not taken that in",
                    remedy="let the query run until it has, and stop it then",
                )

    def _count_unread(self, session: Session) -> int:
        names = ",".join(map(quoted, publication.existing_names(session, self._options.publications)))
        read = int(self._offset.position.lsn).to_bytes(8, "big")
        with translated("looking for changes that were not read"), session.cursor() as cursor:
            cursor.execute(_COUNT_UNREAD, (self._options.slot, names, read))
            (count,) = cursor.fetchone()
            return int(count)

    def _adopted(self, identity: SlotIdentity, point: Lsn | None) -> Adopted:
        offset = self._offset
        begin = self._source.read_end_of_wal() if point is None else point
        position = Position.before(begin)
        if position <= offset.position:
            raise DefiniteError(
                f"the stream has read up to {offset.position}, and the WAL of this server has only come to {begin}: "
                "positions would go back",
                remedy=_ANOTHER,
            )
        published, mark = self._published()
        relations = [table.relation for table in published.tables]
        now = {member.oid: member for member in members_of(published, relations, begin)}
        known = offset.members or ()
        self._require_same_oids(known, now)
        for member in known:
            if member.oid in now:
                _require_sent(offset.publication, member, mark, now[member.oid])
        present = [member for member in known if member.oid in now]
        layouts, altered = self._source.ask(lambda session: self._layouts_now(session, present, position))
        there = {member.name for member in now.values()}
        written = self._source.ask(lambda session: _find_written(session, known))
        return Adopted(
            replace(
                offset,
                identity=identity,
                origin=begin,
                tables=(),
                done=0,
                at=None,
                position=position,
                publication=mark,
                # One that was created again keeps what it was, so that the stream finds it created again.
                members=tuple(replace(now[m.oid], key=m.key) if m.oid in now else m for m in known),
                due=tuple(dict.fromkeys((*offset.due, *altered))),
                layouts=layouts,
                seen=None,
            ),
            again=(*altered, *(m.name for m in known if m.oid not in now and m.name in there)),
            gone=tuple(m.name for m in known if m.oid not in now and m.name not in there),
            written=written,
        )

    def _require_same_oids(self, known: Sequence[Member], now: dict[int, Member]) -> None:
        """Raise DefiniteError where an oid is another table's: rows would be taken for those of that one."""
        others = [f"{now[m.oid].name} for {m.name}" for m in known if m.oid in now and now[m.oid].name != m.name]
        if others:
            raise DefiniteError(
                f"by the oids of the stream's tables, this server has {listed(others)}", remedy=_ANOTHER
            )

    def _layouts_now(
        self, session: Session, known: Sequence[Member], position: Position
    ) -> tuple[str, tuple[str, ...]]:
        """The layouts for the new offset, and the tables that have others than the stream's rows have said.

        What tells a rewrite from none (``CatalogLayout.files`` and ``altered``) differs on every server.
        """
        last = {record.layout.oid: record for record in from_text(self._offset.layouts)}
        if not last:
            return "", ()
        catalog = CatalogLayouts(self._options)
        altered = []
        for now in catalog.records(session, known, catalog.find(session, known), position):
            said = last.get(now.layout.oid)
            if said is None:
                # No row has said anything of it: its first one will.
                continue
            if _is_as(said.layout, now.layout):
                last[now.layout.oid] = replace(said, layout=now.layout)
            else:
                altered.append(now.layout.name)
                unknown = replace(said.layout, files=None, altered=None, primary=None)
                last[now.layout.oid] = replace(said, layout=unknown)
        return to_text(last.values()), tuple(altered)


# Commit has its LSN behind its letter and its flags. Servers before 15 also send transactions without changes.
_COUNT_UNREAD = """
SELECT count(*)
FROM (
    SELECT xid
    FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1', 'publication_names', %s)
    GROUP BY xid
    HAVING bool_or(chr(get_byte(data, 0)) IN ('I', 'U', 'D', 'T'))
        AND bool_or(chr(get_byte(data, 0)) = 'C' AND substring(data FROM 3 FOR 8) > %s)
) AS unread
"""


def _is_as(said: TableLayout, now: TableLayout) -> bool:
    if without_writers(said.insides) != without_writers(now.insides):
        return False
    return replace(said, files=now.files, altered=now.altered, primary=now.primary, insides=now.insides) == now


def _require_idle(offset: StreamOffset) -> None:
    """Raise DefiniteError where the old server still has something that the stream needs."""
    if offset.members is None:
        what = "the last batch of the checkpoint was written by release 0.1.0"
    elif offset.is_reading:
        what = "the last batch of the checkpoint ends in the middle of the first rows"
    elif not offset.position.is_whole:
        what = "the last batch of the checkpoint ends in the middle of a transaction"
    else:
        return
    raise DefiniteError(what, remedy="let the query go on with the old server until it has read everything")


def _require_sent(mark: str, then: Member, mark_now: str, now: Member) -> None:
    """Raise DefiniteError where the publication sends other rows or columns of a table than it did, or less."""
    if change := publication.find_flag_change(then.entry, now.entry, now.name):
        raise DefiniteError(
            f"the publication {change}", remedy="alter the publication to what it was on the old server"
        )
    lost = set(publication.find_left_out(mark_now, now.entry)) - set(publication.find_left_out(mark, then.entry))
    if lost:
        raise DefiniteError(
            f"the publication leaves out {listed(sorted(lost))} of {now.name} now",
            remedy="alter the publication to what it was on the old server (ALTER PUBLICATION ... SET (publish = ...))",
        )


_FIND_WRITTEN = """
SELECT t.oid::bigint
FROM unnest(%s::oid[]) AS t (oid)
CROSS JOIN LATERAL (
    SELECT t.oid AS part
    UNION
    SELECT relid FROM pg_catalog.pg_partition_tree(t.oid)
) AS p
GROUP BY t.oid
HAVING sum(
    pg_stat_get_tuples_inserted(part) + pg_stat_get_tuples_updated(part) + pg_stat_get_tuples_deleted(part)
) > 0
"""


def _find_written(session: Session, known: Sequence[Member]) -> tuple[str, ...]:
    """The tables that were written since the server's statistics began, which pg_upgrade does not take along."""
    with translated("looking for tables that were written"), session.cursor() as cursor:
        cursor.execute(_FIND_WRITTEN, ([member.oid for member in known],))
        found = {oid for (oid,) in cursor}
    return tuple(member.name for member in known if member.oid in found)
