"""Copies between a GPU and the arena, on streams of their own.

A copy waits for what the compute stream was given before it: a store reads what
the model has written, a load overwrites what is queued to be zeroed. The
compute stream waits for a copy where somebody waits for it (``Flight.wait``);
in all other cases vLLM uses the blocks only after it has heard that the copy is
over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .arena import Arena
from .copies import Runs

PIECE = 64 << 30  # bytes that are registered at once; no run crosses a border of pieces

# Copies sizes[i] bytes from address src[i] to dst[i] on the current stream; the
# arrays are of int64 and in host memory. The last argument allows the sources to
# be read before the stream has come that far.
Swap = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]


def vllm_swap() -> Swap:
    """vLLM's own operator, which every supported release has."""
    from vllm import _custom_ops as ops

    def swap(
        src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, any_order: bool
    ) -> None:
        ops.swap_blocks_batch(src, dst, sizes, is_src_access_order_any=any_order)

    return swap


class Flight:
    """A copy under way. Its arrays and events live until it is dropped."""

    def __init__(self, begin: Any, end: Any, keep: tuple[torch.Tensor, ...]) -> None:
        self._begin, self._end, self._keep = begin, end, keep

    @property
    def done(self) -> bool:
        """Whether every byte has been read and written."""
        return bool(self._end.query())

    def wait(self) -> None:
        """Returns when it is done, and orders it before later work of the current stream."""
        torch.cuda.current_stream().wait_event(self._end)
        self._end.synchronize()

    def seconds(self) -> float:
        """How long the copy took; it has to be done."""
        return float(self._begin.elapsed_time(self._end)) * 1e-3


class StreamCopier:
    """Starts copies, those of one direction one after the other. One thread uses it."""

    def __init__(
        self, device: torch.device, log: logging.Logger, swap: Swap | None = None
    ) -> None:
        self._device, self._log = device, log
        self._swap = swap or vllm_swap()
        self._streams = {load: torch.cuda.Stream(device) for load in (False, True)}
        self._pinned: list[int] = []  # addresses of registered pieces

    def prepare(self, arena: Arena) -> None:
        """Registers the arena for DMA. Any thread may call it, once.

        Where the driver refuses, copies are right but slower, which is logged.
        """
        torch.cuda.set_device(self._device)  # it is the thread's own setting
        cudart = torch.cuda.cudart()
        for at in range(0, arena.bytes, PIECE):
            size = min(PIECE, arena.bytes - at)
            code = int(cudart.cudaHostRegister(arena.base + at, size, 0))
            if code != 0:
                self._log.warning(
                    "kvlift: the driver does not register %d bytes of the arena (error %d): "
                    "copies are slower; see ulimit -l",
                    size,
                    code,
                )
                self.release()
                return
            self._pinned.append(arena.base + at)

    def release(self) -> None:
        """Undoes ``prepare``. No copy may be under way. Idempotent."""
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def start(self, runs: Runs, base: int, load: bool) -> Flight:
        """Starts to copy runs between the GPU and the arena at base, and returns."""
        runs = runs.split(PIECE)
        memory = torch.from_numpy(np.ascontiguousarray(runs.memory))
        arena = torch.from_numpy(runs.arena + base)
        sizes = torch.from_numpy(np.ascontiguousarray(runs.lengths))
        src, dst = (arena, memory) if load else (memory, arena)
        stream = self._streams[load]
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            begin.record(stream)
            if len(sizes):
                # Nobody writes the pages of a load. The blocks of a store are the
                # model's, which the stream waits for.
                self._swap(src, dst, sizes, load)
            end.record(stream)
        return Flight(begin, end, (src, dst, sizes))

    def settle(self) -> None:
        """Waits until nothing that was started is under way."""
        for stream in self._streams.values():
            stream.synchronize()
