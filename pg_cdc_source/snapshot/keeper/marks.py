"""Show the readers of an execution why it has no snapshot: a session for each, whose last query is the reason."""

from __future__ import annotations

import logging
import time

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.snapshot.board import mark_name
from pg_cdc_source.snapshot.keeper.liveness import is_lost
from pg_cdc_source.snapshot.reasons import REASON_QUERY, to_reason

log = logging.getLogger(__name__)

_SECONDS = 60.0  # after it was last asked for


class Marks:
    """The marks of one keeper."""

    def __init__(self, options: ConnectionOptions, keeper: str) -> None:
        self._options = options
        self._keeper = keeper
        self._shown: dict[str, tuple[Session, float]] = {}  # execution -> session, last asked for (time.monotonic())

    def __contains__(self, execution: str) -> bool:
        return execution in self._shown

    def __bool__(self) -> bool:
        return bool(self._shown)

    def show(self, execution: str, why: PgCdcError) -> None:
        """Show the mark of an execution, for a minute from now on."""
        session = self._shown[execution][0] if execution in self._shown else None
        if session is None or is_lost(session):
            # Readers may see only the beginning of the reason, or nothing of it.
            log.warning("execution %s has no snapshot: %s", execution, why)
            session = connect(self._options, "pgsnapshot:failing")
            with translated("announcing a failure"), session.cursor() as cursor:
                cursor.execute(REASON_QUERY, (to_reason(why), mark_name(self._keeper, execution)))
        self._shown[execution] = (session, time.monotonic())

    def take_away(self, execution: str) -> None:
        if execution in self._shown:
            session, _ = self._shown.pop(execution)
            session.close()

    def end_old(self, now: float) -> None:
        """Take away the marks that nobody has asked for in the last minute."""
        for execution, (_, asked) in list(self._shown.items()):
            if now - asked > _SECONDS:
                self.take_away(execution)

    def close(self) -> None:
        for session, _ in self._shown.values():
            session.close()
        self._shown.clear()
