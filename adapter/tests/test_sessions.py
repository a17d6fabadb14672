"""The calls of recorded sessions of real vLLM, made again against a real daemon.

Two sessions are in the repository; the others are replayed where they lie beside
the clone (../shared/vllm_cpu/sessions).
"""

from __future__ import annotations

import json
import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_double import Engine, until
from real_daemon import ROOT, Daemon
from test_manager import WithDaemon

HERE = Path(__file__).resolve().parent / "sessions"
SHARED = ROOT.parent / "shared" / "vllm_cpu" / "sessions"

Call = dict[str, Any]


def sessions() -> dict[str, Path]:
    """Every recorded session by name."""
    found = {p.stem: p for p in sorted(HERE.glob("*.jsonl"))}
    for p in sorted(SHARED.glob("*.jsonl")):
        if ".worker" not in p.name:
            found.setdefault(p.stem, p)
    return found


def read(path: Path) -> tuple[Call, list[Call]]:
    """The configuration and the calls, with repeated steps written out."""
    config: Call = {}
    calls: list[Call] = []
    for line in path.read_text().splitlines():
        c = json.loads(line)
        if c["m"] == "config":
            config = c
        elif c["m"] == "repeat_previous_step":
            calls += calls[-c["rows"] :] * c["x"]
        elif c["m"] not in ("session", "recovered", "none_hash", "shutdown"):
            calls.append(c)
    return config, calls


def keys_of(c: Call) -> list[bytes]:
    """The keys of a call."""
    return [bytes.fromhex(k) for k in c.get("keys", [c["key"]] if "key" in c else [])]


class Replay:
    """Makes the calls of a session; what the tier lacks is not loaded."""

    def __init__(self, e: Engine, config: Call, calls: list[Call]) -> None:
        self.e, self.calls = e, calls
        self.contexts: dict[str, Any] = {}
        self.specs: dict[tuple[str, frozenset[bytes]], Any] = {}
        self.hit: dict[str, set[bytes]] = {}
        self.different: list[str] = []  # answers that are not the recorded ones
        self.chunks = {
            g["group_id"]: g["tokens_per_block"] * config["blocks_per_chunk"]
            for g in config["groups"]
        }
        self.positions = self.place()

    def place(self) -> dict[str, dict[bytes, int]]:
        """Where each request's keys stand: vLLM's own list is not recorded.

        Keys of a group were offered in the order of the prompt.
        """
        at: dict[bytes, int] = {}
        out: dict[str, dict[bytes, int]] = {}
        for c in self.calls:
            if "req" not in c:
                continue
            keys = keys_of(c)
            mine = out.setdefault(c["req"], {})
            if c["m"] == "prepare_store":
                for key in keys:
                    n = sum(k[-4:] == key[-4:] for k in mine) + 1
                    chunk = self.chunks[int.from_bytes(key[-4:], "big")]
                    at.setdefault(key, n * chunk)
                    mine[key] = at[key]
            elif c["m"] in ("lookup", "prepare_load"):
                mine.update({k: at[k] for k in keys if k in at})
        return out

    def run(self) -> None:
        """All calls."""
        for i, c in enumerate(self.calls):
            getattr(self, c["m"])(i, c)

    def on_new_request(self, i: int, c: Call) -> None:
        ctx = self.contexts[c["req"]] = self.e.context(c["req"], c.get("params"))
        self.e.call("on_new_request", ctx)

    def lookup(self, i: int, c: Call) -> None:
        key, ctx = keys_of(c)[0], self.contexts[c["req"]]
        if self.e.minor >= 31 and not ctx._offload_key_positions:
            ctx._offload_key_positions.update(self.positions[c["req"]])
        answer = self.e.lookup(key, ctx)
        if answer == "HIT":
            self.hit.setdefault(c["req"], set()).add(key)
        else:
            self.hit.setdefault(c["req"], set()).discard(key)
        if answer != c["ret"]:
            self.different.append(f"call {i}: {answer} instead of {c['ret']}")

    def touch(self, i: int, c: Call) -> None:
        self.e.call("touch", keys_of(c), self.contexts[c["req"]])

    def prepare_load(self, i: int, c: Call) -> None:
        keys = keys_of(c)
        if not self.hit.get(c["req"], set()).issuperset(keys):
            return
        spec = self.e.call("prepare_load", keys, self.contexts[c["req"]])
        self.e.check(spec, keys)
        self.specs[c["req"], frozenset(keys)] = (spec, keys)
        self.e.loaded += keys

    def complete_load(self, i: int, c: Call) -> None:
        keys = frozenset(keys_of(c))
        if (found := self.specs.pop((c["req"], keys), None)) is not None:
            self.e.check(*found)
            self.e.call("complete_load", set(keys), self.contexts[c["req"]])

    def prepare_store(self, i: int, c: Call) -> None:
        out = self.e.store(keys_of(c), self.contexts[c["req"]])
        stored = out.keys_to_store if out is not None else None
        want = [bytes.fromhex(k) for k in (c["ret"] or {}).get("store", [])]
        if stored != want:
            self.different.append(f"call {i}: another part is stored")
        if stored:
            self.specs[c["req"], frozenset(want)] = (out.store_spec, stored)

    def complete_store(self, i: int, c: Call) -> None:
        found = self.specs.pop((c["req"], frozenset(keys_of(c))), None)
        if found is not None:
            spec, keys = found
            self.e.write(spec, keys)
            self.e.call("complete_store", set(keys), self.contexts[c["req"]])
            self.e.call("get_stats")

    def on_schedule_end(self, i: int, c: Call) -> None:
        self.e.end_step(*c["new"])

    def on_request_finished(self, i: int, c: Call) -> None:
        self.e.call("on_request_finished", self.contexts[c["req"]])


class TestSessions(WithDaemon):
    def start(self, d: Daemon, config: Call, **kw: Any) -> Engine:
        groups = [(g["tokens_per_block"], g["layer_names"]) for g in config["groups"]]
        return self.engine(
            d,
            config["vllm_version"],
            groups=groups,
            blocks=config["blocks_per_chunk"],
            parts=[3000 + 5000 * i for i in range(len(groups))],
            world=config["world_size"],
            **kw,
        )

    def test_answers(self) -> None:
        """The answers are those that vLLM was given when it was recorded.

        But where the recorder had less room (preempt) or put a request off.
        """
        found = sessions()
        for name, path in found.items():
            config, calls = read(path)
            with self.subTest(name):
                d = self.daemon("32MiB")
                if name.endswith("_warm_after_kill9"):
                    first = self.start(d, config, engine="killed")
                    before = found[name.replace("_warm_after_kill9", "_cold")]
                    Replay(first, *read(before)).run()
                    first.settled()
                    first.close()
                e = self.start(d, config)
                r = Replay(e, config, calls)
                r.run()
                e.settled()
                if "_preempt" not in name and "_retry" not in name:
                    self.assertEqual(r.different, [])
                self.assertTrue(e.loaded)
                self.assertEqual(d.status()["tiers"][0]["reserved_keys"], 0)
                e.close()
                d.close()

    def test_killed(self) -> None:
        """The daemon is killed and started again in the middle, at several places."""
        for name, path in sessions().items():
            config, calls = read(path)
            if not any(c["m"] == "prepare_store" for c in calls):
                continue
            places = range(9, 200, 13) if path.parent == HERE else (len(calls) // 2,)
            for at in places:
                with self.subTest(name, at=at):
                    d = self.daemon("32MiB")
                    e = self.start(d, config)

                    def before(n: int, at: int = at, e: Engine = e) -> None:
                        if n == at:
                            e.daemon.kill()
                            e.daemon.start()
                            for r in e.ranks:
                                r.attach()

                    e.before = before
                    Replay(e, config, calls).run()
                    e.before = lambda n: None
                    lives = 2 if at < e.calls else 1
                    until(
                        "it is back",
                        lambda e=e, n=lives: e.session.counters.attached == n,
                    )
                    e.settled()
                    # What was lost by the way is stored by the next life.
                    again = self.start(d, config, engine="again")
                    r = Replay(again, config, calls)
                    r.run()
                    again.settled()
                    self.assertTrue(again.loaded)
                    self.assertEqual(d.status()["tiers"][0]["reserved_keys"], 0)
                    again.close()
                    e.close()
                    d.close()


if __name__ == "__main__":
    unittest.main()
