"""What ``pg-cdc adopt`` refuses by what a checkpoint and a publication say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import Lsn, Member, Position, SlotIdentity, StreamOffset
from pg_cdc_source.stream.adoption import _require_idle, _require_sent

OFFSET = StreamOffset(SlotIdentity("1", 1, "shop", "s"), Lsn(10), (), 0, Position(Lsn(20)), members=())


@pytest.mark.parametrize(
    ("offset", "says"),
    [
        (replace(OFFSET, members=None), "release 0.1.0"),
        (replace(OFFSET, tables=("public.t",), done=0), "the first rows"),
        (replace(OFFSET, position=Position(Lsn(20), 7)), "a transaction"),
    ],
)
def test_what_the_old_server_still_has_to_give_is_refused(offset: StreamOffset, says: str) -> None:
    _require_idle(replace(OFFSET, tables=("public.t",), done=1))
    with pytest.raises(DefiniteError, match=says):
        _require_idle(offset)


@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        ("1 iudt 5", "2 iud 9", "leaves out truncates"),
        ("1 iudt 5/771r", "2 iudt 9/771", "has no row filter"),
        ("1 iudt 5/771", "2 iudt 9/771rc@0p81", "has a row filter"),
        ("1 iudt 5/771p8", "2 iudt 9/771c@3p81", "has a column list"),
    ],
)
def test_a_publication_that_sends_something_else_is_refused(then: str, now: str, says: str) -> None:
    def send(then: str, now: str) -> None:
        (mark, _, entry), (mark_now, _, entry_now) = (text.rpartition(" ") for text in (then, now))
        was, member = (Member(1, "public.t", Lsn(1), given) for given in (entry, entry_now))
        _require_sent(mark, was, mark_now, member)

    with pytest.raises(DefiniteError, match=says):
        send(then, now)
    # Entries are others on every server.
    send("1 iudt 5/771rc@3p81i7", "2 iudt 9+10/812rc")
    send("1 iu 5", "2 iudt 9")
