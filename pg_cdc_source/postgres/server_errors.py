"""Turn errors of PostgreSQL and of libpq into errors of this package, split by what the operator has to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg2

from pg_cdc_source.errors import (
    AccessError,
    ConnectError,
    DefiniteError,
    PgCdcError,
    QueryError,
    ServerFullError,
    ServerSetupError,
    SlotLostError,
    TransientError,
    UnrepresentableError,
)
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.libpq_keywords import SECRET_KEYWORDS
from pg_cdc_source.options.names import quoted
from pg_cdc_source.postgres.translated_messages import with_english

# --- while a session is opened ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a failed connection is, told by any of ``texts`` in libpq's message.

    ``remedy`` may name ``{role}`` and ``{database}``.
    """

    texts: tuple[str, ...]
    error: type[PgCdcError]
    remedy: str


_NO_ADDRESS = _Failure(
    ("could not translate host name",), ConnectError, "check the host name and the DNS of driver and executors"
)
_IN_SETTINGS = _Failure(
    ("of service", "service file", "invalid "), ConnectError, "check the connection options"
)  # what libpq finds wrong before it connects
_OTHERWISE = _Failure((), TransientError, "check that the server runs and that this host may reach it")

# Of every method that takes a password: "password authentication failed for user", "PAM authentication failed", ….
_REFUSED_LOGIN = "authentication failed"
# RDS Proxy's. The second one says what the first one does, and is over in a moment.
_REFUSED_BY_PROXY = "password that was provided for the role"
_BUSY_LOGIN = "too many competing requests"
# Of "the database system is shutting down".
_SHUTTING_DOWN = "system is shutting down"

NO_REPLICATION = (
    "a pooler does not pass replication on: connect to PostgreSQL itself (only pgsnapshot can do without, with "
    "consistentPoint=off)"
)

# What a server that wants TLS says of a connection without, as "no pg_hba.conf entry for host …, no encryption". The
# second one is of those before 14.
_WITHOUT_TLS = (", no encryption", ", SSL off")

# libpq gives no SQLSTATE for a failed connection, so texts decide, the first match first. An unknown one counts as
# transient and is tried again within the caller's bound.
_FAILURES = (
    _Failure((_BUSY_LOGIN,), _OTHERWISE.error, "let fewer tasks connect at a time"),
    _Failure(
        _WITHOUT_TLS,
        ConnectError,
        "check the server's pg_hba.conf; if it lets this role in with TLS only (hostssl), set sslmode=verify-full, or "
        "require",
    ),
    _Failure(
        (_REFUSED_LOGIN, "no password supplied", "pg_hba.conf", _REFUSED_BY_PROXY, "no credentials for the role"),
        ConnectError,
        "check user, password (or what gives it) and the server's pg_hba.conf",
    ),
    # "root certificate file … does not exist", "private key file … has group or world access".
    _Failure(
        ("certificate file", "private key file", "certificate revocation list"),
        ConnectError,
        "check sslrootcert, sslcert, sslkey and sslcrl: each process that connects reads these files, on the driver's "
        "host and on every executor",
    ),
    _Failure(
        # And the words of pgbouncer and Supavisor.
        (
            *("does not exist", "is not permitted to log in", "no such user", "no such database"),
            *("enant or user not found", "tenant/user"),
        ),
        ConnectError,
        "check the database and role names in the connection options",
    ),
    _Failure(("permission denied for database",), ConnectError, "GRANT CONNECT ON DATABASE {database} TO {role}"),
    _Failure(
        ("unrecognized configuration parameter", "permission denied to set parameter"),
        ConnectError,
        "check the settings in the connection option options",
    ),
    _Failure(
        ("conversion between",),
        ConnectError,
        "the server cannot send text of the database's encoding as UTF-8: read a copy of it in another encoding",
    ),
    # A resolver or a server that is away for a moment, whose connection ends while TLS is being agreed upon, too. These
    # stand in the same texts as what comes next. The resolver's own are those of glibc and of musl.
    _Failure(
        (
            *("Temporary failure in name", "Try again", "System error", "No address associated"),
            *("server closed the connection", "Connection reset", "could not send SSL negotiation packet"),
            *("SSL SYSCALL error", "SSL connection has been closed", "unexpected eof", "alert internal error"),
            # One that cannot start a process answers before TLS, and the text of that is not trusted.
            *("error response during SSL exchange", "record layer failure"),
        ),
        _OTHERWISE.error,
        _OTHERWISE.remedy,
    ),
    _NO_ADDRESS,
    _Failure(("requires TLS connections",), ConnectError, "set sslmode=verify-full, or require"),
    _Failure(
        ("certificate", "SSL", "channel binding"),
        ConnectError,
        "check certificates and connection options (sslmode, sslrootcert, …), where sslrootcert=system needs the "
        "environment variable SSL_CERT_FILE, with the path of the host's certificates",
    ),
    _IN_SETTINGS,
    _Failure(
        ("unsupported startup parameter: replication", "support streaming replication mode"),
        ServerSetupError,
        NO_REPLICATION,
    ),
    # pgbouncer 1.23 asks auth_query over a replication connection.
    _Failure(
        ("bouncer config error",),
        ServerSetupError,
        f"see the log of pgbouncer; {NO_REPLICATION}; or update pgbouncer, where it has an auth_query",
    ),
    # pgbouncer's words, and those of RDS Proxy.
    _Failure(
        ("unsupported startup parameter", "support command-line options", "support the option"),
        ServerSetupError,
        "a pooler does not pass settings on, as those in the connection option options, in currentSchema of a JDBC URL "
        "or in the environment (PGTZ, PGDATESTYLE, PGGEQO): leave them out, or connect to PostgreSQL itself",
    ),
    _Failure(
        ("max_wal_senders",),
        ServerSetupError,
        "raise max_wal_senders, or end walsenders that nobody needs (pg_stat_replication)",
    ),
    # The words of 16 and later, and of those before.
    _Failure(
        ("to start WAL sender", "to start walsender"),
        ServerSetupError,
        "ALTER ROLE {role} REPLICATION, or on a managed service what it has instead, see `pg-cdc check` (only "
        "pgsnapshot can do without, with consistentPoint=off)",
    ),
    _Failure(
        (
            *("too many connections", "too many clients", "remaining connection slots", "no more connections allowed"),
            # Supavisor's, and those of RDS Proxy.
            *("max clients reached", "max client connections reached", "Max client connections reached"),
            *("client connections to the proxy exceeded", "Rate of connection to proxy"),
            "waiting to acquire database connection",
        ),
        ServerFullError,
        "let fewer tasks read at a time, or raise max_connections, the role's or database's CONNECTION LIMIT, or the "
        "size of a pooler's pool",
    ),
    # As a standby has it, or a role or database with default_transaction_read_only.
    _Failure(
        ("session is read-only", "server is in hot standby mode"),
        _OTHERWISE.error,
        "no server that lets transactions write was found: see whether one is promoted, and set "
        "target_session_attrs=primary where role or database have default_transaction_read_only",
    ),
)
_ORDER = (*_FAILURES, _OTHERWISE)


def is_refused_login(error: psycopg2.Error) -> bool:
    """Whether the server has refused the password, as far as libpq's text tells."""
    text = with_english(str(error))
    return any(words in text for words in (_REFUSED_LOGIN, _REFUSED_BY_PROXY)) and _BUSY_LOGIN not in text


def is_shutting_down(error: PgCdcError) -> bool:
    """Whether a server has refused a session because it shuts down."""
    return _SHUTTING_DOWN in with_english(error.what)


def connect_error(options: ConnectionOptions, given: dict[str, str], error: psycopg2.Error) -> PgCdcError:
    """The error for a connection that failed. Values of secret keywords in ``given`` do not appear in it."""
    text = " ".join(str(error).split())
    otherwise = _IN_SETTINGS if isinstance(error, psycopg2.ProgrammingError) else _OTHERWISE
    # During a failover one host may have no address for a moment, and another one is not a primary yet. So a host that
    # may let in later decides; but a password that was refused is not to be tried on and on, which may lock a role out.
    is_refused = is_refused_login(error)
    failures = sorted(
        (_failure(said, otherwise) for said in _by_host(str(error))),
        key=lambda failure: (is_refused == issubclass(failure.error, TransientError), _ORDER.index(failure)),
    )
    remedy = "; ".join(dict.fromkeys(failure.remedy for failure in failures))
    what = f"cannot connect to PostgreSQL at {options.display()}: {_masked(text, given)}"
    names = {
        field: quoted(given[keyword]) if given.get(keyword) else otherwise
        for field, keyword, otherwise in (("role", "user", "this role"), ("database", "dbname", "this database"))
    }
    found = failures[0].error(what, remedy=remedy.format(**names))
    if isinstance(found, ConnectError):
        found.has_no_address = failures[0] is _NO_ADDRESS
    return found


def _failure(text: str, otherwise: _Failure) -> _Failure:
    text = with_english(text)
    return next((found for found in _FAILURES if any(words in text for words in found.texts)), otherwise)


# What libpq says of each host of a list begins with one of these: fe-connect.c, PQconnectPoll and emitHostIdentityInfo.
_OF_HOST = re.compile(
    r"^(?:connection to server (?:at|on socket)|could not translate host name|could not parse network address)"
    r' "([^"]*)"(?: \([^)]*\))?(?:, port (\d+))?',
    re.MULTILINE,
)


def _by_host(text: str) -> list[str]:
    """libpq's message, split by host where it tells of several.

    A host's addresses are not told apart: a server may listen on one of them. By default (sslmode=prefer), an attempt
    without TLS follows one with it that failed, and a server that wants TLS refuses it whatever had happened before.
    """
    begins = list(_OF_HOST.finditer(text))
    ends = [*(begin.start() for begin in begins[1:]), len(text)]
    by_host: dict[tuple[str | None, ...], list[str]] = {}
    for begin, end in zip(begins, ends, strict=False):
        by_host.setdefault(begin.groups(), []).append(text[begin.start() : end])
    if not by_host:
        return [text]
    telling = {host: [said for said in all_of_it if not _is_without_tls(said)] for host, all_of_it in by_host.items()}
    return ["".join(telling[host] or all_of_it) for host, all_of_it in by_host.items()]


def _is_without_tls(text: str) -> bool:
    return "pg_hba.conf" in text and any(words in text for words in _WITHOUT_TLS)


_WORD = re.compile(r"[^\W\d]+(?:\.[^\W\d]+)*")


def _masked(text: str, given: Mapping[str, str]) -> str:
    """``text`` with asterisks for secrets, but where these would tell a secret that is not there.

    So a secret that may be a word of libpq's is one only in quotes, and one within a name or a number, or within what
    is shown anyway, is none.
    """
    shown = {value for keyword, value in given.items() if value and keyword not in SECRET_KEYWORDS}
    secrets = {value for keyword, value in given.items() if value and keyword in SECRET_KEYWORDS} - shown

    def pattern(value: str) -> str:
        if value in secrets and _WORD.fullmatch(value):
            return rf"""(?<=["'=]){re.escape(value)}(?=["'])"""
        return rf"(?<!\w)(?<!\w\.){re.escape(value)}(?!\w|\.\w)"

    longest_first = sorted(shown | secrets, key=len, reverse=True)
    found = re.compile("|".join(map(pattern, longest_first)))
    return found.sub(lambda match: "***" if match[0] in secrets else match[0], text) if secrets else text


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
