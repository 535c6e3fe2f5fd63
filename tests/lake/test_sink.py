"""Which errors of a batch set tables aside, and which end the query."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ledgers import Rows

from pg_cdc_source.errors import DefiniteError, OptionError
from pg_cdc_source.lake import sink as sink_module
from pg_cdc_source.lake.ledger import FORMAT, MODES, TEMPLATE, LedgerRow
from pg_cdc_source.lake.sink import Sink
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import Start
from pg_cdc_source.postgres.backoff import Backoff

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

    def _look(self, table: str) -> None:
        self.read.append(table)
        if table in self.unreadable:
            raise OSError("no route to host")

    def apply(self, *outcomes: dict[str, Any]) -> dict[str, str]:
        """Run a batch; what is set aside behind it."""
        row = self._sink.apply("q", self._batches, lambda start: outcomes, lambda lsn: False)
        self._batches += 1
        return dict(row.set_aside)


def test_a_bad_table_does_not_end_the_query_where_it_is_alone_in_its_batch() -> None:
    lake = Lake()
    assert lake.apply(outcome(A, LOST)) == {A: LOST}
    assert lake.read == [B]
    assert lake.apply(outcome(A, LOST), outcome(B)) == {A: LOST}


def test_a_new_table_that_has_another_ones_place_does_not_end_the_query() -> None:
    lake = Lake()
    (why,) = lake.apply(outcome('public."A"'), outcome(B)).values()
    assert 'one place for public.a and public."A": /lake/A' in why
    assert lake.apply(outcome(A)) == {'public."A"': why}
    assert lake.ledger.rows[-1].tables.keys() == {A, B, C}
    # Who has begun so has chosen the wrong target.
    sink = Sink(TARGETS, Rows(TARGETS.template))
    with pytest.raises(OptionError, match="one place for"):
        sink.apply("q", 0, lambda start: [outcome(A), outcome('public."A"')], lambda lsn: False)


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


def test_a_ledger_that_cannot_be_written_either_tells_of_the_lake(monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake()
    attempts = []
    whole = lake.ledger.append

    def failing(row: LedgerRow) -> None:
        attempts.append(row)
        if len(attempts) == 1:
            raise OSError("no route to host")
        whole(row)

    monkeypatch.setattr(lake.ledger, "append", failing)
    monkeypatch.setattr(sink_module, "_APPENDING", Backoff(0.0, attempts=2))
    # The store may be back by the next attempt, and the table would be set aside for nothing.
    with pytest.raises(OSError, match="no route"):
        lake.apply(outcome(A, LOST), outcome(B))
    attempts.clear()
    assert lake.apply(outcome(A, "[FOREIGN_WRITER] somebody else"), outcome(B)) == {A: "[FOREIGN_WRITER] somebody else"}
    assert len(attempts) == 2


def test_tables_that_are_set_aside_say_nothing_of_the_lake() -> None:
    lake = Lake()
    why = "c was changed by somebody else"
    assert lake.apply(outcome(C, why)) == {C: why}
    assert lake.read == []
    with pytest.raises(DefiniteError, match="no table of batch"):
        lake.apply(outcome(A, LOST), outcome(B, LOST))
    assert lake.read == []


# --- the ledger of a checkpoint ---------------------------------------------------------------------------------------


def apply(ledger: Rows, number: int, *, query: str = "q", targets: Targets = TARGETS, greatest: int = 10) -> LedgerRow:
    """Have a new process apply a batch that has changes of one table."""
    return Sink(targets, ledger).apply(query, number, lambda start: [outcome(A)], lambda lsn: greatest > lsn)


def test_a_checkpoint_does_not_go_on_in_a_lake_that_lacks_its_batches() -> None:
    ledger = Rows(TARGETS.template)
    with pytest.raises(DefiniteError, match=r"/lake/_pgcdc has no batch of this checkpoint, which is at batch 3") as no:
        apply(ledger, 3)
    assert "with the target, the format and the ledger that the checkpoint began with" in no.value.remedy
    assert ledger.rows == []
    for number in (0, 1):
        apply(ledger, number)
    with pytest.raises(DefiniteError, match="has the checkpoint's batches up to 1 alone, which is at batch 3"):
        apply(ledger, 3)
    assert [apply(ledger, number).batch_id for number in (1, 2, 2)] == [1, 2, 2]


@pytest.mark.parametrize(("number", "greatest"), [(1, 10), (2, 11)], ids=["earlier batches", "another last one"])
def test_a_checkpoint_that_is_older_than_the_ledger_has_no_batch_passed_over(number: int, greatest: int) -> None:
    ledger = Rows(TARGETS.template)
    for done in (0, 1, 2):
        apply(ledger, done)
    with pytest.raises(
        DefiniteError, match=rf"older than the ledger /lake/_pgcdc.*up to 2, to LSN 0/A: batch {number}"
    ):
        apply(ledger, number, greatest=greatest)
    assert len(ledger.rows) == 3


def test_a_first_batch_that_was_ended_before_its_row_comes_again() -> None:
    ledger = Rows(TARGETS.template)

    def killed(start: Start) -> list[dict[str, Any]]:
        raise OSError("killed")

    with pytest.raises(OSError, match="killed"):
        Sink(TARGETS, ledger).apply("q", 0, killed, lambda lsn: False)
    assert apply(ledger, 0).tables == {A: 7}


def test_a_ledger_of_tables_at_another_place_is_refused() -> None:
    ledger = Rows(TARGETS.template)
    apply(ledger, 0)
    other = Targets.of("/other/{table}", TARGETS.ledger)
    for query, number in (("q", 1), ("q", 0)):
        with pytest.raises(DefiniteError, match=r"is of tables at /lake/\{table\}, and not at /other/\{table\}"):
            apply(ledger, number, query=query, targets=other)
    assert len(ledger.rows) == 1
    # The same place, as a cluster wants it written.
    apply(ledger, 1, targets=Targets.of("file:///lake/{table}", "/lake/_pgcdc"))
    assert len(ledger.rows) == 2


def test_a_lake_that_was_moved_with_its_ledger_goes_on() -> None:
    ledger = Rows("/old/{table}")
    assert [apply(ledger, number).batch_id for number in (0, 1)] == [0, 1]
    assert ledger.said[TEMPLATE] == TARGETS.template


def test_a_ledger_says_what_its_tables_keep_now() -> None:
    ledger = Rows(TARGETS.template, modes="of before")
    for number, modes in enumerate(["now", "now", "later"]):
        Sink(TARGETS, ledger, modes=modes).apply("q", number, lambda start: [outcome(A)], lambda lsn: False)
    said = {TEMPLATE: TARGETS.template, FORMAT: ""}
    assert ledger.noted == [{**said, MODES: modes} for modes in ("now", "later")]


def test_a_ledger_is_of_one_format() -> None:
    """Delta's jar and delta-rs write the same ledger, and not the same tables."""
    ledger = Rows(TARGETS.template, format="deltalake")
    for number in (0, 1):
        Sink(TARGETS, ledger, format="deltalake").apply("q", number, lambda start: [outcome(A)], lambda lsn: False)
    with pytest.raises(DefiniteError, match="of tables that format=deltalake has written, and not delta") as refused:
        Sink(TARGETS, ledger, format="delta").apply("q", 2, lambda start: [outcome(A)], lambda lsn: False)
    assert refused.value.remedy.startswith("start with that format")
    assert len(ledger.rows) == 2


@pytest.mark.parametrize("seconds", [9, 11])
def test_a_driver_that_hung_while_another_went_on_writes_no_row(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Rows(TARGETS.template)
    sink = Sink(TARGETS, ledger)
    now = 1000.0
    monkeypatch.setattr(sink_module, "time", SimpleNamespace(time=lambda: now))
    sink.apply("q", 0, lambda start: [outcome(A)], lambda lsn: False)

    def hang(start: Start) -> list[dict[str, Any]]:
        nonlocal now
        now += seconds
        for number in (1, 2):
            apply(ledger, number)
        return [outcome(A)]

    if seconds > 10:
        with pytest.raises(DefiniteError, match="another driver of this mirror has applied batch 2 meanwhile"):
            sink.apply("q", 1, hang, lambda lsn: False)
        assert [row.batch_id for row in ledger.rows] == [0, 1, 2]
    else:
        # Nobody takes over so soon, so nobody looks.
        sink.apply("q", 1, hang, lambda lsn: False)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_ledger_that_has_a_bad_moment_gets_the_row_once(is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have taken the row, though it said that it had not."""
    ledger = Rows(TARGETS.template)
    append, failures = ledger.append, [OSError("a bad moment"), OSError("one more")]

    def failing(row: LedgerRow) -> None:
        if failures:
            if is_taken:
                append(row)
            raise failures.pop()
        append(row)

    monkeypatch.setattr(ledger, "append", failing)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    Sink(TARGETS, ledger).apply("q", 0, lambda start: [outcome(A)], lambda lsn: False)
    assert [row.batch_id for row in ledger.rows] == [0]


def test_a_ledger_that_cannot_be_written_ends_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Rows(TARGETS.template)

    def failing(row: LedgerRow) -> None:
        raise OSError("the store is away")

    monkeypatch.setattr(ledger, "append", failing)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(OSError, match="the store is away"):
        Sink(TARGETS, ledger).apply("q", 0, lambda start: [outcome(A)], lambda lsn: False)


def test_two_mirrors_do_not_have_one_ledger() -> None:
    ledger = Rows(TARGETS.template)
    apply(ledger, 0)
    with pytest.raises(DefiniteError, match="is that of another mirror, of the query q") as refused:
        apply(ledger, 0, query="other")
    assert "ledger=" in refused.value.remedy
    assert apply(ledger, 1).batch_id == 1
    # Nor does one that loads its first rows meanwhile.
    meanwhile = Rows(TARGETS.template)

    def load(start: Start) -> list[dict[str, Any]]:
        apply(meanwhile, 0)
        return [outcome(B)]

    sink = Sink(TARGETS, meanwhile)
    for _ in range(2):
        with pytest.raises(DefiniteError, match="is that of another mirror, of the query q"):
            sink.apply("other", 0, load, lambda lsn: False)
    assert meanwhile.queries() == {"q"}
    # Those that have shared one up to now go on.
    ledger.rows.append(replace(ledger.rows[-1], query="other"))
    assert apply(ledger, 2, query="other").batch_id == 2


class Both(Rows):
    """A ledger into which another mirror writes its row at the same time."""

    def append(self, row: LedgerRow) -> None:
        self.rows += [row, replace(row, query="q" if row.query == "other" else "other")]


def test_one_of_two_mirrors_goes_on_that_began_at_the_same_time() -> None:
    ledger = Both(TARGETS.template)
    # Also behind a start.
    for _ in range(2):
        with pytest.raises(DefiniteError, match="is that of another mirror, of the query other"):
            apply(ledger, 0, query="q")
    ledger = Both(TARGETS.template)
    assert [apply(ledger, number, query="other").batch_id for number in (0, 0, 1)] == [0, 0, 1]
