"""The command ``pg-cdc``."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import sys
from collections.abc import Sequence
from enum import Enum
from json import dumps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit('pg-cdc needs more than the connector does: pip install "pg-cdc-source[demo]"') from None

from pg_cdc_source.errors import PgCdcError

if TYPE_CHECKING:
    from pg_cdc_source.postgres.slots import Usage

# Typer's own tracebacks show local variables, and with them passwords.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Read PostgreSQL into Spark: tables at exactly one point in time, and their changes from there."""


@app.command()
def demo(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    orders: Annotated[int, typer.Option(min=1_000, help="How many orders the shop starts with.")] = 60_000,
    seconds: Annotated[int, typer.Option(min=1, help="How long the shop is followed after the snapshot.")] = 15,
) -> None:
    """Copy a shop that keeps writing, follow it as a stream, and prove that both copies are right.

    One Spark action copies the shop into Parquet at one point in time; then a stream keeps Delta tables equal to it.
    Starts a PostgreSQL server of its own and Spark, and leaves neither behind. Exits with 1 when anything differs.
    """
    from pg_cdc_source.demo.run import print_json, print_table, run

    # py4j logs the calls that Ctrl-C interrupts, tracebacks and all.
    logging.getLogger().addHandler(logging.NullHandler())
    # Like Ctrl-C, so that the server and all files go.
    signal.signal(signal.SIGTERM, _exit)
    try:
        result = run(orders, seconds)
    except PgCdcError as error:
        typer.echo(f"pg-cdc: {error}", err=True)
        raise typer.Exit(1) from None
    (print_json if json else print_table)(result)
    if not result.consistent:
        raise typer.Exit(1)


@app.command()
def bench(
    only: Annotated[
        list[str] | None, typer.Option(help="Ask only this question, or those that begin so; may be repeated.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1_000, help="Rows of the wide table.", show_default="4000000")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Measured rounds.", show_default="5")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rows, one round: shows that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Directory for results.json and the pictures.")] = Path("benchmarks"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the connector beside its peers and beside what is possible, interleaved, in one run.

    Starts a PostgreSQL server of its own (from PG_CDC_TEST_BIN, if set) and Spark, and leaves neither behind. Peers
    that are not installed are named as missing. The numbers of --quick mean nothing.
    """
    try:
        from pg_cdc_source.bench import report, run
    except ModuleNotFoundError as error:
        typer.echo(f'pg-cdc: {error}; the benchmark needs more: pip install "pg-cdc-source[bench]"', err=True)
        raise typer.Exit(1) from None
    logging.getLogger().addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, _exit)
    try:
        names = run.chosen(only or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    try:
        found = run.run(names, run.scale(quick=quick, rows=rows, rounds=rounds), run.command())
    except PgCdcError as error:
        typer.echo(f"pg-cdc: {error}", err=True)
        raise typer.Exit(1) from None
    report.write(found, out)
    (report.print_json if json else report.print_tables)(found)


class _Format(str, Enum):
    PGSNAPSHOT = "pgsnapshot"
    PGCDC = "pgcdc"


@app.command()
def check(
    format_name: Annotated[
        _Format | None, typer.Argument(metavar="[pgsnapshot|pgcdc]", help="Check a read by this format.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="As in .option(); may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Find everything that would keep a snapshot or a stream from working, each with its remedy; change nothing.

    Without a format only the installation is looked at. Exits with 1 when anything is wrong.
    """
    try:
        from pg_cdc_source.cli import preflight
    except ImportError as error:
        typer.echo(f"pg-cdc: {error}\n  Remedy: install the package again, with all it needs", err=True)
        raise typer.Exit(1) from None
    given: dict[str, str] = {}
    for text in option or []:
        name, equals, value = text.partition("=")
        # No word of it is repeated: it may be a URL with a password, whose name was forgotten.
        if not equals or not re.fullmatch(r"[\w.]+", name):
            raise typer.BadParameter("it is not of the form NAME=VALUE", param_hint="--option")
        if name in given:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--option")
        given[name] = value
    if given and format_name is None:
        raise typer.BadParameter("options are those of a format: name it", param_hint="--option")
    findings = preflight.check(None if format_name is None else format_name.value, given)
    (preflight.print_json if json else preflight.print_text)(findings)
    if not preflight.is_right(findings):
        raise typer.Exit(1)


@app.command()
def slots(
    url: Annotated[str, typer.Argument(help="The server, as in the option url: a libpq URI or connection string.")],
    drop: Annotated[list[str] | None, typer.Option(help="Drop this slot; may be repeated.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before slots are dropped.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the logical replication slots of a server and the WAL that they hold; drop those that nobody needs.

    Either all that are named are dropped, or, where one is in use or does not exist, none. What is left is listed.
    """
    from pg_cdc_source.options.given import parse_connection_options
    from pg_cdc_source.postgres.connection import connect
    from pg_cdc_source.postgres.slots import read_usages, undroppable
    from pg_cdc_source.postgres.snapshots import drop_slot

    dropped = list(dict.fromkeys(drop or []))
    try:
        with contextlib.closing(connect(parse_connection_options({"url": url}), "pg-cdc:slots")) as session:
            refused = undroppable(session, dropped)
            for error in refused:
                typer.echo(f"pg-cdc: {error}", err=True)
            if refused:
                raise typer.Exit(1)
            if dropped and not yes and sys.stdin.isatty():
                typer.confirm(f"Drop {', '.join(dropped)}? What they hold cannot be read again.", abort=True, err=True)
            for name in dropped:
                drop_slot(session, name)
            (_print_slots_json if json else _print_slots)(read_usages(session), dropped)
    except PgCdcError as error:
        typer.echo(f"pg-cdc: {error}", err=True)
        raise typer.Exit(1) from None


def _print_slots_json(usages: Sequence[Usage], dropped: Sequence[str]) -> None:
    listed = [
        {
            "name": usage.slot.name,
            "database": usage.slot.database,
            "plugin": usage.slot.plugin,
            "active_pid": usage.slot.active_pid,
            "application": usage.application,
            "running": usage.running,
            "wal_status": usage.slot.wal_status,
            "invalidation": usage.slot.invalidation,
            "confirmed_flush_lsn": None if usage.slot.confirmed_flush is None else str(usage.slot.confirmed_flush),
            "lag_bytes": usage.lag_bytes,
            "held_bytes": usage.held_bytes,
        }
        for usage in usages
    ]
    print(dumps({"dropped": dropped, "slots": listed}))


def _print_slots(usages: Sequence[Usage], dropped: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    # Rows are not cut where nobody looks at them.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 250)
    for name in dropped:
        console.print(f"dropped {name}")
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("slot", "database", "plugin", "runs", "used by", "WAL", "confirmed"):
        table.add_column(title, overflow="fold")
    for title in ("lag", "held"):
        table.add_column(title, justify="right")
    for usage in usages:
        slot = usage.slot
        texts = (
            slot.name,
            slot.database or "",
            slot.plugin or "",
            usage.running or "",
            "" if slot.active_pid is None else f"pid {slot.active_pid} ({usage.application or 'no name'})",
            slot.wal_status if slot.invalidation is None else f"lost: {slot.invalidation}",
            "" if slot.confirmed_flush is None else str(slot.confirmed_flush),
            *("" if count is None else decimal(count) for count in (usage.lag_bytes, usage.held_bytes)),
        )
        # Names are the users', and may look like markup.
        table.add_row(*(Text(text or "") for text in texts))
    console.print(table if usages else "The server has no logical slots.")


def _exit(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
