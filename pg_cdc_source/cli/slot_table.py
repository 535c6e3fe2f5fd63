"""Slots as ``pg-cdc slots`` shows them: a table, or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from pg_cdc_source.cli.shown import shown
from pg_cdc_source.postgres.slot_metrics import SlotMetrics


def as_json(metrics: SlotMetrics) -> dict[str, Any]:
    """A slot as ``--json`` prints it."""
    usage, slot = metrics.usage, metrics.usage.slot
    return {
        "name": slot.name,
        "database": slot.database,
        "plugin": slot.plugin,
        "active_pid": slot.active_pid,
        "application": usage.application,
        "running": usage.running,
        "wal_status": slot.wal_status,
        "invalidation": slot.invalidation,
        "confirmed_flush_lsn": None if slot.confirmed_flush is None else str(slot.confirmed_flush),
        "lag_bytes": usage.lag_bytes,
        "lag_seconds": metrics.lag_seconds,
        "held_bytes": usage.held_bytes,
        "safe_bytes": metrics.safe_bytes,
        "decoding": None if metrics.decoding is None else asdict(metrics.decoding),
    }


def slot_table(found: Sequence[SlotMetrics], caption: str | None = None) -> Table | str:
    """The slots of a server for people."""
    if not found:
        return "The server has no logical slots."
    table = Table(box=box.SIMPLE_HEAD, caption=caption)
    for title in ("slot", "database", "plugin", "runs", "used by", "WAL", "confirmed"):
        table.add_column(title, overflow="fold")
    # Of most servers there is nothing to say in the last two.
    is_bounded = any(metrics.safe_bytes is not None for metrics in found)
    has_spilled = any(metrics.decoding is not None and metrics.decoding.spills for metrics in found)
    for title in ("lag", "held", *["safe"] * is_bounded, *["spilled"] * has_spilled):
        table.add_column(title, justify="right")
    for metrics in found:
        cells = [*_cells(metrics), *[_size(metrics.safe_bytes)] * is_bounded]
        if has_spilled:
            cells.append(_size(None if metrics.decoding is None else metrics.decoding.spilled_bytes))
        # Users choose the names, which may look like markup.
        table.add_row(*(Text(shown(cell)) for cell in cells))
    return table


def _cells(metrics: SlotMetrics) -> Iterator[str]:
    usage, slot = metrics.usage, metrics.usage.slot
    yield slot.name
    yield slot.database or ""
    yield slot.plugin or ""
    yield usage.running or ""
    yield "" if slot.active_pid is None else f"pid {slot.active_pid} ({usage.application or 'no name'})"
    yield (slot.wal_status or "") if slot.invalidation is None else f"lost: {slot.invalidation}"
    yield "" if slot.confirmed_flush is None else str(slot.confirmed_flush)
    yield _size(usage.lag_bytes) + (f", {metrics.lag_seconds:.0f} s" if metrics.lag_seconds else "")
    yield _size(usage.held_bytes)


def _size(count: int | None) -> str:
    if count is None:
        return ""
    return decimal(count) if count >= 0 else f"-{decimal(-count)}"
