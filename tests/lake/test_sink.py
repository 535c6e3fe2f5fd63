"""Which errors of a batch set tables aside, and which end the query."""

from __future__ import annotations

from typing import Any

import pytest
from ledgers import Rows

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.lake.sink import Sink
from pg_cdc_source.lake.targets import Targets

TARGETS = Targets.of("/lake/{table}", None)
A, B, C = "public.a", "public.b", "public.c"
LOST = "[TRANSIENT] the store does not answer"


def outcome(table: str, error: str | None = None) -> dict[str, Any]:
    """What became of a table in a batch."""
    rest: dict[str, Any] = {
        "rows": 1,
        "lsn": 10,
        "seq": 1,
        "commit_ts": None,
        "gone": [],
        "through": None,
        "is_within": False,
    }
    return {"table": table, "error": error, "version": None if error else 7, **rest}


class Lake:
    """Three tables, of which those that are ``unreadable`` cannot be read."""

    def __init__(self) -> None:
        self.unreadable: set[str] = set()
        self.read: list[str] = []
        self.ledger = Rows(TARGETS.template)
        self._sink = Sink(TARGETS, self.ledger, read=self._look)
        self._batches = 0
        self.apply(*map(outcome, (A, B, C)))

    def _look(self, table: str, version: int) -> None:
        assert version == 7
        self.read.append(table)
        if table in self.unreadable:
            raise OSError("no route to host")

    def apply(self, *outcomes: dict[str, Any]) -> dict[str, str]:
        """Run a batch; what is set aside behind it."""
        row = self._sink.apply("q", self._batches, lambda start: outcomes)
        self._batches += 1
        return dict(row.set_aside)


def test_a_bad_table_does_not_end_the_query_where_it_is_alone_in_its_batch() -> None:
    lake = Lake()
    assert lake.apply(outcome(A, LOST)) == {A: LOST}
    assert lake.read == [B]
    assert lake.apply(outcome(A, LOST), outcome(B)) == {A: LOST}


def test_a_lake_that_is_away_sets_nothing_aside() -> None:
    lake = Lake()
    lake.unreadable = {A, B, C}
    with pytest.raises(
        DefiniteError, match=r"no table of batch 1 could be written; public\.a: .*the store does not answer"
    ):
        lake.apply(outcome(A, LOST))
    assert lake.read == [B, C]
    assert len(lake.ledger.rows) == 1
    lake.unreadable = {B}
    assert lake.apply(outcome(A, LOST)) == {A: LOST}


def test_tables_that_are_set_aside_say_nothing_of_the_lake() -> None:
    lake = Lake()
    why = "c was changed by somebody else"
    assert lake.apply(outcome(C, why)) == {C: why}
    assert lake.read == []
    with pytest.raises(DefiniteError, match="no table of batch"):
        lake.apply(outcome(A, LOST), outcome(B, LOST))
    assert lake.read == []
