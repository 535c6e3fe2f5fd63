"""Turn errors of PostgreSQL into errors of this package, split by what the operator has to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psycopg2

from pg_cdc_source.errors import (
    AccessError,
    DefiniteError,
    PgCdcError,
    QueryError,
    ServerFullError,
    ServerSetupError,
    SlotLostError,
    TransientError,
    UnrepresentableError,
)

# --- remedies where changes are lost: only a new snapshot makes the copy complete again -------------------------------

READ_ALL_AGAIN = "start over with a new checkpoint location, which reads the tables again (startFrom=snapshot)"
# Where nothing else has to be done before. A changelog has no row for a table that is emptied.
RESNAPSHOT = (
    "start the query again with the same checkpoint and onSlotLost=resnapshot, which makes a new slot and reads the "
    "tables again (not with changeFormat=changelog)"
)


# --- in a session ----------------------------------------------------------------------------------------------------

# Lost sessions, connections or locks that cannot be had now, serialization, a slot in use, disk or memory that is full:
# none of them has to stay so.
_TRANSIENT = ("08", "57P01", "57P02", "57P03", "57P05", "40001", "40P01", "55P03", "55006", "53100", "53200")

# Syntax, names of columns and functions that are missing or ambiguous, parameters, and what cannot be grouped, cast or
# compared.
_SYNTAX = "42601"
_OF_USERS_SQL = (_SYNTAX, "42P02", "42702", "42703", "42725", "42803", "42804", "42846", "42883", "42P20")

# Text that cannot be converted. The message names the encoding that it is in, which is UTF8 for the user's own SQL.
_NO_TEXT = ("22P05", "22021")
_ENCODING = re.compile('"([A-Z0-9_]+)"')

# Functions of the server whose SQLSTATEs have other meanings elsewhere. Texts may be in any language.
# They refuse an invalidated slot: up to 15, from 16 and from 18 on.
_INVALIDATED_IN = ("StartLogicalReplication", "CreateDecodingContext", "ReplicationSlotAcquire")
# They look a publication up by its name.
_PUBLICATION_IN = ("get_publication_oid", "GetPublicationByName")
# It refuses to decode in recovery, before 16.
_DECODING_IN = "CheckLogicalDecodingRequirements"
_WAL_OPENED_IN = "WalSndSegmentOpen"
_PLUGIN_LOADED_IN = "StartupDecodingContext"


@contextmanager
def translated(doing: str, written: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a block whose psycopg2 errors become errors of this package. The arguments are as in ``translate``."""
    try:
        yield
    except psycopg2.Error as error:
        raise translate(error, doing, written) from None
    except UnicodeDecodeError as error:
        raise DefiniteError(
            f"{doing}: {error.object!r} is not UTF-8, and the database's encoding, SQL_ASCII, does not say what it is",
            remedy="rename what has this name: columns, tables and schemas need names in UTF-8",
        ) from None


def translate(error: psycopg2.Error, doing: str, written: Mapping[str, str] | None = None) -> PgCdcError:
    """The error of this package for an error of psycopg2.

    ``doing`` says what was tried, with the names of table, range or slot. ``written`` has, by option, what the user has
    written of the statement.
    """
    code: str | None = error.pgcode
    primary: str | None = error.diag.message_primary if code else None
    text = primary or " ".join(str(error).split())
    if code is None:
        return TransientError(f"{doing}: {text}")
    place = _place(error, written or {})
    return classified(code, text, doing, error.diag.source_function, place=place, hint=error.diag.message_hint)


def _place(error: psycopg2.Error, written: Mapping[str, str]) -> str:
    """Where in the user's SQL PostgreSQL has found the error; empty where it is not there.

    Only numbers: the SQL itself may hold a secret.
    """
    if error.diag.statement_position is None or error.cursor is None:
        return ""
    statement = error.cursor.query.decode()
    if not statement.isascii() and error.cursor.connection.info.parameter_status("server_encoding") == "SQL_ASCII":
        # Such a server counts bytes.
        return ""
    at = int(error.diag.statement_position) - 1
    for option, text in written.items():
        start = statement.rfind(text, 0, at + len(text))
        # A parser that expects more finds the parenthesis behind the text, which stands in the next line.
        if 0 <= start <= at <= start + len(text) + 1:
            before = text[: at - start].split("\n")
            line = f"line {len(before)}, " if "\n" in text else ""
            return f", at {line}character {len(before[-1]) + 1} of the option {option}"
    return ""


def classified(
    code: str, text: str, doing: str, source_function: str | None = None, *, place: str = "", hint: str | None = None
) -> PgCdcError:
    """The error of this package for an SQLSTATE, a message and a hint of the server.

    ``place`` says where in the user's SQL it is.
    """
    where = f"{doing}: {text} (SQLSTATE {code}){place}"
    with_hint = where + (f"\n  PostgreSQL's hint: {hint}" if hint else "")
    if code == "53300":
        return ServerFullError(where)
    if code.startswith(_TRANSIENT):
        return TransientError(with_hint)
    if (of_slot := _slot_error(code, where, source_function)) is not None:
        return of_slot
    if code == "42501":
        return _access_error(where, source_function)
    if code in ("42P01", "3F000"):
        remedy = "check the name; quote names that are not all lower case"
        if place.endswith(" of the option where"):
            remedy += "; columns of dbtable are qualified with its name alone, without the schema"
        return AccessError(with_hint, remedy=remedy)
    if code in _NO_TEXT and (encoding := _ENCODING.search(text)) and encoding[1] != "UTF8":
        return UnrepresentableError(
            where,
            remedy="the database has bytes that are no text in its own encoding, and PostgreSQL does not send them: "
            "correct the rows, leave the column out with the option columns, or read the bytes in a query, as "
            f"convert_to(column, '{encoding[1]}'); unrepresentable=null has no effect on them",
        )
    if code == _SYNTAX and place.endswith(" of the option query"):
        return QueryError(with_hint, remedy="check the option query, which is one SELECT (or VALUES, or TABLE)")
    # What PostgreSQL does not have is no matter of the server where the user's SQL asks for it, as WITH that writes.
    if code in _OF_USERS_SQL or code.startswith("22") or (code == "0A000" and place):
        return QueryError(
            with_hint, remedy="check the options columns, where and query; of a stream, the publication's row filters"
        )
    if code == "25006":
        return QueryError(with_hint, remedy="sessions of this format only read: leave out what writes")
    if code in ("53400", "0A000"):
        return ServerSetupError(where)
    if code == "57014":
        return DefiniteError(
            with_hint,
            remedy="run the action or start the query again. Somebody has cancelled the statement, as pg_repack does "
            "where it waits for a lock (--no-kill-backend)",
        )
    return DefiniteError(with_hint)


def _slot_error(code: str, where: str, source_function: str | None) -> PgCdcError | None:
    """The error of a function of the server's that decodes; None for that of any other."""
    if code == "42704" and source_function in _PUBLICATION_IN:
        # pgoutput's, before 18. It looks the publication up as of each change's own time, so it stays like this.
        return SlotLostError(
            f"{where}: the slot cannot decode changes that were made while there was no such publication",
            remedy=f"see that the publication is there, and {RESNAPSHOT}; or drop the slot, and {READ_ALL_AGAIN}",
        )
    if code == "55000" and source_function in _INVALIDATED_IN:
        # The slot was invalidated between this package's look at it and the server's own.
        return SlotLostError(
            f"{where}: it was given up by the server, and the changes since the checkpoint are gone",
            remedy=f"pg_replication_slots says why; {RESNAPSHOT}; or drop the slot, and {READ_ALL_AGAIN}",
        )
    if code == "58P01" and source_function == _WAL_OPENED_IN:
        # pg_replication_slots does not show it: the server itself does not know before it looks.
        return SlotLostError(
            f"{where}: the slot still holds that WAL, and the server does not have it any more, as after a crash",
            remedy=f"{RESNAPSHOT}; or drop the slot, and {READ_ALL_AGAIN}",
        )
    if code == "55000" and source_function == _DECODING_IN:
        # A standby does not show the setting of its primary.
        return ServerSetupError(
            where,
            remedy="set wal_level=logical, for a standby also on its primary, and restart PostgreSQL; from 19 on, it "
            "is enough for a standby that its primary has a logical slot",
        )
    if code == "42501" and source_function == _PLUGIN_LOADED_IN:
        # Only roles with pg_read_all_settings see the setting.
        return ServerSetupError(
            where, remedy="add pgoutput to output_plugin_libraries and reload the server's configuration"
        )
    if code == "0A000" and source_function == _DECODING_IN:
        # A stream checks for it before it begins; later it means a server that is about to be promoted.
        return TransientError(where)
    return None


def _access_error(where: str, source_function: str | None) -> AccessError:
    if source_function == "check_enable_rls":
        return AccessError(
            where,
            remedy="rows would be missing without a sign; read as a role with BYPASSRLS, or as the table's owner "
            "without FORCE ROW LEVEL SECURITY",
        )
    return AccessError(where, remedy="GRANT SELECT on it (and USAGE on its schema) to this role")
