"""What errors of the server become: the class says what to do, the remedy how."""

from __future__ import annotations

import psycopg2
import pytest

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
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.server_errors import classified, translated

OPTIONS = parse_connection_options({"url": "host=db user=me password=wonderland dbname=shop"})


@pytest.mark.parametrize(
    ("code", "text", "function", "error"),
    [
        ("08006", "gone", None, TransientError),
        ("57P01", "terminating connection due to administrator command", None, TransientError),
        ("55P03", "canceling statement due to lock timeout", None, TransientError),
        ("53300", "too many connections", None, ServerFullError),
        ("55006", "replication slot is active", None, TransientError),
        ("53100", "could not write to file: No space left on device", None, TransientError),
        ("53200", "out of shared memory", None, TransientError),
        ("42501", "permission denied for table t", None, AccessError),
        ("42501", "query would be affected by row-level security policy", "check_enable_rls", AccessError),
        ("42P01", "relation does not exist", None, AccessError),
        ("42703", "column does not exist", None, QueryError),
        ("22012", "division by zero", None, QueryError),
        (
            "22P05",
            'character with byte sequence 0x81 in encoding "WIN1252" has no equivalent in encoding "UTF8"',
            None,
            UnrepresentableError,
        ),
        ("22021", 'invalid byte sequence for encoding "EUC_JP": 0x81', None, UnrepresentableError),
        (
            "22P05",
            'character with byte sequence 0xe2 0x82 0xac in encoding "UTF8" has no equivalent in encoding "LATIN1"',
            None,
            QueryError,
        ),
        ("25006", "cannot execute UPDATE in a read-only transaction", None, QueryError),
        ("42704", 'publication "p" does not exist', "get_publication_oid", SlotLostError),
        ("42704", "Publikation »p« existiert nicht", "GetPublicationByName", SlotLostError),
        ("42704", 'type "p" does not exist', None, DefiniteError),
        ("55000", "can no longer get changes", "CreateDecodingContext", SlotLostError),
        ("55000", "something else", "ReadBuffer", DefiniteError),
        (
            "0A000",
            "logical decoding cannot be used while in recovery",
            "CheckLogicalDecodingRequirements",
            TransientError,
        ),
        (
            "55000",
            'logical decoding on standby requires "wal_level" >= "logical" on the primary',
            "CheckLogicalDecodingRequirements",
            ServerSetupError,
        ),
        ("42501", 'library "pgoutput" may not be used as an output plugin', "StartupDecodingContext", ServerSetupError),
        ("0A000", "not supported", None, ServerSetupError),
        ("53400", "all replication slots are in use", None, ServerSetupError),
        ("XX000", "internal error", None, DefiniteError),
        ("57014", "canceling statement due to user request", None, DefiniteError),
    ],
)
def test_an_error_of_the_server_is_told_by_its_sqlstate(
    code: str, text: str, function: str | None, error: type[PgCdcError]
) -> None:
    found = classified(code, text, "reading t", function)
    assert type(found) is error
    assert found.what.startswith(f"reading t: {text} (SQLSTATE {code})")


def test_a_lost_session_has_no_sqlstate_and_is_transient() -> None:
    with pytest.raises(TransientError, match="reading t: server closed the connection"), translated("reading t"):
        raise psycopg2.OperationalError("server closed\n\tthe connection")


def test_names_that_are_not_utf_8_are_a_definite_error() -> None:
    with pytest.raises(DefiniteError, match="is not UTF-8"), translated("reading t"):
        b"\xff".decode()
