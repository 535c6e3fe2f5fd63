"""The server's settings that the connector sets itself in each of its sessions, whatever a role or database says."""

from __future__ import annotations

# Values are decoded as these say. They also say what literals in the user's SQL mean, and what a view makes of a time.
VALUE_SETTINGS = {
    "standard_conforming_strings": "on",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "iso_8601",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "quote_all_identifiers": "off",  # regclass and its like are names
    "xmloption": "content",
}

# All that changes how long a session lives, what it may do, or how it prints values. So settings of the role or the
# database cannot change a result. lc_monetary is no such setting: it says how many decimals money has, which is stored
# as a whole number.
SESSION_SETTINGS = {
    "default_transaction_read_only": "on",
    # A serializable transaction, which a hot standby refuses, would wait for those of others where it is deferrable.
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "row_security": "off",  # a policy that would hide rows becomes an error
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    "lock_timeout": "60s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "client_connection_check_interval": "5s",  # a COPY whose reader is gone ends within seconds
    **VALUE_SETTINGS,
    # Ranges are read in physical order, each by one backend: no parallel workers on the source, no start in the
    # middle of the table, and the same order again when a lost session is repeated.
    "max_parallel_workers_per_gather": "0",
    "synchronize_seqscans": "off",
    "enable_tidscan": "on",
    "jit": "off",
    # Nobody reads notices. psycopg2 keeps those of a COPY until it ends, and functions may send one for each row.
    "client_min_messages": "error",
    "synchronous_commit": "off",  # these sessions commit nothing but notifications
}
