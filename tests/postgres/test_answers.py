"""A question that nobody answers ends, and its session with it."""

from __future__ import annotations

import socket
import time
from typing import Any, cast

from pg_cdc_source.postgres.answers import answered_within


def test_what_waits_for_an_answer_that_does_not_come_finds_the_connection_ended() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        with answered_within(cast(Any, ours), 0.1):
            assert ours.recv(1) == b""
        assert theirs.recv(1) == b""


def test_a_connection_that_has_answered_stays() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with answered_within(cast(Any, ours), 0.05):
            theirs.send(b"x")
            assert ours.recv(1) == b"x"
        until = time.monotonic() + 0.2
        theirs.settimeout(0.01)
        while time.monotonic() < until:
            try:
                assert theirs.recv(1), "the connection was ended"
            except TimeoutError:
                continue
