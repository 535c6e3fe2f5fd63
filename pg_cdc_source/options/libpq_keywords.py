"""libpq's keywords: which there are, which hold a secret, and which the connector sets itself."""

from __future__ import annotations

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
# Spark would show these in its plans: it redacts the url, and options whose names say that they are secret.
ONLY_IN_URL = frozenset(("scram_client_key", "scram_server_key"))
OWN_KEYWORDS = {
    "replication": "the connector opens replication connections itself where it needs one",
    "application_name": "readers and the holder of their snapshot find each other by it",
    "fallback_application_name": "readers and the holder of their snapshot find each other by application_name",
    "client_encoding": "the connector decodes values as UTF-8",
}

# The keywords that are accepted as options of the same name, in addition to the options that this package declares.
PASSED_KEYWORDS = LIBPQ_KEYWORDS - OWN_KEYWORDS.keys() - ONLY_IN_URL - {"host", "port", "user", "password"}
