"""KvliftSpec: what vLLM loads by ``spec_name`` and ``spec_module_path``."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker

from . import __version__, geometry, probe, stats, wire
from .attach import Attachment, Config
from .manager import KvliftManager
from .session import Session

_log = logging.getLogger("vllm.kvlift")  # below vLLM's logger, which has a handler


class KvliftSpec(OffloadingSpec):
    """kvlift as an offloading spec of vLLM."""

    def __init__(self, config: Any) -> None:
        """Looks whether vLLM and this engine fit; opens nothing."""
        super().__init__(config)
        ours = (
            ("OffloadingManager", KvliftManager),
            ("OffloadingWorker", _worker_class()),
            ("OffloadingSpec", KvliftSpec),
        )
        self._misfits = probe.misfits(base, ours) + probe.unserved(config)
        for what in self._misfits:
            _log.error("kvlift: this engine runs without the tier: %s", what)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """The metrics that the manager emits; vLLM takes no others."""
        return stats.definitions(base)

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Since 0.33: the labels that ``config_info`` gives."""
        return ("kvlift_version", "kvlift_namespace")

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side. It begins to attach and does not wait for that."""
        emits = bool(self.kv_events_config.enable_kv_cache_events)
        return manager_of(self.config, emits, attaches=not self._misfits)

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """One rank's side. It begins to attach."""
        config = self.config
        if self._misfits:
            return IdleWorker()
        return _worker_class()(
            caches=kv_caches,
            blocks_per_chunk=config.cache.blocks_per_chunk,
            rank=config.parallel.rank,
            world_size=config.parallel.world_size,
            engine_id=geometry.engine_id(config),
            namespace=geometry.namespace(config),
            socket=geometry.socket_of(self.extra_config),
            client=f"kvlift_vllm {__version__}, vLLM {_version()}",
        )


def manager_of(config: Any, emits: bool, attaches: bool = True) -> KvliftManager:
    """The manager of an engine of this OffloadingConfig.

    It emits KV events if that is asked for; one that never attaches misses all.
    """
    groups = geometry.groups_of(config)
    namespace = geometry.namespace(config)
    digest = hashlib.sha256(wire.canonical(namespace).encode()).hexdigest()
    version = _version()
    session = Session(
        Config(
            socket=geometry.socket_of(config.extra_config),
            engine_id=geometry.engine_id(config),
            world_size=config.parallel.world_size,
            namespace=namespace,
            groups=geometry.suffixes(groups),
            client=f"kvlift_vllm {__version__}, vLLM {version}",
            deadline=geometry.deadline_of(config.extra_config),
        ),
        _log,
        events=emits,
    )
    tokens = geometry.longest(config)

    def attached(a: Attachment) -> None:
        line = geometry.describe(groups, a.parts, a.arena_bytes, tokens)
        _log.info("kvlift: attached, %d keys known; %s", len(a.mirror.copies), line)

    session.on_attached = attached
    weights = namespace["identity"]["weights"]
    _log.info(
        "kvlift: %s, namespace %s, weights %s, vLLM %s",
        *(session.config.socket, digest[:16], weights or "unknown", version),
    )
    if not weights:
        _log.warning(
            "kvlift: nothing tells the weights of %s from others under this name; "
            "set weights_id in kv_connector_extra_config",
            config.model.name,
        )
    if probe.untested(version):
        tried = " to ".join(probe.TESTED)
        _log.warning("kvlift: vLLM %s was not tried, %s were", version, tried)
    if attaches:
        session.start()
    info = {"kvlift_version": __version__, "kvlift_namespace": digest[:16]}
    return KvliftManager(session, groups, _log, emits, info)


class IdleWorker(OffloadingWorker):
    """The worker of an engine without a tier: its manager gives it no job."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Is never called."""
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Is never called."""
        return True

    def get_finished(self) -> list[Any]:
        """Nothing ever is."""
        return []

    def wait(self, job_ids: set[int]) -> None:
        """There is nothing to wait for."""


def _worker_class() -> Any:
    """The worker, whose module needs what the scheduler's process may lack."""
    from .worker import KvliftWorker

    return KvliftWorker


def _version() -> str:
    """vLLM's version."""
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))
