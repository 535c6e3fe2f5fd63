"""An SQL execution as the keeper knows it, and why it may have no snapshot any more."""

from __future__ import annotations

from dataclasses import dataclass

from pg_cdc_source.errors import SnapshotLostError, TransientError
from pg_cdc_source.postgres.locks import RUN_AGAIN
from pg_cdc_source.snapshot.board import LINE_SECONDS, Request
from pg_cdc_source.snapshot.keeper.shared import Shared


@dataclass(slots=True, eq=False)
class Execution:
    """An SQL execution and its snapshot; ``shared`` is None while it waits in line."""

    request: Request
    began: float  # time.monotonic(), when it was first heard of
    last_reader: float  # time.monotonic(); until then it may have had a reader
    being_read: bool = False  # at the last look
    shared: Shared | None = None

    @property
    def key(self) -> str:
        return self.request.execution

    @property
    def company(self) -> object:
        """Executions of which this is the same may share a snapshot.

        A slot is made for one action.
        """
        request = self.request
        return request.execution if request.spec.slot else (request.spec, request.shows_lsn)

    @property
    def may_do_without_lsn(self) -> bool:
        """Whether the pool will do."""
        point = self.request.spec.consistent_point
        return point == "off" or (point == "auto" and not self.request.shows_lsn)


def lost_error() -> SnapshotLostError:
    return SnapshotLostError(
        "the snapshot of this action has ended, because PostgreSQL ended all sessions that held it",
        remedy=RUN_AGAIN,
    )


def surplus_error() -> SnapshotLostError:
    return SnapshotLostError(
        "the snapshot of this action has ended, because later ones needed its session, and no task read in it",
        remedy="run fewer actions at a time, read all tables of an action early (cache()), raise maxConnections, or "
        "raise the server's max_connections",
    )


def line_error(most_sessions: int) -> TransientError:
    return TransientError(
        f"this action has waited {LINE_SECONDS:g} s in line for a snapshot: the keeper may have {most_sessions} "
        "sessions, and others read in all of them",
        remedy="run fewer actions at a time, or raise maxConnections",
    )
