"""The command ``pg-cdc slots``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from json import dumps
from typing import Annotated

import typer
from psycopg2.extensions import connection as Session
from rich.console import Console
from rich.live import Live

from pg_cdc_source.cli.exits import failed
from pg_cdc_source.cli.given_options import ConnectionOption, Url, given_options
from pg_cdc_source.cli.prometheus import exposition
from pg_cdc_source.cli.slot_table import as_json, slot_table
from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.slot_checks import undroppable
from pg_cdc_source.postgres.slot_creation import drop_slot
from pg_cdc_source.postgres.slot_metrics import SlotMetrics, read_metrics

SESSION = "pg-cdc:slots"


def slots(
    url: Url,
    option: ConnectionOption = None,
    drop: Annotated[list[str] | None, typer.Option(help="Drop this slot. May be repeated.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before dropping slots.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print Prometheus' text format.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")] = 2.0,
) -> None:
    """List a server's logical replication slots and the WAL they retain, and drop slots.

    Slots named by --drop are dropped before the others are listed. If one of them is in use or does not exist, none is
    dropped.
    """
    names = list(dict.fromkeys(drop or []))
    given = given_options([*(option or []), f"url={url}"])
    _refuse_together({"--drop": bool(names), "--watch": watch, "--prometheus": prometheus})
    _refuse_together({"--json": json, "--prometheus": prometheus})
    try:
        options = parse_connection_options(given)
        if watch:
            _watch(options, every, json=json)
            return
        with contextlib.closing(connect(options, SESSION)) as session:
            _drop(session, names, ask=not yes)
            found = read_metrics(session)
    except PgCdcError as error:
        raise failed(error) from None
    if prometheus:
        sys.stdout.write(exposition(found))
    elif json:
        _print_json(found, names)
    else:
        _print_table(found, names)


def _refuse_together(given: dict[str, bool]) -> None:
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise typer.BadParameter(f"{' and '.join(names)} do not go together")


def _drop(session: Session, names: Sequence[str], *, ask: bool) -> None:
    _require_droppable(session, names)
    if names and ask and sys.stdin.isatty():
        question = f"Drop {', '.join(names)}? The changes they retain cannot be read again."
        typer.confirm(question, abort=True, err=True)
        # A stream may have begun to use one meanwhile.
        _require_droppable(session, names)
    for i, name in enumerate(names):
        try:
            drop_slot(session, name)
        except PgCdcError:
            if i:
                typer.echo(f"pg-cdc: dropped {', '.join(names[:i])}", err=True)
            raise


def _require_droppable(session: Session, names: Sequence[str]) -> None:
    refused = undroppable(session, names)
    for error in refused:
        typer.echo(f"pg-cdc: {error}", err=True)
    if refused:
        raise typer.Exit(1)


def _watch(options: ConnectionOptions, every: float, *, json: bool) -> None:
    """Show the slots again and again until Ctrl-C, on a terminal in place; a session that is lost is opened again."""
    live = Live(auto_refresh=False) if sys.stdout.isatty() and not json else None
    shown = False
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            try:
                with contextlib.closing(connect(options, SESSION)) as session:
                    while True:
                        _show(read_metrics(session), live, json=json)
                        shown = True
                        time.sleep(every)
            except TransientError as error:
                if not shown:
                    raise
                typer.echo(f"pg-cdc: {error}", err=True)
                time.sleep(every)


def _show(found: Sequence[SlotMetrics], live: Live | None, *, json: bool) -> None:
    caption = f"{datetime.now():%H:%M:%S}, Ctrl-C ends"
    if live is not None:
        live.update(slot_table(found, caption), refresh=True)
    elif json:
        _print_json(found, ())
    else:
        _print_table(found, (), caption)
    sys.stdout.flush()


def _print_json(found: Sequence[SlotMetrics], dropped: Sequence[str]) -> None:
    print(dumps({"dropped": dropped, "slots": [as_json(metrics) for metrics in found]}))


def _print_table(found: Sequence[SlotMetrics], dropped: Sequence[str], caption: str | None = None) -> None:
    # Redirected output is not cut to a width.
    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 250)
    for name in dropped:
        console.print(f"dropped {name}")
    console.print(slot_table(found, caption))
