"""Slots in Prometheus' text format (version 0.0.4), as ``pg-cdc slots --prometheus`` prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pg_cdc_source.postgres.slot_metrics import Decoding, SlotMetrics


@dataclass(frozen=True, slots=True)
class Metric:
    """``value`` of a slot is None where there is none, and the slot is left out."""

    name: str
    kind: str
    help: str
    value: Callable[[SlotMetrics], float | None]


def _gauge(name: str, text: str, value: Callable[[SlotMetrics], float | None]) -> Metric:
    return Metric(f"pg_cdc_slot_{name}", "gauge", text, value)


def _counter(name: str, text: str, value: Callable[[Decoding], int]) -> Metric:
    def counted(slot: SlotMetrics) -> int | None:
        return None if slot.decoding is None else value(slot.decoding)

    return Metric(f"pg_cdc_slot_{name}_total", "counter", text, counted)


METRICS = (
    _gauge("active", "1 while a session reads the slot, else 0.", lambda m: m.usage.slot.active_pid is not None),
    _gauge(
        "lost", "1 if the server has invalidated the slot, else 0.", lambda m: m.usage.slot.invalidation is not None
    ),
    _gauge("lag_bytes", "WAL that is not confirmed.", lambda m: m.usage.lag_bytes),
    _gauge("lag_seconds", "Minimum age of the oldest WAL that is not confirmed, in seconds.", lambda m: m.lag_seconds),
    _gauge("retained_bytes", "WAL that the server keeps for the slot.", lambda m: m.usage.held_bytes),
    _gauge("safe_bytes", "WAL that may be written before the slot may be lost.", lambda m: m.safe_bytes),
    _gauge("catalog_age", "Transactions since the oldest one whose catalogs are kept.", lambda m: m.catalog_age),
    _counter("spilled_transactions", "Transactions spilled to the server's disk.", lambda d: d.spilled_transactions),
    _counter("spills", "Number of spills to the server's disk.", lambda d: d.spills),
    _counter("spilled_bytes", "Changes spilled to the server's disk.", lambda d: d.spilled_bytes),
    _counter("streamed_transactions", "Transactions sent before they ended.", lambda d: d.streamed_transactions),
    _counter("streams", "Number of parts of transactions sent before their end.", lambda d: d.streams),
    _counter("streamed_bytes", "Changes sent before their transaction ended.", lambda d: d.streamed_bytes),
    _counter("decoded_transactions", "Transactions decoded.", lambda d: d.transactions),
    _counter("decoded_bytes", "Changes decoded.", lambda d: d.bytes),
)


def exposition(slots: Sequence[SlotMetrics]) -> str:
    """The whole text; a server without slots has the metrics' descriptions alone."""
    return "".join(f"{line}\n" for metric in METRICS for line in _lines(metric, slots))


def _lines(metric: Metric, slots: Iterable[SlotMetrics]) -> Iterable[str]:
    yield f"# HELP {metric.name} {metric.help}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for found in slots:
        value = metric.value(found)
        if value is not None:
            slot = found.usage.slot
            labels = {"slot": slot.name, "database": slot.database or "", "plugin": slot.plugin or ""}
            text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            yield f"{metric.name}{{{text}}} {float(value) if isinstance(value, float) else int(value)}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
