"""Take the consistent point at which tables join a stream, while the stream goes on.

A table that is read at some point and followed from there needs the same point for both. A temporary slot gives it: its
creation waits until every transaction that wrote before has ended, so every commit at or after its consistent point was
decoded with the table published, and its snapshot has every commit before. That holds for tables that were published
when the creation began; others wait for the next slot. It may take as long as the longest transaction runs, so it
happens in a thread of its own.

::

    table joins ──► temporary slot ──► consistent point L, snapshot held ──► a batch at L or behind it brings the rows
    stream      ───── goes on, without the table ─────────────────────────► with the table's commits from L on

What the server lacks for one more slot (all slots or walsenders are taken, the role may not replicate any more) does
not concern the tables that are followed. So the join waits for it, and the log says what to do.
"""

from __future__ import annotations

import logging
import threading

from pg_cdc_source.errors import ServerSetupError, TransientError
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import snapshots
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.snapshots import Held, SnapshotSpec
from pg_cdc_source.stream.tables.stream_plan import session_name

log = logging.getLogger(__name__)

# It holds nobody up, and a transaction may run for long.
TIMEOUT_SECONDS = 600.0
AGAIN = Backoff(1.0, longest_seconds=30.0)


class Joining:
    """Makes a snapshot with a consistent point in a thread. ``is_running`` until :meth:`take` has given it."""

    def __init__(self, options: StreamOptions) -> None:
        self.is_running = False
        # Between two attempts there is no snapshot that would need what comes after its point.
        self.is_pausing = False
        self._options = options
        self._thread: threading.Thread | None = None
        self._held: Held | None = None
        self._error: Exception | None = None
        self._given_up = threading.Event()

    def begin(self) -> None:
        """Begin, unless it is under way."""
        if not self.is_running:
            self.is_running = True
            self._given_up = threading.Event()
            self._thread = threading.Thread(target=self._make, args=(self._given_up,), name="pgcdc-join", daemon=True)
            self._thread.start()

    def take(self, patience_seconds: float = 0.0) -> Held | None:
        """The snapshot, once it is there; the caller closes it. Raises what prevents it for good."""
        if self._thread is None:
            return None
        self._thread.join(patience_seconds)
        if self._thread.is_alive():
            return None
        self._thread, self.is_running = None, False
        held, self._held = self._held, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return held

    def close(self) -> None:
        """Give up."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._held is not None:
            self._held.close()
            self._held = None
        self._error = None
        self.is_running = False

    def _make(self, given_up: threading.Event) -> None:
        options = self._options
        spec = SnapshotSpec("require", None, TIMEOUT_SECONDS, given_up=given_up)
        for pause in AGAIN.pauses():
            try:
                held = snapshots.make_snapshot(
                    options.connection,
                    spec,
                    lambda snapshot_id: session_name(options, "snapshot"),
                    stream=True,
                )
            except (TransientError, ServerSetupError) as error:
                if given_up.is_set():
                    return
                remedy = f". Remedy: {error.remedy}" if isinstance(error, ServerSetupError) else ""
                log.warning("tables that join the stream have to wait: %s; trying again%s", error.what, remedy)
                self.is_pausing = True
                is_over = given_up.wait(pause)
                self.is_pausing = False
                if is_over:
                    return
            except Exception as error:
                # Whatever it is, take() raises it: it must not look like one that goes on.
                self._error = error
                return
            else:
                if given_up.is_set():
                    held.close()
                else:
                    self._held = held
                return
