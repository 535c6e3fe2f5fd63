"""Which failed connections are tried again."""

from __future__ import annotations

from typing import Any

import pytest

from pg_cdc_source.errors import ConnectError, PgCdcError, TransientError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres import connection
from pg_cdc_source.postgres.connection import connect

OPTIONS = parse_connection_options({"url": "host=db user=me dbname=shop"})


def failure(*, has_no_address: bool) -> ConnectError:
    error = ConnectError("cannot connect")
    error.has_no_address = has_no_address
    return error


@pytest.mark.parametrize(
    ("error", "was_there", "is_retried"),
    [
        (TransientError("cannot connect"), False, True),
        (failure(has_no_address=True), True, True),
        (failure(has_no_address=True), False, False),
        (failure(has_no_address=False), True, False),
    ],
)
def test_a_name_without_an_address_is_tried_again_where_it_had_one(
    error: PgCdcError, was_there: bool, is_retried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0

    def once(*args: Any, **options: Any) -> str:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise error
        return "a session"

    monkeypatch.setattr(connection, "_connect_once", once)
    if is_retried:
        assert connect(OPTIONS, "test", retry_seconds=5, was_there=was_there) == "a session"
    else:
        with pytest.raises(ConnectError):
            connect(OPTIONS, "test", retry_seconds=5, was_there=was_there)
    assert attempts == (2 if is_retried else 1)


def test_it_is_transient_where_it_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(*args: Any, **options: Any) -> str:
        raise failure(has_no_address=True)

    monkeypatch.setattr(connection, "_connect_once", once)
    with pytest.raises(TransientError, match="cannot connect"):
        connect(OPTIONS, "test", retry_seconds=0.2, was_there=True)
