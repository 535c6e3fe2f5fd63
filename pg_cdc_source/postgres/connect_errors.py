"""Tell what a connection that failed is, and whether trying again may help, by the text that libpq has for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import psycopg2

from pg_cdc_source.errors import ConnectError, PgCdcError, ServerFullError, ServerSetupError, TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.libpq_keywords import SECRET_KEYWORDS
from pg_cdc_source.options.names import quoted
from pg_cdc_source.postgres.translated_messages import with_english


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
