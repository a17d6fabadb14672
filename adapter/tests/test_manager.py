"""The manager against a real daemon, driven as each release of vLLM does it."""

from __future__ import annotations

import hashlib
import os
import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stand_in
from engine_double import Engine, until
from real_daemon import Daemon, missing
from scheduler_double import Scheduler


def chain(name: str, n: int, group: int = 0) -> list[bytes]:
    """The keys of a document of n chunks."""
    end = group.to_bytes(4, "big")
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() + end for i in range(n)]


class WithDaemon(unittest.TestCase):
    """A test that may start daemons and engines; they end with it."""

    def setUp(self) -> None:
        if why := missing():
            if os.environ.get("CI"):
                self.fail(why)
            self.skipTest(why)
        self.addCleanup(stand_in.unload)

    def daemon(self, *args: str) -> Daemon:
        d = Daemon(*args)
        self.addCleanup(d.close)
        return d

    def engine(self, *args: Any, **kw: Any) -> Engine:
        e = Engine(*args, **kw)
        self.addCleanup(e.close)
        return e

    def serve(self, s: Scheduler, name: str, keys: list[bytes]) -> Any:
        """Runs one request to its end and until its keys are known."""
        r = s.add(name, keys)
        s.run()
        s.engine.settled()
        return r


class TestReleases(WithDaemon):
    def test_documents(self) -> None:
        """A, B, C, A again: the second A is served in full, with its own bytes."""
        for release in stand_in.RELEASES:
            with self.subTest(release):
                d = Daemon()
                e = Engine(d, release, world=2, parts=(5000,))
                try:
                    s = Scheduler(e)
                    docs = {x: chain(x, 10) for x in "ABC"}
                    for x in "ABC":
                        self.assertEqual(self.serve(s, x, docs[x]).hits[-1], 0)
                    self.assertEqual(self.serve(s, "A2", docs["A"]).hits[-1], 10)
                    self.assertEqual(e.loaded, docs["A"])
                    longer = docs["B"][:6] + chain("D", 4)
                    self.assertEqual(self.serve(s, "D", longer).hits[-1], 6)
                    self.look(d.status())
                finally:
                    e.close()
                    d.close()

    def look(self, status: dict[str, Any]) -> None:
        """What the daemon has seen of it."""
        ram = status["tiers"][0]
        self.assertEqual((ram["keys"], ram["reserved_keys"]), (34, 0))
        self.assertEqual(status["traffic"]["hit_tokens"], 16 * 32)
        self.assertEqual(status["traffic"]["requests"], 5)

    def test_preemption(self) -> None:
        """What is stored already is answered without asking, and nothing twice."""
        for release in ("0.30.0", "0.33.0"):
            with self.subTest(release):
                e = self.engine(self.daemon(), release)
                s = Scheduler(e, batch=8)
                r = s.add("A", chain("A", 24))
                for _ in range(3):
                    s.step()
                s.preempt(r)
                s.run()
                e.settled()
                asked = e.session.counters.reserves
                e.end_step()
                # As 0.33 does it: every chunk is offered again.
                again = e.context("again")
                out = e.store(r.keys, again)
                self.assertEqual(out.keys_to_store, [])
                self.assertEqual(e.session.counters.reserves, asked)
                self.assertEqual(e.daemon.status()["tiers"][0]["keys"], 24)

    def test_starved(self) -> None:
        """A hit that is repeated for many steps delays no acknowledgement."""
        d = self.daemon()
        e = self.engine(d, "0.32.0", engine="one")
        s = Scheduler(e)
        docs = [chain(x, 43) for x in "ABC"]
        for i, keys in enumerate(docs):
            self.serve(s, f"fill{i}", keys)
        other = self.engine(d, modules=e.m, engine="two", release="0.32.0")
        until("both know it", lambda: other.session.keys == e.session.keys)
        before = e.calls
        s.starved = 75
        requests = [s.add(f"r{i}", keys) for i, keys in enumerate(docs)]
        for _ in range(25):
            s.step()
        self.assertEqual(sum(len(r.hits) for r in requests) * 43, 3225)
        self.assertGreater(e.calls - before, 3225)
        other.call("reset_cache")
        until("the reset is over", lambda: not other.session._reset)
        until("it is acknowledged", lambda: self.behind(d) == 0)
        s.run()
        e.settled()

    def behind(self, d: Daemon) -> int:
        return sum(e["behind"] for e in d.status()["engines"])


class TestStores(WithDaemon):
    def test_full_tier(self) -> None:
        """Of a batch that does not fit the longest head is stored, and counted."""
        d = self.daemon("256KiB")  # 64 pages
        e = self.engine(d, parts=(20480,))
        keys = chain("A", 20)
        ctx = e.context("r")
        e.call("on_new_request", ctx)
        for i, key in enumerate(keys, 1):
            ctx._offload_key_positions[key] = i * 32
        out = e.store(keys, ctx)
        self.assertEqual(out.keys_to_store, keys[:12])
        self.assertEqual(e.store(chain("B", 2), ctx).keys_to_store, [])
        e.write(out.store_spec, out.keys_to_store)
        e.call("complete_store", set(out.keys_to_store), ctx)
        stats = e.call("get_stats").values
        self.assertEqual(stats["vllm:kvlift_refused_keys", ("no-room",)], 10)
        e.call("on_request_finished", ctx)
        e.settled()
        # The next one takes the room of what has ended, and is told so.
        late = e.context("late")
        out = e.store(chain("C", 4), late)
        self.assertEqual(len(out.keys_to_store), 4)
        self.assertEqual(set(out.evicted_keys), set(keys[8:12]))
        self.assertEqual(e.lookup(keys[11], late), "MISS")
        self.assertEqual(e.lookup(keys[0], late), "HIT")

    def test_partly_present(self) -> None:
        """What is stored already is left out, and what is being stored too."""
        e = self.engine(self.daemon())
        keys = chain("A", 6)
        s = Scheduler(e)
        self.serve(s, "A", keys[:2])
        one, two = e.context("one"), e.context("two")
        self.assertEqual(e.store(keys[:4], one).keys_to_store, keys[2:4])
        self.assertEqual(e.store(keys, two).keys_to_store, keys[4:])

    def test_tails(self) -> None:
        """A state is stored on its own: nobody asks for the chain before it."""
        layers = (
            (288, ("model.layers.0.linear_attn",)),
            (288, ("model.layers.3.self_attn.attn",)),
        )
        e = self.engine(self.daemon(), groups=layers, parts=(9000, 5000))
        ctx = e.context("r")
        e.call("on_new_request", ctx)
        state, full = chain("A", 5, 0), chain("A", 5, 1)
        for i, key in enumerate(full, 1):
            ctx._offload_key_positions[key] = i * 288
        ctx._offload_key_positions[state[4]] = 5 * 288
        out = e.store([state[4]], ctx)
        self.assertEqual(out.keys_to_store, [state[4]])
        self.assertEqual(e.places(out.store_spec)[0][0], 0)
        out = e.store(full, ctx)
        self.assertEqual(out.keys_to_store, full)
        self.assertEqual([g for g, _ in e.places(out.store_spec)], [1] * 5)

    def test_failed_copy(self) -> None:
        """A rank that could not copy leaves a mark: the job's keys are not kept."""
        for rank in (0, 1):
            with self.subTest(rank=rank):
                e = self.engine(self.daemon(), world=2)
                keys, ctx = chain("A", 3), e.context("r")
                out = e.store(keys, ctx)
                e.write(out.store_spec, keys)
                e.mark(out.store_spec, rank)
                e.call("complete_store", set(keys), ctx)
                e.settled()
                self.assertEqual(e.daemon.status()["tiers"][0]["keys"], 0)
                stats = e.call("get_stats").values
                self.assertEqual(stats["vllm:kvlift_failed_stores", ()], 1)
                out = e.store(keys, ctx)  # the next one may store them
                self.assertEqual(out.keys_to_store, keys)
                e.write(out.store_spec, keys)
                e.call("complete_store", set(keys), ctx)
                e.settled()
                until("they are known", lambda e=e: e.session.keys == 3)


class TestWindows(WithDaemon):
    def test_hit_holds(self) -> None:
        """In a window nothing changes, whatever the daemon has said meanwhile."""
        for release in ("0.32.0", "0.33.0"):
            with self.subTest(release):
                d = self.daemon()
                e = self.engine(d, release, engine="one")
                other = self.engine(d, modules=e.m, engine="two", release=release)
                keys = chain("A", 4)
                self.serve(Scheduler(e), "A", keys)
                ctx = e.context("r")
                self.assertEqual(e.lookup(keys[0], ctx), "HIT")
                other.call("reset_cache")
                until("the reset is over", lambda o=other: not o.session._reset)
                for key in keys:
                    self.assertEqual(e.lookup(key, ctx), "HIT")
                spec = e.call("prepare_load", keys, ctx)
                e.end_step()
                e.check(spec, keys)
                self.assertEqual(e.lookup(keys[0], ctx), "MISS")
                e.end_step()
                status = {x["engine_id"]: x for x in d.status()["engines"]}
                self.assertEqual(status["one"]["jobs"], 1)
                e.call("complete_load", set(keys), ctx)
                e.settled()
                until("all is free", lambda d=d: self.used(d) == 0)

    def used(self, d: Daemon) -> int:
        ram = d.status()["tiers"][0]
        return int(ram["total_bytes"] - ram["free_bytes"])

    def test_load_without_hit(self) -> None:
        """What no lookup of the step has hit is never loaded."""
        e = self.engine(self.daemon())
        keys = chain("A", 2)
        self.serve(Scheduler(e), "A", keys)
        ctx = e.context("r")
        self.assertEqual(e.lookup(keys[0], ctx), "HIT")
        e.end_step()
        with self.assertRaises(RuntimeError):
            e.manager.prepare_load(keys, ctx)

    def test_two_engines(self) -> None:
        """What one stores the other hits, without any call in between."""
        d = self.daemon()
        one = self.engine(d, engine="one")
        two = self.engine(d, modules=one.m, engine="two")
        keys = chain("A", 10)
        self.serve(Scheduler(one), "A", keys)
        s = Scheduler(two)
        self.assertEqual(self.serve(s, "B", keys).hits[-1], 10)
        self.assertEqual(two.loaded, keys)


class TestRequests(WithDaemon):
    def test_hints(self) -> None:
        """What a request says of its conversation goes into its finish."""
        e = self.engine(self.daemon())
        sent: list[bytes] = []
        post = e.session.post
        e.session.post = lambda t, p: (sent.append(p), post(t, p))
        cases: list[tuple[Any, int]] = [
            *((None, 0), ({}, 0), ({"kvlift": None}, 0), ({"kvlift": []}, 0)),
            *(({"kvlift": {"session": s}}, i + 1) for i, s in enumerate(HINTS)),
            ({"kvlift": {"session": "none"}}, 0),
            ({"kvlift": {"session": ["idle"]}}, 0),
        ]
        for params, hint in cases:
            with self.subTest(params):
                ctx = e.context("r", params)
                e.call("on_new_request", ctx)
                e.call("on_request_finished", ctx)
                self.assertEqual(sent[-1][16], hint)
        e.end_step()
        self.assertTrue(e.session.attached)

    def test_positions(self) -> None:
        """Positions come from vLLM, before 0.31 from what it touches."""
        for release in ("0.30.0", "0.31.0"):
            with self.subTest(release):
                e = self.engine(self.daemon(), release)
                s = Scheduler(e)
                asked: list[bytes] = []
                self.listen(e, asked)
                self.serve(s, "A", chain("A", 6))
                at = [int.from_bytes(r[44:48], "little") for r in asked]
                self.assertEqual(at, [32, 64, 96, 128, 160, 192])

    def listen(self, e: Engine, asked: list[bytes]) -> None:
        """Gathers the key records of all reserves."""
        reserve = e.session.reserve

        def listening(request: int, keys: Any, records: Any) -> Any:
            asked.extend(records)
            return reserve(request, keys, records)

        e.session.reserve = listening

    def test_events(self) -> None:
        """Stored when the store is kept, removed when it is gone, whoever took it."""
        d = self.daemon("256KiB")
        e = self.engine(d, parts=(16384,), engine="one", events=True)
        other = self.engine(d, modules=e.m, parts=(16384,), engine="two")
        keys, ctx = chain("A", 10), e.context("r")
        e.call("on_new_request", ctx)
        out = e.store(keys, ctx)
        e.write(out.store_spec, keys)
        self.assertEqual(e.call("take_events"), [])
        e.call("complete_store", set(keys), ctx)
        e.call("on_request_finished", ctx)
        self.assertEqual(self.events(e, 10), [(False, keys)])
        s = Scheduler(other, batch=12)
        self.serve(s, "B", chain("B", 12))
        gone = self.events(e, 1)
        self.assertEqual([r for r, _ in gone], [True])
        self.assertLessEqual(set(gone[0][1]), set(keys))
        self.assertEqual(list(other.call("take_events")), [])

    def events(self, e: Engine, n: int) -> list[tuple[bool, list[bytes]]]:
        """At least n keys' events: whether they say removed, and the keys."""
        out: list[tuple[bool, list[bytes]]] = []

        def come() -> bool:
            e.end_step()
            out.extend((x.removed, x.keys) for x in e.call("take_events"))
            return sum(len(k) for _, k in out) >= n

        until(f"events of {n} keys", come)
        return out

    def test_odd_calls(self) -> None:
        """Empty and unknown things are harmless."""
        e = self.engine(self.daemon())
        ctx = e.context("never announced")
        self.assertEqual(e.store([], ctx).keys_to_store, [])
        self.assertEqual(e.store([bytes(64)], ctx).keys_to_store, [])
        e.call("complete_store", {b"x"}, ctx)
        e.call("complete_load", {b"x"}, ctx)
        e.call("touch", [], ctx)
        e.call("on_request_finished", ctx)
        e.end_step("nobody")
        self.assertEqual(len(e.call("prepare_load", [], ctx)), 0)
        self.assertTrue(e.session.attached)

    def test_own_error(self) -> None:
        """An error of the adapter ends the tier for this engine and nothing else."""
        e = self.engine(self.daemon())
        keys = chain("A", 4)
        s = Scheduler(e)
        self.serve(s, "A", keys)
        with self.assertLogs("vllm.kvlift", "ERROR") as logs:
            e.call("touch", [b"no such group"], e.context("r"))
        self.assertIn("goes on without the tier", logs.output[0])
        ctx = e.context("r")
        self.assertEqual(e.lookup(keys[0], ctx), "MISS")
        self.assertEqual(e.store(keys, ctx).keys_to_store, [])
        e.end_step()
        self.assertEqual(e.call("get_stats").values["vllm:kvlift_errors", ()], 1)


HINTS = ("active", "idle", "closed")

if __name__ == "__main__":
    unittest.main()
