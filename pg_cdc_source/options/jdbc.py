"""JDBC URLs of PostgreSQL, translated to libpq's keywords."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote, unquote_plus

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.libpq_keywords import OWN_KEYWORDS
from pg_cdc_source.options.malformed_url import PERCENT_ENCODE, check_address, unknown_parameter
from pg_cdc_source.options.suggestions import in_words

PREFIX = "jdbc:postgresql:"

# pgjdbc's parameters (org.postgresql.PGProperty, 42.7). A row of _KEYWORDS names the libpq
# keyword and, where the values differ, libpq's value for each; None leaves libpq's default, which means the same.
_KEYWORDS: dict[str, tuple[str, dict[str, str | None] | None]] = {
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
_TRANSLATED = frozenset((*_KEYWORDS, "ssl", "connectTimeout", "loginTimeout", "currentSchema"))
# They tune the Java driver. They mean nothing for COPY through libpq and do not affect what is read.
IGNORED_PARAMETERS = frozenset(
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
_REFUSED_PARAMETERS = {
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
    "authenticationPluginClassName": "libpq runs no Java code; use the option passwordProvider or passwordCommand",
    **dict.fromkeys(
        ("jaasApplicationName", "jaasLogin", "gssUseDefaultCreds", "useSpnego", "sspiServiceClass"),
        "libpq takes Kerberos credentials from the ticket cache; leave it out",
    ),
    "replication": OWN_KEYWORDS["replication"],
}

_HOST_AND_PORT = re.compile(r"(?:\[([^][]+)\]|([^][:]*))(?::([^:]*))?")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%00|\s", re.ASCII)
_NOT_UTF_8 = re.compile("[\udc80-\udcff]")


def parse_jdbc_url(url: str) -> dict[str, str]:
    """Translate a JDBC URL, read as org.postgresql.Driver.parseURL does, to libpq's keywords.

    Raises OptionError for what pgjdbc does not accept either, and for what libpq cannot do.
    """
    server, _, query = url.removeprefix(PREFIX).partition("?")
    given = _parameters(query)
    settings = _address(server, has_service="service" in given) | _same_parameters(given)
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


def _address(server: str, *, has_service: bool) -> dict[str, str]:
    """Read what stands before the question mark: ``//host:port,host:port/database`` or ``database``.

    A service has its own host and port, unless these are written.
    """
    if server.startswith("//"):
        network, slash, database = server[2:].partition("/")
    else:
        network, slash, database = "", "/", server
    if "/" in database or (network and not slash):
        raise OptionError(
            "it is not of the form jdbc:postgresql://host:port/database?parameters", remedy=PERCENT_ENCODE
        )
    hosts, ports = _hosts_and_ports(network)
    # Unlike libpq, pgjdbc always connects by TCP, and its default port does not depend on the environment.
    settings = {}
    if any(hosts) or not has_service:
        settings["host"] = ",".join(_decode(host) or "localhost" for host in hosts)
    if any(ports) or not has_service:
        settings["port"] = ",".join(port or "5432" for port in ports) if any(ports) else "5432"
    if database:
        check_address(database)
        settings["dbname"] = _decode(database, plus_is_space=True)
    return settings


def _hosts_and_ports(network: str) -> tuple[list[str], list[str]]:
    hosts, ports = [], []
    for element in network.split(","):
        match = _HOST_AND_PORT.fullmatch(element)
        if match is None or "@" in element:
            raise OptionError("its host and port cannot be read", remedy=PERCENT_ENCODE)
        hosts.append(match[1] or match[2] or "")
        ports.append(match[3] or "")
    return hosts, ports


def _parameters(query: str) -> dict[str, str]:
    """Read the parameters that have a meaning here."""
    given: dict[str, str] = {}
    for position, pair in enumerate(query.split("&") if query else (), 1):
        if not pair:
            continue
        name, _, value = pair.partition("=")
        if name in _REFUSED_PARAMETERS:
            raise OptionError(f"its parameter {name} has no meaning here", remedy=_REFUSED_PARAMETERS[name])
        if name in IGNORED_PARAMETERS:
            continue
        if name not in _TRANSLATED:
            raise unknown_parameter(name, position, _TRANSLATED)
        if name in given:
            raise OptionError(f"it sets {name} twice", remedy=f"remove one; {PERCENT_ENCODE}")
        given[name] = _decode(value, plus_is_space=True)
    return given


def _same_parameters(given: Mapping[str, str]) -> dict[str, str]:
    """Translate the parameters that have a keyword of libpq for them."""
    settings: dict[str, str] = {}
    for name, (keyword, values) in _KEYWORDS.items():
        if name in given:
            if values is not None and given[name] not in values:
                raise OptionError(
                    f"its parameter {name} has a value that libpq does not know",
                    remedy=f"use {in_words(tuple(values))}, or remove it and set {keyword} as an option",
                )
            value = given[name] if values is None else values[given[name]]
            if value is not None:
                settings[keyword] = value
    return settings


def _decode(text: str, *, plus_is_space: bool = False) -> str:
    if _NO_ESCAPE.search(text):
        raise OptionError("it has a space, or a % that is not part of an escape such as %20", remedy=PERCENT_ENCODE)
    # An exception of the codec would carry the text.
    decoded = (unquote_plus if plus_is_space else unquote)(text, errors="surrogateescape")
    if _NOT_UTF_8.search(decoded):
        raise OptionError("its escapes are not UTF-8", remedy="percent-encode the bytes of UTF-8")
    return decoded
