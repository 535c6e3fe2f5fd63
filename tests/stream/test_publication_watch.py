"""What a look at the publication is compared with, in one process; without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from given_options import STREAM

from pg_cdc_source.offsets import Horizon, Lsn, Member
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.attached import Attachments
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.publication import Publication, PublishedTable
from pg_cdc_source.stream.tables import members
from pg_cdc_source.stream.tables.publication_watch import NOTHING_FOUND, PublicationWatch

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


def test_an_entry_is_renewed_though_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that runs for years has to know at its next start what was there: ids come again after 2^32."""
    r = Relation(11, "public", "r", "p")
    watch = PublicationWatch(
        parse_stream_options(STREAM), cast(Any, SimpleNamespace(find_refused=lambda *_: (), may_lack=set))
    )
    session = cast(Any, SimpleNamespace(server_version=180000))
    horizon = 700

    def read(*_: object) -> Publication:
        table = PublishedTable(r, None, None, ("91",), None, Attachments("e0ca", horizon))
        return Publication(90, "s", False, True, True, True, True, True, True, (table,), 70)

    monkeypatch.setattr(publication, "read_publication", read)
    monkeypatch.setattr(publication, "stream_tables", lambda *_: (r,))
    monkeypatch.setattr(watch, "_require_sent", lambda *_: None)

    def look(entry: str) -> str | None:
        member = root(entry)
        plan = SimpleNamespace(
            planned=[SimpleNamespace(member=member)], members=[member], gone=(), horizon=Horizon(Lsn(9))
        )
        _, difference = watch.look(session, cast(Any, plan), MARK, NOTHING_FOUND)
        return None if difference is None else difference.kept[0].entry

    assert look("91p700.e0ca") == "91p700.e0ca"
    horizon += 1000
    assert look("91p700.e0ca") is None
    horizon += 1 << 24
    renewed = f"91p{horizon}.e0ca"
    assert look("91p700.e0ca") == renewed
    assert look(renewed) == renewed
    assert look(renewed) is None
