"""The command ``pg-cdc slots``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from json import dumps
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from pg_cdc_source.cli.exits import failed
from pg_cdc_source.cli.given_options import given_options
from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.slot_checks import undroppable
from pg_cdc_source.postgres.slot_creation import drop_slot
from pg_cdc_source.postgres.slots import Usage, read_usages


def slots(
    url: Annotated[str, typer.Argument(help="The server, as in the option url: a libpq URI or connection string.")],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", "-o", metavar="NAME=VALUE", help="A further option of the connection. May be repeated."
        ),
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Drop this slot. May be repeated.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before dropping slots.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List a server's logical replication slots and the WAL they retain, and drop slots.

    Slots named by --drop are dropped before the others are listed. If one of them is in use or does not exist, none is
    dropped.
    """
    names = list(dict.fromkeys(drop or []))
    given = given_options([*(option or []), f"url={url}"])
    try:
        with contextlib.closing(connect(parse_connection_options(given), "pg-cdc:slots")) as session:
            refused = undroppable(session, names)
            for error in refused:
                typer.echo(f"pg-cdc: {error}", err=True)
            if refused:
                raise typer.Exit(1)
            if names and not yes and sys.stdin.isatty():
                question = f"Drop {', '.join(names)}? The changes they retain cannot be read again."
                typer.confirm(question, abort=True, err=True)
            for name in names:
                drop_slot(session, name)
            (_print_json if json else _print_table)(read_usages(session), names)
    except PgCdcError as error:
        raise failed(error) from None


def _print_json(usages: Sequence[Usage], dropped: Sequence[str]) -> None:
    print(dumps({"dropped": dropped, "slots": [_as_json(usage) for usage in usages]}))


def _as_json(usage: Usage) -> dict[str, Any]:
    slot = usage.slot
    return {
        "name": slot.name,
        "database": slot.database,
        "plugin": slot.plugin,
        "active_pid": slot.active_pid,
        "application": usage.application,
        "running": usage.running,
        "wal_status": slot.wal_status,
        "invalidation": slot.invalidation,
        "confirmed_flush_lsn": None if slot.confirmed_flush is None else str(slot.confirmed_flush),
        "lag_bytes": usage.lag_bytes,
        "held_bytes": usage.held_bytes,
    }


def _print_table(usages: Sequence[Usage], dropped: Sequence[str]) -> None:
    # Redirected output is not cut to a width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 250)
    for name in dropped:
        console.print(f"dropped {name}")
    if not usages:
        console.print("The server has no logical slots.")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("slot", "database", "plugin", "runs", "used by", "WAL", "confirmed"):
        table.add_column(title, overflow="fold")
    for title in ("lag", "held"):
        table.add_column(title, justify="right")
    for usage in usages:
        # Users choose the names, which may look like markup.
        table.add_row(*map(Text, _cells(usage)))
    console.print(table)


def _cells(usage: Usage) -> tuple[str, ...]:
    slot = usage.slot
    wal_status = slot.wal_status if slot.invalidation is None else f"lost: {slot.invalidation}"
    return (
        slot.name,
        slot.database or "",
        slot.plugin or "",
        usage.running or "",
        "" if slot.active_pid is None else f"pid {slot.active_pid} ({usage.application or 'no name'})",
        wal_status or "",
        "" if slot.confirmed_flush is None else str(slot.confirmed_flush),
        *("" if count is None else decimal(count) for count in (usage.lag_bytes, usage.held_bytes)),
    )
