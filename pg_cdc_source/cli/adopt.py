"""The command ``pg-cdc adopt``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from json import dumps
from typing import Annotated, Any

import typer

from pg_cdc_source.cli.exits import failed
from pg_cdc_source.cli.given_options import Url, given_options
from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.offsets import StreamOffset
from pg_cdc_source.options.stream_options import StreamOptions, parse_stream_options
from pg_cdc_source.spark.checkpoint import Checkpoint
from pg_cdc_source.stream.adoption import Adopted, Adoption


def adopt(
    url: Url,
    slot: Annotated[str, typer.Option(help="The slot of the stream. It is created if pg_upgrade has not kept it.")],
    checkpoint: Annotated[str, typer.Option(help="The directory of the query's checkpoint.")],
    publication: Annotated[
        str | None, typer.Option(help="The stream's publication.", show_default="the slot's name")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="A further option of the query. May be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before anything is changed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Let a stream or a mirror go on after pg_upgrade, without reading its tables again.

    Stop all writers, let the query read everything, and stop it. With the old server, this command then says whether
    all was read. Upgrade the server, run the command with the new one, start the query, and last the writers.
    """
    try:
        stored = Checkpoint(checkpoint, slot)
        options = _options(stored.offset, given_options([*(option or []), f"url={url}"]), slot, publication)
        with contextlib.closing(Adoption(stored.offset, options)) as adoption:
            # Before Spark 4.2, a start with the new server plans a batch of it, and then finds that it is another one.
            if stored.unfinished is None or not adoption.is_refused(stored.unfinished):
                stored.require_done()
            if adoption.is_of_this_server:
                _say_whether_all_is_read(stored, adoption.count_unread(), json=json)
                return
            found = adoption.find()
            if not json:
                _describe(stored, found)
            _warn_of_written(found)
            if not yes and sys.stdin.isatty():
                question = "Were all writers stopped before the query had read everything, and are they still?"
                typer.confirm(question, abort=True, err=True)
            adopted = adoption.carry_out(found)
        stored.replace(adopted.offset)
    except PgCdcError as error:
        raise failed(error) from None
    if json:
        print(dumps(_as_json(stored, adopted)))
    else:
        print(f"The query goes on from {adopted.offset.origin}, with the same checkpoint.")


def _say_whether_all_is_read(stored: Checkpoint, unread: int, *, json: bool) -> None:
    if json:
        print(dumps({"batch": stored.batch, "lsn": str(stored.offset.position.lsn), "unread": unread}))
    elif not unread:
        print(
            f"The stream has read everything, up to {stored.offset.position}. If no writers run, upgrade the server, "
            "and run this command again with the new one."
        )
    if unread:
        typer.echo(
            f"pg-cdc: the stream has not read {unread} transactions after {stored.offset.position}\n  Remedy: stop "
            "all writers, and let the query read everything (once=True) before it is stopped",
            err=True,
        )
        raise typer.Exit(1)


def _options(offset: StreamOffset, given: Mapping[str, str], slot: str, publication: str | None) -> StreamOptions:
    own = {"slot": slot, "tables": ",".join(member.name for member in offset.members or ())}
    if publication is not None:
        own["publication"] = publication
    return parse_stream_options({**given, **own})


def _describe(stored: Checkpoint, found: Adopted) -> None:
    was, now = stored.offset, found.offset
    others = {*found.again, *found.gone}
    print(f"checkpoint  batch {stored.batch}, read up to {was.position} of server {was.identity.system}")
    print(f"server      {now.identity.system}, from {now.origin} on")
    for title, tables in (
        ("go on", [member.name for member in now.members or () if member.name not in others]),
        ("come again", found.again),
        ("are gone", found.gone),
    ):
        if tables:
            print(f"{title:<11} {', '.join(tables)}")


def _warn_of_written(found: Adopted) -> None:
    if found.written:
        typer.echo(
            f"pg-cdc: {', '.join(found.written)}: rows were written on this server, as its statistics say. What was "
            f"committed before {found.offset.origin} is missing in the stream.\n  Remedy: if it is not only what the "
            "old server had, abort, and start over with a new checkpoint and slot",
            err=True,
        )


def _as_json(stored: Checkpoint, adopted: Adopted) -> Mapping[str, Any]:
    was, now = stored.offset, adopted.offset
    return {
        "batch": stored.batch,
        "was": {"system": was.identity.system, "lsn": str(was.position.lsn)},
        "now": {"system": now.identity.system, "lsn": str(now.origin)},
        "again": adopted.again,
        "gone": adopted.gone,
        "written": adopted.written,
    }
