"""What runs in each of vLLM's workers: it copies between the engine's blocks and the arena.

vLLM has no failed transfers: a worker that raises or reports a failure ends the
engine. So every job is accepted, and what cannot be copied ends in another way.

* A **store** leaves the job's mark in the arena (docs/protocol.md, "A copy that
  fails") and is then reported like any other; the manager never commits it.
* A **load** is never reported: its request waits, and vLLM never computes on
  bytes that did not come. So does a store whose mark could not be written.
* The one exception is a failed load that vLLM waits for within its step
  (``expedited``): going on would be wrong bytes, so ``wait`` raises.
"""

# ruff: noqa: BLE001 - whatever goes wrong here must not reach vLLM

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from .arena import Arena
from .copies import (
    MARK_BYTES,
    BadJob,
    Layout,
    Runs,
    Tensor,
    copy_host,
    mark_place,
    plan,
)
from .rank import Rank

BOOT_TIMEOUT = 120.0  # seconds that a boot waits for the first attempt to attach

_log = logging.getLogger("vllm.kvlift")


class Flight(Protocol):
    """A copy under way."""

    @property
    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def seconds(self) -> float: ...


class Copier(Protocol):
    """Starts copies; the seam for other ways to move bytes."""

    def prepare(self, arena: Arena) -> None: ...
    def release(self) -> None: ...
    def start(self, runs: Runs, base: int, load: bool) -> Flight: ...
    def settle(self) -> None: ...


class _Copied:
    """A copy that was over when it was started."""

    done = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> None:
        return

    def seconds(self) -> float:
        return self._seconds


class HostCopier:
    """Copies host memory within the call: no stream and no thread is involved."""

    def prepare(self, arena: Arena) -> None:
        return

    def release(self) -> None:
        return

    def start(self, runs: Runs, base: int, load: bool) -> Flight:
        began = time.perf_counter()
        copy_host(runs, base, load)
        return _Copied(time.perf_counter() - began)

    def settle(self) -> None:
        return


def layout_of(caches: Any, blocks_per_chunk: int) -> Layout:
    """The layout of vLLM's CanonicalKVCaches, groups by position.

    Rows may be further apart than a page is long; the copied bytes of a block
    are those of the reference, without padding. ValueError when a reference does
    not fit its tensor.
    """
    tensors = []
    for t in caches.tensors:
        v, width = t.tensor, t.tensor.element_size()
        tensors.append(Tensor(v.data_ptr(), int(v.shape[0]), int(v.stride(0)) * width))
    refs = tuple(
        tuple((int(r.tensor_idx), int(r.page_size_bytes)) for r in group)
        for group in caches.group_data_refs
    )
    for group in refs:
        for index, size in group:
            if not 0 < size <= tensors[index].stride:
                raise ValueError(
                    f"{size} bytes of a block in rows of {tensors[index].stride}"
                )
    return Layout(tuple(tensors), refs, blocks_per_chunk)


def copier_of(caches: Any) -> Copier:
    """The way to copy that fits the device of the tensors."""
    devices = {t.tensor.device.type for t in caches.tensors}
    if devices <= {"cpu"}:
        return HostCopier()
    if devices == {"cuda"}:
        from .cuda import StreamCopier

        return StreamCopier(caches.tensors[0].tensor.device, _log)
    raise ValueError(f"tensors on {', '.join(sorted(devices))}")


@dataclass
class _Job:
    id: int  # vLLM's
    slots: Any  # ArenaSpec
    load: bool
    flight: Flight
    bytes: int


class KvliftWorker(OffloadingWorker):
    """One rank's copies. vLLM calls it from one thread."""

    def __init__(
        self,
        caches: Any,
        blocks_per_chunk: int,
        rank: int,
        world_size: int,
        engine_id: str,
        namespace: dict[str, Any],
        socket: str,
        client: str,
        copier: Copier | None = None,
    ) -> None:
        """Begins to attach; returns when the first attempt is over, well or not.

        ``caches`` are vLLM's CanonicalKVCaches. ``engine_id``, ``world_size`` and
        ``namespace`` are the same in every process of the engine. Caches that
        cannot be served are logged, and the rank never attaches: then its
        manager never hears ``ready`` and gives it no job.
        """
        self._number = rank
        self._caches = caches  # the tensors have to live as long as their addresses
        self._flying: deque[_Job] = deque()
        self._over: list[TransferResult] = []
        self._lost: set[int] = set()  # loads that vLLM waits for and that failed
        self._rank: Rank | None = None
        try:
            self._layout = layout_of(caches, blocks_per_chunk)
            self._copier = copier or copier_of(caches)
        except Exception as e:
            _log.error("kvlift: rank %d runs without a tier: %s", rank, e)
            return
        self._rank = Rank(
            socket,
            {
                "client": client,
                "role": "worker",
                "engine_id": engine_id,
                "rank": rank,
                "world_size": world_size,
                "namespace": namespace,
                "parts": self._layout.parts,
            },
            _log,
            self._copier.prepare,
        )
        self._rank.start()
        if not self._rank.tried.wait(BOOT_TIMEOUT):
            _log.warning("kvlift: rank %d is still about to attach", rank)

    @property
    def attached(self) -> bool:
        """Whether the arena is mapped."""
        return self._rank is not None and self._rank.arena is not None

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Copies blocks to the arena. Always True."""
        self._submit(job_id, src_spec, dst_spec, load=False, expedited=False)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: Any,
        dst_spec: Any,
        expedited: bool = False,
        **_: Any,
    ) -> bool:
        """Copies from the arena to blocks. Always True.

        ``expedited``: vLLM calls ``wait`` for it within this step. Copies start
        at once in any case.
        """
        self._submit(job_id, dst_spec, src_spec, load=True, expedited=expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        """The jobs that have ended since the last call, each once."""
        self._collect()
        over, self._over = self._over, []
        return over

    def wait(self, job_ids: set[int]) -> None:
        """Returns when these jobs have ended, in the order of the compute stream too.

        Jobs that were never submitted here are passed over. RuntimeError for an
        expedited load that failed.
        """
        for job in list(self._flying):
            if job.id in job_ids:
                try:
                    job.flight.wait()
                except Exception:
                    _log.exception("kvlift: waiting for job %d", job.id)
        self._collect()
        if lost := self._lost & set(job_ids):
            raise RuntimeError(
                f"kvlift: jobs {sorted(lost)} could not be loaded, and this step "
                "cannot go on without their bytes"
            )

    def shutdown(self) -> None:
        """Ends the copies, unmaps the arena and says goodbye. Idempotent."""
        if self._rank is None:
            return
        try:
            self._copier.settle()
            self._collect()
            self._copier.release()
        except Exception:
            _log.exception("kvlift: shutdown")
        self._rank.close()

    def _submit(
        self, job_id: int, blocks: Any, slots: Any, load: bool, expedited: bool
    ) -> None:
        try:
            arena = self._arena(slots)
            runs = plan(
                self._layout,
                self._number,
                slots,
                blocks.block_ids,
                blocks.group_sizes,
                blocks.block_indices,
                arena.pages,
                whole=not load,
            )
            flight = self._copier.start(runs, arena.base, load)
        except Exception as e:
            if expedited:
                self._lost.add(job_id)
            self._fail(job_id, slots, load, e)
            return
        self._flying.append(_Job(job_id, slots, load, flight, runs.bytes))
        self._collect()

    def _arena(self, slots: Any) -> Arena:
        arena = self._rank.arena if self._rank is not None else None
        if arena is None:
            raise BadJob("no arena is mapped")
        if slots.arena != arena.id:
            raise BadJob(f"arena {slots.arena}, {arena.id} is mapped")
        return arena

    def _collect(self) -> None:
        """Moves the jobs whose copies are over to those to be reported."""
        flying, self._flying = self._flying, deque()
        for job in flying:
            try:
                if not job.flight.done:
                    self._flying.append(job)
                    continue
                seconds = job.flight.seconds()
            except Exception as e:
                self._fail(job.id, job.slots, job.load, e)
                continue
            self._report(job.slots)
            self._over.append(TransferResult(job.id, True, job.bytes, seconds))

    def _fail(self, job_id: int, slots: Any, load: bool, why: Exception) -> None:
        """Ends a job whose bytes were not copied, or not all of them."""
        what = "load" if load else "store"
        _log.error("kvlift: %s job %d failed: %s", what, job_id, why)
        try:
            self._copier.settle()  # a part may be on its way
            if not load:
                self._mark(slots)
            self._report(slots)
        except Exception as e:
            _log.error("kvlift: job %d is never reported as done: %s", job_id, e)
            return
        if load:
            _log.error(
                "kvlift: the request of job %d waits until it is aborted: its bytes did "
                "not come",
                job_id,
            )
            return
        self._over.append(TransferResult(job_id, True))

    def _report(self, slots: Any) -> None:
        if self._rank is not None:
            self._rank.report(slots.session, slots.job)

    def _mark(self, slots: Any) -> None:
        """Says in the arena that this rank's part of the job is worth nothing."""
        arena, mark = self._arena(slots), slots.mark
        if len(mark) != MARK_BYTES:
            raise BadJob(f"a mark of {len(mark)} bytes")
        at = mark_place(self._layout, self._number, slots, arena.pages)
        ctypes.memmove(arena.base + at, mark, MARK_BYTES)
