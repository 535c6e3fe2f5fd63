"""A sink and the operator of its stream, who does what an error says and nothing else.

The sink is a :class:`Replica`. It starts over only where the stream says so; how often it did, and what was refused, is
for the test to say.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from driving import Drive, Row, drop_slots, run
from psycopg2.extensions import connection as Session
from replica import Replica, rows_of
from watch import wait_until

from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.offsets import Lsn, Position

# What becomes of the query while something is done to its tables: it is down; or it runs, and finds all of it at once;
# or it takes one statement after the other.
HOW = ("down", "unseen", "seen")
# What onSchemaChange is, and how it is shown: with emit all is found at once, with fail a query ends in between.
WAYS = (("emit", "down"), ("emit", "unseen"), ("fail", "down"), ("fail", "seen"))


class Obedient:
    """``replica`` is what the sink has, ``refusals`` are what the stream ended with, in order."""

    def __init__(self, pg: Session, drive: Drive, **options: str) -> None:
        self.replica = Replica(heals=True)
        self.refusals: list[str] = []
        self.started_over = 0
        self._pg = pg
        self._drive = drive
        self._driver = drive(**options)
        self._options = dict(self._driver.options)
        self._says_columns = options.get("onSchemaChange") == "emit"
        self._random = random.Random(str(options))
        self._repeats: list[Row] | None = None  # what the batch had that comes again
        self._unheeded = ""  # what was refused since the last batch
        self._borrows = False  # whether the query has options of a remedy
        self._leaving: set[str] = set()  # the tables that it goes on without, as told

    # --- the query ----------------------------------------------------------------------------------------------------

    def run(self, how: str, *statements: str) -> None:
        """Run statements, each a transaction of its own, while the query is as ``how`` says (see ``HOW``)."""
        assert how in HOW
        with self.stopped() if how == "down" else contextlib.nullcontext():
            for statement in statements:
                run(self._pg, statement)
                if how == "seen":
                    self.follow()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The query is down meanwhile."""
        self._driver.stop()
        yield
        self._restart()

    def follow(self) -> None:
        """Run batches until all has come that is committed now."""
        end = Position.before(self._end_of_wal())

        def is_here() -> bool:
            self.step()
            if self._driver.batches == 0:
                return False
            offset = self._driver.offset
            return not offset.is_reading and offset.position >= end

        wait_until(is_here)

    def _end_of_wal(self) -> Lsn:
        ((lsn,),) = run(self._pg, "SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint")
        return Lsn(lsn)

    def step(self) -> None:
        """Run a batch, now and then a second time in a new process, as after a crash before Spark had committed it."""
        driver = self._driver
        try:
            if self._repeats is None and self._random.random() < 0.1:
                self._repeats = driver.attempt() or None
                if self._repeats is not None:
                    driver.restart()
            before = driver.batches
            rows = driver.batch()
        except PgCdcError as error:
            self._obey(error)
            return
        if driver.batches > before:
            assert self._repeats is None or self._compared(rows) == self._compared(self._repeats)
            through = 0 if self._repeats is None else self._end_of_wal()
            self._repeats, self._unheeded = None, ""
            self.replica.apply(rows, through)
            self._let_leave({member.name for member in driver.members}, rows)

    def _let_leave(self, members: Collection[str], rows: list[Row]) -> None:
        """Give up tables that the stream goes on without, when their last changes have come."""
        back = {row["_table"] for row in rows if row["_change_type"] == "truncate" and row["_seq"] == 0}
        for name in self._leaving.difference(members, back):
            self.replica.drop(name)
        self._leaving = self._leaving.intersection(members) - back

    def _compared(self, rows: list[Row]) -> Counter[str]:
        """What a batch has each time.

        Rows of a table that is read again may be in the state of a later change. A DataFrame that is loaded anew may
        have other columns.
        """
        changes = [row for row in rows if row["_change_type"] != "snapshot"]
        return Counter(
            repr(row if self._says_columns else (row["_table"], row["_change_type"], row["_commit_lsn"], row["_seq"]))
            for row in changes
        )

    # --- what the operator is told ------------------------------------------------------------------------------------

    def _restart(self, **named: str) -> None:
        self._driver.stop()
        self._driver.options, self._borrows = {**self._options, **named}, bool(named)
        try:
            self._driver.start()
        except PgCdcError as error:
            self._obey(error)

    def _obey(self, error: PgCdcError) -> None:
        assert error.what != self._unheeded, f"what it says does not help: {error}"
        self._unheeded = error.what
        if isinstance(error, TransientError):
            self._restart()
            return
        self.refusals.append(error.what)
        if "same checkpoint" in error.remedy or error.remedy == "load the DataFrame again":
            self._leaving |= set(_lost(error.what))
            if match := re.match(r"(\S+) was renamed to (\S+)", error.what):
                self.replica.rename(*match.groups())
            self._restart(**dict(re.findall(r"same checkpoint and (\w+)=(\w+)", error.remedy)))
        elif "start over" in error.remedy:
            self._start_over()
        else:
            raise error

    def _start_over(self) -> None:
        self.started_over += 1
        self._driver.stop()
        drop_slots(self._pg)
        self.replica, self._repeats = Replica(heals=True), None
        options = {name: value for name, value in self._options.items() if name not in ("url", "slot")}
        self._driver = self._drive(**options)

    def was_told(self, *refusals: str, started_over: int = 0, gaps: Collection[str] = ()) -> None:
        """Just these refusals have come, and so often it had to start over.

        Of tables in ``gaps`` the stream had missed changes, so that some did not fit until their rows came again.
        """
        assert len(self.refusals) == len(refusals), self.refusals
        for text, expected in zip(self.refusals, refusals, strict=True):
            assert expected in text, self.refusals
        assert self.started_over == started_over, self.refusals
        assert self.replica.healed.keys() <= {_named(table) for table in gaps}, self.replica.healed

    # --- what the sink has --------------------------------------------------------------------------------------------

    def equals(self, *tables: str, **selected: str) -> None:
        """The sink comes to have the rows of these tables, or of a SELECT, and of no others, when all has come."""
        sources = {name: name for name in tables}
        sources |= {name: f"({select}) AS selected" for name, select in selected.items()}
        sources = {_named(name): source for name, source in sources.items()}
        self.follow()

        def is_equal() -> bool:
            if not self._differences(sources) and not self._leaving:
                return True
            self.step()
            return False

        try:
            wait_until(is_equal, 20)
        except AssertionError:
            raise AssertionError(f"{self._differences(sources)}; it was told {self.refusals}") from None
        if self._borrows:
            # What a remedy names is for what it was named for.
            self._restart()

    def _differences(self, sources: Mapping[str, str]) -> dict[str, Any]:
        """By table, what it has and the sink has not, and the other way round."""
        found: dict[str, Any] = dict.fromkeys(self.replica.filled - sources.keys(), "not expected")
        found |= {f"{name} misfits": change for name, change in self.replica.misfits.items()}
        for name, source in sources.items():
            there, here = rows_of(self._pg, source), self.replica.rows(name)
            if not self._says_columns:
                # Nothing has told the sink what the columns of its rows are now.
                there, here = (
                    _without_nulls(there),
                    _without_nulls(here, {column for row in there for column, _ in row}),
                )
            if there != here:
                found[name] = {"lacks": there - here, "has": here - there}
        return found


def _named(table: str) -> str:
    return table if "." in table else f"public.{table}"


def _lost(what: str) -> list[str]:
    """The tables that an error says have left."""
    match = re.search(r" has lost (.*); the stream has no changes", what)
    return [] if match is None else [name.partition(",")[0] for name in match[1].split("; ")]


def _without_nulls(
    rows: Counter[tuple[tuple[str, str | None], ...]], columns: set[str] | None = None
) -> Counter[tuple[tuple[str, str | None], ...]]:
    found: Counter[tuple[tuple[str, str | None], ...]] = Counter()
    for row, count in rows.items():
        found[tuple(v for v in row if v[1] is not None and (columns is None or v[0] in columns))] += count
    return found
