"""Where and as whom to connect: libpq's and pgjdbc's ways of saying it, read without ever showing a secret.

A malformed URL is where that is hard, because a password whose special characters are not percent-encoded ends up in
the host, the port or a parameter's name. So errors name a URL's parameters by position, never by what stands there, and
never quote the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, unquote_plus

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.names import in_words, nearest

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
OWN_KEYWORDS = {
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
    "replication": OWN_KEYWORDS["replication"],
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
    """An ``url`` as libpq keywords; ``conninfo`` is its text where libpq reads that itself."""

    conninfo: str
    settings: dict[str, str]


def parse_url(text: str) -> Url:
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
    for keyword, reason in OWN_KEYWORDS.items():
        if keyword in settings:
            raise OptionError(f"it sets {keyword}, which cannot be chosen", remedy=f"remove it: {reason}")
    check_settings(settings)
    return Url(conninfo, settings)


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
                    remedy=f"use {in_words(tuple(values))}, or remove it and set {keyword} as an option",
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
    near = nearest(name, known)
    return OptionError(
        f"its parameter {position} is not known",
        remedy=(f"did you mean {near}? " if near else "") + f"If it is part of a password: {_PERCENT_ENCODE}",
    )


def check_settings(settings: Mapping[str, str]) -> None:
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
