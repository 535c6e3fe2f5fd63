"""How a mirror gets on: a line for each batch, or a table that is drawn again and again on a terminal."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pg_cdc_source.offsets import Lsn

if TYPE_CHECKING:
    from pg_cdc_source.lake.sink import Applied

_MOST_NAMED = 5
# The rate on the screen is that of the batches of the last seconds, the last one at least.
_RATE_SECONDS = 5.0
# Between two batches Spark says for some tenths of a second that there is no data.
_IDLE_SECONDS = 1.0


class Progress:
    """What the batches since the start have done."""

    def __init__(self, now: datetime) -> None:
        self.last: Applied | None = None
        self.rows: Counter[str] = Counter()
        self._counted = deque([(now, 0)])
        self._idle_since: datetime | None = None
        self._complete_at: datetime | None = None

    def add(self, batch: Applied) -> None:
        """Count a batch."""
        self.last = batch
        self._idle_since = None
        self.rows.update(batch.rows)
        self._counted.append((batch.row.applied_at, self.rows.total()))
        self._forget(batch.row.applied_at)

    def look(self, now: datetime, *, is_idle: bool) -> None:
        """Note whether the query has nothing to work on. It has not before its first batch, which is being prepared."""
        self._idle_since = (self._idle_since or now) if is_idle and self.last is not None else None
        if self._idle_since is not None and (now - self._idle_since).total_seconds() >= _IDLE_SECONDS:
            self.complete(now)

    def complete(self, now: datetime) -> None:
        """Note that the tables have all that the stream had."""
        self._complete_at = now

    def seconds_behind(self, now: datetime) -> float | None:
        """The age of the newest commit that the tables have; 0.0 where they have all.

        What came since they had all cannot be older than that. None while the first rows are read.
        """
        if self.last is None:
            return None
        known = [at for at in (self.last.row.commit_ts, self._complete_at) if at is not None]
        return max(0.0, (now - max(known)).total_seconds()) if known else None

    def _forget(self, now: datetime) -> None:
        """Forget batches from before those that make the rate."""
        while len(self._counted) > 1 and (now - self._counted[1][0]).total_seconds() >= _RATE_SECONDS:
            self._counted.popleft()

    def rows_per_second(self, now: datetime) -> float:
        self._forget(now)
        since, rows = self._counted[0]
        seconds = (now - since).total_seconds()
        return (self.rows.total() - rows) / seconds if seconds > 0 else 0.0

    def screen(self, now: datetime) -> Group:
        """Return where all tables stand, and below it a line for each of them."""
        if self.last is None:
            return Group(Text("The first rows are being read"))
        row, behind = self.last.row, self.seconds_behind(now)
        facts = [f"LSN {Lsn(row.lsn)}", f"batch {row.batch_id}", f"{self.rows_per_second(now):,.0f} rows/s"]
        if behind is not None:
            facts.append(f"{behind:.1f} s behind" if behind else "up to date")
        return Group(Text("   ".join(facts)), self._tables())

    def _tables(self) -> Table:
        assert self.last is not None
        row = self.last.row
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("table", no_wrap=True)
        for title in ("last batch", "rows", "version"):
            table.add_column(title, justify="right", no_wrap=True)
        if row.set_aside:
            # The only one that gives way on a narrow terminal.
            table.add_column("set aside")
        for name in sorted({*row.tables, *row.set_aside}, key=lambda name: (name not in row.set_aside, name)):
            cells = [name, f"{self.last.rows.get(name, 0):,}", f"{self.rows[name]:,}", str(row.tables.get(name, ""))]
            why = Text(row.set_aside.get(name, "").partition("\n")[0], no_wrap=True, overflow="ellipsis")
            # Users choose the names, which may look like markup.
            table.add_row(*map(Text, cells), *[why] * bool(row.set_aside))
        return table


def line_of(batch: Applied, now: datetime) -> str:
    """Where all tables stand after a batch, and which of them it changed."""
    row, names = batch.row, sorted(batch.rows)
    # Without a change, its time is that of an older one.
    at = row.commit_ts if names else None
    behind = "" if at is None else f", {max(0.0, (now - at).total_seconds()):.1f} s behind"
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    changed = ", ".join(names[:_MOST_NAMED]) + more
    return f"LSN {Lsn(row.lsn)}, batch {row.batch_id}{behind}: {changed or 'nothing changed'}"


def newly_set_aside(before: Applied | None, batch: Applied) -> Iterator[str]:
    """A line for each table that a batch set aside."""
    known = {} if before is None else before.row.set_aside
    for table, why in sorted(batch.row.set_aside.items()):
        if table not in known:
            yield f"{table} is set aside: {why}"
