"""The options of the formats, parsed once into frozen dataclasses.

Nothing below this module sees the dict of strings that Spark hands over. ``OPTIONS`` is the one table of what can be
set: reading, error texts and the README's tables come from it. Two rules hold throughout:

- Everything is checked before a connection is opened, and everything that is wrong is reported at once.
- No error text, ``repr`` or ``display()`` ever holds a secret. A malformed URL is where that is hard, because a
  password whose special characters are not percent-encoded ends up in the host, the port or a parameter's name. So
  errors name a URL's parameters by position, never by what stands there, and never quote the rest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args
from urllib.parse import unquote, unquote_plus

from pg_cdc_source.errors import OptionError

ConsistentPoint = Literal["auto", "require", "off"]
Unrepresentable = Literal["error", "null"]
Group = Literal["connection", "pgsnapshot"]

# --- names -----------------------------------------------------------------------------------------------------------

# PostgreSQL cuts a longer identifier silently (NAMEDATALEN - 1), so that it could name another table.
_MAX_NAME_BYTES = 63

# The lexer's rules (src/backend/parser/scan.l): every character outside ASCII counts as a letter, also a space there.
_NAME_PART = re.compile(
    r"""\s*(?:"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>[A-Za-z_\u0080-\U0010ffff][A-Za-z0-9_$\u0080-\U0010ffff]*))\s*""",
    re.ASCII,
)
_NEEDS_NO_QUOTES = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)
_ASCII_UPPER_TO_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
_SUBQUERY = re.compile(r"\s*(?:\(|(?:select|with|table|values)\s)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class QualifiedName:
    """A relation's name in one to three parts: ``database.schema.table`` from the right."""

    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> QualifiedName:
        """Read a name as SQL does: unquoted parts fold to lower case, quoted parts keep everything."""
        if _SUBQUERY.match(text):
            raise OptionError(f"{text!r} is a query, not a table's name", remedy="pass it in the option query")
        names = _parse_names(text)
        if len(names) != 1:
            raise OptionError(f"{text!r} names {len(names)} tables", remedy="load each table on its own")
        if len(names[0]) > 3:
            raise OptionError(
                f"{text!r} has {len(names[0])} parts, a table has three at most: database.schema.table",
                remedy='quote a part that holds a dot: public."a.b"',
            )
        return cls(names[0])

    def __str__(self) -> str:
        """Give it as ``parse`` reads it, with quotes only where they are needed."""
        return ".".join(map(_quote_where_needed, self.parts))


def _quote_where_needed(part: str) -> str:
    if _NEEDS_NO_QUOTES.fullmatch(part):
        return part
    return '"' + part.replace('"', '""') + '"'


def _parse_names(text: str) -> list[tuple[str, ...]]:
    """Read a comma-separated list of dotted names."""
    names: list[tuple[str, ...]] = []
    parts: list[str] = []
    position = 0
    while True:
        match = _NAME_PART.match(text, position)
        if match is None:
            raise _malformed_name(text, position)
        parts.append(_name(match))
        position = match.end()
        separator = text[position : position + 1]
        if separator != ".":
            names.append(tuple(parts))
            parts = []
        if separator == "":
            return names
        if separator not in ".,":
            raise _malformed_name(text, position)
        position += 1


def _name(part: re.Match[str]) -> str:
    quoted = part["quoted"]
    name = part["plain"].translate(_ASCII_UPPER_TO_LOWER) if quoted is None else quoted.replace('""', '"')
    _check_characters(name)
    if not name:
        raise OptionError('a quoted name is empty ("")', remedy="write the name between the quotes")
    length = len(name.encode())
    if length > _MAX_NAME_BYTES:
        raise OptionError(
            f"the name {name!r} has {length} bytes, PostgreSQL's names have {_MAX_NAME_BYTES} at most",
            remedy="write the name as the catalog holds it: PostgreSQL cut it when it was created",
        )
    return name


def _check_characters(text: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise OptionError("it holds a character that PostgreSQL's text cannot (NUL or half a surrogate pair)")


def _malformed_name(text: str, position: int) -> OptionError:
    rest = text[position:].lstrip()
    if not text.strip():
        what = "it is empty"
    elif not rest:
        what = f"{text!r} ends where a name is expected"
    elif rest.startswith('"'):
        what = f"{text!r} has a quote that is not closed"
    else:
        what = f"{text!r} is not a name as SQL has them: {rest[0]!r} at character {len(text) - len(rest) + 1}"
    return OptionError(what, remedy='quote names as in SQL: schema."Table name", with "" for a quote inside')


def _parse_columns(text: str) -> tuple[str, ...]:
    if text.strip() == "*":
        raise OptionError("'*' is not a column", remedy="leave the option out to mean every column")
    names = _parse_names(text)
    for name in names:
        if len(name) > 1:
            raise OptionError(
                f"{'.'.join(map(_quote_where_needed, name))} is a qualified name, a plain column is needed",
                remedy='write only the column; quote a column whose name holds a dot: "a.b"',
            )
    columns = tuple(name for (name,) in names)
    for column in columns:
        if columns.count(column) > 1:
            raise OptionError(f"the column {_quote_where_needed(column)} is there twice", remedy="name it once")
    return columns


# --- values ----------------------------------------------------------------------------------------------------------

# Binary units, as in postgresql.conf: 1kB is 1024 bytes.
_SIZE_UNITS = {unit: 1 << 10 * power for power, unit in enumerate(("", "k", "m", "g", "t"))}
# The number of digits is bounded because int() refuses thousands of them with an error of its own.
_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?)"
_SIZE = re.compile(_NUMBER + r"\s*(?:([kmgt])i?)?b?", re.IGNORECASE | re.ASCII)
_DURATION_UNITS = {
    "": Fraction(1),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_DURATION = re.compile(_NUMBER + r"\s*(ms|s|min|m|h|d|)", re.IGNORECASE | re.ASCII)
_DECIMAL = re.compile(r"decimal\s*\(\s*(\d{1,4})\s*,\s*(\d{1,4})\s*\)", re.IGNORECASE | re.ASCII)
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}", re.ASCII)
_SNAPSHOT_ID = re.compile(r"[0-9A-F]+(?:-[0-9A-F]+)+", re.ASCII)


@dataclass(frozen=True, slots=True)
class NumericAs:
    """What a ``numeric`` that its declaration does not fit into a DECIMAL is read as."""

    kind: Literal["string", "double", "decimal"]
    precision: int = 0
    scale: int = 0

    @classmethod
    def parse(cls, text: str) -> NumericAs:
        """Read ``string``, ``double`` or ``decimal(p,s)`` within Spark's bounds."""
        word = text.strip().lower()
        if word == "string":
            return cls("string")
        if word == "double":
            return cls("double")
        match = _DECIMAL.fullmatch(word)
        if match is None:
            raise OptionError(
                f"{text!r} is not a type for numeric", remedy="use string, double or decimal(p,s) such as decimal(38,9)"
            )
        precision, scale = int(match[1]), int(match[2])
        if not (1 <= precision <= 38 and scale <= precision):
            raise OptionError(
                f"decimal({precision},{scale}) does not exist in Spark",
                remedy="choose a precision from 1 to 38, and a scale that is not greater",
            )
        return cls("decimal", precision, scale)


def _size(least: str, most: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = _bytes(text)
        if not _bytes(least) <= value <= _bytes(most):
            raise OptionError(f"{text.strip()} is out of bounds", remedy=f"choose a size from {least} to {most}")
        return value

    return parse


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{text!r} is not a size", remedy="write bytes as a number, or with a unit: 512kB, 64MB, 1GB (1kB is 1024)"
        )
    return int(Fraction(match[1]) * _SIZE_UNITS[(match[2] or "").lower()])


def _duration(least: str, most: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = _seconds(text)
        if not _seconds(least) <= value <= _seconds(most):
            raise OptionError(f"{text.strip()} is out of bounds", remedy=f"choose a time from {least} to {most}")
        return value

    return parse


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{text!r} is not a time", remedy="write seconds as a number, or with a unit: 500ms, 10s, 2min, 1h"
        )
    return float(Fraction(match[1]) * _DURATION_UNITS[match[2].lower()])


def _whole_number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.strip()
        if not (re.fullmatch(r"\d{1,18}", digits, re.ASCII) and least <= int(digits) <= most):
            raise OptionError(f"{text!r} is not a whole number from {least} to {most}", remedy="choose one")
        return int(digits)

    return parse


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in choices:
            raise OptionError(f"{text!r} is not a choice", remedy=f"use {_or(choices)}")
        return word

    return parse


def _or(words: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _not_blank(text: str) -> str:
    if not text.strip():
        raise OptionError("it is empty", remedy="give it a value or leave the option out")
    return text


def _condition(text: str) -> str:
    return _not_blank(text).strip()


def _query(text: str) -> str:
    return _condition(text.strip().removesuffix(";"))


def _slot(text: str) -> str:
    if not _SLOT_NAME.fullmatch(text):
        raise OptionError(
            f"{text!r} is not a name for a replication slot",
            remedy="use 1 to 63 lower-case letters, digits and underscores",
        )
    return text


def _snapshot_id(text: str) -> str:
    if not _SNAPSHOT_ID.fullmatch(text.strip()):
        raise OptionError(
            f"{text!r} is not the id of an exported snapshot",
            remedy="pass what pg_export_snapshot() returned, such as 00000003-0000001B-1",
        )
    return text.strip()


def _password(text: str) -> str:
    return text


# --- connection ------------------------------------------------------------------------------------------------------

# PQconndefaults() of libpq 13 to 18, without authtype, tty and requiressl, which 13 accepts and ignores.
LIBPQ_KEYWORDS = frozenset(
    """
    service user password passfile channel_binding connect_timeout dbname host hostaddr port client_encoding options
    application_name fallback_application_name keepalives keepalives_idle keepalives_interval keepalives_count
    tcp_user_timeout sslmode sslnegotiation sslcompression sslcert sslkey sslcertmode sslpassword sslrootcert sslcrl
    sslcrldir sslsni requirepeer require_auth min_protocol_version max_protocol_version ssl_min_protocol_version
    ssl_max_protocol_version gssencmode krbsrvname gsslib gssdelegation replication target_session_attrs
    load_balance_hosts scram_client_key scram_server_key oauth_issuer oauth_client_id oauth_client_secret oauth_scope
    sslkeylogfile
    """.split()  # noqa: SIM905 - as a list it would fill 50 lines
)
SECRET_KEYWORDS = frozenset(("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"))
_OWN_KEYWORDS = {
    "replication": "the connector opens replication connections itself where it needs one",
    "application_name": "readers and the holder of their snapshot find each other by it",
    "fallback_application_name": "readers and the holder of their snapshot find each other by application_name",
    "client_encoding": "values are decoded as UTF-8",
}

# pgjdbc's parameters (org.postgresql.PGProperty, 42.7) by what becomes of them. A row of _JDBC_KEYWORDS names the libpq
# keyword and, where the values differ, libpq's value for each; None leaves libpq's default, which means the same.
_JDBC_KEYWORDS: dict[str, tuple[str, dict[str, str | None] | None]] = {
    "user": ("user", None),
    "password": ("password", None),
    "options": ("options", None),
    "service": ("service", None),
    "sslmode": ("sslmode", None),
    "sslcert": ("sslcert", None),
    "sslkey": ("sslkey", None),
    "sslpassword": ("sslpassword", None),
    "sslrootcert": ("sslrootcert", None),
    "sslNegotiation": ("sslnegotiation", None),
    "channelBinding": ("channel_binding", None),
    "requireAuth": ("require_auth", None),
    "kerberosServerName": ("krbsrvname", None),
    "gssEncMode": (
        "gssencmode",
        {"allow": None, "disable": "disable", "prefer": "prefer", "require": "require"},
    ),
    "gsslib": ("gsslib", {"auto": None, "gssapi": "gssapi", "sspi": "sspi"}),
    "loadBalanceHosts": ("load_balance_hosts", {"true": "random", "false": None}),
    "targetServerType": (
        "target_session_attrs",
        {
            "any": None,
            "primary": "primary",
            "master": "primary",
            "secondary": "standby",
            "slave": "standby",
            "preferSecondary": "prefer-standby",
            "preferSlave": "prefer-standby",
        },
    ),
}
_JDBC_TRANSLATED = frozenset((*_JDBC_KEYWORDS, "ssl", "connectTimeout", "loginTimeout", "currentSchema"))
# Tuning of the driver itself: without meaning for COPY through libpq, and without effect on what is read.
IGNORED_JDBC_PARAMETERS = frozenset(
    """
    ApplicationName adaptiveFetch adaptiveFetchMaximum adaptiveFetchMinimum allowEncodingChanges
    assumeMinServerVersion autosave binaryTransfer binaryTransferDisable binaryTransferEnable cancelSignalTimeout
    classLoaderStrategy cleanupSavepoints connectExecutor connectExecutorArg convertBooleanToNumeric
    databaseMetadataCacheFields databaseMetadataCacheFieldsMiB defaultRowFetchSize disableColumnSanitiser
    escapeSyntaxCallMode flushCacheOnDdl groupStartupParameters gssResponseTimeout hideUnprivilegedObjects
    hostRecheckSeconds logServerErrorDetail logUnclosedConnections loggerFile loggerLevel maxResultBuffer
    maxSendBufferSize pemKeyAlgorithm preferQueryMode prepareThreshold preparedStatementCacheQueries
    preparedStatementCacheSizeMiB protocolVersion queryTimeout quoteReturningIdentifiers reWriteBatchedInserts
    reWriteBatchedInsertsSize readOnly readOnlyMode receiveBufferSize scramMaxIterations sendBufferSize socketTimeout
    sslResponseTimeout stringtype tcpKeepAlive tcpNoDelay unknownLength xmlFactoryFactory
    """.split()  # noqa: SIM905 - as a list it would fill 60 lines
)
_REFUSED_JDBC_PARAMETERS = {
    **dict.fromkeys(("PGHOST", "PGPORT", "PGDBNAME"), "host, port and database stand before the ?"),
    **dict.fromkeys(
        ("sslfactory", "sslfactoryarg", "sslhostnameverifier"),
        "libpq checks certificates by sslmode and sslrootcert; use these",
    ),
    "sslpasswordcallback": "use sslpassword",
    **dict.fromkeys(
        ("socketFactory", "socketFactoryArg"), "libpq opens its own sockets; connect directly or through a proxy"
    ),
    "localSocketAddress": "libpq cannot choose the local address",
    "authenticationPluginClassName": "libpq runs no Java code; pass the password, or use passfile",
    **dict.fromkeys(
        ("jaasApplicationName", "jaasLogin", "gssUseDefaultCreds", "useSpnego", "sspiServiceClass"),
        "libpq takes Kerberos credentials from the ticket cache; leave it out",
    ),
    "replication": _OWN_KEYWORDS["replication"],
}

_PERCENT_ENCODE = (
    "percent-encode special characters in user and password (@ is %40, : is %3A, / is %2F, ? is %3F, & is %26, % is "
    "%25), or pass both in the options user and password"
)
_USER_INFO = re.compile(r"[^@/]*@")
_HOST_AND_PORT = re.compile(r"(?:\[([^][]+)\]|([^][:]*))(?::([^:]*))?")
_CONNINFO_PAIR = re.compile(r"([^=\s]+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|((?!')(?:[^\s\\]|\\.)*))\s*", re.ASCII | re.DOTALL)
_PORTS = re.compile(r"\d{0,5}(?:,\d{0,5})*", re.ASCII)
# What a password looks like that was separated in another driver's manner (host=h;password=x).
_STRAY_PASSWORD = re.compile(r"(?:password|passwd|pass|pwd)\s*=", re.IGNORECASE)


@dataclass(frozen=True, slots=True, repr=False)
class ConnectionOptions:
    """Where and as whom to connect: ``psycopg2.connect(conninfo, **dict(keywords))``.

    ``conninfo`` is the user's libpq URI or connection string, '' without one; ``keywords`` never repeats what it says.
    """

    conninfo: str = ""
    keywords: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        try:
            settings = self.settings()
        except OptionError:
            return "ConnectionOptions(url=***)"
        shown = (f"{k}={'***' if k in SECRET_KEYWORDS else repr(v)}" for k, v in settings.items())
        return f"ConnectionOptions({', '.join(shown)})"

    def display(self) -> str:
        """Give ``host:port/database as user`` for messages: what the options say of it, and no secret."""
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
        """Give all that the options say as libpq keywords, secrets included; raises OptionError."""
        url = _parse_url(self.conninfo).settings if self.conninfo else {}
        settings = {**url, **dict(self.keywords)}
        _check_settings(settings)
        return settings


def _host_text(host: str) -> str:
    if not host:
        return "the default host"
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True, repr=False)
class _Url:
    """An ``url`` as libpq keywords; ``conninfo`` is its text where libpq reads that itself."""

    conninfo: str
    settings: dict[str, str]


def _parse_url(text: str) -> _Url:
    url = text.strip()
    if url.startswith(("postgresql://", "postgres://")):
        settings = _parse_uri(url)
        conninfo = url
    elif url.startswith("jdbc:postgresql:"):
        settings = _parse_jdbc(url.removeprefix("jdbc:postgresql:"))
        conninfo = ""
    elif re.match(r"[a-z][a-z0-9+.-]*:", url, re.IGNORECASE) or "=" not in url:
        raise OptionError(
            "it is no URL of PostgreSQL",
            remedy="use postgresql://user@host:port/database, jdbc:postgresql://host:port/database, or a libpq "
            "connection string such as 'host=... dbname=...'",
        )
    else:
        settings = _parse_conninfo(url)
        conninfo = url
    for keyword, reason in _OWN_KEYWORDS.items():
        if keyword in settings:
            raise OptionError(f"it sets {keyword}, which cannot be chosen", remedy=f"remove it: {reason}")
    _check_settings(settings)
    return _Url(conninfo, settings)


def _parse_uri(uri: str) -> dict[str, str]:
    """Read a libpq URI as conninfo_uri_parse_options (src/interfaces/libpq/fe-connect.c) does.

    Stricter than libpq where a raw character in the password moves the parts that follow it.
    """
    rest = uri.partition("://")[2]
    settings: dict[str, str] = {}
    if user_info := _USER_INFO.match(rest):
        user, _, password = user_info[0][:-1].partition(":")
        settings |= {"user": _decode(user), "password": _decode(password)}
        rest = rest[user_info.end() :]
    address, _, query = rest.partition("?")
    network, _, database = address.partition("/")
    hosts, ports = _hosts_and_ports(network)
    settings |= {"host": _decode(hosts), "port": _decode(ports), "dbname": _decode(_raw_database(database))}
    settings = {keyword: value for keyword, value in settings.items() if value}
    for position, pair in enumerate(query.removesuffix("&").split("&") if query else (), 1):
        name, equals, value = pair.partition("=")
        if not equals or "=" in value:
            raise OptionError(f"its parameter {position} is not of the form name=value", remedy=_PERCENT_ENCODE)
        keyword, value = _decode(name), _decode(value)
        if (keyword, value) == ("ssl", "true"):
            keyword, value = "sslmode", "require"
        _check_keyword(keyword, position)
        settings[keyword] = value
    return settings


def _parse_conninfo(conninfo: str) -> dict[str, str]:
    """Read a libpq connection string as conninfo_parse (src/interfaces/libpq/fe-connect.c) does."""
    settings: dict[str, str] = {}
    end, position = 0, 1
    while end < len(conninfo):
        pair = _CONNINFO_PAIR.match(conninfo, end)
        if pair is None:
            raise OptionError(
                f"its part {position} is not of the form keyword=value",
                remedy=r"separate with spaces; put a value with spaces between single quotes, and write \' and \\ for "
                r"a quote and a backslash",
            )
        _check_keyword(pair[1], position)
        value = pair[3] if pair[2] is None else pair[2]
        settings[pair[1]] = re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
        end, position = pair.end(), position + 1
    return settings


def _parse_jdbc(rest: str) -> dict[str, str]:
    """Translate a JDBC URL, read as org.postgresql.Driver.parseURL does, to libpq keywords."""
    server, _, query = rest.partition("?")
    if server.startswith("//"):
        network, slash, database = server[2:].partition("/")
    else:
        network, slash, database = "", "/", server
    if "/" in database or (network and not slash):
        raise OptionError(
            "it is not of the form jdbc:postgresql://host:port/database?parameters", remedy=_PERCENT_ENCODE
        )
    hosts, ports = _hosts_and_ports(network)
    # Unlike libpq, pgjdbc always connects by TCP, and its default port does not depend on the environment.
    settings = {
        "host": ",".join(_decode(host) or "localhost" for host in hosts.split(",")),
        "port": ",".join(port or "5432" for port in ports.split(",")) if ports else "5432",
    }
    if database:
        settings["dbname"] = _decode(_raw_database(database), plus_is_space=True)
    given = _jdbc_parameters(query)
    for name, (keyword, values) in _JDBC_KEYWORDS.items():
        if name in given:
            if values is not None and given[name] not in values:
                raise OptionError(
                    f"its parameter {name} has a value that libpq does not know",
                    remedy=f"use {_or(tuple(values))}, or remove it and set {keyword} as an option",
                )
            value = given[name] if values is None else values[given[name]]
            if value is not None:
                settings[keyword] = value
    if given.get("ssl") in ("", "true"):
        settings.setdefault("sslmode", "verify-full")
    elif given.get("ssl", "false") != "false":
        raise OptionError("its parameter ssl is neither true nor false", remedy="set sslmode instead")
    if settings.get("sslkey", "").endswith((".pk8", ".p12", ".pfx")):
        raise OptionError(
            "its parameter sslkey is a key in Java's form, libpq reads PEM", remedy="convert it with openssl pkcs8"
        )
    timeout = given.get("connectTimeout") or given.get("loginTimeout")
    if timeout:
        if not re.fullmatch(r"\d{1,9}", timeout, re.ASCII):
            raise OptionError("its connectTimeout or loginTimeout is not a number", remedy="write whole seconds")
        settings["connect_timeout"] = timeout
    if "currentSchema" in given:
        # The server splits options at spaces that no backslash protects (pg_split_opts).
        search_path = re.sub(r"([\\\s])", r"\\\1", given["currentSchema"])
        settings["options"] = f"{settings.get('options', '')} -csearch_path={search_path}".lstrip()
    return settings


def _jdbc_parameters(query: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for position, pair in enumerate(query.split("&") if query else (), 1):
        if not pair:
            continue
        name, _, value = pair.partition("=")
        if name in _REFUSED_JDBC_PARAMETERS:
            raise OptionError(f"its parameter {name} means nothing here", remedy=_REFUSED_JDBC_PARAMETERS[name])
        if name in IGNORED_JDBC_PARAMETERS:
            continue
        if name not in _JDBC_TRANSLATED:
            raise _unknown_parameter(name, position, _JDBC_TRANSLATED)
        if name in given:
            raise OptionError(f"it sets {name} twice", remedy=f"remove one; {_PERCENT_ENCODE}")
        given[name] = _decode(value, plus_is_space=True)
    return given


def _hosts_and_ports(network: str) -> tuple[str, str]:
    hosts, ports = [], []
    for element in network.split(","):
        match = _HOST_AND_PORT.fullmatch(element)
        if match is None or "@" in element:
            raise OptionError("its host and port cannot be read", remedy=_PERCENT_ENCODE)
        hosts.append(match[1] or match[2] or "")
        ports.append(match[3] or "")
    return ",".join(hosts), ",".join(ports)


def _raw_database(text: str) -> str:
    if re.search(r"[@&=;]", text):
        raise OptionError("after its host there is one of @ & = ; as it stands", remedy=_PERCENT_ENCODE)
    return text


def _decode(text: str, *, plus_is_space: bool = False) -> str:
    # libpq before 17 keeps a raw space and later ones drop it, so neither meaning is safe.
    if re.search(r"%(?![0-9A-Fa-f]{2})|%00|\s", text, re.ASCII):
        raise OptionError("it has a space, or a % that is not part of an escape such as %20", remedy=_PERCENT_ENCODE)
    try:
        return unquote_plus(text, errors="strict") if plus_is_space else unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise OptionError("its escapes are not UTF-8", remedy="percent-encode the bytes of UTF-8") from None


def _check_keyword(keyword: str, position: int) -> None:
    if keyword not in LIBPQ_KEYWORDS:
        raise _unknown_parameter(keyword, position, LIBPQ_KEYWORDS)


def _unknown_parameter(name: str, position: int, known: frozenset[str]) -> OptionError:
    near = _nearest(name, known)
    return OptionError(
        f"its parameter {position} is not known",
        remedy=(f"did you mean {near}? " if near else "") + f"If it is part of a password: {_PERCENT_ENCODE}",
    )


def _check_settings(settings: Mapping[str, str]) -> None:
    """Refuse what cannot work or would show a password, without repeating any of it."""
    for keyword, value in settings.items():
        if keyword not in SECRET_KEYWORDS and keyword != "options" and _STRAY_PASSWORD.search(value):
            raise OptionError(f"{keyword} seems to hold a password", remedy="pass it in the option password")
    # A host that begins with @ is an abstract Unix socket.
    if re.search(r"[^,]@|[\s;=?&]", settings.get("host", "")):
        raise OptionError("the host has a character that no host's name has", remedy=_PERCENT_ENCODE)
    port = settings.get("port", "")
    if not _PORTS.fullmatch(port) or any(p and not 1 <= int(p) <= 65535 for p in port.split(",")):
        raise OptionError("the port is not a number from 1 to 65535", remedy=f"correct it; in a url, {_PERCENT_ENCODE}")
    if "://" in settings.get("dbname", ""):
        raise OptionError("the database is a URL", remedy="pass it in the option url")


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how it is named, explained and read.

    ``default`` is read as if the user had written it; where there is none the value is None and the documentation
    shows ``without``.
    """

    name: str
    group: Group
    meaning: str
    parse: Callable[[str], Any]
    default: str | None = None
    without: str = "none"


OPTIONS: tuple[Option, ...] = (
    Option(
        "url",
        "connection",
        "libpq URI (`postgresql://…`), libpq connection string (`host=… dbname=…`) or `jdbc:postgresql://…`",
        _parse_url,
    ),
    Option("host", "connection", "server, or a comma-separated list of servers", _not_blank, without="libpq's"),
    Option("port", "connection", "port, or one for each host", _not_blank, without="libpq's"),
    Option("database", "connection", "database (libpq's `dbname` is taken too)", _not_blank, without="libpq's"),
    Option("user", "connection", "role to connect as", _not_blank, without="libpq's"),
    Option("password", "connection", "its password; libpq's `passfile` works too", _password),
    Option(
        "dbtable",
        "pgsnapshot",
        "`schema.table`, parts quoted as in SQL where needed: plain, partitioned and inherited tables, views, "
        "materialized views, foreign tables",
        QualifiedName.parse,
    ),
    Option("query", "pgsnapshot", "a SELECT instead of `dbtable`; read as one partition", _query),
    Option(
        "columns",
        "pgsnapshot",
        "columns to read, separated by commas and quoted as in SQL where needed",
        _parse_columns,
        without="all",
    ),
    Option("where", "pgsnapshot", "condition that PostgreSQL applies to the rows", _condition),
    Option(
        "partitionBytes", "pgsnapshot", "size of the part of a table that one task reads", _size("8kB", "32TB"), "64MB"
    ),
    Option("numPartitions", "pgsnapshot", "number of parts, instead of their size", _whole_number(1, 100_000)),
    Option(
        "consistentPoint",
        "pgsnapshot",
        "`auto`: know the snapshot's LSN, by way of a temporary slot, if role and `wal_level` allow it within "
        "`slotTimeout`, else do without; `require`: or fail; `off`: do without",
        _one_of(get_args(ConsistentPoint)),
        "auto",
    ),
    Option(
        "slot",
        "pgsnapshot",
        "create this durable replication slot with the snapshot and leave it, for a stream that starts where the "
        "snapshot ends; an error if it exists",
        _slot,
    ),
    Option("snapshot", "pgsnapshot", "read this exported snapshot instead of making one", _snapshot_id),
    Option(
        "lsnColumn",
        "pgsnapshot",
        "add a BIGINT column of this name with the snapshot's LSN (null where it is not known)",
        _not_blank,
    ),
    Option("asString", "pgsnapshot", "columns to read as PostgreSQL's own text", _parse_columns),
    Option(
        "numericAs",
        "pgsnapshot",
        "type of a `numeric` whose declaration does not fit DECIMAL: `string`, `double` or `decimal(p,s)`",
        NumericAs.parse,
        "string",
    ),
    Option(
        "unrepresentable",
        "pgsnapshot",
        "what becomes of a value that its Spark type cannot hold (infinity, NaN in a DECIMAL, a date out of range, an "
        "array of other dimensions): `error` or `null`",
        _one_of(get_args(Unrepresentable)),
        "error",
    ),
    Option("batchBytes", "pgsnapshot", "size of the Arrow batches handed to Spark", _size("64kB", "512MB"), "4MB"),
    Option("slotTimeout", "pgsnapshot", "longest wait for a slot", _duration("100ms", "1d"), "10s"),
    Option(
        "snapshotIdle",
        "pgsnapshot",
        "how long a snapshot stays open after its last reader",
        _duration("1s", "1d"),
        "60s",
    ),
)


def option_table_markdown(group: Group) -> str:
    """Give the README's table of one group of options."""
    rows = [("option", "meaning", "default"), ("---", "---", "---")]
    for option in OPTIONS:
        if option.group == group:
            default = option.without if option.default is None else f"`{option.default}`"
            rows.append((f"`{option.name}`", option.meaning, default))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# Names that users bring from elsewhere, in lower case, and what replaces them.
_FROM_LOAD = "load() takes no path here: name the table in the option dbtable"
_RANGES = "nothing to choose: tables are split by physical ranges; partitionBytes or numPartitions sets how many"
_PUSH_DOWN = "leave it out: use columns, where or query for what PostgreSQL shall do"
_WRITING = "leave it out: this format only reads"
_KERBEROS = "leave it out: libpq takes Kerberos credentials from the ticket cache, and krbsrvname as an option"
_HABITS = {
    "path": _FROM_LOAD,
    "paths": _FROM_LOAD,
    "table": "use dbtable",
    "dsn": "use url: Spark hides that one in its plans",
    "username": "use user",
    "driver": "nothing is needed: no JDBC driver takes part",
    "fetchsize": "nothing is needed: rows are streamed; batchBytes sets the size of a batch",
    "partitioncolumn": _RANGES,
    "lowerbound": _RANGES,
    "upperbound": _RANGES,
    "predicates": _RANGES,
    **dict.fromkeys(
        ("pushdownpredicate", "pushdownaggregate", "pushdownlimit", "pushdownoffset", "pushdowntablesample"), _PUSH_DOWN
    ),
    "sessioninitstatement": "set parameters in the option options: '-c name=value'",
    "preparequery": "write it into query: WITH ... SELECT ...",
    "customschema": "use asString or numericAs, or cast in query",
    "prefertimestampntz": "nothing is needed: types follow PostgreSQL's",
    "querytimeout": "leave it out: cancelling the Spark job ends its queries",
    "hint": "leave it out: PostgreSQL has no hints",
    "isolationlevel": "nothing is needed: an action reads one snapshot",
    **dict.fromkeys(
        ("batchsize", "truncate", "cascadetruncate", "createtableoptions", "createtablecolumntypes"), _WRITING
    ),
    **dict.fromkeys(("keytab", "principal", "refreshkrb5config", "connectionprovider"), _KERBEROS),
    "ssl": "use sslmode",
    "sslfactory": "use sslmode and sslrootcert",
    "currentschema": "qualify the table: schema.table; or set options to '-c search_path=...'",
    "sockettimeout": "leave it out; tcp_user_timeout bounds the wait for a dead server",
    **dict.fromkeys(("connecttimeout", "logintimeout"), "use connect_timeout"),
}

# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """The options of ``spark.read.format("pgsnapshot")``. With ``snapshot``, ``consistent_point`` has no meaning."""

    connection: ConnectionOptions
    dbtable: QualifiedName | None
    query: str | None
    columns: tuple[str, ...] | None
    where: str | None
    partition_bytes: int
    num_partitions: int | None
    consistent_point: ConsistentPoint
    slot: str | None
    snapshot: str | None
    lsn_column: str | None
    as_string: tuple[str, ...]
    numeric_as: NumericAs
    unrepresentable: Unrepresentable
    batch_bytes: int
    slot_timeout_seconds: float
    snapshot_idle_seconds: float


def parse_connection_options(options: Mapping[str, str]) -> ConnectionOptions:
    """Read options that are all of the connection; raises OptionError with everything that is wrong."""
    given = _read(options, ("connection",))
    connection = given.connection()
    given.raise_problems()
    return connection


def parse_snapshot_options(options: Mapping[str, str]) -> SnapshotOptions:
    """Read the options of ``pgsnapshot``; raises OptionError with everything that is wrong."""
    given = _read(options, ("connection", "pgsnapshot"))
    connection = given.connection()
    given.problems.extend(_snapshot_contradictions(given))
    given.raise_problems()
    values = given.values
    return SnapshotOptions(
        connection=connection,
        dbtable=values["dbtable"],
        query=values["query"],
        columns=values["columns"],
        where=values["where"],
        partition_bytes=values["partitionBytes"],
        num_partitions=values["numPartitions"],
        consistent_point="require" if values["slot"] else values["consistentPoint"],
        slot=values["slot"],
        snapshot=values["snapshot"],
        lsn_column=values["lsnColumn"],
        as_string=values["asString"] or (),
        numeric_as=values["numericAs"],
        unrepresentable=values["unrepresentable"],
        batch_bytes=values["batchBytes"],
        slot_timeout_seconds=values["slotTimeout"],
        snapshot_idle_seconds=values["snapshotIdle"],
    )


def _snapshot_contradictions(given: _Given) -> Iterator[OptionError]:
    names, values = given.names, given.values
    if "dbtable" not in names and "query" not in names:
        yield OptionError("neither dbtable nor query is given", remedy="name a table in dbtable, or write a query")
    if "query" in names:
        if "dbtable" in names:
            yield OptionError("both dbtable and query are given", remedy="remove one of them")
        for name in ("columns", "where", "partitionBytes", "numPartitions"):
            if name in names:
                use = "write it into the query" if name in ("columns", "where") else "a query is read as one partition"
                yield OptionError(f"{name} is not used with query", remedy=f"remove {name}: {use}")
    if {"partitionBytes", "numPartitions"} <= names:
        yield OptionError("partitionBytes and numPartitions both say how a table is split", remedy="remove one of them")
    if "snapshot" in names:
        for name in ("slot", "consistentPoint", "slotTimeout", "snapshotIdle"):
            if name in names:
                yield OptionError(
                    f"{name} is not used with snapshot",
                    remedy=f"remove {name}: it belongs to making a snapshot, and this one exists",
                )
    elif values["consistentPoint"] == "off":
        for name in ("slot", "slotTimeout"):
            if name in names:
                yield OptionError(
                    f"{name} contradicts consistentPoint=off",
                    remedy="remove one of them: a slot is what gives a snapshot its consistent point",
                )
    columns, lsn_column = values["columns"], values["lsnColumn"]
    if columns is not None:
        for column in values["asString"] or ():
            if column not in columns:
                yield OptionError(
                    f"asString names the column {_quote_where_needed(column)}, which columns leaves out",
                    remedy="add it to columns, or remove it from asString",
                )
        # Spark's columns have no case.
        if lsn_column is not None and lsn_column.lower() in map(str.lower, columns):
            yield OptionError(f"lsnColumn {lsn_column!r} is also one of columns", remedy="choose another name for it")


@dataclass(frozen=True, slots=True)
class _Given:
    """What was read: ``values`` of every option of the groups, ``names`` of those that the user wrote."""

    values: dict[str, Any]
    names: set[str]
    libpq: dict[str, str]
    problems: list[OptionError]

    def connection(self) -> ConnectionOptions:
        """Bring the options of the connection together; adds what contradicts to ``problems``."""
        url: _Url = self.values["url"] or _Url("", {})
        settings = dict(self.libpq)
        for name in ("host", "port", "database", "user", "password"):
            if self.values[name] is not None:
                settings["dbname" if name == "database" else name] = self.values[name]
        if "database" in self.names and "dbname" in self.libpq:
            self.problems.append(OptionError("database and dbname are the same", remedy="remove one of them"))
        for keyword in sorted(settings.keys() & url.settings.keys()):
            name = "database" if keyword == "dbname" and "database" in self.names else keyword
            self.problems.append(
                OptionError(f"both url and the option {name} say {keyword}", remedy="remove one of them")
            )
        try:
            _check_settings(settings)
        except OptionError as error:
            self.problems.append(error)
        if not url.conninfo:
            settings = {**url.settings, **settings}
        return ConnectionOptions(url.conninfo, tuple(sorted(settings.items())))

    def raise_problems(self) -> None:
        """Raise one OptionError for all that was found."""
        if len(self.problems) == 1:
            raise self.problems[0]
        if self.problems:
            lines = "".join(f"\n- {problem}" for problem in self.problems)
            raise OptionError(f"{len(self.problems)} things are wrong with the options:{lines}")


def _read(options: Mapping[str, str], groups: tuple[Group, ...]) -> _Given:
    """Read every option of ``groups`` on its own; what is between them is the caller's to check."""
    rows = {option.name.lower(): option for option in OPTIONS if option.group in groups}
    defaults = {row.name: None if row.default is None else row.parse(row.default) for row in rows.values()}
    given = _Given(defaults, set(), {}, [])
    texts: dict[str, str] = {}
    for key, text in options.items():
        # Spark hands over lower-case keys; a caller in Python may write both.
        if key.lower() in texts:
            given.problems.append(OptionError(f"the option {key} is given twice", remedy="names have no case"))
        texts[key.lower()] = text
    for key, text in texts.items():
        option = rows.get(key)
        if option is not None:
            given.names.add(option.name)
        try:
            _check_characters(text)
            if option is not None:
                given.values[option.name] = option.parse(text)
            elif key in LIBPQ_KEYWORDS and key not in _OWN_KEYWORDS:
                given.libpq[key] = text
            else:
                given.problems.append(_unknown_option(key, list(rows.values())))
        except OptionError as error:
            given.problems.append(OptionError(f"option {option.name if option else key}: {error}"))
    return given


def _unknown_option(key: str, rows: list[Option]) -> OptionError:
    if key in _OWN_KEYWORDS:
        return OptionError(f"the option {key} cannot be chosen", remedy=f"remove it: {_OWN_KEYWORDS[key]}")
    if key in _HABITS:
        return OptionError(f"the option {key} is not known here", remedy=_HABITS[key])
    names = [option.name for option in rows]
    near = _nearest(key, frozenset((*names, *LIBPQ_KEYWORDS)) - _OWN_KEYWORDS.keys())
    remedy = f"did you mean {near}?" if near else f"the options are {', '.join(names)} and libpq's keywords"
    return OptionError(f"the option {key} is not known", remedy=remedy)


def _nearest(name: str, known: frozenset[str]) -> str | None:
    lowered = {candidate.lower(): candidate for candidate in sorted(known)}
    near = difflib.get_close_matches(name.lower(), lowered, n=1)
    return lowered[near[0]] if near else None
