"""The publication is looked at now and then, and what a mark says is compared; the marks are in tests/postgres/."""

from __future__ import annotations

from typing import Any

import pytest

from pg_cdc_source.errors import SchemaChangedError, TransientError
from pg_cdc_source.options.stream_options import Publications, parse_stream_options
from pg_cdc_source.postgres import publication
from pg_cdc_source.stream import publication_watch
from pg_cdc_source.stream.publication_watch import PublicationWatch

OPTIONS = parse_stream_options({"url": "postgresql://u@h/d", "dbtable": "t", "slot": "user"})
NAMES = {7: "public.t"}


class Source:
    """A session that is lost as often as ``lost`` says."""

    def __init__(self, lost: int = 0) -> None:
        self.closed = 0
        self._lost = lost

    def open(self) -> str:
        if self._lost:
            self._lost -= 1
            raise TransientError("the session was lost")
        return "session"

    def close(self) -> None:
        self.closed += 1


def watch(source: Source) -> PublicationWatch:
    return PublicationWatch(OPTIONS, source)  # type: ignore[arg-type]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the publication, which lacks nothing."""
    asked: list[Any] = []

    def find_lost(*what: Any) -> str:
        asked.append(what)
        return ""

    monkeypatch.setattr(publication, "find_lost", find_lost)
    return asked


def test_the_publication_is_looked_at_once_within_its_time(looks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(Source())
    watched.mark = "mark"
    watched.look_sometimes(NAMES)
    watched.look_sometimes(NAMES)
    assert looks == [("session", Publications("user"), "mark", NAMES)]
    monkeypatch.setattr(publication_watch, "WATCH_SECONDS", 0.0)
    watched.look_sometimes(NAMES)
    assert len(looks) == 2


def test_a_lost_session_is_no_lost_publication(looks: list[Any]) -> None:
    source = Source(lost=1)
    watched = watch(source)
    watched.look(NAMES)
    assert (looks, source.closed) == ([], 1)
    watched.look(NAMES)
    assert len(looks) == 1


def test_a_table_that_is_not_sent_any_longer_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "find_lost", lambda *_: "does not send public.t any longer")
    with pytest.raises(SchemaChangedError, match='publication "user" does not send'):
        watch(Source()).look(NAMES)


def test_an_offset_without_a_mark_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "find_change", lambda *_: "was created again")
    watch(Source()).require_unchanged("", NAMES)
    with pytest.raises(SchemaChangedError, match='publication "user" was created again, so changes may be missing'):
        watch(Source()).require_unchanged("another mark", NAMES)
