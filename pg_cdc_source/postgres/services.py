"""Services that run PostgreSQL for others: what tells them apart on the server, and what logical decoding needs there.

None of them lets anybody edit postgresql.conf, and most give the right to replicate in a way of their own. What they
need is from their documentation; the tests only make servers look like them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Service:
    """A service. ``decoding`` turns logical decoding on, ``replicating`` is SQL that lets ``{role}`` use slots.

    ``setting`` is the server's parameter that shows whether decoding is on, if it is not only wal_level.
    """

    name: str
    decoding: str
    replicating: str
    setting: str | None
    advice: str


_OF_AMAZON = (
    "roles of IAM connect with passwordCommand or passwordProvider, and their replication connections need "
    "rds.iam_auth_for_replication=1"
)

# By the role that only this service's servers have. Aurora has that of RDS, and a function besides.
SERVICES = {
    "rds_superuser": Service(
        "Amazon RDS",
        "set rds.logical_replication=1 in the DB parameter group (of an Aurora cluster, in the cluster's) and reboot "
        "the instance",
        "GRANT rds_replication TO {role}",
        "rds.logical_replication",
        _OF_AMAZON,
    ),
    "cloudsqlsuperuser": Service(
        "Google Cloud SQL",
        "set the flag cloudsql.logical_decoding=on, which restarts the instance",
        "as a member of cloudsqlsuperuser: ALTER ROLE {role} REPLICATION",
        "cloudsql.logical_decoding",
        "roles of IAM connect with passwordCommand or passwordProvider",
    ),
    "alloydbsuperuser": Service(
        "Google AlloyDB",
        "set the flag alloydb.logical_decoding=on, which restarts the instance",
        "as a member of alloydbsuperuser: ALTER ROLE {role} REPLICATION",
        "alloydb.logical_decoding",
        "roles of IAM connect with passwordCommand or passwordProvider",
    ),
    "azure_pg_admin": Service(
        "Azure Database for PostgreSQL",
        "set the server parameter wal_level to logical and restart the server",
        "as a member of azure_pg_admin: ALTER ROLE {role} REPLICATION",
        None,
        "roles of Entra ID connect with passwordCommand or passwordProvider; azure.extensions is for extensions, and "
        "pgoutput is none",
    ),
    "neon_superuser": Service(
        "Neon",
        "enable logical replication in the project's settings, which restarts its computes",
        "ALTER ROLE {role} REPLICATION; roles that Neon's console, CLI or API makes have the right already",
        None,
        "connect to the host without -pooler; Neon drops slots that nobody has read for about 40 hours, and all of a "
        "branch that is restored",
    ),
    "supabase_admin": Service(
        "Supabase",
        "set wal_level=logical, which is the default there, and restart the project",
        "as postgres: ALTER ROLE {role} REPLICATION",
        None,
        "connect to the database itself (db.<project>.supabase.co, by IPv6 or with the IPv4 add-on) and not to the "
        "pooler",
    ),
}
AURORA = Service(
    "Amazon Aurora",
    "set rds.logical_replication=1 in the DB cluster parameter group and reboot the writer",
    "GRANT rds_replication TO {role}",
    "rds.logical_replication",
    f"streams read the writer, by the cluster's endpoint; {_OF_AMAZON}",
)


def service_of(roles: Collection[str], *, has_aurora_version: bool) -> Service | None:
    """The service whose roles these are among those of a server; None for a server of one's own."""
    if "rds_superuser" in roles and has_aurora_version:
        return AURORA
    return next((service for role, service in SERVICES.items() if role in roles), None)
