"""The worker against tensors of NumPy: bytes, failures, and that vLLM never hears of one."""

from __future__ import annotations

import importlib.util
import logging
import os
import struct
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).parent)]

from daemon_double import PAGE, Daemon

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
if HAS_NUMPY:
    import numpy as np
    import stub_vllm

    stub_vllm.install()
    from kvlift_vllm.worker import KvliftWorker

SESSION, ARENA = "00000000000000aa", "ab" * 16
MARK = bytes(range(100, 116))


class Tensor:
    """What the worker asks a torch tensor for."""

    def __init__(self, blocks: int, page: int, device: str = "cpu") -> None:
        self.array = np.zeros((blocks, page), np.uint8)
        self.shape = (blocks, page)
        self.device = SimpleNamespace(type=device)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self, dim: int) -> int:
        return self.array.strides[dim]

    def element_size(self) -> int:
        return 1


def caches(tensors, groups):
    return SimpleNamespace(
        tensors=[
            SimpleNamespace(tensor=t, page_size_bytes=t.shape[1]) for t in tensors
        ],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=i, page_size_bytes=n) for i, n in g]
            for g in groups
        ],
    )


def slots(job, pages, group=0, starts=((0,),), arena=ARENA, mark=MARK, size=1):
    return SimpleNamespace(
        job=job,
        session=SESSION,
        arena=arena,
        mark=mark,
        groups=np.full(len(pages), group, np.int64),
        extents=np.array([(p, size) for p in pages], np.int64).reshape(-1, 2),
        offsets=np.arange(len(pages) + 1),
        starts=np.array(starts, np.int64),
    )


def blocks(*ids, at=0):
    return SimpleNamespace(
        block_ids=np.array(ids, np.int32), group_sizes=[len(ids)], block_indices=[at]
    )


class Slow:
    """A copier whose copies end when the test says so, or fail."""

    def __init__(self) -> None:
        self.flights: list[SimpleNamespace] = []
        self.fails = False
        self.settled = 0

    def prepare(self, arena) -> None: ...
    def release(self) -> None: ...

    def settle(self) -> None:
        self.settled += 1

    def start(self, runs, base, load):
        if self.fails:
            raise RuntimeError("no such operator")
        f = SimpleNamespace(done=False, seconds=lambda: 0.5)

        def wait() -> None:
            f.done = True

        f.wait = wait
        self.flights.append(f)
        return f


@unittest.skipUnless(HAS_NUMPY, "needs NumPy")
class TestWorker(unittest.TestCase):
    def setUp(self) -> None:
        logging.getLogger("vllm.kvlift").setLevel(logging.CRITICAL)
        self.daemon = Daemon()
        self.addCleanup(self.daemon.close)
        self.tensor = Tensor(16, PAGE)
        self.tensor.array[:] = np.arange(1, 17)[:, None]

    def worker(self, copier=None, attach=True, per_chunk=1, of=None):
        import threading

        got: list = []
        peer = None
        t = threading.Thread(
            target=lambda: got.append(
                KvliftWorker(
                    of or caches([self.tensor], [[(0, PAGE)]]),
                    per_chunk,
                    0,
                    1,
                    "e",
                    {"identity": {}, "groups": []},
                    self.daemon.path,
                    "test",
                    copier,
                )
            )
        )
        if not attach:
            self.daemon.go_away()
        t.start()
        if attach:
            peer, self.hello = self.daemon.attach()
        t.join(10)
        self.addCleanup(got[0].shutdown)
        return got[0], peer

    def page(self, n: int) -> bytes:
        return os.pread(self.daemon.arena, PAGE, n * PAGE)

    def results(self, w):
        return [(r.job_id, r.success) for r in w.get_finished()]

    def test_there_and_back(self) -> None:
        w, peer = self.worker()
        self.assertEqual(self.hello["parts"], [PAGE])
        self.assertTrue(w.attached)
        self.assertTrue(w.submit_store(3, blocks(2, 5), slots(30, (9, 4))))
        (r,) = w.get_finished()
        self.assertEqual((r.job_id, r.success, r.transfer_size), (3, True, 2 * PAGE))
        self.assertGreaterEqual(r.transfer_time, 0)
        self.assertEqual(self.page(9) + self.page(4), b"\3" * PAGE + b"\6" * PAGE)
        self.assertEqual(peer.read(), ("ended", struct.pack("<Q", 30)))
        self.tensor.array[:] = 0
        self.assertTrue(
            w.submit_load(
                4, slots(31, (4,), mark=b""), blocks(7), new_in_some_release=1
            )
        )
        self.assertEqual(self.results(w), [(4, True)])
        self.assertTrue((self.tensor.array[7] == 6).all())
        self.assertEqual(int(self.tensor.array.sum()), 6 * PAGE)
        self.assertEqual(peer.read(), ("ended", struct.pack("<Q", 31)))
        self.assertEqual(self.results(w), [])

    def test_a_store_that_does_not_fit(self) -> None:
        """vLLM hears success, the arena has the mark, and nothing of the job is copied."""
        w, peer = self.worker()
        for number, (what, spec) in enumerate(
            {
                "a chunk too many": (blocks(2), slots(30, (9, 4))),
                "a block outside": (blocks(2, 99), slots(31, (9, 4))),
            }.items()
        ):
            with self.subTest(what):
                os.pwrite(self.daemon.arena, bytes(PAGE), 9 * PAGE)
                self.assertTrue(w.submit_store(number, *spec))
                self.assertEqual(self.results(w), [(number, True)])
                self.assertEqual(self.page(9), MARK + bytes(PAGE - 16))
                self.assertEqual(peer.read()[0], "ended")

    def test_half_a_chunk_is_not_stored(self) -> None:
        w, _ = self.worker(per_chunk=2)
        starts = ((0,),)
        w.submit_store(1, blocks(2, 3, 4), slots(30, (8, 10), starts=starts, size=2))
        self.assertEqual(self.results(w), [(1, True)])
        self.assertEqual(self.page(8)[:16], MARK)
        w.submit_store(2, blocks(2, 3, 4, 5), slots(31, (8, 10), starts=starts, size=2))
        self.assertEqual(self.results(w), [(2, True)])
        self.assertEqual([self.page(n)[0] for n in (8, 9, 10, 11)], [3, 4, 5, 6])

    def test_what_cannot_be_marked_is_never_over(self) -> None:
        w, _ = self.worker()
        for spec in (
            slots(30, (64,)),
            slots(30, (9,), arena="cd" * 16),
            slots(30, (9, 10), mark=b"short"),
            slots(30, ()),
            slots(30, (9,), group=3),
        ):
            self.assertTrue(w.submit_store(1, blocks(2), spec))
        self.assertTrue(w.submit_store(2, None, None))
        self.assertEqual(self.results(w), [])

    def test_a_load_that_fails_is_never_over(self) -> None:
        w, peer = self.worker()
        before = self.tensor.array.copy()
        self.assertTrue(w.submit_load(1, slots(30, (9, 4)), blocks(2)))
        self.assertTrue(w.submit_load(2, slots(31, (99,)), blocks(2)))
        self.assertEqual(self.results(w), [])
        self.assertTrue((self.tensor.array == before).all())
        self.assertEqual(peer.read()[0], "ended")  # nobody copies there any more
        w.wait({1, 2, 3})

    def test_an_expedited_load_that_fails(self) -> None:
        """The only way not to compute on other bytes is to end the step."""
        w, _ = self.worker()
        self.assertTrue(w.submit_load(1, slots(30, (99,)), blocks(2), expedited=True))
        w.wait({2})
        with self.assertRaises(RuntimeError):
            w.wait({1})

    def test_without_a_daemon(self) -> None:
        w, _ = self.worker(attach=False)
        self.assertFalse(w.attached)
        self.assertTrue(w.submit_store(1, blocks(2), slots(30, (9,))))
        self.assertTrue(w.submit_load(2, slots(30, (9,)), blocks(2)))
        self.assertEqual(self.results(w), [])

    def test_caches_that_cannot_be_served(self) -> None:
        for bad in (
            caches([Tensor(4, 64, "xpu")], [[(0, 64)]]),
            caches([Tensor(4, 64)], [[(0, 65)]]),
            caches([Tensor(4, 64)], [[(0, 0)]]),
            caches([Tensor(4, 64)], [[(1, 64)]]),
        ):
            w = KvliftWorker(bad, 1, 0, 1, "e", {}, self.daemon.path, "test")
            self.assertFalse(w.attached)
            self.assertTrue(w.submit_store(1, blocks(2), slots(30, (9,))))
            w.shutdown()

    def test_order_of_ends(self) -> None:
        """A job is over when its copy is; wait really waits; each is told once."""
        slow = Slow()
        w, peer = self.worker(slow)
        w.submit_store(1, blocks(2), slots(30, (9,)))
        w.submit_load(2, slots(31, (9,), mark=b""), blocks(3))
        w.submit_store(3, blocks(4), slots(32, (10,)))
        self.assertEqual(self.results(w), [])
        slow.flights[1].done = True
        self.assertEqual(self.results(w), [(2, True)])
        self.assertEqual(peer.read(), ("ended", struct.pack("<Q", 31)))
        w.wait({3, 99})
        self.assertEqual([f.done for f in slow.flights], [False, True, True])
        self.assertEqual(self.results(w), [(3, True)])
        self.assertEqual(peer.read(), ("ended", struct.pack("<Q", 32)))
        slow.flights[0].done = True
        (r,) = w.get_finished()
        self.assertEqual((r.job_id, r.transfer_time, r.transfer_size), (1, 0.5, PAGE))

    def test_a_copier_that_fails(self) -> None:
        """What may be on its way is waited for before the mark is written."""
        slow = Slow()
        w, _ = self.worker(slow)
        slow.fails = True
        self.assertTrue(w.submit_store(1, blocks(2), slots(30, (9,))))
        self.assertEqual((self.results(w), slow.settled), ([(1, True)], 1))
        self.assertEqual(self.page(9)[:16], MARK)
        slow.fails = False
        w.submit_store(2, blocks(2), slots(31, (10,)))

        def fails() -> float:
            raise RuntimeError("the device is lost")

        slow.flights[-1].seconds, slow.flights[-1].done = fails, True
        self.assertEqual(self.results(w), [(2, True)])
        self.assertEqual(self.page(10)[:16], MARK)


if __name__ == "__main__":
    unittest.main()
