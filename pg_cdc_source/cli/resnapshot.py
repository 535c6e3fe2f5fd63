"""The command ``pg-cdc resnapshot``."""

from __future__ import annotations

import contextlib
from json import dumps
from typing import Annotated

import typer
from psycopg2.extensions import connection as Session

from pg_cdc_source.cli.exits import failed
from pg_cdc_source.cli.given_options import ConnectionOption, Url, given_options
from pg_cdc_source.errors import START_OVER, AccessError, OptionError, PgCdcError, ServerSetupError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.names import QualifiedName, quoted
from pg_cdc_source.options.stream_options import INSERTS, Publications
from pg_cdc_source.postgres.catalog import find_relations, read_server
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.decoding_messages import MESSAGES_VERSION, emit_message
from pg_cdc_source.postgres.publication import read_publication
from pg_cdc_source.postgres.slot_checks import check_slot
from pg_cdc_source.postgres.slots import Slot, read_slot, wait_for_end_of_wal
from pg_cdc_source.protocol.decoding_messages import EVERY_TABLE, OWN_PREFIX, Asked, write_request


def resnapshot(
    url: Url,
    slot: Annotated[str, typer.Option(help="The slot of the stream that is to read the tables again.")],
    option: ConnectionOption = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="TABLE", help="Read this table again. May be repeated.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Read every table of the stream again.")] = False,
    publication: Annotated[
        str | None, typer.Option(help="The stream's publication.", show_default="the slot's name")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Ask a stream to read tables again, while it runs and without a new checkpoint.

    The request is a message in the WAL, at one exact place. The query that reads the slot then gives a truncate row of
    each table, the table's rows, and the changes after them. If the query does not run now, the request waits until
    it does.
    """
    if every == bool(table):
        raise typer.BadParameter("give --table (once or more) or --all, not both", param_hint="--table")
    given, name = given_options([*(option or []), f"url={url}"]), publication or slot
    try:
        with contextlib.closing(connect(parse_connection_options(given), "pg-cdc:resnapshot")) as session:
            given_names = (EVERY_TABLE,) if every else tuple(str(_parse_name(name)) for name in table or [])
            _require_primary(session, Asked(given_names, slot))
            found = _find_slot(session, slot)
            published = _find_published(session, name)
            tables = (EVERY_TABLE,) if every else _find_tables(session, name, published, table or [])
            written = emit_message(session, OWN_PREFIX, write_request(Asked(tables, slot)))
            # Aurora may say an LSN of another sequence.
            lsn = min(written, wait_for_end_of_wal(session))
    except PgCdcError as error:
        raise failed(error) from None
    if json:
        asked = {"slot": slot, "publication": name, "tables": tables, "lsn": str(lsn)}
        print(dumps(asked | {"active_pid": found.active_pid}))
        return
    print(f"asked at {lsn} for {'every table' if every else ', '.join(tables)}")
    when = (
        "No query reads the slot now: the request waits until one does."
        if found.active_pid is None
        else f"Its reader has pid {found.active_pid}."
    )
    print(
        f"The query that reads slot {slot} will give, for each table that it reads, a truncate row, the table's rows "
        f"and then its changes. A changelog ignores the request. {when}"
    )


def _require_primary(session: Session, asked: Asked) -> None:
    """Raise ServerSetupError where no message can be written, or none would be sent."""
    server = read_server(session)
    if server.version_num < MESSAGES_VERSION:
        raise ServerSetupError(
            "a stream is asked by a logical decoding message, which pgoutput sends from PostgreSQL 14 on",
            remedy=START_OVER,
        )
    if server.in_recovery:
        request = write_request(asked).replace("'", "''")
        raise ServerSetupError(
            "this server is a standby, and the request has to be written into the WAL",
            remedy="connect to the primary; for a slot of the standby, run there: SELECT pg_logical_emit_message(true, "
            f"'{OWN_PREFIX}', '{request}')",
        )


def _find_slot(session: Session, name: str) -> Slot:
    found = read_slot(session, name)
    if found is None:
        raise OptionError(f"slot {name} does not exist on this server", remedy="pg-cdc slots lists the server's slots")
    try:
        check_slot(found, session.info.dbname)
    except OptionError as error:
        # To drop a slot of somebody else is no remedy here.
        raise OptionError(error.what, remedy="name the stream's slot; pg-cdc slots lists the server's slots") from None
    return found


def _find_published(session: Session, name: str) -> set[int]:
    """The oids of the publication's tables, also of those whose inserts alone are sent."""
    found = [read_publication(session, Publications(each)) for each in (name, name + INSERTS)]
    if found[0] is None:
        raise OptionError(
            f"publication {quoted(name)} does not exist",
            remedy="name the stream's publication by --publication (the option publication of its query)",
        )
    return {table.relation.oid for one in found if one is not None for table in one.tables}


def _find_tables(session: Session, publication: str, published: set[int], names: list[str]) -> tuple[str, ...]:
    """The full names of tables that the publication has under these names."""
    relations = find_relations(session, [_parse_name(name) for name in names])
    missing = [str(relation) for relation in relations if relation.oid not in published]
    if missing:
        raise AccessError(
            f"publication {quoted(publication)} does not have {', '.join(missing)}",
            remedy="name tables of the stream; a partition is read under the name that it is published by: its own, or "
            "its root's. A table that is added by ALTER PUBLICATION … ADD TABLE is read without being asked for",
        )
    return tuple(dict.fromkeys(map(str, relations)))


def _parse_name(name: str) -> QualifiedName:
    try:
        return QualifiedName.parse(name, for_query="name a table", for_several="repeat --table for each of them")
    except OptionError as error:
        raise OptionError(f"--table {name!r}: {error.what}", remedy=error.remedy) from None
