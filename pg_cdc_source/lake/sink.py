"""Apply batches one after another, and write the ledger's row behind each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from pg_cdc_source.errors import DefiniteError, short_text
from pg_cdc_source.lake.bring import Mark
from pg_cdc_source.lake.ledger import FORMAT, MODES, TEMPLATE, Ledger, LedgerRow
from pg_cdc_source.lake.standing import Standing, caught_up_at
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import OF_ANY_TABLE, Start
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres.backoff import Backoff

log = logging.getLogger(__name__)

# So many other tables are looked at to tell a table's fault from the lake's: a version may have expired.
_TABLES_TO_READ = 3
# No other driver has a batch of this one sooner: it starts a JVM, and the slot has to be free.
_TAKEN_OVER_SECONDS = 10.0

_APPENDING = Backoff(0.2, growth=3.0, attempts=4)
_LONG_AGO = datetime(1970, 1, 1, tzinfo=timezone.utc)

# Applies a batch; what became of each table, in rows of ``OUTCOME_SCHEMA``.
Run = Callable[[Start], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Applied:
    """A batch that was applied: its row of the ledger, and how many rows it had of each table that took them."""

    row: LedgerRow
    rows: Mapping[str, int]


class Sink:
    """The tables of one query.

    ``on_batch`` is told of each batch when the ledger has it. ``read`` reads something of a table's version, and
    raises where that cannot be had now. ``modes`` is what each table keeps (``Shapes.digest``), and ``format`` what
    writes them, for the ledger to say.
    """

    def __init__(
        self,
        targets: Targets,
        ledger: Ledger,
        on_batch: Callable[[Applied], None] | None = None,
        read: Callable[[str], object] | None = None,
        *,
        modes: str = "",
        format: str = "",
    ) -> None:
        self._targets = targets
        self._ledger = ledger
        self._on_batch = on_batch
        self._read = read
        self._said = {TEMPLATE: targets.template, MODES: modes, FORMAT: format}
        self._last: LedgerRow | None = None
        self._seen_at = 0.0  # by a clock that does not stand still while the machine does

    def apply(self, query: str, batch_id: int, run: Run, is_past: Callable[[int], bool]) -> LedgerRow:
        """Apply a batch, unless the ledger has it, and return its row.

        ``is_past`` looks whether the batch has anything behind an LSN.
        Raises DefiniteError where every table that the batch touches would be set aside, and no other one can be read:
        that is no table's fault. And where the ledger is not the one that the query has had from its first batch on.
        """
        if self._last is None:
            self._last, self._seen_at = self._begin(query, batch_id, is_past), time.time()
        last = self._last
        if last is not None and last.batch_id >= batch_id:
            return last
        start = last or LedgerRow(query, -1, 0, None, _LONG_AGO)
        set_aside = {table: why for table, why in start.set_aside.items() if caught_up_at(why) is None}
        catching_up = frozenset(start.set_aside.keys() - set_aside.keys())
        outcomes = list(run(Start(Mark(query, batch_id), start.tables, set_aside, catching_up)))
        row = self._row(start, batch_id, outcomes)
        new = [why for table, why in row.set_aside.items() if table not in start.set_aside]
        if last is None:
            # Another one may have loaded its first rows at the same time.
            self._require_alone()
        elif last.batch_id == 0:
            self._require_first(query)
        if last is not None and time.time() - self._seen_at > _TAKEN_OVER_SECONDS:
            self._require_newest(last)
        self._append(row, is_doubtful=any(why.startswith(OF_ANY_TABLE) for why in new))
        if last is None:
            self._require_first(query)
        self._last, self._seen_at = row, time.time()
        rows = {o["table"]: o["rows"] for o in outcomes if o["version"] is not None}
        log.info("batch %d: %d rows, %d tables at LSN %d", batch_id, sum(rows.values()), len(row.tables), row.lsn)
        if self._on_batch is not None:
            self._on_batch(Applied(row, rows))
        return row

    def _append(self, row: LedgerRow, *, is_doubtful: bool) -> None:
        """Write the ledger's row. A catalog or a store has bad moments, and may have taken the row all the same.

        ``is_doubtful``: it sets tables aside for what may have been such a moment. Then it has one attempt.
        """
        pauses, is_again = iter(()) if is_doubtful else _APPENDING.pauses(), False
        while True:
            try:
                if is_again and self._ledger.last(query=row.query, since=row.batch_id) is not None:
                    return
                self._ledger.append(row)
                return
            except Exception as error:
                if (pause_seconds := next(pauses, None)) is None:
                    raise
                text = short_text(error)
                log.warning("the ledger %s could not be written, and is tried again: %s", self._targets.ledger, text)
            time.sleep(pause_seconds)
            is_again = True

    def _begin(self, query: str, batch_id: int, is_past: Callable[[int], bool]) -> LedgerRow | None:
        """Return the query's last row, None before its first batch.

        Spark numbers a query's batches one by one from 0. Where the ledger lacks batches before this one, the tables do
        as well. Spark repeats the last batch alone, up to where that ended: what the ledger has besides is of a
        checkpoint that was newer.
        """
        ledger, last = self._targets.ledger, self._ledger.last(query=query)
        done = -1 if last is None else last.batch_id
        if done < batch_id - 1:
            has = "no batch of this checkpoint" if last is None else f"the checkpoint's batches up to {done} alone"
            raise DefiniteError(
                f"the ledger {ledger} has {has}, which is at batch {batch_id}: the tables lack what came before",
                remedy="start with the target, the format and the ledger that the checkpoint began with; where those "
                "are lost, with a new checkpoint, a new slot and a new target",
            )
        if last is not None and (done > batch_id or (done == batch_id and is_past(last.lsn))):
            raise DefiniteError(
                f"the checkpoint is older than the ledger {ledger}, which has its batches up to {done}, to LSN "
                f"{Lsn(last.lsn)}: batch {batch_id} has other rows now, which would be passed over",
                remedy="put the newest copy of the checkpoint back; where that is lost, start with a new checkpoint, a "
                "new slot, a new ledger and a new target",
            )
        if last is None:
            self._require_alone()
        elif done == 0:
            self._require_first(query)
        self._ledger.create(self._said)
        said = self._ledger.said
        # A ledger that is beside its tables has been moved with them.
        at, was = (place.removeprefix("file://") for place in (self._targets.template, said[TEMPLATE]))
        if at != was and not self._targets.has_own_ledger:
            raise DefiniteError(
                f"the ledger {ledger} is of tables at {said[TEMPLATE]}, and not at {self._targets.template}",
                remedy="start with that target, in the format that it has; or mirror into this one with another "
                "checkpoint, slot and ledger",
            )
        if (format := said.get(FORMAT, self._said[FORMAT])) != self._said[FORMAT]:
            raise DefiniteError(
                f"the ledger {ledger} is of tables that format={format} has written, and not {self._said[FORMAT]}",
                remedy="start with that format; or mirror into another target, with another checkpoint and slot",
            )
        if not self._said.items() <= said.items():
            self._ledger.note(self._said)
        return last

    def _require_newest(self, last: LedgerRow) -> None:
        """Raise DefiniteError where another driver of this query has gone on meanwhile."""
        found = self._ledger.last(query=last.query, since=last.batch_id)
        if found is None or found.batch_id != last.batch_id:
            raise DefiniteError(
                f"another driver of this mirror has applied batch {-1 if found is None else found.batch_id} meanwhile, "
                f"so this one does not write into the ledger {self._targets.ledger}",
                remedy="let one driver run with a checkpoint; nothing has to be done for the tables",
            )

    def _require_alone(self) -> None:
        """Raise DefiniteError where the ledger has rows of another query, and none of this one."""
        if others := self._ledger.queries():
            raise self._shared_error(min(others))

    def _require_first(self, query: str) -> None:
        """Raise DefiniteError where two have written their first rows at the same time: one of them goes on."""
        if (first := min(self._ledger.queries(), default=query)) != query:
            raise self._shared_error(first)

    def _shared_error(self, query: str) -> DefiniteError:
        return DefiniteError(
            f"the ledger {self._targets.ledger} is that of another mirror, of the query {query}: nobody could tell at "
            "which point the tables of both are",
            remedy="give this mirror a ledger of its own (ledger=…), with a new checkpoint and slot if it has begun; "
            "or, where it is to take the other's place, move the other's ledger and tables away first",
        )

    def _row(self, start: LedgerRow, batch_id: int, outcomes: Sequence[Mapping[str, Any]]) -> LedgerRow:
        self._require_lake(start, batch_id, outcomes)
        lsn = max([start.lsn, *(outcome["lsn"] for outcome in outcomes)])
        standing = Standing(start)
        standing.behind(outcomes, lsn, self._targets)
        times = [o["commit_ts"] for o in outcomes if o["commit_ts"] is not None]
        return LedgerRow(
            start.query,
            batch_id,
            lsn,
            max(times, default=start.commit_ts),
            # A clock may be set back.
            max(datetime.now(timezone.utc), start.applied_at + timedelta(microseconds=1)),
            standing.versions,
            standing.set_aside,
            not any(o["is_within"] for o in outcomes),
        )

    def _require_lake(self, start: LedgerRow, batch_id: int, outcomes: Sequence[Mapping[str, Any]]) -> None:
        """Raise DefiniteError where all tables of the batch would be set aside, and others cannot be read either."""
        aside = start.set_aside
        new = {o["table"]: o["error"] for o in outcomes if o["error"] is not None and o["table"] not in aside}
        strange = {table: error for table, error in new.items() if error.startswith(OF_ANY_TABLE)}
        is_everywhere = len(strange) == sum(o["table"] not in (None, *aside) for o in outcomes)
        if strange and is_everywhere and not self._can_read(start.tables, {*strange, *aside}):
            table, error = min(strange.items())
            raise DefiniteError(
                f"no table of batch {batch_id} could be written; {table}: {error}",
                remedy="start the query again once that is mended: it goes on with this batch",
            )

    def _can_read(self, versions: Mapping[str, int], without: Collection[str]) -> bool:
        """Whether the lake is there: whether any of some tables ``without`` these can be read."""
        if self._read is None:
            return False
        for table in [table for table in versions if table not in without][:_TABLES_TO_READ]:
            try:
                # As it is now: its version may be one that VACUUM has ended.
                self._read(table)
                return True
            except Exception as error:
                log.warning("%s cannot be read either: %s", table, short_text(error))
        return False
