"""What the demo has found: as tables on the terminal, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from pg_cdc_source.demo.mirror import MirrorResult
from pg_cdc_source.demo.side_by_side import ReaderResult
from pg_cdc_source.demo.snapshot import SnapshotResult


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo found. ``readers`` are ``pgsnapshot`` and, where its driver was to be had, Spark's JDBC source."""

    readers: tuple[ReaderResult, ...]
    snapshot: SnapshotResult
    mirror: MirrorResult

    @property
    def consistent(self) -> bool:
        ours = self.readers[0]
        return ours.true_sums == ours.sums and self.snapshot.consistent and self.mirror.consistent


def print_json(result: Result) -> None:
    print(json.dumps({**asdict(result), "consistent": result.consistent}))


def print_table(result: Result, lake: Path | None) -> None:
    """Print it for people. ``lake`` is where the mirror's tables are; None: they are removed."""
    console = Console(highlight=False)
    _print_readers(console, result.readers)
    _print_snapshot(console, result.snapshot)
    _print_mirror(console, result.mirror)
    if lake is None:
        console.print("The tables are removed; with --keep DIRECTORY, pg-cdc demo leaves them there.")
    else:
        where = f'The tables are in {lake}; mirror_at(spark, "{lake}/_pgcdc") reads them.'
        console.print(where, markup=False, soft_wrap=True)


def _print_readers(console: Console, readers: tuple[ReaderResult, ...]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("read by")
    table.add_column("sums that were true", justify="right")
    table.add_column(f"time for {readers[0].rows:,} rows", justify="right")
    for r in readers:
        colour = "green" if r.true_sums == r.sums else "bold red"
        table.add_row(r.reader, f"[{colour}]{r.true_sums} of {r.sums}[/]", f"{r.seconds:.1f} s")
    console.print(table)
    console.print(
        "Each sum is of all customers' balances, while orders move money from one to another: it never changes."
    )
    if len(readers) == 1:
        console.print("Spark's JDBC source is left out: its driver is not here, and Maven Central did not answer.")


def _print_snapshot(console: Console, result: SnapshotResult) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("snapshot")
    for title in ("rows", "MB", "ranges"):
        table.add_column(title, justify="right")
    table.add_column("LSN")
    table.add_column("copy and source")
    for t in result.tables:
        table.add_row(
            f"shop.{t.table}",
            f"{t.rows:,}",
            f"{t.source_bytes / 1e6:,.1f}",
            str(t.ranges),
            ", ".join(t.lsns),
            _verdict(t.equals_source),
        )
    console.print(table)
    console.print(
        f"One Spark action copied {sum(t.rows for t in result.tables):,} rows in {result.seconds:.1f} s;\n"
        f"meanwhile the shop took {result.orders_placed_meanwhile:,} orders."
    )
    _print_broken_rules(console, result.broken_rules)
    if result.consistent:
        console.print(f"[green]Every row is as it was at {result.lsn}, and the shop's books balance.[/]")


def _print_mirror(console: Console, result: MirrorResult) -> None:
    end, meanwhile = result.at_the_end, result.meanwhile
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("mirror")
    for title in ("rows", "changes"):
        table.add_column(title, justify="right")
    table.add_column("Delta table and source")
    for t in end.tables:
        table.add_row(f"shop.{t.table}", f"{t.rows:,}", f"{t.changes:,}", _verdict(t.equals_source))
    console.print(table)
    console.print(
        f"A mirror took {result.first_rows:,} rows of its own snapshot in {result.first_seconds:.1f} s,\n"
        f"then {result.changes:,} changes ({result.changes_per_second:,.0f} a second) in {result.batches} batches;\n"
        f"meanwhile the shop took {result.orders_placed_meanwhile:,} orders. Changes had waited for the snapshot,\n"
        f"so the Delta tables were {result.median_seconds_behind:.1f} s behind"
        f" (median; at most {result.most_seconds_behind:.1f} s),\n"
        f"and complete {result.drain_seconds:.1f} s after the last order."
    )
    _print_broken_rules(console, meanwhile.broken_rules)
    if not meanwhile.broken_rules:
        console.print(f"[green]At {meanwhile.lsn}, while orders came in, the shop's books balance in the lake.[/]")
    colour = "green" if end.takings == end.takings_in_lake else "bold red"
    source, lake = (f"{Decimal(takings):,}" for takings in (end.takings, end.takings_in_lake))
    console.print(
        f"[{colour}]At {end.lsn}, after the last order, orders joined with their items come to\n"
        f"{source} in PostgreSQL, {lake} in the lake.[/]"
    )


def _verdict(equal: bool) -> str:
    return "[green]equal[/]" if equal else "[bold red]differ[/]"


def _print_broken_rules(console: Console, rules: tuple[str, ...]) -> None:
    for rule in rules:
        console.print(f"[bold red]The copy breaks a rule of the shop: {rule}.[/]")
