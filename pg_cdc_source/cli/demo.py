"""The command ``pg-cdc demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pg_cdc_source.cli.exits import failed, lacking_extra, leave_nothing_when_stopped
from pg_cdc_source.errors import PgCdcError


def demo(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    orders: Annotated[int, typer.Option(min=1_000, help="How many orders the shop starts with.")] = 60_000,
    seconds: Annotated[int, typer.Option(min=1, help="How long to mirror the shop's changes after the snapshot.")] = 15,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Leave the mirror's Delta tables in this directory.")
    ] = None,
) -> None:
    """Read a shop that keeps writing, copy it, mirror it into a lake, and verify both copies.

    Sums and a large table are read beside Spark's JDBC source, whose driver is fetched from Maven Central where this
    machine has none (PG_CDC_JDBC_JAR says where one is). One Spark action copies the shop's tables to Parquet at one
    point in time. A mirror then keeps Delta tables equal to them. The demo starts its own PostgreSQL server and Spark,
    and removes both when it ends. It exits with status 1 if a sum was not true, or a copy differs from PostgreSQL.
    """
    leave_nothing_when_stopped()
    try:
        from pg_cdc_source.demo.report import print_json, print_table
        from pg_cdc_source.demo.run import run

        result = run(orders, seconds, keep)
    except ModuleNotFoundError as error:
        raise lacking_extra(error, "demo") from None
    except PgCdcError as error:
        raise failed(error) from None
    except KeyboardInterrupt:
        typer.echo("stopped; nothing is left behind", err=True)
        raise typer.Exit(130) from None
    if json:
        print_json(result)
    else:
        print_table(result, keep)
    if not result.consistent:
        raise typer.Exit(1)
