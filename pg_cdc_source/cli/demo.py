"""The command ``pg-cdc demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from pg_cdc_source.cli.exits import failed, lacking_extra, leave_nothing_when_stopped
from pg_cdc_source.errors import PgCdcError


def demo(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    orders: Annotated[int, typer.Option(min=1_000, help="How many orders the shop starts with.")] = 60_000,
    seconds: Annotated[int, typer.Option(min=1, help="How long to follow the shop's changes after the snapshot.")] = 15,
) -> None:
    """Copy a shop that keeps writing, follow its changes, and verify both copies.

    One Spark action copies the shop's tables to Parquet at one point in time. A stream then keeps Delta tables equal
    to them. The demo starts its own PostgreSQL server and Spark, and removes both when it ends. It exits with status 1
    if a copy differs from PostgreSQL.
    """
    try:
        from pg_cdc_source.demo.report import print_json, print_table
        from pg_cdc_source.demo.run import run
    except ModuleNotFoundError as error:
        raise lacking_extra(error, "demo") from None
    leave_nothing_when_stopped()
    try:
        result = run(orders, seconds)
    except PgCdcError as error:
        raise failed(error) from None
    (print_json if json else print_table)(result)
    if not result.consistent:
        raise typer.Exit(1)
