"""What a stream has read is the server's past, or the stream ends; a real promotion is in integration/."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from pg_cdc_source.errors import SlotLostError
from pg_cdc_source.offsets import Lsn, Position, SlotIdentity
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.stream.tables import slot_history
from pg_cdc_source.stream.tables.slot_history import SlotHistory

OPTIONS = parse_stream_options({"url": "postgresql://u@h/d", "dbtable": "t", "slot": "s"})
OURS = SlotIdentity("7711", 3, "d", "s")
# Timeline 1 was left at 0/2000, 2 at 0/3000.
HISTORY = "1\t0/2000\tno recovery target specified\n\n2\t0/3000\tbefore 2026-01-01\n"


class Source:
    """A server on timeline 3, where the checkpoint's database ``is_gone``. Older ones give a history as bytes."""

    def __init__(self, *, as_bytes: bool = False, is_gone: bool = False) -> None:
        self.commands: list[str] = []
        self._as_bytes = as_bytes
        self._is_gone = is_gone

    def ask(self, question: object) -> bool:
        """Whether the database of the checkpoint is gone."""
        return self._is_gone

    def run_replication_command(self, command: str) -> tuple[Any, ...]:
        self.commands.append(command)
        if command == "IDENTIFY_SYSTEM":
            return OURS.system, OURS.timeline, "0/4000", OURS.database
        assert command == "TIMELINE_HISTORY 3"
        return "00000003.history", HISTORY.encode() if self._as_bytes else HISTORY


def history(source: Source | None = None) -> SlotHistory:
    return SlotHistory(OPTIONS, source or Source())  # type: ignore[arg-type]


def test_a_slot_in_use_is_asked_for_for_about_12_s() -> None:
    assert 10 < sum(slot_history.IN_USE.pauses()) < 15


def test_a_server_is_asked_once_who_it_is_until_that_is_forgotten() -> None:
    source = Source()
    known = history(source)
    assert known.identify() == known.identify() == OURS
    known.require_common(OURS, Position(Lsn(1 << 40)))
    assert source.commands == ["IDENTIFY_SYSTEM"]
    known.forget_identity()
    known.identify()
    assert source.commands == ["IDENTIFY_SYSTEM"] * 2


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(("timeline", "lsn"), [(1, 0x1FFF), (2, 0x2FFF), (2, 0x100)])
def test_what_was_read_before_a_timeline_was_left_is_common(
    timeline: int, lsn: int, as_bytes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        history(Source(as_bytes=as_bytes)).require_common(replace(OURS, timeline=timeline), Position(Lsn(lsn)))
    assert f"from timeline {timeline} to 3; the stream goes on" in caplog.text


@pytest.mark.parametrize(("timeline", "lsn", "end"), [(1, 0x2000, "0/2000"), (2, 0x3000, "0/3000")])
def test_what_was_read_after_a_timeline_was_left_may_not_be_there(timeline: int, lsn: int, end: str) -> None:
    with pytest.raises(SlotLostError, match=f"left timeline {timeline} at {end}") as caught:
        history().require_common(replace(OURS, timeline=timeline), Position(Lsn(lsn)))
    assert "synchronized_standby_slots" in caught.value.remedy


@pytest.mark.parametrize("theirs", [replace(OURS, system="7712"), replace(OURS, slot="r")])
def test_a_database_is_renamed_only_where_its_server_and_slot_are_the_same(theirs: SlotIdentity) -> None:
    renamed = history(Source(is_gone=True))
    renamed.require_common(replace(OURS, database="e"), Position(Lsn(1)))
    assert renamed.as_named_now(replace(OURS, database="e")) == OURS
    with pytest.raises(SlotLostError):
        renamed.require_common(replace(theirs, database="e"), Position(Lsn(1)))


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (replace(OURS, system="7712"), "system identifier '7711' instead of '7712'"),
        (replace(OURS, database="e"), "database 'd' instead of 'e'"),
        (replace(OURS, slot="r"), "slot 's' instead of 'r'"),
        (replace(OURS, timeline=4), "timeline 3 instead of 4"),
        (replace(OURS, timeline=0), "timeline 3 instead of 0"),
        (replace(OURS, system="7712", slot="r"), "'7712', slot 's' instead of 'r'"),
    ],
)
def test_another_place_is_refused_and_named(theirs: SlotIdentity, said: str) -> None:
    with pytest.raises(SlotLostError, match="the checkpoint was made with another server or slot") as caught:
        history().require_common(theirs, Position(Lsn(1)))
    assert said in caught.value.what
