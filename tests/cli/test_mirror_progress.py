"""What ``pg-cdc mirror`` shows of batches, as lines and on a terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone

from rich.console import Console

from pg_cdc_source.cli.mirror_progress import Progress, line_of, newly_set_aside
from pg_cdc_source.lake.ledger import LedgerRow
from pg_cdc_source.lake.sink import Applied

START = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def batch(
    number: int,
    rows: Mapping[str, int],
    *,
    applied: float,
    committed: float | None = None,
    set_aside: Mapping[str, str] | None = None,
) -> Applied:
    versions = dict.fromkeys(rows, number)
    committed_at = None if committed is None else at(committed)
    return Applied(LedgerRow("q", number, 0x1A2B3C8, committed_at, at(applied), versions, set_aside or {}), rows)


def screen(progress: Progress, seconds: float, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(progress.screen(at(seconds)))
    return [line.strip() for line in out.getvalue().splitlines() if line.strip()]


def test_the_screen_has_a_line_for_each_table() -> None:
    progress = Progress(START)
    assert screen(progress, 1) == ["The first rows are being read"]
    progress.add(batch(0, {"public.a": 1000, "public.b": 20}, applied=2))
    assert screen(progress, 2)[0] == "LSN 0/1A2B3C8   batch 0   510 rows/s"
    progress.add(batch(1, {"public.b": 5, "public.a": 0}, applied=4, committed=3))
    head, titles, _, *tables = screen(progress, 4)
    assert head == "LSN 0/1A2B3C8   batch 1   256 rows/s   1.0 s behind"
    assert titles.split() == ["table", "last", "batch", "rows", "version"]
    assert [line.split() for line in tables] == [["public.a", "0", "1,000", "1"], ["public.b", "5", "25", "1"]]


def test_batches_are_forgotten_where_nobody_looks_at_the_screen() -> None:
    progress = Progress(START)
    for number in range(1_000):
        progress.add(batch(number, {"public.a": 10}, applied=number))
    assert len(progress._counted) < 10
    assert progress.rows_per_second(at(999)) == 10


def test_a_table_that_is_set_aside_stands_first_and_its_reason_is_cut() -> None:
    progress = Progress(START)
    why = "public.z has no key, so its rows cannot be told apart in the lake\n  Remedy: add a primary key"
    progress.add(batch(0, {"public.a": 1, "[b]": 1}, applied=1, set_aside={"public.z": why}))
    *_, first, second, third = screen(progress, 2, width=70)
    assert first.split()[:2] == ["public.z", "0"]
    assert first.endswith("has no key, so …")
    assert (second.split()[0], third.split()[0]) == ("[b]", "public.a")
    assert not any("Remedy" in line for line in screen(progress, 2, width=300))


def test_what_comes_after_a_pause_is_not_as_old_as_the_commit_before_it() -> None:
    progress = Progress(START)
    progress.add(batch(0, {"public.a": 1}, applied=2, committed=1))
    progress.look(at(2.5), is_idle=False)
    assert progress.seconds_behind(at(2.5)) == 1.5
    for seconds, shown in ((899, "898.0 s behind"), (899.5, "898.5 s behind"), (900, "up to date")):
        progress.look(at(seconds), is_idle=True)
        assert screen(progress, seconds)[0].endswith(f"   {shown}")
    progress.look(at(901), is_idle=False)
    assert screen(progress, 901)[0].endswith("   1.0 s behind")


def test_the_pause_between_two_batches_is_not_the_end_of_the_stream() -> None:
    progress = Progress(START)
    for seconds in (0, 1.9):
        progress.look(at(seconds), is_idle=True)
    progress.add(batch(0, {"public.a": 1}, applied=2))
    assert progress.seconds_behind(at(2)) is None
    progress.look(at(2.1), is_idle=True)
    progress.look(at(2.6), is_idle=False)
    progress.add(batch(1, {"public.b": 1}, applied=4))
    progress.look(at(4), is_idle=True)
    assert progress.seconds_behind(at(4)) is None
    progress.complete(at(4.1))
    assert progress.seconds_behind(at(4.1)) == 0


def test_rows_a_second_are_those_of_the_last_seconds() -> None:
    progress = Progress(START)
    for n in range(1, 21):
        progress.add(batch(n, {"public.a": 100}, applied=n))
        assert progress.rows_per_second(at(n)) == 100
    assert progress.rows_per_second(at(40)) == 0


def test_a_line_says_where_all_tables_stand_and_what_has_changed() -> None:
    many = {f"public.{name}": 1 for name in "gfedcba"}
    changed = "public.a, public.b, public.c, public.d, public.e and 2 more"
    assert line_of(batch(7, many, applied=4), at(5)) == f"LSN 0/1A2B3C8, batch 7: {changed}"
    assert line_of(batch(8, {"public.a": 1}, applied=4, committed=2), at(5)) == (
        "LSN 0/1A2B3C8, batch 8, 3.0 s behind: public.a"
    )
    # The last change is an older batch's, and may have been long ago.
    assert line_of(batch(9, {}, applied=4, committed=2), at(5)) == "LSN 0/1A2B3C8, batch 9: nothing changed"


def test_a_table_is_said_to_be_set_aside_once() -> None:
    first = batch(1, {}, applied=1, set_aside={"public.a": "why"})
    second = batch(2, {}, applied=2, set_aside={"public.a": "why", "public.b": "other"})
    assert list(newly_set_aside(None, first)) == ["public.a is set aside: why"]
    assert list(newly_set_aside(first, second)) == ["public.b is set aside: other"]
