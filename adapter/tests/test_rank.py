"""A rank against a daemon that the test plays: rules R12 and R13."""

from __future__ import annotations

import importlib.util
import logging
import os
import struct
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).parent)]

from daemon_double import PAGE, Daemon

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
if HAS_NUMPY:
    from kvlift_vllm.rank import Rank

HELLO = {"client": "t", "role": "worker", "engine_id": "e", "rank": 0, "parts": [9]}


def until(holds) -> None:
    """Waits for something that another thread does at once."""
    import time

    end = time.monotonic() + 10
    while not holds():
        if time.monotonic() > end:
            raise AssertionError("it did not come")
        time.sleep(0.001)


@unittest.skipUnless(HAS_NUMPY, "needs NumPy")
class TestRank(unittest.TestCase):
    def setUp(self) -> None:
        self.log = logging.getLogger("kvlift.test")
        self.log.propagate = False
        self.said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda r: self.said.append(r.getMessage())  # type: ignore[method-assign]
        self.log.handlers = [handler]
        self.daemon = Daemon()
        self.addCleanup(self.daemon.close)

    def rank(self, **more) -> Rank:
        r = Rank(self.daemon.path, HELLO, self.log, **more)
        self.addCleanup(r.close)
        r.start()
        return r

    def test_attach(self) -> None:
        """Hello says what it was told, the arena is mapped, then comes the word."""
        seen = []
        rank = self.rank(prepare=lambda arena: seen.append(arena.pages))
        peer, hello = self.daemon.attach()
        self.assertEqual(hello, {**HELLO, "protocol": [1, 0]})
        self.assertTrue(rank.tried.wait(10))
        self.assertEqual(seen, [64])
        self.assertEqual((rank.arena.id, rank.arena.bytes), ("ab" * 16, 64 * PAGE))
        os.pwrite(self.daemon.arena, b"kvlift", 3 * PAGE)
        import ctypes

        self.assertEqual(ctypes.string_at(rank.arena.base + 3 * PAGE, 6), b"kvlift")
        rank.close()
        self.assertEqual(peer.read(), ("bye", b""))
        self.assertNotIn("memfd:arena", Path("/proc/self/maps").read_text())

    def test_reports_until_acknowledged(self) -> None:
        """What was not acknowledged is said again on the next connection, and no more."""
        rank = self.rank()
        peer, _ = self.daemon.attach()
        for job in (7, 8, 2**64 - 1):
            rank.report("00000000000000aa", job)
        rank.report("0000000000000001", 5)  # a job of another session
        self.assertEqual(
            [peer.read() for _ in range(3)],
            [("ended", struct.pack("<Q", j)) for j in (7, 8, 2**64 - 1)],
        )
        peer.send("ended-ack", struct.pack("<Q", 8))
        until(lambda: rank.owed == 3)
        peer.close()
        peer, hello = self.daemon.attach()
        self.assertEqual(
            (hello["session"], hello["arena_id"]), ("00000000000000aa", "ab" * 16)
        )
        self.assertEqual(
            [peer.read()[1] for _ in range(2)],
            [struct.pack("<Q", j) for j in (7, 2**64 - 1)],
        )
        for job in (7, 2**64 - 1):
            peer.send("ended-ack", struct.pack("<Q", job))
        until(lambda: rank.owed == 0)

    def test_absent_at_boot(self) -> None:
        """Without a daemon the first attempt ends at once; it attaches when one comes."""
        self.daemon.go_away()
        rank = self.rank()
        self.assertTrue(rank.tried.wait(10))
        self.assertIsNone(rank.arena)
        self.daemon.listen()
        self.daemon.attach()
        until(lambda: rank.arena is not None)
        self.assertEqual(len([s for s in self.said if "trying again" in s]), 1)

    def test_a_descriptor_of_the_same_arena(self) -> None:
        """A daemon that knew nothing of this process hands out a new lock; the pages stay."""
        rank = self.rank()
        peer, _ = self.daemon.attach()
        until(lambda: rank.arena is not None)
        base = rank.arena.base
        peer.close()
        self.daemon.attach(session="00000000000000bb")
        rank.report("00000000000000aa", 1)  # of the session that is gone
        self.assertEqual(rank.arena.base, base)

    def test_refused(self) -> None:
        """A final refusal ends the attempts, one that may pass does not."""
        rank = self.rank()
        peer = self.daemon.accept()
        peer.hello()
        peer.refuse("busy")
        peer = self.daemon.accept()
        peer.hello()
        peer.refuse("geometry")
        until(lambda: any("refused this rank" in s for s in self.said))
        rank._thread.join(10)
        self.assertFalse(rank._thread.is_alive())
        self.assertIsNone(rank.arena)

    def test_another_arena(self) -> None:
        """Whoever maps the former arena stays off, and keeps what it maps."""
        rank = self.rank()
        peer, _ = self.daemon.attach()
        peer.close()
        peer = self.daemon.accept()
        peer.hello()
        peer.welcome(self.daemon.arena, arena_id="cd" * 16)
        until(lambda: any("refused this rank" in s for s in self.said))
        self.assertEqual(rank.arena.id, "ab" * 16)

    def test_nonsense(self) -> None:
        """A welcome that makes no sense is a lost connection, whatever it says."""
        self.rank()
        before = len(os.listdir("/proc/self/fd"))
        for change in (
            {"arena_bytes": 0},
            {"arena_bytes": 4097},
            {"arena_bytes": "many"},
            {"arena_bytes": -PAGE},
            {"arena_bytes": 1 << 62},
            {"session": None, "arena_bytes": None},
        ):
            peer = self.daemon.accept()
            peer.hello()
            peer.welcome(self.daemon.arena, **change)
            with self.assertRaises(EOFError):
                peer.read()
            peer.close()
        peer = self.daemon.accept()
        peer.hello()
        peer.welcome()  # no descriptor
        with self.assertRaises(EOFError):
            peer.read()
        peer.close()
        self.daemon.attach()
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), before + 4)


if __name__ == "__main__":
    unittest.main()
