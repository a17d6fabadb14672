"""Copies between a GPU and the arena. Left out where there is no GPU.

vLLM's operator is replaced by one driver call for each run, so that torch alone is
enough: what is tested here is the order of streams, the pinning and the addresses.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    import torch

    HAS_GPU = torch.cuda.is_available()
except ImportError:
    HAS_GPU = False

if HAS_GPU and importlib.util.find_spec("numpy") is not None:
    import numpy as np

    from kvlift_vllm import cuda
    from kvlift_vllm.arena import PAGE, Arena
    from kvlift_vllm.copies import Runs

KINDS = {True: 1, False: 2}  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost


def one_by_one(src, dst, sizes, load) -> None:
    """cudaMemcpyAsync for each run, on the current stream."""
    runtime = ctypes.CDLL(None)
    if not hasattr(runtime, "cudaMemcpyAsync"):
        folder = Path(torch.__file__).parents[1] / "nvidia"
        found = [
            *folder.rglob("libcudart.so.*"),
            *Path("/usr/local").rglob("libcudart.so.*"),
        ]
        runtime = ctypes.CDLL(str(found[0]))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    for s, d, n in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        code = runtime.cudaMemcpyAsync(
            ctypes.c_void_p(d),
            ctypes.c_void_p(s),
            ctypes.c_size_t(n),
            KINDS[load],
            stream,
        )
        if code:
            raise RuntimeError(f"cudaMemcpyAsync: {code}")


@unittest.skipUnless(HAS_GPU, "needs a GPU")
class TestStreamCopier(unittest.TestCase):
    def setUp(self) -> None:
        fd = os.memfd_create("arena")
        os.ftruncate(fd, 256 << 20)
        self.fd = os.dup(fd)
        self.addCleanup(os.close, self.fd)
        self.arena = Arena(fd, "a", 256 << 20)
        self.addCleanup(self.arena.close)
        self.log = logging.getLogger("kvlift.cuda")
        self.device = torch.device("cuda", 0)
        self.copier = cuda.StreamCopier(self.device, self.log, one_by_one)
        with self.assertNoLogs(self.log):
            self.copier.prepare(self.arena)
        self.addCleanup(self.copier.release)

    def runs(self, tensor, pages) -> Runs:
        """One run for each row, to pages in reverse order."""
        n = tensor.shape[0]
        rows = tensor.data_ptr() + np.arange(n, dtype=np.int64) * tensor.stride(0)
        at = (np.arange(n, dtype=np.int64)[::-1] * pages).copy() * PAGE
        return Runs(rows, at, np.full(n, tensor.shape[1], np.int64))

    def test_waits_for_the_compute_stream(self) -> None:
        """A store has what a long kernel wrote last; a load is not overwritten by one."""
        big = torch.randn(8192, 8192, device=self.device)
        blocks = torch.zeros((64, 1 << 20), dtype=torch.uint8, device=self.device)
        runs = self.runs(blocks, 256)
        for _ in range(20):
            big = big @ big  # keeps the stream busy for long
            big /= big.norm()
        blocks.fill_(7)
        flight = self.copier.start(runs, self.arena.base, load=False)
        self.assertFalse(flight.done)
        flight.wait()
        self.assertTrue(flight.done)
        self.assertGreater(flight.seconds(), 0)
        self.assertEqual(os.pread(self.fd, 64 << 20, 0), b"\7" * (64 << 20))
        os.pwrite(self.fd, b"\5" * (64 << 20), 0)
        for _ in range(20):
            big = big @ big
            big /= big.norm()
        blocks.zero_()  # queued before the load, as vLLM zeroes new blocks
        flight = self.copier.start(runs, self.arena.base, load=True)
        flight.wait()
        total = int(blocks.sum(dtype=torch.int64))  # later work sees what was loaded
        self.assertEqual(total, 5 * (64 << 20))

    def test_pieces(self) -> None:
        """No copy crosses the border between two registrations."""
        self.copier.release()
        cuda.PIECE, whole = 1 << 20, cuda.PIECE
        self.addCleanup(setattr, cuda, "PIECE", whole)
        self.copier.prepare(self.arena)
        blocks = torch.zeros((8, 3 << 20), dtype=torch.uint8, device=self.device)
        for i in range(8):
            blocks[i] = i + 1
        runs = self.runs(blocks, 800)
        self.copier.start(runs, self.arena.base, load=False).wait()
        blocks.zero_()
        self.copier.start(runs, self.arena.base, load=True).wait()
        self.assertEqual(
            blocks.float().mean(1).tolist(), [float(i + 1) for i in range(8)]
        )
        self.assertEqual(os.pread(self.fd, 1, 7 * 800 * PAGE), b"\1")

    def test_refused_registration(self) -> None:
        """Copies go on without it, and the log says that they are slower."""
        again = cuda.StreamCopier(self.device, self.log, one_by_one)
        with self.assertLogs(self.log, "WARNING"):
            again.prepare(self.arena)  # it is registered already
        again.release()
        blocks = torch.full((4, PAGE), 9, dtype=torch.uint8, device=self.device)
        flight = self.copier.start(self.runs(blocks, 1), self.arena.base, load=False)
        flight.wait()
        self.assertEqual(os.pread(self.fd, 4 * PAGE, 0), b"\11" * (4 * PAGE))


if __name__ == "__main__":
    unittest.main()
