"""Assemble transactions from a replication stream: messages in, changes and positions out.

A walsender sends one message after another: Begin, Relation, Insert, Commit, keepalives, and blocks of transactions
that have not committed yet. The decoder needs rows by the thousand, each with its commit. To hand
out every commit by itself would cost a hundred NumPy calls for each (80 times as slow). So rows of many commits are
collected, and handed out when there are enough of them or somebody asks.

::

    receive(message) ──► rows of many commits collected ──► take() ──► Changes ──► decoded by the caller
    rows ◄── C, thousands at once    │                                                │
                                     └── complete, received ◄── kept() or refused() ◄─┘

This is a state machine: no socket, no thread, no clock, no log. Whoever drives it has the lock, if there is one.

- Commits arrive in the order of their LSNs, so everything before the commit that is being received is complete.
- Changes come in this order, each once, in ``Changes`` of whole runs: rows of one commit that follow each other.
- A relation whose columns change ends a ``Changes``: rows before it have the columns that they were sent with.
- After a lost session the slot sends again what was not confirmed. What was kept is left out: whole commits here, the
  first rows of one that was cut by position (``Changes.after``).
- A transaction that is streamed (protocol 2) waits by itself, and is replayed when its commit comes: at the place, and
  with the numbers, that it would have had otherwise. Relations that it described hold for those behind it as well,
  where nobody has described them since: the server goes by what it has sent, whatever has committed in between.
- Logical decoding messages that somebody wants stand between the rows of their commit, where they were written. The
  server sends one that ends where a record begins before that record's rows or behind them. So the last record of a
  commit that goes on waits for what follows it.
- Messages of rows need not pass through Python one by one: ``rows`` says where they may go without being looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from pg_cdc_source.errors import TransientError, WireError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.protocol.changes import Run
from pg_cdc_source.protocol.collected_runs import CollectedRuns
from pg_cdc_source.protocol.decoding_messages import NO_XID, OWN_PREFIX, lsn_of_its_own
from pg_cdc_source.protocol.pgoutput import (
    Begin,
    Commit,
    Message,
    RelationMessage,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
)
from pg_cdc_source.protocol.streamed import XID_AT, XID_BYTES, StreamedTransaction
from pg_cdc_source.protocol.walsender import HEADER_BYTES, KEEPALIVE, XLOG_DATA, Keepalive, read_keepalive
from pg_cdc_source.values.wire import Collected, Messages

# As many messages are decoded at a time: they stay in cache, and the cost of a NumPy call is shared.
MESSAGES_PER_CHUNK = 8192

_COUNTED = frozenset((*pgoutput.ROWS, pgoutput.TRUNCATE))


@dataclass(frozen=True, slots=True)
class SentRelation:
    """A relation as the stream describes it, from the commit of transaction ``xid`` at ``lsn`` on."""

    relation: RelationMessage
    lsn: Lsn
    xid: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Messages of rows and truncations, in order, not none. ``after``: rows up to there were handed out before."""

    messages: Messages
    runs: tuple[Run, ...]
    after: Position
    relations: Mapping[int, SentRelation]

    def relation(self, oid: int) -> SentRelation:
        """The relation that rows with this oid are of."""
        if oid not in self.relations:
            raise WireError(f"pgoutput: expected a Relation message for oid {oid} before its rows, got none")
        return self.relations[oid]


class TransactionAssembler:
    """Collects the changes after ``start``, and logical decoding messages that begin with one of ``prefixes``.

    ``streamed`` makes the place where a streamed transaction waits. A relation that was sent before ``renewed_before``
    counts as another one where it is sent again as it was. The server does that after DDL that a Relation message does
    not show, and after DDL that brought back what there was.

    ``complete``: every commit through here has been received. ``received``: everything through here was kept, or there
    was nothing to keep; a new session begins there. ``requests``: contents of messages with this package's own prefix,
    each with its commit; the caller takes them out. ``needs_whole``: what came of a transaction before its commit is of
    no use. Until a commit has come, sessions are to send transactions whole.
    """

    def __init__(
        self,
        start: Position,
        streamed: Callable[[], StreamedTransaction],
        *,
        prefixes: Collection[str] = (),
        messages_per_chunk: int = MESSAGES_PER_CHUNK,
        renewed_before: int = 0,
    ) -> None:
        self.received = start
        self.complete = start
        self.requests: list[tuple[Position, bytes]] = []
        self.needs_whole = False
        self._prefixes = frozenset((*prefixes, OWN_PREFIX))
        self._waits_for_messages = bool(prefixes)
        self._asked: list[bytes] = []  # requests of the transaction
        self._new_streamed = streamed
        self._renewed_before = renewed_before
        self._relations: dict[int, SentRelation] = {}
        self._described = 0  # relations in this session
        self._described_as: dict[int, int] = {}  # the number, in that order, of each of ``_relations``
        self._leave_out = False  # the transaction was kept in an earlier session
        self._streamed: dict[int, StreamedTransaction] = {}
        self._in_stream: StreamedTransaction | None = None
        self._replay: Iterator[Changes] | None = None
        self._runs = CollectedRuns(messages_per_chunk)
        self._collected = self._runs.messages

    # --- what there is ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many messages wait to be taken."""
        return len(self._collected)

    @property
    def size_bytes(self) -> int:
        return self._collected.size_bytes

    @property
    def left(self) -> tuple[int, int]:
        """How many messages :meth:`take` has left, and their bytes: they wait for what the server sends next."""
        return self._collected.left

    @property
    def file_bytes(self) -> int:
        """What of transactions that have not committed yet is in files."""
        return sum(streamed.file_bytes for streamed in self._streamed.values())

    @property
    def oldest_us(self) -> int | None:
        """When the first change that waits to be taken was committed, in microseconds since 1970."""
        return self._runs.oldest_us

    @property
    def commit_lsn(self) -> Lsn | None:
        """The commit of the transaction that is being received, None between two."""
        transaction = self._runs.transaction
        return None if transaction is None else transaction.final_lsn

    @property
    def rows(self) -> Collected | None:
        """Where messages of rows may be put without :meth:`receive`, None where they may not.

        Whoever does so calls :meth:`make_room` when it is full, before the next message.
        """
        if self._in_stream is not None:
            return self._in_stream.waiting
        return self._collected if self._runs.transaction is not None and not self._leave_out else None

    @property
    def is_replaying(self) -> bool:
        """Whether what had to wait for a commit is due: until not, :meth:`replay` comes before the next message."""
        return self._replay is not None

    # --- what comes in ------------------------------------------------------------------------------------------------

    def begin_session(self) -> None:
        """Forget what the session before has left unfinished: it comes whole again. Call :meth:`take` before."""
        assert len(self) == self.left[0]
        self._runs.forget()
        self._in_stream = self._replay = None
        self._relations = {}
        self._described_as = {}
        self.close()

    def close(self) -> None:
        """Give up what streamed transactions wait in."""
        for streamed in self._streamed.values():
            streamed.close()
        self._streamed.clear()
        self._asked = []

    def receive(self, data: bytes) -> Changes | Keepalive | None:
        """Take one message, and give what it makes due. Raises WireError for one that cannot come here."""
        if data[0] == KEEPALIVE:
            keepalive = read_keepalive(data)
            if self._runs.transaction is None and keepalive.end:
                self._advance(Position.before(keepalive.end))
            return keepalive
        if data[0] != XLOG_DATA or len(data) <= HEADER_BYTES:
            raise WireError(f"replication: expected XLogData or a keepalive, got {data[:1]!r} with {len(data)} bytes")
        tag = data[HEADER_BYTES]
        if self._in_stream is not None and tag != pgoutput.STREAM_STOP:
            if tag != pgoutput.MESSAGE or self._is_wanted(_without_xid(data)):
                self._in_stream.append(data)
                self._in_stream.has_messages |= tag == pgoutput.MESSAGE
            if tag == pgoutput.RELATION:
                relation = pgoutput.read(_without_xid(data), HEADER_BYTES)
                self._describe(self._in_stream.relations, relation.oid)
            return None
        return self._receive_message(tag, data)

    def make_room(self) -> Changes | None:
        """Make room where :attr:`rows` is full."""
        if self._in_stream is not None:
            self._in_stream.make_room()
        return self._take_if_full()

    def replay(self) -> Changes | None:
        """Take what had to wait as if it came only now, up to where a chunk is full or to its end."""
        assert self._replay is not None
        changes = next(self._replay, None)
        if changes is None:
            self._replay = None
        return changes

    def _receive_message(self, tag: int, data: bytes) -> Changes | None:
        if tag in _COUNTED:
            self._require_transaction(tag)
            if not self._leave_out:
                self._collected.append(data)
            return self._take_if_full()
        message = pgoutput.read(data, HEADER_BYTES)
        if isinstance(message, RelationMessage):
            if self._replay is None:
                self._describe(self._described_as, message.oid)
            return self._receive_relation(message)
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Commit):
            self._finish(message.commit_lsn)
        elif isinstance(message, Message):
            return self._receive_emitted(message, data)
        elif isinstance(message, StreamStart):
            if message.xid not in self._streamed:
                self._streamed[message.xid] = self._new_streamed()
            self._in_stream = self._streamed[message.xid]
        elif isinstance(message, StreamStop):
            self._in_stream = None
        elif isinstance(message, StreamAbort):
            self._abort(message)
        elif isinstance(message, StreamCommit):
            self._replay = self._replayed(self._streamed_whole(message.xid), message)
        return None

    def _streamed_whole(self, xid: int) -> StreamedTransaction:
        if xid not in self._streamed:
            raise WireError(f"pgoutput: Stream Commit: expected a transaction that was streamed, got {xid}")
        streamed = self._streamed[xid]
        if streamed.is_unclear:
            # A session that is sent it whole is sent only what was committed.
            self.needs_whole = True
            raise TransientError(
                f"transaction {xid} was sent before its commit, a part of it was rolled back, and PostgreSQL does not "
                "say which of its logical decoding messages are of that part"
            )
        return streamed

    def _is_wanted(self, data: bytes) -> bool:
        return pgoutput.read(data, HEADER_BYTES).prefix in self._prefixes

    def _receive_emitted(self, message: Message, data: bytes) -> Changes | None:
        if message.transactional:
            self._require_transaction(pgoutput.MESSAGE)
            self._keep_emitted(message, data)
            return self._take_if_full()
        if not 0 < message.lsn < 1 << 63:
            raise WireError(f"pgoutput: Message: expected the LSN of its end, got {message.lsn}")
        lsn = lsn_of_its_own(message)
        self._begin(Begin(lsn, 0, NO_XID))
        self._keep_emitted(message, data)
        self._finish(lsn)
        return self._take_if_full()

    def _keep_emitted(self, message: Message, data: bytes) -> None:
        if self._leave_out or message.prefix not in self._prefixes:
            return
        if message.prefix == OWN_PREFIX:
            self._asked.append(message.content)
        else:
            self._collected.append(data)

    def _require_transaction(self, tag: int) -> Begin:
        if self._runs.transaction is None:
            raise WireError(f"pgoutput: expected {chr(tag)!r} within a transaction, got one outside")
        return self._runs.transaction

    def _describe(self, described_as: dict[int, int], oid: int) -> None:
        """Note that a relation was described just now."""
        self._described += 1
        described_as[oid] = self._described

    def _receive_relation(self, relation: RelationMessage) -> Changes | None:
        transaction = self._require_transaction(pgoutput.RELATION)
        known = self._relations.get(relation.oid)
        if known is not None and known.relation == relation and known.lsn >= self._renewed_before:
            return None
        changes = None
        if known is not None:
            # Nothing can follow that stands before the rows so far.
            changes = self._take(leave=0)
            # What was taken keeps those that its rows were sent with.
            self._relations = dict(self._relations)
        self._relations[relation.oid] = SentRelation(relation, transaction.final_lsn, transaction.xid)
        return changes

    def _begin(self, begin: Begin) -> None:
        if self._runs.transaction is not None:
            raise WireError("pgoutput: expected Commit before the next Begin")
        self._runs.begin(begin)
        self._leave_out = Position(begin.final_lsn) <= self.received

    def _finish(self, commit_lsn: Lsn) -> None:
        """End a transaction that has committed."""
        if commit_lsn != self.commit_lsn:
            raise WireError("pgoutput: expected the Commit of the transaction that began, got another")
        self._runs.end()
        self.needs_whole = False
        self.requests += ((Position(commit_lsn), content) for content in self._asked)
        self._asked = []
        self._advance(Position(commit_lsn))

    def _abort(self, abort: StreamAbort) -> None:
        # PostgreSQL 18 also says it of subtransactions of which it has sent nothing, because it knew already that the
        # transaction was rolled back (reorderbuffer.c: ReorderBufferCheckAndTruncateAbortedTXN).
        rolled_back = self._streamed.get(abort.xid)
        if rolled_back is not None and abort.subxid != abort.xid:
            rolled_back.roll_back(abort.subxid)
        elif rolled_back is not None:
            self._streamed.pop(abort.xid).close()

    def _replayed(self, streamed: StreamedTransaction, commit: StreamCommit) -> Iterator[Changes]:
        """Give what gets full on the way."""
        before = dict(self._relations)
        self._begin(Begin(commit.commit_lsn, commit.commit_ts, commit.xid))
        for part in streamed.parts():
            tag = int(part.buffer.data[part.starts[0] + HEADER_BYTES])
            if tag not in pgoutput.ROWS:
                data = part.octets(0)
                if tag in pgoutput.IN_STREAM:
                    data = _without_xid(data)
                if changes := self._receive_message(tag, data):
                    yield changes
                continue
            while len(part) and not self._leave_out:
                part = part[self._collected.extend(part, XID_AT, XID_BYTES) :]
                if changes := self._take_if_full():
                    yield changes
        for oid, number in streamed.relations.items():
            if number > self._described_as.get(oid, 0):
                self._described_as[oid] = number
            elif changes := self._receive_relation(before[oid].relation):
                yield changes
        self._finish(commit.commit_lsn)
        self._streamed.pop(commit.xid).close()

    def _advance(self, position: Position) -> None:
        self.complete = max(self.complete, position)
        if not self._collected:
            self.received = max(self.received, position)

    # --- what goes out ------------------------------------------------------------------------------------------------

    def take(self) -> Changes | None:
        """Give what was collected, if anything. :meth:`kept` or :meth:`refused` is called before anything else."""
        return self._take(self._runs.count_of_last_record() if self._waits_for_messages else 0)

    def _take(self, leave: int) -> Changes | None:
        messages, runs = self._runs.take(leave)
        return Changes(messages, runs, self.received, self._relations) if len(messages) else None

    def kept(self, changes: Changes, last_seq: int) -> None:
        """Note that changes were decoded and are safe here; ``last_seq`` is the number of their last one."""
        commit_lsn = changes.runs[-1].commit_lsn
        if commit_lsn == self.commit_lsn:
            self._runs.last_seq = last_seq
            self.received = max(self.received, Position(commit_lsn, last_seq))
        else:
            self.received = max(self.received, self.complete)

    def refused(self, changes: Changes) -> None:
        """Note that changes could not be decoded: nothing from there on is complete. The session cannot go on."""
        first = changes.runs[0]
        # The record of a message that is a commit of its own begins before its position.
        before = self.received if first.xid == NO_XID else Position.before(first.commit_lsn)
        self.complete = max(self.received, min(self.complete, before))

    def _take_if_full(self) -> Changes | None:
        return self.take() if self._collected.is_full else None


def _without_xid(data: bytes) -> bytes:
    """A message of a streamed transaction as it is outside of one."""
    return data[:XID_AT] + data[XID_AT + XID_BYTES :]
