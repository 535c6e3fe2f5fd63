"""What the processes that plan for one SparkContext share: files, which Spark deletes with it, and a number."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from psycopg2.extensions import connection as Session

from pg_cdc_source.postgres.instances import Instance, read_instance

log = logging.getLogger(__name__)


def driver_file(of: str, name: str) -> Path:
    """The file of this name for what ``of`` says, such as a server, a database and a role."""
    number = hashlib.sha256(of.encode()).hexdigest()[:12]
    return Path(sparks_directory() or tempfile.gettempdir(), f"pgsnapshot-{os.getuid()}-{number}-{name}")


def sparks_directory() -> str:
    """The directory of the running context, which Spark gives its Python processes and deletes; "" for others."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]


def context_number() -> int:
    """A number of 31 bits that is the SparkContext's own, as the random name of its directory is."""
    return int.from_bytes(hashlib.sha256(sparks_directory().encode()).digest()[:4], "big") >> 1


def lsn_file(session: Session, instance: Instance) -> str:
    """The file that is there once a scan of the driver shows or requires an LSN; "" where none can be.

    It is for the server, database and role of a session. A server has many addresses, and started once.
    """
    of = f"{instance.started}: {session.info.dbname} as {session.info.user}"
    return str(driver_file(of, "lsn")) if sparks_directory() else ""


def note_lsn_wanted(session: Session) -> None:
    if path := lsn_file(session, read_instance(session)):
        try:
            Path(path).touch()
        except OSError as error:
            log.warning("an action in which only some scans show or require an LSN may have none: %s", error)


def may_want_lsn(path: str) -> bool:
    """Whether any scan of the driver may. An action may have several, and the first one that reads asks for all."""
    return not path or Path(path).exists()
