"""Follow a slot ahead of Spark: one thread receives into a bounded buffer, which answers what Spark asks.

::

    walsender ──► thread: receive ──► buffer: assemble, decode, cut at limits ──► payloads for Spark's partitions
        ▲                                                                              │
        └──────────── confirm: only what Spark has committed ◄──────── release ◄───────┘

To connect for each batch would be simpler, and was rejected: the server would decode again from the slot's restart_lsn,
up to 15 s of WAL each time.

- The slot moves when Spark commits, and only then.
- A slot that turns out to be lost while connecting again ends the stream at once: what is here may not be in the
  server's history, and none of it is handed out.
- After a lost session the slot sends again what was not confirmed; what is here already is left out by position.
- While the buffer is full nothing is received, and PostgreSQL waits; its timeout is kept away by our own messages.
- The thread and Spark's questions take turns at the buffer, by one lock. A question also decodes what has come.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection

from pg_cdc_source.errors import (
    START_OVER,
    ConnectError,
    DefiniteError,
    PgCdcError,
    ServerSetupError,
    SlotLostError,
    TransientError,
)
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.replication import DecodingError, ReplicationStream
from pg_cdc_source.postgres.slots import may_be_within_a_record
from pg_cdc_source.stream.received.buffer import BufferLevel, ChangeBuffer, Request
from pg_cdc_source.stream.received.chunks import Chunk
from pg_cdc_source.stream.received.server_watch import ServerWatch

log = logging.getLogger(__name__)

# One burst of receiving holds the lock, for about a millisecond.
MESSAGES_PER_BURST = 1024
# Well within half of the least wal_sender_timeout that anybody sets (PostgreSQL's default is 60 s).
CONFIRM_SECONDS = 1.0
IDLE_ASK_SECONDS = 1.0
# A dead network or host ends the session by itself (tcp_user_timeout). This is for a walsender that hangs, and for a
# proxy that has lost it. One that decodes for long without a row answers within half of wal_sender_timeout, and not at
# all where that is switched off. A new session would begin the transaction again, and again.
SILENT_SECONDS = 300.0
SILENT_SECONDS_WITHOUT_TIMEOUT = 7200.0
# A walsender sends each message by itself. A reader that waits for each is slower, and by waking up all the time keeps
# the walsender from its work: a backlog came 1.2 times as fast with a pause. Where there are cores to spare, 10 ms save
# 11 % of the CPU that walsender and reader take together with 2 ms. A message that comes alone is not kept waiting.
PAUSE_SECONDS = 0.01
# Until a session brings something new. Walsenders that are lost may still count against max_wal_senders meanwhile.
RECONNECTING = Backoff(0.1, longest_seconds=5.0, within_seconds=60.0)
# Where no session can be had: a managed server takes a minute or two to fail over, and some more to be restarted.
AWAY = Backoff(0.1, longest_seconds=5.0, within_seconds=300.0)
# A server that fails over may let in once or twice meanwhile. One that lets in more often ends sessions by itself.
MOST_LET_IN = 2
# A server asks once within half of wal_sender_timeout. One that shuts down asks again with every answer, until all is
# confirmed, which Spark may never get to: it has to wait for us as long as we stay (walsender.c, WalSndDone).
SHUTDOWN_QUESTIONS = 20
SHUTDOWN_PAUSE_SECONDS = 0.1


def longest_silence(stream: ReplicationStream) -> float:
    """For how many seconds a walsender that is asked all the time may say nothing."""
    timeout = stream.sender_timeout_seconds
    return max(SILENT_SECONDS, 0.75 * timeout) if timeout else SILENT_SECONDS_WITHOUT_TIMEOUT


def silent_error(seconds: float) -> TransientError:
    return TransientError(f"reading the slot: the server has said nothing for {seconds:g} s")


class SlotReader:
    """Reads one slot into ``buffer``, in a thread, until closed. ``connect`` opens the stream after a position.

    Everything through ``safe`` may be confirmed from the beginning. ``watch`` looks after the server while the buffer
    is full.
    """

    def __init__(
        self,
        connect: Callable[[Position], ReplicationStream],
        watch: ServerWatch,
        buffer: ChangeBuffer,
        safe: Position,
    ) -> None:
        self._connect = connect
        self._watch = watch
        self._buffer = buffer
        self._confirmed = Lsn(0)
        self._confirm(safe)
        self._lost: SlotLostError | None = None  # why connecting again was refused
        self._unlimited = False  # read on, however much there is
        self._closed = False
        self._changed = threading.Condition()
        # Everybody takes this one first. The thread takes both again and again; without it, others would seldom get in.
        self._turn = threading.Lock()
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="pgcdc-slot", daemon=True)
        self._thread.start()

    # --- what the source asks for -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop reading and forget what is here."""
        with self._locked():
            self._closed = True
            self._changed.notify_all()
        self._poke()
        self._thread.join()
        self._wake.close()
        self._waker.close()
        self._buffer.close()

    def release(self, position: Position) -> None:
        """Forget what is at or before ``position`` and confirm it to the slot: Spark has committed it."""
        with self._locked():
            self._drop(position)
            self._confirm(position)
            self._changed.notify_all()
        self._poke()

    def cut(
        self,
        start: Position,
        ceiling: Position | None,
        patience: float,
        *,
        only_rows: bool = False,
        only_full: bool = False,
    ) -> Position:
        """Where a batch from ``start`` ends; ``start`` itself when nothing has come within ``patience`` seconds.

        Nothing beyond ``ceiling`` is taken. With ``only_rows``, an end before it without a row is nothing; with
        ``only_full``, one before it that would leave much room. Raises what the thread has met, once all that came
        before it was handed out; the loss of the slot at once. Spark asks for the next batch when it is done with the
        one that ends at ``start``, so chunks up to there make room. They are confirmed when Spark says so.
        """
        deadline = time.monotonic() + patience
        with self._locked():
            self._drop(start)
            while True:
                self._raise_loss()
                # To look decodes what waits, and little at a time takes longer.
                if not only_full or self._buffer.fills_batch(ceiling):
                    end = self._buffer.end_of_batch(start, ceiling, only_rows=only_rows)
                    if end > start:
                        return end
                self._raise_error()
                rest = deadline - time.monotonic()
                if rest <= 0:
                    return start
                # What was decoded may have been read before, and have left room.
                self._changed.notify_all()
                self._changed.wait(rest)

    def read_through(self, end: Position, require_driver: Callable[[], None]) -> None:
        """Read until ``end`` is here, without limits. Raises what keeps that from happening.

        ``require_driver`` raises where nobody waits for it any more.
        """
        with self._locked():
            self._unlimited = True
            self._changed.notify_all()
            try:
                self._raise_loss()
                while not self._buffer.has(end):
                    self._raise_error()
                    require_driver()
                    self._poke()
                    self._changed.wait(0.5)
            finally:
                self._unlimited = False

    def batch(self, start: Position, end: Position) -> list[Chunk]:
        """The chunks with the rows after ``start`` up to ``end``, cut where they reach over."""
        with self._locked():
            chunks = self._buffer.batch(start, end)
        return [chunk.between(start, end) for chunk in chunks]

    def waiting(self, position: Position) -> BufferLevel:
        """What is here of the changes after ``position``."""
        with self._locked():
            return self._buffer.waiting(position)

    def is_quiet(self, after: Position, through: Position) -> bool:
        """Whether there is neither a row nor a request behind ``after`` and up to ``through``, which is here."""
        with self._locked():
            return self._buffer.is_quiet(after, through)

    def requests(self, after: Position, through: Position) -> list[Request]:
        """What was asked for behind ``after`` and up to ``through``, which is here: it was cut or read through."""
        with self._locked():
            return self._buffer.requests(after, through)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._turn:
            self._changed.acquire()
        try:
            yield
        finally:
            self._changed.release()

    def _raise_loss(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _raise_error(self) -> None:
        if self._buffer.error is not None:
            raise self._buffer.error

    def _confirm(self, position: Position) -> None:
        # The slot is to keep the record that a position may lie within; one of the next positions moves it on.
        if not may_be_within_a_record(position.next_lsn):
            self._confirmed = max(self._confirmed, position.next_lsn)

    def _drop(self, position: Position) -> None:
        if self._buffer.drop(position):
            self._changed.notify_all()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"x")

    # --- the thread ---------------------------------------------------------------------------------------------------

    @property
    def _goes_on(self) -> bool:
        return not self._closed and self._buffer.error is None

    def _run(self) -> None:
        # Since something new was brought: the pauses while no session can be had, while one is refused for good, and
        # behind sessions that ended; and how many of these there were.
        away: Iterator[float] | None = None
        refused: Iterator[float] | None = None
        ended: Iterator[float] | None = None
        let_in = 0
        furthest, followed = self._buffer.received, False
        failed_decoding = False  # the session before
        while self._goes_on:
            opened: float | None = None
            try:
                with contextlib.closing(self._open_stream()) as stream, contextlib.closing(self._watch):
                    opened, followed = time.monotonic(), True
                    self._follow(stream)
            except (TransientError, ServerSetupError, ConnectError) as error:
                # A server that was there may come back under its name, or have room again.
                may_come_back = followed and opened is None and getattr(error, "has_no_address", True)
                if isinstance(error, DefiniteError) and not may_come_back:
                    self._fail(error)
                    return
                # Each session is answered, also where each ends at the same place. A quiet one brings nothing, and a
                # firewall may drop it. A server that cannot decode may need minutes to come to the place again.
                lasted = opened is not None and time.monotonic() > opened + RECONNECTING.within_seconds
                again = failed_decoding and isinstance(error, DecodingError)
                if (lasted and not again) or self._buffer.received > furthest:
                    away, refused, ended, let_in, furthest = None, None, None, 0, self._buffer.received
                failed_decoding = isinstance(error, DecodingError)
                if opened is not None:
                    let_in += 1
                    pause = next(ended := ended or RECONNECTING.pauses(), None)
                elif isinstance(error, DefiniteError):
                    pause = next(refused := refused or RECONNECTING.pauses(), None)
                else:
                    ended = ended if let_in > MOST_LET_IN else None
                    pause = next(away := away or AWAY.pauses(), None)
                if pause is None:
                    self._fail(error if opened is None else _without_end(error, furthest))
                    return
                log.warning("%s; connecting again", error.what)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, pause)
            except BaseException as error:
                self._fail(error)
                return

    def _open_stream(self) -> ReplicationStream:
        # Before the server is looked at: what the session before has brought is compared with its history, too.
        with self._changed:
            self._buffer.begin_session()
        try:
            return self._connect(self._buffer.received)
        except SlotLostError as error:
            self._lost = error
            raise

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._buffer.error = error
            self._changed.notify_all()

    def _follow(self, stream: ReplicationStream) -> None:
        """Receive until closed. Raises TransientError where the server says nothing, though it is asked."""
        answers = _Answers(stream)
        longest = longest_silence(stream)
        heard = time.monotonic()
        while self._goes_on:
            with self._turn:
                pass
            answers.confirm(self._confirmed)
            if self._is_full():
                with self._changed:
                    if self._is_full():
                        self._changed.wait(CONFIRM_SECONDS / 2)
                self._watch.look()
                heard = time.monotonic()
                continue
            self._watch.rest()
            more, something = self._burst(stream, answers)
            if something:
                heard = time.monotonic()
            elif time.monotonic() > heard + longest:
                raise silent_error(longest)
            if not more and not answers.is_awaited:
                if something:
                    connection.wait([self._wake], PAUSE_SECONDS)
                # A large message takes long to come in.
                if stream.wait(self._wake, IDLE_ASK_SECONDS):
                    heard = time.monotonic()
        # What was released a moment ago, at the end of a run.
        answers.confirm(self._confirmed)

    def _is_full(self) -> bool:
        return not self._unlimited and self._buffer.is_full

    def _burst(self, stream: ReplicationStream, answers: _Answers) -> tuple[bool, bool]:
        """Receive what is there, bounded: (there is more, there was something)."""
        buffer = self._buffer
        with self._changed:
            received = 0
            # Relations are looked up in the catalog, and a table may have thousands of partitions. The server waits for
            # a confirmation no longer than wal_sender_timeout.
            until = time.monotonic() + CONFIRM_SECONDS
            # The side that asks for a batch decodes as well. What was refused there must not be passed over here.
            while received < MESSAGES_PER_BURST and buffer.error is None and time.monotonic() < until:
                if buffer.lost is not None:
                    raise buffer.lost
                if buffer.is_replaying:
                    buffer.replay()
                    break
                rows = buffer.rows
                count = len(rows or ())
                data = stream.receive(rows)
                came = len(rows or ()) - count + (data is not None)
                received += came
                if rows is not None and rows.is_full:
                    buffer.make_room()
                elif not came:
                    if received:
                        self._changed.notify_all()
                    return False, received > 0
                if data is not None and buffer.can_go_on and buffer.receive(data):
                    answers.question()
            self._changed.notify_all()
            return True, True


def _without_end(error: PgCdcError, furthest: Position) -> PgCdcError:
    """The error of sessions that all ended with it, and of which none came any further."""
    never = (
        "see the server's log. Try a newer minor version of the server first, which may decode what this one cannot; a "
        f"transaction that none can decode is left behind only where you {START_OVER}"
    )
    return type(error)(
        f"{error.what}; so all sessions ended for {RECONNECTING.within_seconds:g} s and longer, and nothing behind "
        f"{furthest} has come",
        remedy=never if error.remedy == error.usual_remedy else error.remedy,
    )


class _Answers:
    """What one session tells its server, and when: the position that is safe, and now and then a question."""

    def __init__(self, stream: ReplicationStream) -> None:
        self._stream = stream
        self._confirmed = Lsn(0)
        self._confirm_at = 0.0
        self._ask_at = 0.0
        self._questions = 0
        self._questioned_at = 0.0

    @property
    def is_awaited(self) -> bool:
        """Whether the server waits for an answer."""
        return self._ask_at == 0.0

    def confirm(self, confirmed: Lsn) -> None:
        """Say that everything before ``confirmed`` is safe, if that is new or it is time to say something."""
        now = time.monotonic()
        ask = now >= self._ask_at
        if now >= self._confirm_at or confirmed != self._confirmed or ask:
            self._stream.confirm(confirmed, ask=ask)
            self._confirmed = confirmed
            self._confirm_at = now + CONFIRM_SECONDS
            if ask:
                self._ask_at = now + IDLE_ASK_SECONDS

    def question(self) -> None:
        """Note that the server asks for an answer. Raises TransientError where it asks because it shuts down."""
        self._ask_at = 0.0
        now = time.monotonic()
        self._questions = self._questions + 1 if now < self._questioned_at + SHUTDOWN_PAUSE_SECONDS else 0
        self._questioned_at = now
        if self._questions >= SHUTDOWN_QUESTIONS:
            raise TransientError("reading the slot: the server is shutting down")
