"""Where and as whom to connect.

libpq itself reads its connection strings and URIs. Its errors are not shown, because they repeat the part that could
not be read, which may be a part of a password. libpq also accepts strings that put a part of a password into the
host or the database; the checks here refuse those.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import psycopg2
from psycopg2.extensions import parse_dsn

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options import jdbc
from pg_cdc_source.options.libpq_keywords import LIBPQ_KEYWORDS, OWN_KEYWORDS, SECRET_KEYWORDS
from pg_cdc_source.options.malformed_url import PERCENT_ENCODE, check_address, unknown_parameter
from pg_cdc_source.options.names import check_characters
from pg_cdc_source.options.session_settings import SESSION_SETTINGS, VALUE_SETTINGS

_URI_PREFIXES = ("postgresql://", "postgres://")
# libpq looks for the @ that ends user and password up to the first slash (fe-connect.c: conninfo_uri_parse_options).
_USER_INFO = re.compile(r"[^@/]*@")
_CONNINFO_PART = re.compile(r"([^=\s]+)\s*=\s*(?:'(?:[^'\\]|\\.)*'|(?!')(?:[^\s\\]|\\.)*)\s*", re.ASCII | re.DOTALL)
_PORTS = re.compile(r"\d{0,5}(?:,\d{0,5})*", re.ASCII)
# A setting in the keyword options, as postgres takes it on its command line: -c name=value, or --name=value.
_SETTING = re.compile(r"(?:^|\s)(?:-c\s*|--)([\w.-]+)=((?:[^\s\\]|\\.)*)", re.ASCII | re.DOTALL)
# What a password looks like that was separated in another driver's manner (host=h;password=x).
_STRAY_PASSWORD = re.compile(r"(?:password|passwd|pass|pwd)\s*=", re.IGNORECASE)


@dataclass(frozen=True, slots=True, repr=False)
class ConnectionOptions:
    """Where and as whom to connect: ``psycopg2.connect(conninfo, **dict(keywords))``.

    ``conninfo`` is the user's libpq URI or connection string, '' without one; ``keywords`` never repeats what it says.
    ``password_command`` or ``password_provider`` is asked for the password before each connection.
    """

    conninfo: str = ""
    keywords: tuple[tuple[str, str], ...] = ()
    password_command: str | None = None
    password_provider: str | None = None

    def __repr__(self) -> str:
        try:
            settings = self.settings()
        except OptionError:
            return "ConnectionOptions(url=***)"
        shown = [f"{k}={'***' if k in SECRET_KEYWORDS else repr(v)}" for k, v in settings.items()]
        if self.password_command is not None:
            shown.append("password_command=***")
        if self.password_provider is not None:
            shown.append(f"password_provider={self.password_provider!r}")
        return f"ConnectionOptions({', '.join(shown)})"

    def display(self) -> str:
        """Return ``host:port/database as user`` for messages, as far as the options say it, without any secret."""
        try:
            settings = self.settings()
        except OptionError:
            return "a server whose url cannot be read"
        hosts = (settings.get("host") or settings.get("hostaddr") or "").split(",")
        ports = settings.get("port", "").split(",")
        if len(ports) == 1:
            ports *= len(hosts)
        pairs = ((_host_text(host), port) for host, port in zip(hosts, ports, strict=False))
        text = ",".join(f"{host}:{port}" if port else host for host, port in pairs)
        if settings.get("dbname"):
            text += f"/{settings['dbname']}"
        if settings.get("user"):
            text += f" as {settings['user']}"
        if settings.get("service"):
            text += f" (service {settings['service']})"
        return text

    def settings(self) -> dict[str, str]:
        """Return everything the options say as libpq keywords, secrets included; raises OptionError."""
        url = parse_url(self.conninfo).settings if self.conninfo else {}
        settings = {**url, **dict(self.keywords)}
        check_settings(settings)
        return settings


def _host_text(host: str) -> str:
    if not host:
        return "the default host"
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True, repr=False)
class Url:
    """A URL as libpq keywords; ``conninfo`` is its text if libpq can read that, else empty."""

    conninfo: str
    settings: dict[str, str]


def parse_url(text: str) -> Url:
    """Read a libpq URI, a libpq connection string or a JDBC URL; raises OptionError without repeating any of it."""
    check_characters(text)
    url = text.strip()
    conninfo = url
    if url.startswith(_URI_PREFIXES):
        settings = _read_uri(url)
    elif url.startswith(jdbc.PREFIX):
        settings = jdbc.parse_jdbc_url(url)
        conninfo = ""
    elif re.match(r"[a-z][a-z0-9+.-]*:", url, re.IGNORECASE) or "=" not in url:
        raise OptionError(
            "it is not a URL of PostgreSQL",
            remedy="use postgresql://user@host:port/database, jdbc:postgresql://host:port/database, or a libpq "
            "connection string such as 'host=... dbname=...'",
        )
    else:
        settings = _read_conninfo(url)
    for keyword, reason in OWN_KEYWORDS.items():
        if keyword in settings:
            raise OptionError(f"it sets {keyword}, which the connector sets itself", remedy=f"remove it: {reason}")
    check_settings(settings)
    return Url(conninfo, settings)


def _read_uri(uri: str) -> dict[str, str]:
    rest = uri.partition("://")[2]
    # libpq before 17 keeps a raw space and later ones drop it, so neither meaning is safe.
    if re.search(r"\s", rest, re.ASCII):
        raise OptionError("it has a space", remedy=PERCENT_ENCODE)
    user_info = _USER_INFO.match(rest)
    address, _, query = rest[user_info.end() if user_info else 0 :].partition("?")
    check_address(address)
    settings = _ask_libpq(uri)
    if settings is None:
        raise _malformed_uri(query)
    return settings


def _read_conninfo(conninfo: str) -> dict[str, str]:
    settings = _ask_libpq(conninfo)
    if settings is None:
        raise _malformed_conninfo(conninfo)
    return settings


def _ask_libpq(conninfo: str) -> dict[str, str] | None:
    """Parse by PQconninfoParse. Returns None on failure: the exception would repeat what may be a password."""
    try:
        return dict(parse_dsn(conninfo))
    except (psycopg2.Error, ValueError):
        return None


def _malformed_uri(query: str) -> OptionError:
    for position, pair in enumerate(query.removesuffix("&").split("&") if query else (), 1):
        name, equals, value = pair.partition("=")
        if not equals or "=" in value:
            return OptionError(f"its parameter {position} is not of the form name=value", remedy=PERCENT_ENCODE)
        if problem := _problem_with_keyword(unquote(name), position):
            return problem
    return OptionError("libpq cannot read it", remedy=PERCENT_ENCODE)


def _malformed_conninfo(conninfo: str) -> OptionError:
    end = 0
    for position in itertools.count(1):
        part = _CONNINFO_PART.match(conninfo, end)
        if part is None:
            break
        if problem := _problem_with_keyword(part[1], position):
            return problem
        end = part.end()
    return OptionError(
        f"its part {position} is not of the form keyword=value",
        remedy=r"separate with spaces; put a value with spaces between single quotes, and write \' and \\ for "
        r"a quote and a backslash",
    )


def _problem_with_keyword(keyword: str, position: int) -> OptionError | None:
    if keyword not in LIBPQ_KEYWORDS:
        return unknown_parameter(keyword, position, LIBPQ_KEYWORDS)
    if _ask_libpq(f"{keyword}=''") is None:
        return OptionError(
            f"its parameter {position} is not known to the libpq that psycopg2 uses here",
            remedy="remove it, or install a psycopg2 with a newer libpq",
        )
    return None


def check_settings(settings: Mapping[str, str]) -> None:
    """Refuse what cannot work or would show a password, without repeating any of it."""
    for keyword, value in settings.items():
        if keyword not in SECRET_KEYWORDS and keyword != "options" and _STRAY_PASSWORD.search(value):
            raise OptionError(f"{keyword} seems to hold a password", remedy="pass it in the option password")
    # A host that begins with @ is an abstract Unix socket.
    if re.search(r"[^,]@|[\s;=?&]", settings.get("host", "")):
        raise OptionError("the host has a character that host names do not have", remedy=PERCENT_ENCODE)
    port = settings.get("port", "")
    if not _PORTS.fullmatch(port) or any(p and not 1 <= int(p) <= 65535 for p in port.split(",")):
        raise OptionError("the port is not a number from 1 to 65535", remedy=f"correct it; in a url, {PERCENT_ENCODE}")
    if "://" in settings.get("dbname", ""):
        raise OptionError("the database is a URL", remedy="pass it in the option url")
    _check_server_settings(settings.get("options", ""))


def _check_server_settings(options: str) -> None:
    """Refuse a setting that sessions override: it would have no effect, or SQL of the user's another meaning."""
    own = {name.lower(): (name, value) for name, value in SESSION_SETTINGS.items()}
    for match in _SETTING.finditer(options):
        name, value = own.get(match[1].lower().replace("-", "_"), ("", ""))
        given = re.sub(r"\\(.)", r"\1", match[2])
        if name and given.lower().replace(" ", "") != value.lower().replace(" ", ""):
            in_sql = (
                ", and write into the SQL what it is to mean: timestamps with their zone, dates as year-month-day, "
                "AT TIME ZONE"
            )
            raise OptionError(
                f"options sets {name}, which the connector sets to {value!r} in all of its sessions",
                remedy=f"leave it out{in_sql if name in VALUE_SETTINGS else ''}",
            )
