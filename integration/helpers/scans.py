"""Scans without Spark, under a snapshot that is held meanwhile."""

from __future__ import annotations

from typing import Any

from pg_cdc_source import OpenSnapshot
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import Plan, ScanRange, make_plan
from pg_cdc_source.snapshot.source import Source, plan_ranges

Planned = tuple[Plan, Source, list[ScanRange]]


def planned(opened: OpenSnapshot, **options: str) -> Planned:
    parsed = parse_snapshot_options({**opened.options, **options})
    plan = make_plan(parsed)
    return plan, *plan_ranges(plan, parsed)


def rows_of(planned: Planned) -> list[dict[str, Any]]:
    """The rows as dicts, from the batches that tasks would give Spark."""
    plan, source, ranges = planned
    batches = [batch for scan_range in ranges for batch in read_range(plan, source, scan_range, "test")]
    return [row for batch in batches for row in batch.to_pylist()]
