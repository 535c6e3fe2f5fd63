"""How the keeper's errors reach its readers through pg_stat_activity.query."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.errors import DefiniteError, PgCdcError, SnapshotLostError, TransientError
from pg_cdc_source.snapshot.reasons import REASON_QUERY, error_in, to_reason

ENDED = SnapshotLostError(
    "the snapshot of this action has ended, because 5 later ones waited for readers too, and each takes two of the "
    "server's connections",
    remedy="run fewer actions at a time, read all tables of an action early (cache()), or raise the server's "
    "max_connections",
)


def shown(error: PgCdcError, size: int = 1 << 20) -> str:
    """What pg_stat_activity shows of the query, up to ``size`` bytes."""
    return (REASON_QUERY % (f"'{to_reason(error)}'", "'pgsnapshot:abc:1!'", 1, 2))[: size - 1]


@pytest.mark.parametrize(
    "error",
    [
        ENDED,
        TransientError("größer als \U0001f40d"),
        DefiniteError(""),
        DefiniteError('it\'s 100% "gone"\\', remedy="start\nagain"),
    ],
)
def test_an_error_survives_pg_stat_activity(error: PgCdcError) -> None:
    found = error_in(shown(error))
    assert (type(found), found.what, found.remedy) == (type(error), error.what, error.remedy)


@given(what=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), remedy=st.text())
def test_no_text_needs_quotes(what: str, remedy: str) -> None:
    remedy = remedy.encode(errors="ignore").decode()
    error = TransientError(what, remedy=remedy)
    literal = to_reason(error)
    assert not set("'\\") & set(literal)
    assert literal.isascii()
    found = error_in(shown(error))
    assert (found.what, found.remedy) == (what, error.remedy)


def test_a_long_error_fits_what_postgresql_keeps_of_a_query() -> None:
    writers = ", ".join(f"pid {pid} for 00:00:{pid % 60:02}.{pid * 7919 % 1000000}" for pid in range(4711, 4729))
    error = TransientError(
        "slot pgsnapshot_0123456789abcdef found no consistent point within 30 s, because it waits for every running "
        f"transaction that has written: {writers}",
        remedy="end them, or raise slotTimeout, or use consistentPoint=off (a snapshot without LSN)",
    )
    assert len(error.what) > 600
    assert error_in(shown(error, 1024)).remedy == error.remedy


@pytest.mark.parametrize("size", range(100, 400))
def test_an_error_that_was_cut_keeps_its_class_and_as_much_text_as_there_is(size: int) -> None:
    query = shown(ENDED, size)
    found = error_in(query)
    assert type(found) is SnapshotLostError
    if len(query) < size - 1:
        assert found.what == ENDED.what
        return
    text = found.what.removesuffix(" …")
    assert ENDED.what.startswith(text) or text == "the snapshot of this action could not be made or has ended"
    assert found.remedy in (ENDED.remedy, "the driver's standard error says why")


def test_text_is_shown_as_far_as_it_goes() -> None:
    found = error_in(shown(ENDED, 140))
    assert found.what.startswith("the snapshot of this action has ended, because 5 later")
    assert found.what.endswith(" …")


@pytest.mark.parametrize(
    "query", ["<command string not enabled>", "<insufficient privilege>", "", "SELECT 'SNAPSHOT_L"]
)
def test_a_hidden_error_points_to_the_log(query: str) -> None:
    found = error_in(query)
    assert type(found) is DefiniteError
    assert "standard error" in found.remedy
