"""A mirror whose process ends behind each commit to a table, and begins again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from driving import run
from lake import Lake, rows_of
from psycopg2.extensions import connection as Session
from watch import wait_until


class _Killed(BaseException):
    """Ends a batch as a killed process does."""


def breaking(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Have each batch end behind each of its commits, and the first one before them; a look that runs it to its end.

    What ends behind a commit has not begun the next one.
    """
    has_begun = False
    done: set[Any] = set()
    for name in ("apply", "empty", "add_files", "tell_apart"):
        whole = getattr(lake.kind, name)

        def broken(self: Any, step: Any, part: Any, whole: Any = whole) -> None:
            nonlocal has_begun
            assert (self._mark, step) not in done, "a step is done that was done"
            if has_begun:
                whole(self, step, part)
                done.add((self._mark, step))
            has_begun = True
            raise _Killed

        monkeypatch.setattr(lake.kind, name, broken)

    def step() -> object:
        try:
            return lake.step()
        except _Killed:
            lake.restart()
            return step()

    return step


def wait_for(lake: Lake, pg: Session, step: Callable[[], object]) -> None:
    """Run batches until the table has PostgreSQL's rows."""
    of_table = "attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped"
    ((names,),) = run(pg, f"SELECT array_agg(attname::text) FROM pg_attribute WHERE {of_table}")
    wait_until(lambda: [step(), lake.rows("t", names=names) == rows_of(pg, "t")][1])
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}
