"""The command ``pg-cdc mirror``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated

import typer

from pg_cdc_source.cli.exits import failed, lacking_extra, leave_nothing_when_stopped
from pg_cdc_source.cli.given_options import given_options
from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.offsets import Lsn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from pg_cdc_source.lake.ledger import Ledger, LedgerRow

_LOOK_SECONDS = 1


def mirror(
    url: Annotated[str, typer.Argument(help="The server, as in the option url: a libpq URI or connection string.")],
    tables: Annotated[str, typer.Option(help="Which tables, as in the option tables: 'public.*'.")],
    slot: Annotated[str, typer.Option(help="The replication slot. It is created when it is missing.")],
    target: Annotated[str, typer.Option(help="Where each table goes, with {table} and perhaps {schema}.")],
    checkpoint: Annotated[str, typer.Option(help="The directory of Spark's checkpoint.")],
    format: Annotated[str, typer.Option(help="What the tables are: deltalake.")] = "deltalake",
    ledger: Annotated[
        str | None, typer.Option(help="Where the ledger is.", show_default="the target with _pgcdc for the table")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Take what is there, and end.")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="A further option of pgcdc. May be repeated."),
    ] = None,
) -> None:
    """Keep tables of a lake equal to PostgreSQL's, all of them at one LSN.

    Each line is a batch: the LSN at which all tables stand, how long ago it was committed, and the tables that changed.
    Ctrl-C ends it; the same command goes on where it was.
    """
    try:
        import pg_cdc_source
        from pg_cdc_source.lake.ledger import Ledger
        from pg_cdc_source.lake.targets import Targets
    except ModuleNotFoundError as error:
        raise lacking_extra(error, "mirror") from None
    leave_nothing_when_stopped()
    given = given_options(option or [])
    try:
        place = Targets.of(target, ledger).ledger
        spark = _session()
        query = pg_cdc_source.mirror(
            spark,
            url=url,
            tables=tables,
            slot=slot,
            target=target,
            checkpoint=checkpoint,
            ledger=ledger,
            format=format,  # type: ignore[arg-type]
            once=once,
            **given,
        )
    except PgCdcError as error:
        raise failed(error) from None
    try:
        _follow(query, Ledger(place))
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
    finally:
        query.stop()
        spark.stop()


def _session() -> SparkSession:
    from pyspark.sql import SparkSession

    # Workers run this interpreter, not the first python3 on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.appName("pg-cdc mirror").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _follow(query: StreamingQuery, ledger: Ledger) -> None:
    """Print a line for each batch, until the query ends."""
    shown: LedgerRow | None = None
    while True:
        has_ended = query.awaitTermination(_LOOK_SECONDS) or not query.isActive
        last = ledger.last(query=str(query.id))
        if last is not None and (shown is None or last.batch_id > shown.batch_id):
            _print(last, {} if shown is None else shown.tables, set() if shown is None else set(shown.set_aside))
            shown = last
        if has_ended:
            break


def _print(row: LedgerRow, before: Mapping[str, int], known: set[str]) -> None:
    changed = [name for name, version in row.tables.items() if before.get(name) != version]
    behind = ""
    if row.commit_ts is not None:
        behind = f", {max(0.0, (datetime.now(timezone.utc) - row.commit_ts).total_seconds()):.1f} s behind"
    shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    typer.echo(f"LSN {Lsn(row.lsn)}, batch {row.batch_id}{behind}: {shown or 'nothing changed'}")
    for table in sorted(set(row.set_aside) - known):
        typer.echo(f"{table} is set aside: {row.set_aside[table]}", err=True)
