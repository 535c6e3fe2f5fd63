"""The PostgreSQL server that the tests run on: one that exists, a container, or one started here."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pg_cdc_source.embedded import embedded_postgres

SETTINGS = {
    "wal_level": "logical",
    "max_connections": "200",
    "max_prepared_transactions": "10",
    "max_replication_slots": "30",
    "max_wal_senders": "30",
}


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yield the URL of a superuser.

    The server is PG_CDC_TEST_URL's, which is left running; else one started from PG_CDC_TEST_BIN, a directory of
    binaries; else a container, where a Docker engine answers; else one from the ``embedded-postgres`` package.
    """
    if url := os.environ.get("PG_CDC_TEST_URL"):
        yield url
    elif bin_dir := os.environ.get("PG_CDC_TEST_BIN"):
        with embedded_postgres(SETTINGS, bin_dir=Path(bin_dir)) as url:
            yield url
    elif _docker_answers():
        with _container() as url:
            yield url
    else:
        with embedded_postgres(SETTINGS) as url:
            yield url


def _docker_answers() -> bool:
    import docker

    with warnings.catch_warnings():
        # A client that gets no answer leaves its socket to the garbage collector, which would warn within some test.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            docker.from_env(timeout=2).close()
            answers = True
        except docker.errors.DockerException:
            answers = False
        gc.collect()
    return answers


@contextmanager
def _container() -> Iterator[str]:
    from testcontainers.postgres import PostgresContainer

    arguments = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
    with PostgresContainer("postgres:18", driver=None).with_command(f"postgres {arguments}") as container:
        yield container.get_connection_url()


@contextmanager
def second_server(settings: Mapping[str, str]) -> Iterator[str]:
    """Run one more server, with other settings and of the version that the tests run on where that is known."""
    bin_dir = os.environ.get("PG_CDC_TEST_BIN")
    with embedded_postgres({**SETTINGS, **settings}, bin_dir=Path(bin_dir) if bin_dir else None) as url:
        yield url
