"""Check that all connections lead to one server, as those that share a snapshot have to."""

from __future__ import annotations

import contextlib
import re

from psycopg2.extensions import connection as Session

from pg_cdc_source.cli.preflight.findings import ScarceError, counted
from pg_cdc_source.errors import ServerSetupError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.instances import ONE_SERVER, read_instance

NAME = "pg-cdc:check"

# An endpoint of two servers, which gives them by turns or at random, shows it to six connections but for 3 % of cases.
_CONNECTIONS = 6
# Amazon's name for the endpoint of a cluster's readers. With one reader only it leads to one server today.
_OF_READERS = re.compile(r"\.cluster-ro-[a-z0-9]+\.", re.IGNORECASE)


def require_one_server(options: ConnectionOptions, session: Session) -> str:
    """Connect some more times; raises ServerSetupError where that leads to several servers."""
    first = read_instance(session)
    found = {first.started: first}
    for _ in range(_CONNECTIONS - 1):
        with contextlib.closing(connect(options, NAME)) as other:
            instance = read_instance(other)
            found[instance.started] = instance
    if len(found) > 1:
        raise ServerSetupError(
            f"connections lead to {counted(len(found), 'server')}: {'; '.join(map(str, found.values()))}",
            remedy=ONE_SERVER,
        )
    if _OF_READERS.search(options.settings().get("host", "")):
        raise ScarceError(
            "the host is the endpoint of an Aurora cluster's readers, which spreads connections once there are several",
            remedy=ONE_SERVER,
        )
    return f"every connection leads to {first}"
