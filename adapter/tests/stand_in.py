"""Stand-ins for the classes of vLLM that the adapter is built on, release by release.

They have the methods, arguments and fields of 0.27.1 to 0.33.0 and do nothing. ``load`` puts them where vLLM would be and
imports the adapter's modules anew, so that each release gets its own.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RELEASES = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")

_before: dict[str, ModuleType] = {}  # what stand-ins have taken the place of

_OURS = ("manager", "requests", "spec", "specs", "stats", "worker")


def minor(release: str) -> int:
    """The release's number: 27 to 33."""
    return int(release.split(".")[1])


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class CacheHitSource(Enum):
    HOST = "host"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


class ScheduleEndContext(NamedTuple):
    new_req_ids: Any
    preempted_req_ids: Any


class LoadStoreSpec:
    pass


class GPULoadStoreSpec(LoadStoreSpec):
    pass


@dataclass
class PrepareStoreOutput:
    keys_to_store: list[bytes]
    store_spec: LoadStoreSpec
    evicted_keys: list[bytes]


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass(frozen=True)
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingGaugeMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass
class OldReqContext:
    """Up to 0.30: without positions."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    _state: dict[type, Any] = field(default_factory=dict)

    def set_state(self, value: Any) -> None:
        self._state[type(value)] = value

    def get_state(self, cls: type) -> Any:
        return self._state.get(cls)


@dataclass
class ReqContext(OldReqContext):
    """Since 0.31."""

    _offload_key_positions: dict[bytes, int] = field(default_factory=dict)


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Any = None


class Stats:
    """vLLM's OffloadingConnectorStats, as far as a manager fills it."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}

    def increase_counter(
        self, name: str, value: float = 1, labelvalues: tuple[str, ...] = ()
    ) -> None:
        at = (name, labelvalues)
        self.values[at] = self.values.get(at, 0) + value

    def set_gauge(
        self, name: str, value: float, labelvalues: tuple[str, ...] = ()
    ) -> None:
        self.values[name, labelvalues] = value


class OldManager(ABC):
    """Up to 0.31."""

    @abstractmethod
    def lookup(self, key: bytes, req_context: Any) -> LookupResult: ...
    @abstractmethod
    def prepare_load(self, keys: Any, req_context: Any) -> LoadStoreSpec: ...
    @abstractmethod
    def prepare_store(self, keys: Any, req_context: Any) -> Any: ...
    @abstractmethod
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext: ...
    def touch(self, keys: Any, req_context: Any) -> None: ...
    def complete_load(self, keys: Any, req_context: Any) -> None: ...
    def complete_store(
        self, keys: Any, req_context: Any, success: bool = True
    ) -> None: ...
    def on_request_finished(self, req_context: Any) -> None: ...
    def take_events(self) -> Any:
        return ()

    def on_schedule_end(self, context: Any) -> None: ...
    def has_pending_work(self) -> bool:
        return False

    def reset_cache(self) -> None: ...
    def get_stats(self) -> Any: ...
    def shutdown(self) -> None: ...


class Manager32(OldManager):
    """0.32."""

    def get_load_source(self, key: bytes, req_context: Any) -> Any: ...


class Manager33(Manager32):
    """0.33."""

    def on_reset_flushed(self) -> None: ...
    def config_info(self) -> Any:
        return [{}]


class OldWorker(ABC):
    """Up to 0.32."""

    @abstractmethod
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...
    @abstractmethod
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...
    @abstractmethod
    def get_finished(self) -> list[TransferResult]: ...
    @abstractmethod
    def wait(self, job_ids: set[int]) -> None: ...
    def shutdown(self) -> None: ...


class Worker33(OldWorker):
    """0.33."""

    @abstractmethod
    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool: ...


class Spec(ABC):
    """All releases, but for config_info_keys, which 0.33 asks for."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.extra_config = config.extra_config
        self.kv_events_config = SimpleNamespace(
            enable_kv_cache_events=config.enable_kv_cache_events
        )

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        return {}

    @abstractmethod
    def get_manager(self) -> Any: ...
    @abstractmethod
    def get_worker(self, kv_caches: Any) -> Any: ...


def base_of(release: str) -> ModuleType:
    """The module vllm.v1.kv_offload.base of a release."""
    n = minor(release)
    base = ModuleType("vllm.v1.kv_offload.base")
    for x in (
        *(LookupResult, Medium, LoadStoreSpec, GPULoadStoreSpec, PrepareStoreOutput),
        *(TransferResult, RequestOffloadingContext, OffloadingEvent),
        *(OffloadingCounterMetadata, OffloadingGaugeMetadata, ScheduleEndContext),
    ):
        setattr(base, x.__name__, x)
    base.ReqContext = ReqContext if n >= 31 else OldReqContext  # type: ignore[attr-defined]
    manager = Manager33 if n >= 33 else Manager32 if n == 32 else OldManager
    base.OffloadingManager = manager  # type: ignore[attr-defined]
    base.OffloadingWorker = Worker33 if n >= 33 else OldWorker  # type: ignore[attr-defined]
    base.OffloadingSpec = Spec  # type: ignore[attr-defined]
    return base


def load(
    release: str, change: Callable[[ModuleType], None] = lambda base: None
) -> SimpleNamespace:
    """The adapter on a release: its modules manager and spec, and vLLM's base.

    ``change`` may alter the base first. Real vLLM, where it is there, is left
    out; ``unload`` brings it back.
    """
    unload()
    _before.update({name: sys.modules.pop(name) for name in _loaded()})
    base = base_of(release)
    change(base)
    metrics = ModuleType("metrics")
    metrics.OffloadingConnectorStats = Stats  # type: ignore[attr-defined]
    source = ModuleType("cache_hit_source")
    source.CacheHitSource = CacheHitSource  # type: ignore[attr-defined]
    top = ModuleType("vllm")
    top.__version__ = release  # type: ignore[attr-defined]
    v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    modules = {"vllm": top, "vllm.v1.kv_offload.base": base}
    modules[v1 + ".offloading.metrics"] = metrics
    if minor(release) >= 32:
        modules["vllm.v1.metrics.cache_hit_source"] = source
    for name in list(modules):
        parts = name.split(".")
        for i in range(1, len(parts)):
            parent = ".".join(parts[:i])
            modules.setdefault(parent, ModuleType(parent))
    for name, module in modules.items():
        module.__path__ = []
        sys.modules[name] = module
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, module)
    return SimpleNamespace(
        base=base,
        manager=importlib.import_module("kvlift_vllm.manager"),
        spec=importlib.import_module("kvlift_vllm.spec"),
        release=release,
    )


def unload() -> None:
    """Takes stand-ins out, and what of the adapter was built on them."""
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(_before)
    _before.clear()


def _loaded() -> list[str]:
    ours = {f"kvlift_vllm.{m}" for m in _OURS}
    return [n for n in sys.modules if n in ours or n.split(".")[0] == "vllm"]


def config(
    socket: str,
    groups: Any = ((32, ("model.layers.0.self_attn.attn",)),),
    world: int = 1,
    engine: str = "engine",
    release: str = "0.32.0",
    model: str = "model",
    events: bool = False,
    blocks: int = 1,
    **extra: Any,
) -> SimpleNamespace:
    """An OffloadingConfig of a release; groups are pairs of tokens and layers."""
    n = minor(release)
    out = []
    for i, (tokens, layers, *window) in enumerate(groups):
        g = SimpleNamespace(tokens_per_block=tokens, layer_names=tuple(layers))
        if n >= 30:
            g.group_id = i
        if n >= 33:
            g.sliding_window_size_in_chunks = window[0] if window else None
        out.append(g)
    parallel = SimpleNamespace(
        rank=0, world_size=world, tp_size=world, pp_size=1, pcp_size=1, dcp_size=1
    )
    said = {"kvlift_socket": socket, "weights_id": "test", "kvlift_deadline_ms": 500}
    return SimpleNamespace(
        groups=tuple(out),
        enable_kv_cache_events=events,
        extra_config=said | extra,
        engine_id=engine,
        model=SimpleNamespace(name=model, dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=groups[0][0], blocks_per_chunk=blocks),
        parallel=parallel,
        kv_cache_layout=None,
    )
