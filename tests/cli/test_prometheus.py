"""Prometheus' metrics: names that are documented, and labels that cannot break a line."""

from __future__ import annotations

import re
from pathlib import Path

from pg_cdc_source.cli.prometheus import METRICS, exposition
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres.slot_metrics import Decoding, SlotMetrics
from pg_cdc_source.postgres.slots import Slot, Usage

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def metrics_of(name: str, database: str) -> SlotMetrics:
    slot = Slot(
        name=name,
        plugin="pgoutput",
        slot_type="logical",
        database=database,
        active_pid=7,
        restart_lsn=Lsn(1),
        confirmed_flush=Lsn(2),
        wal_status="reserved",
        invalidation=None,
        temporary=False,
        two_phase=False,
        failover=False,
        synced=False,
    )
    return SlotMetrics(Usage(slot, "a", "pgcdc", 12, 34), 0.25, -5, 7, Decoding(1, 2, 3, 4, 5, 6, 7, 8))


def test_every_metric_is_documented_and_none_else() -> None:
    documented = re.findall(r"^\| `(pg_cdc_slot_\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert documented == [metric.name for metric in METRICS]


def test_names_in_labels_are_escaped() -> None:
    text = exposition([metrics_of("s", 'a "shop"\\ of\ntwo')])
    assert 'pg_cdc_slot_lag_bytes{slot="s",database="a \\"shop\\"\\\\ of\\ntwo",plugin="pgoutput"} 12\n' in text
    assert len(text.splitlines()) == 3 * len(METRICS)


def test_values_are_numbers() -> None:
    values = [line.rpartition(" ")[2] for line in exposition([metrics_of("s", "d")]).splitlines() if line[0] != "#"]
    assert values == ["1", "0", "12", "0.25", "34", "-5", "7", *map(str, range(1, 9))]
