"""The few names of vLLM that the worker needs, for tests where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from abc import ABC
from dataclasses import dataclass


def install() -> None:
    """Makes ``vllm.v1.kv_offload.base`` importable, unless the real one is."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return

    class OffloadingWorker(ABC):
        pass

    class LoadStoreSpec(ABC):
        pass

    @dataclass
    class TransferResult:
        job_id: int
        success: bool
        transfer_size: int | None = None
        transfer_time: float | None = None

    names = ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.base")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    base = sys.modules[names[-1]]
    for item in (OffloadingWorker, LoadStoreSpec, TransferResult):
        setattr(base, item.__name__, item)
