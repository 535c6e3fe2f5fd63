"""What can go wrong, divided by what the operator must do.

::

    PgCdcError
    ├── TransientError              retry: the same call may succeed later (session lost, server starting, lock busy)
    │   └── ServerFullError         the server, the role or the database has no connection left
    └── DefiniteError               do the remedy first: something has to be changed, or the action run or loaded anew
        ├── OptionError             an option is unknown, malformed, contradictory or unused
        ├── ConnectError            the server does not let this role in, or is not the one that was meant
        ├── AccessError             a relation is missing, or this role may not read all of it
        ├── ServerSetupError        the server or a pooler in front of it lacks something (wal_level, slots, sessions)
        ├── SnapshotLostError       the snapshot that an action depends on has ended
        ├── SlotLostError           the slot no longer has the changes that the checkpoint needs
        ├── SchemaChangedError      a relation has changed since it was planned
        ├── QueryError              PostgreSQL refused the user's own SQL (``query``, ``where``)
        ├── UnrepresentableError    a value does not fit its Spark type
        ├── ForeignWriterError      somebody else has changed a table of a mirror
        └── WireError               bytes do not follow PostgreSQL's formats

``what`` says what happened and where, ``remedy`` says what to do, and ``code`` names the class; the meaning of a code
never changes between releases. No text ever holds a password. PostgreSQL's own messages about the user's SQL may quote
a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

# The last remedy, where an old stream cannot go on.
START_OVER = "start over with a new checkpoint location and a new slot"
# Of a mirror's table that cannot go on with the rows that it has.
RESNAPSHOT = "have the table's rows come again: pg-cdc resnapshot"


class PgCdcError(Exception):
    """Base of all errors that this package raises on purpose."""

    code: ClassVar[str] = "PGCDC"
    # Where no better one is known at the place.
    usual_remedy: ClassVar[str] = ""

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy or self.usual_remedy

    def __str__(self) -> str:
        return f"[{self.code}] {self._without_code()}"

    def _without_code(self) -> str:
        return f"{self.what}\n  Remedy: {self.remedy}" if self.remedy else self.what


class TransientError(PgCdcError):
    """The same call may succeed later."""

    code = "TRANSIENT"
    usual_remedy = "run the action or start the query again; if that does not help, see the server's log"


class ServerFullError(TransientError):
    """The server has no connection left, or the role or the database has reached its CONNECTION LIMIT."""

    code = "SERVER_FULL"
    usual_remedy = (
        "close sessions that nobody needs (pg_stat_activity), set the option maxConnections to fewer, or raise "
        "max_connections, or the CONNECTION LIMIT of the role or database"
    )


class DefiniteError(PgCdcError):
    """Read the remedy first: the same call fails again, unless the remedy says to run it again."""

    code = "DEFINITE"
    usual_remedy = "correct what the message names, then run the action or start the query again"


class OptionError(DefiniteError):
    """An option is unknown, malformed, contradictory or unused.

    Where several are, ``problems`` has an error for each, and ``what`` only says how many there are.
    """

    code = "OPTION"
    usual_remedy = ""  # each problem has its own

    def __init__(self, what: str, *, remedy: str = "", problems: Sequence[OptionError] = ()) -> None:
        super().__init__(what, remedy=remedy)
        self.problems = tuple(problems)

    def _without_code(self) -> str:
        text = super()._without_code()
        lines = (f"\n- {problem._without_code()}" for problem in self.problems)
        return f"{text}:{''.join(lines)}" if self.problems else text


class ConnectError(DefiniteError):
    """The server does not let this role in, there is none of this name, or its certificate is not the right one."""

    code = "CONNECT"
    # Whether the host's name has no address. One that had one before may have one again, as behind a failover.
    has_no_address = False


class AccessError(DefiniteError):
    """A relation is missing, or this role may not read all of it."""

    code = "ACCESS"


class ServerSetupError(DefiniteError):
    """The server, or a pooler in front of it, lacks something that this read needs."""

    code = "SERVER_SETUP"


class SnapshotLostError(DefiniteError):
    """The snapshot that an action depends on has ended."""

    code = "SNAPSHOT_LOST"


class SlotLostError(DefiniteError):
    """The slot no longer has the changes that the checkpoint needs."""

    code = "SLOT_LOST"


class SchemaChangedError(DefiniteError):
    """A relation has changed since it was planned."""

    code = "SCHEMA_CHANGED"


class QueryError(DefiniteError):
    """PostgreSQL refused SQL that the user wrote (``query``, ``where``)."""

    code = "QUERY"


class UnrepresentableError(DefiniteError):
    """A value does not fit its Spark type."""

    code = "UNREPRESENTABLE"


class ForeignWriterError(DefiniteError):
    """Somebody else has changed a table of a mirror."""

    code = "FOREIGN_WRITER"


class WireError(DefiniteError):
    """Bytes do not follow PostgreSQL's documented formats."""

    code = "WIRE"
    usual_remedy = (
        "report this with the server's version: the server and the connector do not agree on a format, or something "
        "between them changes what is sent"
    )


_BY_CODE: dict[str, type[PgCdcError]] = {
    error.code: error
    for error in (
        *(TransientError, ServerFullError, DefiniteError, OptionError, ConnectError, AccessError, ServerSetupError),
        *(SnapshotLostError, SlotLostError, SchemaChangedError, QueryError, UnrepresentableError, ForeignWriterError),
        WireError,
    )
}


_MOST_CAUSES = 20


def short_text(error: Any) -> str:
    """What an error says in its first line, without the JVM's stack, and what the first of its causes says there."""
    if not hasattr(error, "java_exception"):
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    causes = [error.java_exception]
    # Causes may go round in a circle.
    while len(causes) < _MOST_CAUSES and (cause := causes[-1].getCause()) is not None:
        causes.append(cause)
    text, first = (str(causes[i].toString()).partition("\n")[0] for i in (0, -1))
    return text if first in text else f"{text}, caused by {first}"


def error_of(code: str, what: str, remedy: str = "") -> PgCdcError:
    """Rebuild an error that another process has sent as code and texts; an unknown code gives a DefiniteError."""
    return _BY_CODE.get(code, DefiniteError)(what, remedy=remedy)
