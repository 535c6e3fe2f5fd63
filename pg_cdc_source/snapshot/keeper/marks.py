"""Show the readers of executions why these have no snapshot: a session for each reason, which is its last query."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.snapshot.board import execution_key, mark_name
from pg_cdc_source.snapshot.keeper.liveness import is_lost
from pg_cdc_source.snapshot.reasons import REASON_QUERY, to_reason

log = logging.getLogger(__name__)

_SECONDS = 60.0  # after it was last asked for
# Most marks at a time. Readers look four times a second, and ask again after three.
_MOST = 2
_SHOWN_AT_LEAST_SECONDS = 1.0
# Each execution has an advisory lock until its mark ends, and a server has some thousands for everybody.
_MOST_EXECUTIONS = 500


@dataclass(slots=True, eq=False)
class _Mark:
    session: Session
    reason: str
    name: str
    since: float  # time.monotonic()
    executions: dict[str, float] = field(default_factory=dict)  # when each was last asked for (time.monotonic())


class Marks:
    """The marks of one keeper."""

    def __init__(self, options: ConnectionOptions, keeper: str) -> None:
        self._options = options
        self._keeper = keeper
        self._shown: list[_Mark] = []
        # Why no session can be had for a mark, and it is no use to try again: as where the password was replaced.
        self.refused: PgCdcError | None = None

    def __contains__(self, execution: str) -> bool:
        return any(execution in mark.executions for mark in self._shown)

    def __len__(self) -> int:
        """How many sessions show marks."""
        return len(self._shown)

    def show(self, execution: str, why: PgCdcError) -> None:
        """Show why an execution has no snapshot, for a minute from now on.

        Nothing is shown where there is no session to be had for it now: readers ask again.
        """
        now, reason = time.monotonic(), to_reason(why)
        if execution not in self:
            # Readers may see only the beginning of the reason, or nothing of it.
            log.warning("execution %s has no snapshot: %s", execution, why)
        mark = next((mark for mark in self._shown if mark.reason == reason), None)
        if mark is not None and (is_lost(mark.session) or len(mark.executions) >= _MOST_EXECUTIONS):
            self._close(mark)
            mark = None
        if mark is None:
            mark = self._new(execution, reason, now)
        if mark is None:
            return
        if execution not in mark.executions:
            try:
                with translated("announcing a failure"), mark.session.cursor() as cursor:
                    cursor.execute(REASON_QUERY, (mark.reason, mark.name, *execution_key(execution)))
            except TransientError as error:
                # Its session is lost, and not the keeper's. Readers ask again.
                log.warning("it cannot be shown why execution %s has no snapshot: %s", execution, error)
                self._close(mark)
                return
        mark.executions[execution] = now

    def _new(self, execution: str, reason: str, now: float) -> _Mark | None:
        """A session for another reason, in place of the oldest where there are enough."""
        if len(self._shown) >= _MOST:
            oldest = min(self._shown, key=lambda mark: mark.since)
            if now - oldest.since < _SHOWN_AT_LEAST_SECONDS:
                return None
            self._close(oldest)
        try:
            session = connect(self._options, "pgsnapshot:failing", was_there=True, known_to_last=True)
        except PgCdcError as error:
            log.warning("it cannot be shown why execution %s has no snapshot: %s", execution, error)
            self.refused = None if isinstance(error, TransientError) else error
            return None
        self.refused = None
        mark = _Mark(session, reason, mark_name(self._keeper, execution), now)
        self._shown.append(mark)
        return mark

    def _close(self, mark: _Mark) -> None:
        mark.session.close()
        self._shown.remove(mark)

    def end_old(self, now: float) -> None:
        """Take away the marks that nobody has asked for in the last minute."""
        for mark in list(self._shown):
            if now - max(mark.executions.values(), default=mark.since) > _SECONDS:
                self._close(mark)

    def close(self) -> None:
        for mark in list(self._shown):
            self._close(mark)
