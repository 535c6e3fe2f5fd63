"""The command ``pg-cdc mirror``."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.text import Text

from pg_cdc_source.cli.exits import failed, lacking_extra, leave_nothing_when_stopped
from pg_cdc_source.cli.given_options import Url, given_options
from pg_cdc_source.cli.mirror_progress import Progress, line_of, newly_set_aside
from pg_cdc_source.cli.shown import shown
from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.options.given import connection_of
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.postgres.connection import connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from pg_cdc_source.lake.sink import Applied

# What has an argument or an option of its own, by its name in mirror(), in lower case.
_HAS_ITS_OWN = {
    **{name: f"--{name}" for name in ("tables", "slot", "target", "checkpoint", "format", "ledger", "mode", "deletes")},
    **{
        "url": "the argument URL",
        "once": "--once",
        "onschemachange": "--on-schema-change",
        "jsonas": "--json-as",
        "asstring": "--as-string",
        "numericas": "--numeric-as",
        "unrepresentable": "--unrepresentable",
        "interval": "--interval",
    },
    **{"autocompact": "--no-auto-compact", "on_batch": "mirror() in Python", "spark": "spark-submit"},
}

_LOOK_SECONDS = 0.5
_FINISH_SECONDS = 30.0


def mirror(
    url: Url,
    tables: Annotated[str, typer.Option(help="Which tables, as in the option tables: 'public.*'.")],
    slot: Annotated[str, typer.Option(help="The replication slot. It is created when it is missing.")],
    target: Annotated[str, typer.Option(help="Where each table goes, with {table} and perhaps {schema}.")],
    checkpoint: Annotated[str, typer.Option(help="The directory of Spark's checkpoint.")],
    format: Annotated[str, typer.Option(help="What the tables are: deltalake, delta or iceberg.")] = "deltalake",
    ledger: Annotated[
        str | None, typer.Option(help="Where the ledger is.", show_default="the target with _pgcdc for the table")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TABLE=]MODE",
            help="What the tables keep: merge, append or history. With a name, that table. May be repeated.",
            show_default="merge",
        ),
    ] = None,
    deletes: Annotated[str, typer.Option(help="With merge: remove deleted rows (hard) or mark them (soft).")] = "hard",
    on_schema_change: Annotated[
        str, typer.Option(help="Which changes of columns are taken over: evolve (all), additive or fail.")
    ] = "evolve",
    auto_compact: Annotated[
        bool, typer.Option("--auto-compact/--no-auto-compact", help="Write small files of a table together.")
    ] = True,
    json_as: Annotated[
        str, typer.Option(help="What json and jsonb are in the lake: string or variant (delta and iceberg).")
    ] = "string",
    as_string: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCHEMA.TABLE.COLUMN", help="A column that has PostgreSQL's text in the lake. May be repeated."
        ),
    ] = None,
    numeric_as: Annotated[
        str, typer.Option(help="What numeric without a precision is in the lake: string or decimal(p,s).")
    ] = "string",
    unrepresentable: Annotated[
        str, typer.Option(help="What a value becomes that the lake's type cannot hold: error (sets aside) or null.")
    ] = "error",
    once: Annotated[bool, typer.Option("--once", help="Take what is there, and end.")] = False,
    interval: Annotated[
        str, typer.Option(help="The least time between two batches, unless more waits than a batch may hold.")
    ] = "0s",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="A further option of pgcdc. May be repeated."),
    ] = None,
) -> None:
    """Keep tables of a lake equal to PostgreSQL's, all of them at one LSN.

    A terminal shows where all tables stand, and how many rows each of them took. Without a terminal, each line is a
    batch: the LSN at which all tables stand, how long ago it was committed, and the tables that changed.
    Ctrl-C ends it after the batch that runs, within 30 seconds; a second Ctrl-C ends it at once. The same command
    goes on from there.
    """
    try:
        from pg_cdc_source import mirror as start_mirror
    except ModuleNotFoundError as error:
        lacks_spark = (error.name or "").partition(".")[0] == "pyspark"
        raise lacking_extra(error, "spark" if lacks_spark else "mirror") from None
    leave_nothing_when_stopped()
    from pyspark.errors import PySparkException

    given = given_options(option or [])
    for name in given:
        if name.lower() in _HAS_ITS_OWN:
            raise typer.BadParameter(f"use {_HAS_ITS_OWN[name.lower()]} instead of {name}", param_hint="--option")
    batches: SimpleQueue[Applied] = SimpleQueue()
    try:
        # Spark would say it after a while, and with its own stack.
        parse_stream_options({**given, "url": url, "tables": tables, "slot": slot})
        _try_to_connect({**given, "url": url})
        spark = _session()
        query = start_mirror(
            spark,
            url=url,
            tables=tables,
            slot=slot,
            target=target,
            checkpoint=checkpoint,
            ledger=ledger,
            format=format,  # type: ignore[arg-type]
            mode=_modes(mode or []),
            deletes=deletes,  # type: ignore[arg-type]
            onSchemaChange=on_schema_change,  # type: ignore[arg-type]
            autoCompact=auto_compact,
            jsonAs=json_as,  # type: ignore[arg-type]
            asString=as_string or (),
            numericAs=numeric_as,
            unrepresentable=unrepresentable,  # type: ignore[arg-type]
            once=once,
            interval=interval,
            on_batch=batches.put,
            **given,
        )
    except PgCdcError as error:
        raise failed(error) from None
    except PySparkException as error:
        typer.echo(f"pg-cdc: {_reason(str(error))}", err=True)
        raise typer.Exit(1) from None
    try:
        is_stopped = _follow(query, batches)
        # It would say what the end interrupts.
        spark.sparkContext.setLogLevel("OFF")
        query.stop()
    finally:
        spark.stop()
    if is_stopped:
        typer.echo("stopped; the same command goes on from here", err=True)


def _modes(texts: Sequence[str]) -> dict[str, str]:
    """Modes by table, ``*`` for all others; one that is given twice ends the command."""
    modes: dict[str, str] = {}
    for text in texts:
        table, equals, mode = text.rpartition("=")
        if (table or "*") in modes:
            what = f"the mode of {table}" if equals else "the mode of all tables"
            raise typer.BadParameter(f"{what} is given twice", param_hint="--mode")
        modes[table or "*"] = mode
    return modes


def _try_to_connect(given: Mapping[str, str]) -> None:
    """Raise at once what Spark would say after a while. A server that is away is waited for, and that is said."""
    try:
        connect(connection_of(given), "pg-cdc:mirror").close()
    except TransientError as error:
        typer.echo(f"pg-cdc: {error.what}\n  It is tried again.", err=True)


def _session() -> SparkSession:
    from pyspark.sql import SparkSession

    # Workers run this interpreter, not the first python3 on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Spark's own bar would be drawn over the table.
    builder = SparkSession.builder.appName("pg-cdc mirror").config("spark.ui.showConsoleProgress", "false")
    spark = builder.getOrCreate()
    # What ends the query is printed without the log, which has 40 lines of stack. On a terminal, the log's lines would
    # be drawn over the table.
    spark.sparkContext.setLogLevel("OFF" if sys.stdout.isatty() else "ERROR")
    jvm: Any = spark.sparkContext._jvm
    for package in ("", ".runtime"):  # before and since Spark 4.1
        ends = f"org.apache.spark.sql.execution.streaming{package}.MicroBatchExecution"
        jvm.org.apache.logging.log4j.core.config.Configurator.setLevel(ends, "OFF")
    return spark


def _follow(query: StreamingQuery, batches: SimpleQueue[Applied]) -> bool:
    """Show each batch until the query ends, or until Ctrl-C; whether that was it. Raises the query's error."""
    stops: list[float] = []
    # An exception could interrupt a call into the JVM, and the next one might wait for ever.
    signal.signal(signal.SIGINT, lambda *_: stops.append(time.monotonic()))
    progress = Progress(datetime.now(timezone.utc))
    live = Live(auto_refresh=False) if sys.stdout.isatty() else None
    with live or contextlib.nullcontext():
        while True:
            # Asked first: what a query does before it ends is shown.
            has_ended = not query.isActive
            before = progress.last
            for batch in _waiting(batches):
                _show(batch, progress, live)
            is_idle = not query.status["isDataAvailable"]
            if live is not None:
                now = datetime.now(timezone.utc)
                progress.look(now, is_idle=is_idle)
                if has_ended and query.exception() is None:
                    progress.complete(now)
                live.update(progress.screen(now), refresh=True)
            is_between_batches = is_idle or progress.last is not before
            if has_ended or (stops and (is_between_batches or _is_impatient(stops))):
                break
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (error := query.exception()) is not None:
        typer.echo(f"pg-cdc: {_reason(str(error))}", err=True)
        raise typer.Exit(1)
    return bool(stops)


def _reason(text: str) -> str:
    """This package's own error in what Spark says of a failed query; all that it says where there is none."""
    found = re.search(
        r"pg_cdc_source(?:\.\w+)+: (\[[A-Z_]+\] .+?)(?=\n\s*SQLSTATE|\n===|\n\tat |\n\s*\n|\Z)", text, re.DOTALL
    )
    return found[1] if found else text


def _is_impatient(stops: Sequence[float]) -> bool:
    """Whether the batch that runs is not waited for any longer: the next start has to do it again."""
    return len(stops) > 1 or time.monotonic() > stops[0] + _FINISH_SECONDS


def _waiting(batches: SimpleQueue[Applied]) -> Iterator[Applied]:
    """The batches that have come, or that come within a moment."""
    with contextlib.suppress(Empty):
        yield batches.get(timeout=_LOOK_SECONDS)
        while True:
            yield batches.get_nowait()


def _show(batch: Applied, progress: Progress, live: Live | None) -> None:
    for found in newly_set_aside(progress.last, batch):
        line = shown(found, keeping="\n\t")
        if live is None:
            typer.echo(line, err=True)
        else:
            live.console.print(Text(line))
    progress.add(batch)
    if live is None:
        typer.echo(shown(line_of(batch, datetime.now(timezone.utc))))
