"""The metrics of a manager, for vLLM's own Prometheus endpoint."""

from __future__ import annotations

from typing import Any

PREFIX = "vllm:kvlift_"

# What each is called, its kind, its labels and what it means: docs/adapter.md.
COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "loaded_keys": ((), "Keys that were given to workers to load."),
    "stored_keys": ((), "Keys that were given to workers to store."),
    "present_keys": ((), "Offered keys that were stored already or being stored."),
    "refused_keys": (("reason",), "Offered keys that the daemon had no room for."),
    "skipped_keys": (("why",), "Offered keys that the daemon was not asked about."),
    "failed_stores": ((), "Store jobs whose copy failed on a rank."),
    "late_reserves": ((), "Reserves that were not answered within the deadline."),
    "reserves": ((), "Reserves that were sent to the daemon."),
    "reserve_seconds": ((), "Seconds that steps waited for reserves."),
    "lost_connections": ((), "Connections to the daemon that were lost."),
    "errors": ((), "Errors of the adapter itself; after one it misses everything."),
}
GAUGES: dict[str, str] = {
    "attached": "1 while the daemon is there and its keys are known.",
    "known_keys": "Stored keys of the namespace that lookups can hit.",
    "breaker_open": "1 while stores are left out because answers came late.",
}


class Stats:
    """Counts, and says what has changed since it was asked last."""

    def __init__(self) -> None:
        """Everything is 0 and has not been said."""
        self._counts: dict[tuple[str, tuple[str, ...]], float] = {}
        self._said: dict[str, float] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Adds to a counter of COUNTERS."""
        if value:
            key = (name, labels)
            self._counts[key] = self._counts.get(key, 0) + value

    def level(self, name: str, total: float) -> None:
        """Adds to a counter of COUNTERS what a total has grown by."""
        before = self._said.get(name, 0)
        if total != before:
            self._said[name] = total
            self.add(name, total - before)

    def fill(self, out: Any, gauges: dict[str, float]) -> bool:
        """Says what is new to vLLM's OffloadingConnectorStats; whether it was anything."""
        counts, self._counts = self._counts, {}
        for (name, labels), value in counts.items():
            out.increase_counter(PREFIX + name, value, labels)
        new = {n: v for n, v in gauges.items() if self._said.get(n) != v}
        self._said.update(new)
        for name, value in new.items():
            out.set_gauge(PREFIX + name, value)
        return bool(counts or new)


def definitions(base: Any) -> dict[str, Any]:
    """The declarations of all metrics, of the classes of vLLM's module base."""
    out: dict[str, Any] = {}
    for name, (labels, text) in COUNTERS.items():
        out[PREFIX + name] = base.OffloadingCounterMetadata(
            documentation=text, labelnames=labels
        )
    for name, text in GAUGES.items():
        out[PREFIX + name] = base.OffloadingGaugeMetadata(documentation=text)
    return out
