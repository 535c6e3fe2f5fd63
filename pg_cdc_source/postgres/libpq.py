"""Functions of libpq that psycopg2 does not offer, called by ctypes.

They take the pointers that psycopg2 gives of its own objects: ``connection.pgconn_ptr`` and ``cursor.pgresult_ptr``. So
psycopg2 connects (TLS, SCRAM and everything else about logging in) and owns the connection. The functions are described
in the manual's chapter "libpq".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2

from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.postgres.server_errors import classified

# The functions are looked up in psycopg2's extension module and in the libraries that it depends on, so they are those
# of the libpq that it has loaded, wherever that lies. PyDLL keeps the interpreter's lock: releasing and taking it again
# would cost more than calls that do not wait. CDLL releases it for the calls that wait for the server.
_QUICK = ctypes.PyDLL(psycopg2._psycopg.__file__)
_WAITING = ctypes.CDLL(psycopg2._psycopg.__file__)

_connection, _result = ctypes.c_void_p, ctypes.c_void_p


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


# PQgetCopyData: the next message of a COPY, with 1 as the last argument without waiting. Its length; 0 where none has
# arrived, -1 at the end, -2 after an error. psycopg2's replication cursor calls it too, but confirms positions itself.
get_copy_data = _function(
    _QUICK, "PQgetCopyData", ctypes.c_int, _connection, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
)
# PQfreemem: frees the message that PQgetCopyData has allocated.
free_memory = _function(_QUICK, "PQfreemem", None, ctypes.c_void_p)
# PQconsumeInput: reads what the socket has without waiting; PQgetCopyData with 1 does not always read by itself.
consume_input = _function(_QUICK, "PQconsumeInput", ctypes.c_int, _connection)
# PQputCopyData and PQflush: send a message inside a COPY; this is how a client answers a walsender.
put_copy_data = _function(_WAITING, "PQputCopyData", ctypes.c_int, _connection, ctypes.c_char_p, ctypes.c_int)
flush = _function(_WAITING, "PQflush", ctypes.c_int, _connection)
# PQexec: runs a COPY without the cursor that psycopg2 would give its rows to.
execute = _function(_WAITING, "PQexec", _result, _connection, ctypes.c_char_p)
# PQprepare and PQdescribePrepared: what columns a statement gives, without planning it.
_prepare = _function(
    _WAITING,
    "PQprepare",
    _result,
    *(_connection, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p),
)
_describe_prepared = _function(_WAITING, "PQdescribePrepared", _result, _connection, ctypes.c_char_p)
# PQgetResult: how a COPY ended; NULL once there is nothing more.
get_result = _function(_WAITING, "PQgetResult", _result, _connection)
# PQresultStatus: an ExecStatusType, of which these are used (libpq-fe.h).
result_status = _function(_QUICK, "PQresultStatus", ctypes.c_int, _result)
COMMAND_OK = 1
COPY_OUT = 3

_clear = _function(_QUICK, "PQclear", None, _result)
_error_message = _function(_QUICK, "PQerrorMessage", ctypes.c_char_p, _connection)
_error_field = _function(_QUICK, "PQresultErrorField", ctypes.c_char_p, _result, ctypes.c_int)
_column_count = _function(_QUICK, "PQnfields", ctypes.c_int, _result)
_column_table_column = _function(_QUICK, "PQftablecol", ctypes.c_int, _result, ctypes.c_int)
_column_type = _function(_QUICK, "PQftype", ctypes.c_uint, _result, ctypes.c_int)
_column_modifier = _function(_QUICK, "PQfmod", ctypes.c_int, _result, ctypes.c_int)

# Addresses of the same functions, for the C accelerator to call.
GET_COPY_DATA, FREE_MEMORY, CONSUME_INPUT = (
    ctypes.cast(function, ctypes.c_void_p) for function in (get_copy_data, free_memory, consume_input)
)


@contextmanager
def cleared(result: int | None) -> Iterator[int | None]:
    """Free a result (PQclear) when the block ends."""
    try:
        yield result
    finally:
        _clear(result)


def sqlstate(result: int | None) -> str | None:
    """The SQLSTATE of a result that is an error; None where there is no result, or it comes from libpq itself."""
    return _field(result, "C") or None


def message(result: int | None) -> str:
    """The server's primary message in a result that is an error."""
    return _field(result, "M")


def _field(result: int | None, name: str) -> str:
    """A field of an error (PQresultErrorField) by its letter in the protocol; empty where it has none."""
    text: bytes | None = _error_field(result, ord(name)) if result else None
    return (text or b"").decode(errors="replace")


def error_of(pgconn: int, result: int | None, doing: str, otherwise: str) -> PgCdcError:
    """The error of this package for a failed result, or for the connection where the result does not say what failed.

    ``otherwise`` is the text where neither says anything.
    """
    code = sqlstate(result)
    if code is None:
        text = " ".join((_error_message(pgconn) or b"").decode(errors="replace").split())
        return TransientError(f"{doing}: {text or otherwise}")
    return classified(code, message(result), doing, _field(result, "R"), hint=_field(result, "H"))


def column_modifiers(cursor: Any) -> list[int]:
    """The type modifier (PQfmod) of each column of the rows that ``cursor`` has; -1 is none.

    psycopg2 shows only those of numeric, as precision and scale.
    """
    result = cursor.pgresult_ptr
    return [_column_modifier(result, i) for i in range(_column_count(result))]


def described(pgconn: int, statement: bytes, doing: str) -> list[tuple[int, int, int]]:
    """The columns that a statement would give: number in its table (0: none), type's oid, type modifier.

    The server parses the statement, which locks the tables that it names, and does not plan it. The unnamed prepared
    statement is replaced.
    """
    with cleared(_prepare(pgconn, b"", statement, 0, None)) as result:
        _expect_ok(pgconn, result, doing)
    with cleared(_describe_prepared(pgconn, b"")) as result:
        _expect_ok(pgconn, result, doing)
        return [
            (_column_table_column(result, i), _column_type(result, i), _column_modifier(result, i))
            for i in range(_column_count(result))
        ]


def _expect_ok(pgconn: int, result: int | None, doing: str) -> None:
    if result_status(result) != COMMAND_OK:
        raise error_of(pgconn, result, doing, "the server did not describe a statement")
