"""The command ``pg-cdc``."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit('pg-cdc needs more than the connector does: pip install "pg-cdc-source[demo]"') from None

from pg_cdc_source.errors import PgCdcError

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
    from pg_cdc_source.demo import print_json, print_table, run

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


def _exit(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
