"""The manager while the daemon dies, stops, is late or away, and over resets."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stand_in
from engine_double import Engine, until
from scheduler_double import Scheduler
from test_manager import WithDaemon, chain

DOCS = ("A", "B", "A")
EVERY = 10  # for each release one of so many places is tried; for one of them all


def quiet(test: Any) -> Any:
    """What a daemon that is gone is reported as does not belong to a test's output."""
    return test.assertLogs("vllm.kvlift", "WARNING")


class TestKilled(WithDaemon):
    """The daemon is killed between two calls and started again before the next."""

    def test_between_calls(self) -> None:
        for release in stand_in.RELEASES:
            n = self.play(release, None)
            self.assertGreater(n, 40)
            every = 1 if release == "0.32.0" else EVERY
            for at in range(int(release[2:4]) % every, n, every):
                with self.subTest(release, at=at):
                    self.play(release, at)

    def play(self, release: str, at: int | None) -> int:
        """A, B, A with a kill before call number at; returns how many calls it took."""
        d = self.daemon()
        e = self.engine(d, release, parts=(5000,))
        e.reports = at is None
        s = Scheduler(e)

        def before(n: int) -> None:
            if n == at:
                d.kill()
                d.start()
                for r in e.ranks:
                    r.attach()

        e.before = before
        try:
            for i, x in enumerate(DOCS):
                s.add(f"{x}{i}", chain(x, 7))
                s.run()
            n = e.calls
            if at is not None and at < n:
                until("it is back", lambda: e.session.counters.attached == 2)
            e.settled()
            # What was kept, or is stored anew, is served with its own bytes.
            for i in range(2):
                for x in "AB":
                    r = s.add(f"{x}again{i}", chain(x, 7))
                    s.run()
                    e.settled()
            self.assertEqual(r.hits[-1], 7)
            ram = d.status()["tiers"][0]
            self.assertEqual((ram["keys"], ram["reserved_keys"]), (14, 0))
            return n
        finally:
            e.before = lambda n: None
            e.close()
            d.close()

    def test_away(self) -> None:
        """Without a daemon: no call waits, everything misses, and it comes back."""
        d = self.daemon()
        e = self.engine(d)
        s = Scheduler(e)
        self.serve(s, "A", chain("A", 6))
        with quiet(self) as logs:
            d.kill()
            r = s.add("B", chain("B", 6))
            s.run()
            self.assertEqual(r.hits, [0])
            r = s.add("A2", chain("A", 6))
            s.run()
            self.assertEqual(r.hits, [0])
        self.assertLessEqual(len(logs.output), 2)  # gone, then away
        stats = e.call("get_stats").values if e.session.attached else {}
        self.assertFalse(stats)
        d.start()
        e.reattach()
        self.assertEqual(self.serve(s, "A3", chain("A", 6)).hits, [6])

    def test_promised_load_completes(self) -> None:
        """What was hit before the daemon's death is loaded; it stays pinned after."""
        d = self.daemon()
        e = self.engine(d)
        s = Scheduler(e)
        keys = chain("A", 5)
        self.serve(s, "A", keys)
        ctx = e.context("r")
        e.call("on_new_request", ctx)
        for k in keys:
            self.assertEqual(e.lookup(k, ctx), "HIT")
        d.kill()
        spec = e.call("prepare_load", keys, ctx)
        e.end_step("r")
        e.check(spec, keys)
        d.start()
        e.reattach()
        self.assertEqual(d.status()["engines"][0]["jobs"], 1)
        e.check(spec, keys)
        e.call("complete_load", set(keys), ctx)
        e.settled()


class TestStopped(WithDaemon):
    """The daemon is stopped by SIGSTOP: nothing waits longer than the deadline."""

    def test_anywhere(self) -> None:
        for release in ("0.27.1", "0.32.0", "0.33.0"):
            for at in range(int(release[2:4]) % 7, 50, 7):
                with self.subTest(release, at=at):
                    self.play(release, at)

    def play(self, release: str, at: int) -> None:
        d = self.daemon()
        e = self.engine(d, release, kvlift_deadline_ms=5)
        e.reports = False
        s = Scheduler(e)
        e.before = lambda n: d.stop() if n == at else None
        try:
            for i, x in enumerate(DOCS):
                s.add(f"{x}{i}", chain(x, 7))
                s.run()
            d.go_on()
            until("an answer is not owed", lambda: self.idle(e))
            e.settled()
            e.session.config = e.session.config.__class__(
                **{**vars(e.session.config), "deadline": 0.5}
            )
            until("the breaker lets one through", lambda: self.tried(e))
            for i in range(2):
                r = s.add(f"again{i}", chain("A", 7))
                s.run()
                e.settled()
            self.assertEqual(r.hits[-1], 7)
            self.assertEqual(d.status()["tiers"][0]["reserved_keys"], 0)
        finally:
            e.close()
            d.close()

    def idle(self, e: Engine) -> bool:
        e.end_step()
        return not e.session._owed

    def tried(self, e: Engine) -> bool:
        return e.session._breaker.allows(e.session._clock())

    def test_late_answer(self) -> None:
        """While an answer is owed everything misses; then its job is aborted."""
        d = self.daemon()
        e = self.engine(d, kvlift_deadline_ms=20)
        s = Scheduler(e)
        keys = chain("A", 4)
        self.serve(s, "A", keys)
        ctx = e.context("r")
        d.stop()
        out = e.store(chain("B", 4), ctx)
        self.assertIsNone(out)  # offered again in the next step
        for _ in range(2):
            self.assertEqual(e.lookup(keys[0], ctx), "MISS")
            self.assertIsNone(e.store(chain("B", 4), ctx))
        out = e.store(chain("B", 4), ctx)
        self.assertEqual(out.keys_to_store, [])  # not for ever
        e.end_step()
        self.assertEqual(e.session.counters.reserves, 2)
        self.assertEqual(e.session.counters.late, 1)
        d.go_on()
        until("it is read", lambda: self.idle(e))
        e.settled()
        self.assertEqual(d.status()["tiers"][0]["reserved_keys"], 0)
        self.assertEqual(e.lookup(keys[0], ctx), "HIT")
        e.end_step()

    def test_stopped_at_boot(self) -> None:
        """An engine boots beside a daemon that does not answer, and waits for nothing."""
        d = self.daemon()
        d.stop()
        e = self.engine(d, attach=False)
        clock = e.session._clock() + 60
        ctx = e.context("r")
        until("it is dialled", lambda: e.session.expecting)
        self.assertEqual(e.lookup(chain("A", 1)[0], ctx), "RETRY")
        e.manager._clock = lambda: clock
        self.assertEqual(e.lookup(chain("A", 1)[0], ctx), "MISS")
        self.assertEqual(e.store(chain("A", 2), ctx).keys_to_store, [])
        e.end_step()
        d.go_on()
        e.reattach()


class TestBoot(WithDaemon):
    def test_first_request_waits(self) -> None:
        """Until the first snapshot a request is put off, and then it hits."""
        d = self.daemon()
        first = self.engine(d, engine="first")
        keys = chain("A", 6)
        self.serve(Scheduler(first), "A", keys)
        e = self.engine(d, modules=first.m, engine="second", attach=False)
        s = Scheduler(e)
        r = s.add("A", keys)
        until("it is dialled", lambda: e.session.expecting)
        s.step()
        self.assertEqual((r.retries, r.hits), (1, []))
        e.reattach()
        s.run()
        self.assertEqual(r.hits, [6])

    def test_no_daemon(self) -> None:
        """Without a daemon nothing is put off; it is attached to when it comes."""
        d = self.daemon()
        d.kill()
        with quiet(self) as logs:
            e = self.engine(d, attach=False)
            s = Scheduler(e)
            until("it has been tried", lambda: len(logs.output) > 0)
            r = s.add("A", chain("A", 6))
            s.run()
        self.assertEqual((r.retries, r.hits), (0, [0]))
        d.start()
        e.reattach()
        self.serve(s, "A2", chain("A", 6))
        self.assertEqual(self.serve(s, "A3", chain("A", 6)).hits, [6])

    def test_other_geometry(self) -> None:
        """Ranks of another size under the same name are refused, in a clear line."""
        d = self.daemon()
        one = self.engine(d, engine="one", parts=(5000,))
        with quiet(self) as logs:
            two = self.engine(d, modules=one.m, engine="two", attach=False)
            two.ranks[0].parts = (6000,)
            two.ranks[0].attach()
            until("it is refused", lambda: two.session._link.over)
        self.assertIn("geometry", logs.output[0])
        ctx = two.context("r")
        self.assertEqual(two.lookup(chain("A", 1)[0], ctx), "MISS")
        self.assertEqual(two.store(chain("A", 2), ctx).keys_to_store, [])

    def test_other_arena(self) -> None:
        """An engine stays off a new arena until it is restarted itself."""
        d = self.daemon()
        e = self.engine(d)
        with quiet(self) as logs:
            d.kill()
            for f in (d.arena / "a").iterdir():
                f.unlink()
            d.start()
            until("it is refused", lambda: e.session._link.over)
        self.assertIn("arena", logs.output[-1])
        s = Scheduler(e)
        r = s.add("A", chain("A", 6))
        s.run()
        self.assertEqual(r.hits, [0])


class TestReset(WithDaemon):
    def test_jobs_in_flight(self) -> None:
        """Loads and stores under way at a reset end without a word of vLLM's."""
        for release in stand_in.RELEASES:
            for kill in (False, True):
                with self.subTest(release, kill=kill):
                    self.play(release, kill)

    def play(self, release: str, kill: bool) -> None:
        d = self.daemon()
        e = self.engine(d, release, parts=(5000,), world=2)
        s = Scheduler(e)
        a = chain("A", 6)
        self.serve(s, "A", a)
        s.add("A2", a)  # it loads
        s.add("B", chain("B", 6))  # it stores
        e.reports = False
        jobs = self.prepare(s)
        self.assertEqual([j.load for j in jobs], [True, False])
        s.reset()
        ctx = e.context("r")
        self.assertEqual(e.lookup(a[0], ctx), "MISS")
        e.end_step()
        if kill:
            d.kill()
            d.start()
            e.reattach()
        until("the reset is confirmed", lambda: not e.session._reset)
        self.assertEqual(e.lookup(a[0], ctx), "MISS")
        e.end_step()
        s.flush()
        e.reports = True
        s.run()  # both requests go on with the new weights
        r = self.serve(s, "A3", a)
        e.settled()
        r = self.serve(s, "A4", a)
        self.assertEqual(r.hits[-1], 6)
        ram = d.status()["tiers"][0]
        self.assertEqual(ram["reserved_keys"], 0)
        self.assertEqual(ram["pending_bytes"], 0)
        e.close()
        d.close()

    def prepare(self, s: Scheduler) -> list[Any]:
        """A step whose jobs are not completed."""
        complete, s._complete = s._complete, lambda: None  # type: ignore[method-assign]
        s.step()
        s._complete = complete  # type: ignore[method-assign]
        return s.jobs


if __name__ == "__main__":
    unittest.main()
