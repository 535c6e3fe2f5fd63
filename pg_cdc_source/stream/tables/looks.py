"""Looks at the publication, every few seconds while a stream runs."""

from __future__ import annotations

import logging
import time

from pg_cdc_source.errors import TransientError
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres.lock_waits import describe_lockers, waiting_for_nobody
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.stream.tables.look_pace import LookPace
from pg_cdc_source.stream.tables.members import Difference
from pg_cdc_source.stream.tables.publication_watch import NOTHING_FOUND, PublicationWatch
from pg_cdc_source.stream.tables.second_look import settled
from pg_cdc_source.stream.tables.source_session import SourceSession
from pg_cdc_source.stream.tables.stream_plan import StreamPlan

log = logging.getLogger(__name__)

WATCH_SECONDS = 2.0


class Looks:
    """``found`` is what the last look has found."""

    def __init__(self, options: StreamOptions, source: SourceSession, watch: PublicationWatch) -> None:
        self.found = NOTHING_FOUND
        self._options = options
        self._source = source
        self._watch = watch
        self._pace = LookPace()

    @property
    def is_due(self) -> bool:
        return self._pace.is_due()

    def rest(self) -> None:
        """Let the next one come only after a while: what it would see was seen."""
        self._pace.rest(WATCH_SECONDS)

    def hurry(self) -> None:
        """Let the next one come at once."""
        self._pace.hurry()

    def look(self, plan: StreamPlan, mark: str) -> Difference | None:
        """How the publication differs from what is followed; None where it does not.

        Raises TransientError where that could not be seen, and says so once that lasts; SchemaChangedError where
        changes are missing.
        """
        self.rest()
        try:
            with self._source.asking() as session:
                began = time.monotonic()
                # DDL may go on for hours, and the other tables' changes would wait behind the look.
                with translated("looking at the publication"), session.cursor() as cursor, waiting_for_nobody(cursor):
                    self.found, difference = settled(lambda: self._watch.look(session, plan, mark, self.found))
                self._pace.took(time.monotonic() - began)
                return difference
        except TransientError as error:
            self._note_failure(error)
            raise

    def _note_failure(self, error: TransientError) -> None:
        if (seconds := self._pace.failed()) is None:
            return
        lockers = self._source.ask_in_passing(describe_lockers)
        why = f"{error.what} (locked: {lockers})" if lockers else error.what
        log.warning(
            "publication %s could not be looked at for %.0f s: %s. Changes go on; no table joins or leaves the stream",
            *(quoted(self._options.publication), seconds, why),
        )
