"""Messages of rows that have come, and of which commit each one is."""

from __future__ import annotations

from pg_cdc_source.protocol.changes import Run
from pg_cdc_source.protocol.decoding_messages import NO_XID
from pg_cdc_source.protocol.pgoutput import Begin
from pg_cdc_source.protocol.walsender import START
from pg_cdc_source.values.wire import Collected, Messages

BYTES_PER_CHUNK = 4 << 20


class CollectedRuns:
    """Collects ``messages``. Those of one ``transaction`` that follow each other are a run; None between two.

    ``last_seq`` is the number of the last change of the transaction that was kept before.
    """

    def __init__(self, messages_per_chunk: int) -> None:
        self.messages = Collected(messages_per_chunk, BYTES_PER_CHUNK)
        self.transaction: Begin | None = None
        self.last_seq = 0
        self._runs: list[Run] = []
        self._run_start = 0

    @property
    def oldest_us(self) -> int | None:
        """When the first change that waits was committed, in microseconds since 1970."""
        if not self.messages:
            return None
        first = self._runs[0] if self._runs else self.transaction
        # A message that is not transactional has no time.
        return None if first is None or first.xid == NO_XID else first.commit_ts

    def forget(self) -> None:
        """Give up what has been left, and the transaction."""
        self.messages.take()
        self.transaction = None

    def begin(self, transaction: Begin) -> None:
        self.transaction, self.last_seq = transaction, 0
        self._run_start = len(self.messages)

    def end(self) -> None:
        """End the transaction."""
        self._end_run(0)
        self.transaction = None

    def take(self, leave: int) -> tuple[Messages, tuple[Run, ...]]:
        """Give all messages but the last ``leave``, and their runs."""
        self._end_run(leave)
        messages, runs = self.messages.take(leave), tuple(self._runs)
        self._runs, self._run_start = [], 0
        return messages, runs

    def count_of_last_record(self) -> int:
        """How many messages of a commit that goes on are of its last record, or end where that begins."""
        count = len(self.messages) - self._run_start
        if self.transaction is None or not count:
            return 0
        lsn = self.messages.octets(-1)[START]
        return next((i for i in range(1, count) if self.messages.octets(-i - 1)[START] != lsn), count)

    def _end_run(self, leave: int) -> None:
        """Close the transaction's run of messages, if it has any but the last ``leave``."""
        count = len(self.messages) - self._run_start - leave
        if self.transaction is not None and count:
            of = self.transaction
            self._runs.append(Run(of.final_lsn, of.commit_ts, of.xid, self.last_seq, count))
            self._run_start += count
            # Known after decoding; only a transaction that is cut by a chunk's end needs it.
            self.last_seq = 0
