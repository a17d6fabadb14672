"""Whether this vLLM is one that the adapter fits, and this engine one that it serves.

What does not fit is named, and the engine boots without a tier.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

TESTED = ("0.27.1", "0.33.0")  # the first and the last release that was tried

NEEDED = (
    *("LoadStoreSpec", "LookupResult", "Medium", "OffloadingEvent", "ReqContext"),
    *("OffloadingManager", "OffloadingSpec", "OffloadingWorker", "TransferResult"),
    *("PrepareStoreOutput", "RequestOffloadingContext", "GPULoadStoreSpec"),
)
RESULTS = ("MISS", "HIT", "RETRY")
FIELDS = {
    "PrepareStoreOutput": ("keys_to_store", "store_spec", "evicted_keys"),
    "OffloadingEvent": ("keys", "medium", "removed"),
    "TransferResult": ("job_id", "success", "transfer_size", "transfer_time"),
}


def misfits(base: Any, ours: Iterable[tuple[str, type]]) -> list[str]:
    """What of vLLM's interface (the module base) is not as it has to be.

    ours are pairs: the name of a base class, and our class of it.
    """
    out = [f"{name} is missing" for name in NEEDED if not hasattr(base, name)]
    if out:
        return out
    out += [f"LookupResult.{r}" for r in RESULTS if not hasattr(base.LookupResult, r)]
    for name, fields in FIELDS.items():
        known = inspect.signature(getattr(base, name)).parameters
        out += [f"{name}.{f} is missing" for f in fields if f not in known]
        out += [
            f"{name}.{p.name} is new and has no default"
            for p in known.values()
            if p.name not in fields and p.default is p.empty
        ]
    for name, cls in ours:
        out += _methods(getattr(base, name), cls)
    return out


def _methods(base: type, ours: type) -> Iterable[str]:
    """Methods of a base class that ours lacks or does not take the arguments of."""
    for name in sorted(getattr(base, "__abstractmethods__", ())):
        if getattr(ours, name, None) in (None, getattr(base, name)):
            yield f"{base.__name__}.{name} is new"
    for name, theirs in vars(base).items():
        mine = inspect.getattr_static(ours, name, None)
        if name.startswith("_") or not inspect.isfunction(theirs):
            continue
        if mine is None or mine is theirs:  # not ours
            continue
        if not inspect.isfunction(mine):
            yield f"{base.__name__}.{name} is no method any more"
            continue
        takes = inspect.signature(mine).parameters
        if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            continue
        for p in inspect.signature(theirs).parameters:
            if p not in takes:
                yield f"{base.__name__}.{name} has a new argument {p!r}"


def unserved(config: Any) -> list[str]:
    """Why the adapter does not serve an engine of this OffloadingConfig."""
    out = []
    if getattr(config, "kv_cache_layout", None) == "BLHNC":
        out.append("HiSparse loads after the step in which it looks up")
    if getattr(config, "canonical_layout", False):
        out.append("canonical_layout stores bytes in an order of its own")
    return out


def untested(version: str) -> bool:
    """Whether a version of vLLM lies outside of those that were tried."""

    def key(v: str) -> list[int]:
        return [int("0" + "".join(filter(str.isdigit, n))) for n in v.split(".")[:3]]

    return not key(TESTED[0]) <= key(version.split("+")[0]) <= key(TESTED[1])
