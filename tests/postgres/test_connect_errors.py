"""What a connection that failed is, by libpq's text: the class says what to do, the remedy how."""

from __future__ import annotations

import psycopg2
import pytest

from pg_cdc_source.errors import (
    ConnectError,
    PgCdcError,
    ServerFullError,
    ServerSetupError,
    TransientError,
)
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.connect_errors import connect_error

OPTIONS = parse_connection_options({"url": "host=db user=me password=wonderland dbname=shop"})


@pytest.mark.parametrize(
    ("text", "error", "remedy"),
    [
        ('FATAL:  password authentication failed for user "me"', ConnectError, "check user, password"),
        ("fe_sendauth: no password supplied", ConnectError, "check user, password"),
        (
            'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "me", SSL off',
            ConnectError,
            "set sslmode=verify-full",
        ),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "me", no encryption', ConnectError, "sslmode"),
        ("FATAL:  pg_hba.conf rejects connection for host", ConnectError, "pg_hba.conf"),
        ('FATAL:  permission denied for database "shop"', ConnectError, "GRANT CONNECT ON DATABASE shop TO me"),
        ('FATAL:  unrecognized configuration parameter "serch_path"', ConnectError, "connection option options"),
        ('FATAL:  permission denied to set parameter "log_statement"', ConnectError, "connection option options"),
        ("FATAL:  conversion between UTF8 and MULE_INTERNAL is not supported", ConnectError, "as UTF-8"),
        ('FATAL:  database "shop" does not exist', ConnectError, "database and role names"),
        ('FATAL:  role "me" is not permitted to log in', ConnectError, "database and role names"),
        ('could not translate host name "db" to address', ConnectError, "check the host name"),
        ("server does not support SSL, but SSL was required", ConnectError, "check certificates"),
        ('root certificate file "/none" does not exist', ConnectError, "check sslrootcert"),
        ('private key file "/key" has group or world access', ConnectError, "check sslrootcert, sslcert, sslkey"),
        ('definition of service "x" not found', ConnectError, "check the connection options"),
        ('invalid sslmode value: "x"', ConnectError, "check the connection options"),
        ("unsupported startup parameter: replication", ServerSetupError, "connect to PostgreSQL itself"),
        (
            "FATAL:  number of requested standby connections exceeds max_wal_senders",
            ServerSetupError,
            "max_wal_senders",
        ),
        ("FATAL:  permission denied to start WAL sender", ServerSetupError, "ALTER ROLE me REPLICATION"),
        ("FATAL:  must be superuser or replication role to start walsender", ServerSetupError, "REPLICATION"),
        ("FATAL:  sorry, too many clients already", ServerFullError, "max_connections"),
        ('FATAL:  too many connections for role "me"', ServerFullError, "CONNECTION LIMIT"),
        (
            "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
            ServerFullError,
            "max_connections",
        ),
        ("connection refused", TransientError, "check that the server runs"),
        (
            'could not translate host name "db" to address: Temporary failure in name resolution',
            TransientError,
            "check that the server runs",
        ),
        (
            "server closed the connection unexpectedly SSL SYSCALL error: EOF detected",
            TransientError,
            "check that the server runs",
        ),
        ("SSL negotiation: Connection reset by peer", TransientError, "check that the server runs"),
        ("SSL SYSCALL error: Connection timed out", TransientError, "check that the server runs"),
        ("SSL connection has been closed unexpectedly", TransientError, "check that the server runs"),
        ("SSL error: unexpected eof while reading", TransientError, "check that the server runs"),
        ("server sent an error response during SSL exchange", TransientError, "check that the server runs"),
        ("SSL error: record layer failure", TransientError, "check that the server runs"),
        ("SSL error: tlsv1 alert internal error", TransientError, "check that the server runs"),
        ("could not send SSL negotiation packet: Resource temporarily unavailable", TransientError, "server runs"),
        ('could not translate host name "db" to address: Try again', TransientError, "check that the server runs"),
        ('could not translate host name "db" to address: System error', TransientError, "server runs"),
        ('SSL error: certificate verify failed; FATAL: role "me" does not exist', ConnectError, "role names"),
        ("SSL error: certificate verify failed", ConnectError, "check certificates"),
    ],
)
def test_a_failed_connection_is_told_by_its_text(text: str, error: type[PgCdcError], remedy: str) -> None:
    found = connect_error(OPTIONS, OPTIONS.settings(), psycopg2.OperationalError(text))
    assert type(found) is error
    assert remedy in (found.remedy or "")


UNKNOWN_HOST = 'could not translate host name "pg-0" to address: Name or service not known\n'
NO_RESOLVER = 'could not translate host name "pg-0" to address: Temporary failure in name resolution\n'
PROMOTED = "see whether one is promoted"
SERVER_RUNS, HOST_NAME, ROLE_NAMES = "check that the server runs", "check the host name", "database and role names"


def said_of(host: str, text: str) -> str:
    return f'connection to server at "{host}" (10.0.0.{host[-1]}), port 5432 failed: {text}\n'


REFUSED = "Connection refused\n\tIs the server running on that host and accepting TCP/IP connections?"


@pytest.mark.parametrize(
    "text",
    [
        UNKNOWN_HOST + said_of("pg-1", "FATAL:  the database system is starting up"),
        UNKNOWN_HOST + said_of("pg-1", "FATAL:  the database system is shutting down"),
        UNKNOWN_HOST
        + said_of(
            "pg-1",
            "FATAL:  the database system is not yet accepting connections\n"
            "DETAIL:  Consistent recovery state has not been yet reached.",
        ),
        UNKNOWN_HOST + said_of("pg-1", "session is read-only"),
        UNKNOWN_HOST + said_of("pg-1", "server is in hot standby mode"),
        UNKNOWN_HOST + said_of("pg-1", "server is not in hot standby mode"),
        UNKNOWN_HOST + said_of("pg-1", REFUSED),
        said_of("pg-1", "session is read-only") + UNKNOWN_HOST,
        UNKNOWN_HOST
        + 'connection to server on socket "/run/.s.PGSQL.5432" failed: No such file or directory\n'
        + "\tIs the server running locally and accepting connections on that socket?\n",
        'could not parse network address "10.0.0.300": Name or service not known\n' + said_of("pg-1", REFUSED),
        said_of("pg-0", REFUSED) + said_of("pg-1", 'FATAL:  database "shop" does not exist'),
        # Two servers behind one name are told by their ports.
        'connection to server at "pg", port 5432 failed: session is read-only\n'
        'connection to server at "pg", port 5433 failed: SSL error: certificate verify failed\n',
    ],
)
def test_several_hosts_are_tried_again_where_one_of_them_may_let_in_later(text: str) -> None:
    found = connect_error(OPTIONS, OPTIONS.settings(), psycopg2.OperationalError(text))
    assert type(found) is TransientError
    assert found.what.endswith(" ".join(text.split()))
    assert found.remedy.startswith((SERVER_RUNS, "no server that lets transactions write was found"))


@pytest.mark.parametrize(
    ("text", "error", "remedies"),
    [
        # Each remedy is named, that of the class first.
        (UNKNOWN_HOST + said_of("pg-1", "session is read-only"), TransientError, [PROMOTED, HOST_NAME]),
        (NO_RESOLVER + said_of("pg-1", "session is read-only"), TransientError, [SERVER_RUNS, PROMOTED]),
        (
            said_of("pg-0", "FATAL:  MaxClientsInSessionMode: max clients reached - in Session mode max clients"),
            ServerFullError,
            ["let fewer tasks read"],
        ),
        (
            said_of("pg-0", "FATAL:  unsupported startup parameter in options: search_path"),
            ServerSetupError,
            ["a pooler does not pass settings on"],
        ),
        *(
            (said_of("pg-0", f"FATAL:  {text}"), error, [remedy])
            for text, error, remedy in (
                ("(EMAXCONN) max client connections reached, limit: 200", ServerFullError, "let fewer tasks read"),
                (
                    "The maximum number of client connections to the proxy exceeded 100.",
                    ServerFullError,
                    "let fewer tasks read",
                ),
                ("Timed-out waiting to acquire database connection", ServerFullError, "let fewer tasks read"),
                (
                    "Feature not supported: RDS Proxy currently doesn't support streaming replication mode",
                    ServerSetupError,
                    "a pooler does not pass replication on",
                ),
                (
                    "Feature not supported: RDS Proxy currently doesn't support the option geqo",
                    ServerSetupError,
                    "a pooler does not pass settings on",
                ),
                ("The password that was provided for the role me is wrong.", ConnectError, "check user, password"),
                ("Tenant or user not found", ConnectError, ROLE_NAMES),
                ('no such user: "me"', ConnectError, ROLE_NAMES),
                ("This RDS Proxy requires TLS connections", ConnectError, "set sslmode=verify-full"),
                (
                    "The IAM authentication failed because of too many competing requests.",
                    TransientError,
                    "let fewer tasks connect",
                ),
            )
        ),
        (UNKNOWN_HOST + UNKNOWN_HOST.replace("pg-0", "pg-1"), ConnectError, [HOST_NAME]),
        (
            UNKNOWN_HOST + said_of("pg-1", 'FATAL:  database "shop" does not exist'),
            ConnectError,
            [ROLE_NAMES, HOST_NAME],
        ),
        (
            said_of("pg-0", REFUSED) + said_of("pg-1", 'FATAL:  password authentication failed for user "me"'),
            ConnectError,
            ["check user, password", SERVER_RUNS],
        ),
        (
            said_of("pg-0", REFUSED) + said_of("pg-1", "FATAL:  sorry, too many clients already"),
            ServerFullError,
            ["let fewer tasks read", SERVER_RUNS],
        ),
    ],
)
def test_the_remedies_for_several_hosts_are_all_named(text: str, error: type[PgCdcError], remedies: list[str]) -> None:
    found = connect_error(OPTIONS, OPTIONS.settings(), psycopg2.OperationalError(text))
    assert type(found) is error
    parts = found.remedy.split("; ")
    assert len(parts) == len(remedies)
    assert all(remedy in part for remedy, part in zip(remedies, parts, strict=True))


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        # A server that listens on one of its name's addresses.
        (
            'connection to server at "localhost" (::1), port 5432 failed: Connection refused\n'
            "\tIs the server running on that host and accepting TCP/IP connections?\n"
            'connection to server at "localhost" (127.0.0.1), port 5432 failed: FATAL:  password authentication failed '
            'for user "me"\n',
            "check user, password",
        ),
        # sslmode=prefer: with TLS and without.
        (
            said_of(
                "pg-0", 'FATAL:  no pg_hba.conf entry for host "10.0.0.9", user "me", database "shop", SSL encryption'
            )
            + said_of("pg-0", "server does not support unencrypted connections"),
            "pg_hba.conf",
        ),
    ],
)
def test_several_messages_of_one_host_are_one(text: str, remedy: str) -> None:
    found = connect_error(OPTIONS, OPTIONS.settings(), psycopg2.OperationalError(text))
    assert type(found) is ConnectError
    assert remedy in found.remedy


WITHOUT_TLS = 'FATAL:  no pg_hba.conf entry for host "10.0.0.9", user "me", database "shop", no encryption'


@pytest.mark.parametrize(
    ("with_tls", "error"),
    [
        ("FATAL:  sorry, too many clients already", ServerFullError),
        ("SSL SYSCALL error: EOF detected", TransientError),
        ("Connection reset by peer", TransientError),
        ("SSL error: certificate verify failed", ConnectError),
    ],
)
def test_a_server_that_wants_tls_is_told_by_its_answer_to_tls(with_tls: str, error: type[PgCdcError]) -> None:
    """By default (sslmode=prefer), libpq tries again without it, and that is refused whatever had happened."""
    text = said_of("pg-0", with_tls) + said_of("pg-0", WITHOUT_TLS)
    for said in (text, text + said_of("pg-1", "session is read-only")):
        found = connect_error(OPTIONS, OPTIONS.settings(), psycopg2.OperationalError(said))
        expected = error if said == text or issubclass(error, TransientError) else TransientError
        assert isinstance(found, expected)
        assert "pg_hba" not in found.remedy


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        (UNKNOWN_HOST, True),
        (UNKNOWN_HOST + UNKNOWN_HOST.replace("pg-0", "pg-1"), True),
        (said_of("pg-0", "FATAL:  password authentication failed"), False),
        (UNKNOWN_HOST + said_of("pg-1", "FATAL:  password authentication failed"), False),
    ],
)
def test_a_name_without_an_address_is_told_from_what_stays_so(text: str, is_it: bool) -> None:
    found = connect_error(OPTIONS, OPTIONS.settings(), psycopg2.OperationalError(text))
    assert isinstance(found, ConnectError)
    assert found.has_no_address == is_it


def test_a_remedy_does_without_names_that_the_options_do_not_have() -> None:
    error = psycopg2.OperationalError('FATAL:  permission denied for database "shop"')
    options = parse_connection_options({"url": "host=db"})
    assert (
        connect_error(options, options.settings(), error).remedy
        == "GRANT CONNECT ON DATABASE this database TO this role"
    )


def test_what_psycopg2_refuses_itself_is_in_the_settings() -> None:
    found = connect_error(OPTIONS, OPTIONS.settings(), psycopg2.ProgrammingError("something new"))
    assert type(found) is ConnectError
    assert found.remedy == "check the connection options"


@pytest.mark.parametrize(
    ("password", "text"),
    [
        ("wonderland", 'could not connect as "me" with "wonderland"'),
        ("wonder-1", "could not connect as me with wonder-1: no"),
        ("me-1", "could not connect as me with me-1"),
    ],
)
def test_no_password_is_in_the_error(password: str, text: str) -> None:
    given = {**OPTIONS.settings(), "password": password}
    assert password not in str(connect_error(OPTIONS, given, psycopg2.OperationalError(text)))


@pytest.mark.parametrize("password", ["authentication", "password", "m", "me", "me_too", "10", "5432", "pg_hba"])
def test_asterisks_do_not_tell_a_password_that_is_not_there(password: str) -> None:
    given = {"user": "me_too", "password": password, "port": "5432"}
    text = 'at "db" (10.0.0.1), port 5432: no pg_hba.conf entry; password authentication failed for user "me_too"'
    found = connect_error(OPTIONS, given, psycopg2.OperationalError(text))
    assert type(found) is ConnectError
    assert found.what.endswith(text)
