"""What a look at the publication is compared with, in one process; without a server."""

from __future__ import annotations

from typing import Any, cast

import pytest
from given_options import STREAM

from pg_cdc_source.offsets import Lsn, Member
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.stream.tables import members
from pg_cdc_source.stream.tables.publication_watch import PublicationWatch

MARK = "90 iudt 70"


def root(entry: str) -> Member:
    return Member(11, "public.r", Lsn(5), entry)


def test_partitions_are_new_since_the_last_look_that_found_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def find(session: object, oid: int, earlier: object, seconds: float) -> None:
        asked.append(str(earlier))

    monkeypatch.setattr(members, "find_filled_partition", find)
    watch = PublicationWatch(parse_stream_options(STREAM), cast(Any, None))
    then = root("91p700.e0ca.703")

    def compare(now: str) -> str:
        (kept,) = watch.compare(cast(Any, None), [then], MARK, [root(now)], MARK).kept
        return kept.entry

    # The offset's entry stays, and the next look is compared with the present one.
    assert compare("91p900.e0ca") == then.entry
    assert not asked
    assert compare("91p950.3bc0.960") == "91p950.3bc0.960"
    assert asked == ["900.e0ca"]
    # Of an offset that has other partitions, only its own entry tells.
    assert compare("91p970.ad17") == "91p970.ad17"
    assert asked[1:] == ["700.e0ca.703"]
