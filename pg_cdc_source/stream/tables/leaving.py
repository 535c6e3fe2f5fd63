"""Tables that leave a stream: until when they are followed, and what the operator is told."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import START_OVER, SchemaChangedError
from pg_cdc_source.offsets import Member, Position
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.stream.tables.members import describe_left

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a table is not read any more, and what mends that."""

    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """Tables that have left, and a position after all that they have in the stream."""

    members: tuple[Member, ...]
    through: Position

    def tell(self, session: Session, options: StreamOptions, refused: Collection[int]) -> None:
        """Raise, or say so in the log, as ``onSchemaChange`` says; of those that are ``refused`` the log says why."""
        members = [member for member in self.members if member.oid not in refused]
        if not members:
            return
        what = describe_left(session, members, options.publication)
        what = f"{what}; the stream has no changes of theirs after {self.through.lsn}"
        if options.dbtable is not None:
            raise SchemaChangedError(
                what,
                remedy="to go on, publish the table again and start the query with onNewTable=snapshot, which reads "
                f"its rows anew; or {START_OVER}",
            )
        if options.on_schema_change == "fail":
            raise SchemaChangedError(
                what,
                remedy="start the query again with the same checkpoint and onSchemaChange=ignore (or emit, where "
                "a row says so): it goes on without them. One that comes back is read anew (onNewTable=snapshot)",
            )
        log.warning("%s; the stream goes on without them", what)
