"""The command ``pg-cdc``."""

from __future__ import annotations

import logging
import signal
import sys
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


def _exit(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
