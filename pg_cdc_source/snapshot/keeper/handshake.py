"""What planning tells the keeper process when it starts it, on stdin, and what that answers, one line on stdout.

Standard input is the way because others can read argv and the environment, and the settings hold the password.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pg_cdc_source.errors import DefiniteError, PgCdcError, error_of
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.instances import Instance
from pg_cdc_source.snapshot.board import Request
from pg_cdc_source.snapshot.driver import Process


@dataclass(frozen=True, slots=True)
class Settings:
    """How a keeper connects and for whom it works. ``example`` is what it takes for a request on a standby.

    ``planned_on`` is the server that the driver looks for it on. Options may name files from the working ``directory``
    of planning.
    """

    connection: ConnectionOptions
    token: str
    driver: Process
    example: Request
    planned_on: Instance
    directory: str

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"example": self.example.to_json()})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        fields = json.loads(text)
        connection = fields["connection"]
        return cls(
            ConnectionOptions(**{**connection, "keywords": tuple((k, v) for k, v in connection["keywords"])}),
            fields["token"],
            Process(**fields["driver"]),
            Request.from_json(fields["example"]),
            Instance(**fields["planned_on"]),
            fields["directory"],
        )


READY = "ready"  # this process is the keeper
TAKEN = "taken"  # another one is


def answer_of(error: PgCdcError) -> str:
    """The answer of a process that cannot be the keeper."""
    return json.dumps({"code": error.code, "what": error.what, "remedy": error.remedy})


def read_answer(line: str) -> PgCdcError | None:
    """What an answer says went wrong; None for a keeper that runs."""
    if line in (READY, TAKEN):
        return None
    try:
        fields = json.loads(line)
        return error_of(fields["code"], f"{_COULD_NOT}: {fields['what']}", fields["remedy"])
    except (ValueError, TypeError, KeyError):
        ended = "it ended at once" if not line else "its first line was not an answer"
        return DefiniteError(f"{_COULD_NOT}: {ended}", remedy="the driver's standard error says why")


_COULD_NOT = "the keeper (process that holds snapshots) could not start"
