"""What a server lacks for a logical slot, by version, service and WAL level. No PostgreSQL 19 is at hand to ask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pg_cdc_source.postgres.catalog import Server
from pg_cdc_source.postgres.services import AURORA, SERVICES, Service, service_of
from pg_cdc_source.postgres.slot_creation import lacks_for_slot

REPLICA = Server(
    version_num=180000,
    in_recovery=False,
    wal_level="replica",
    effective_wal_level="replica",
    block_size=8192,
    role="reader",
    may_replicate=True,
    old_snapshot_threshold=None,
    service=None,
)
ON_19 = replace(REPLICA, version_num=190000)


def lacks(server: Server) -> list[str]:
    return [
        f"{error.what}; {error.remedy}" for error in lacks_for_slot(server, stream=True, failover=False, messages=False)
    ]


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (REPLICA, "a stream needs wal_level=logical, but it is replica; set wal_level=logical and restart PostgreSQL"),
        (replace(REPLICA, wal_level="logical", effective_wal_level="logical"), None),
        (ON_19, None),
        (replace(ON_19, effective_wal_level="logical"), None),
        (
            replace(ON_19, wal_level="minimal", effective_wal_level="minimal"),
            "a stream needs wal_level=replica, but it is minimal; set wal_level=replica and restart PostgreSQL",
        ),
        (
            replace(ON_19, in_recovery=True),
            "a stream on a standby needs a primary that writes for logical decoding, but effective_wal_level is "
            "replica; on the primary, create a logical slot and keep it, or set wal_level=logical",
        ),
        # What the standby's own setting says does not count before its promotion.
        (
            replace(ON_19, in_recovery=True, wal_level="logical"),
            "a stream on a standby needs a primary that writes for logical decoding, but effective_wal_level is "
            "replica; on the primary, create a logical slot and keep it, or set wal_level=logical",
        ),
        (replace(ON_19, in_recovery=True, effective_wal_level="logical"), None),
    ],
)
def test_a_server_decodes_by_its_version_and_wal_level(server: Server, says: str | None) -> None:
    assert lacks(server) == ([] if says is None else [says])


@pytest.mark.parametrize(
    ("server", "on_demand"),
    [
        (REPLICA, False),
        (ON_19, True),
        (replace(ON_19, effective_wal_level="logical"), False),
        (replace(ON_19, wal_level="minimal", effective_wal_level="minimal"), False),
        (replace(ON_19, in_recovery=True), False),
    ],
)
def test_decoding_is_turned_on_by_a_slot_on_a_primary_of_19(server: Server, on_demand: bool) -> None:
    assert server.decodes_on_demand is on_demand


@pytest.mark.parametrize("service", [*SERVICES.values(), AURORA], ids=lambda service: service.name)
def test_a_remedy_is_one_of_the_service(service: Service) -> None:
    decoding, replicating = lacks(replace(REPLICA, service=service, may_replicate=False, role="Reader"))
    assert decoding.endswith(service.decoding)
    assert service.replicating.format(role='"Reader"') in replicating
    assert "restart PostgreSQL" not in decoding


def test_services_are_told_by_their_roles() -> None:
    for role, service in SERVICES.items():
        assert service_of([role], has_aurora_version=False) is service
    assert service_of(["rds_superuser"], has_aurora_version=True) is AURORA
    # Somebody's own function of that name makes no Aurora.
    assert service_of([], has_aurora_version=True) is None
    assert service_of(["postgres"], has_aurora_version=False) is None
