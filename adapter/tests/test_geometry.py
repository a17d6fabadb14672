"""What an engine says of its cache: groups, namespace, weights, and what is refused."""

from __future__ import annotations

import json
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stand_in

from kvlift_vllm import geometry, probe, weights
from kvlift_vllm.breaker import LIMIT, PAUSE, Breaker
from kvlift_vllm.slots import Slots
from kvlift_vllm.wire import canonical

ATTENTION = "model.layers.{}.self_attn.attn"
GROUPS = (
    (32, (ATTENTION.format(0), ATTENTION.format(2))),
    (32, (ATTENTION.format(1), ATTENTION.format(3))),
)


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def model(self, **config: Any) -> str:
        (self.folder / "config.json").write_text(json.dumps(config))
        return str(self.folder)


class TestKinds(Folder):
    def kinds(self, groups: Any, release: str = "0.32.0", **kw: Any) -> list[Any]:
        c = stand_in.config("s", groups, release=release, **kw)
        return [(g.kind, g.window_chunks, g.certain) for g in geometry.groups_of(c)]

    def test_from_vllm(self) -> None:
        """0.33 says them itself."""
        state = (288, ("model.layers.0.linear_attn",), 1)
        groups = ((*GROUPS[0], 4), GROUPS[1], state)
        self.assertEqual(
            self.kinds(groups, "0.33.0"),
            [("window", 4, True), ("full", 0, True), ("state", 1, True)],
        )

    def test_from_model(self) -> None:
        """The model's config.json says which layers have windows."""
        sliding = ["sliding_attention", "full_attention"] * 2
        window, full, unsure = ("window", 4, True), ("full", 0, True), ("full", 0, 0)
        chunked = ["chunked_attention", "full_attention"] * 2
        cases: list[tuple[dict[str, Any], list[Any]]] = [
            ({"layer_types": sliding, "sliding_window": 128}, [window, full]),
            ({"text_config": {"layer_types": sliding, "sliding_window": 100}}, [window, full]),
            ({"layer_types": chunked, "attention_chunk_size": 128}, [window, full]),
            ({"layer_types": sliding}, [unsure, full]),
            ({"layer_types": ["odd"] * 4, "sliding_window": 128}, [unsure, unsure]),
            ({"layer_types": sliding[:1], "sliding_window": 128}, [unsure, unsure]),
            ({"sliding_window": 128, "use_sliding_window": False}, [full, full]),
            ({"sliding_window": 128}, [unsure, unsure]),
            ({"layer_types": 7}, [full, full]),
            ({}, [full, full]),
        ]  # fmt: skip
        for config, want in cases:
            with self.subTest(config):
                self.assertEqual(self.kinds(GROUPS, model=self.model(**config)), want)

    def test_without_a_model(self) -> None:
        state = (288, ("model.layers.0.linear_attn", "model.layers.1.linear_attn"))
        self.assertEqual(
            self.kinds((state, GROUPS[1])), [("state", 0, True), ("full", 0, False)]
        )
        self.assertEqual(self.kinds(GROUPS[:1]), [("full", 0, True)])

    def test_from_settings(self) -> None:
        said = [{"kind": "window", "window_chunks": 3}, {"kind": "state"}]
        want = [("window", 3, True), ("state", 0, True)]
        self.assertEqual(self.kinds(GROUPS, kvlift_groups=said), want)
        odd: list[Any] = [{"kind": "window"}, "full"]
        self.assertEqual(
            self.kinds(GROUPS, kvlift_groups=odd), [("full", 0, False)] * 2
        )
        self.assertEqual(
            self.kinds(GROUPS[:1], kvlift_groups=said), [("full", 0, True)]
        )

    def test_group_ids(self) -> None:
        """Keys end with the model's number of a group, not with its position."""
        c = stand_in.config("s", GROUPS)
        c.groups[0].group_id, c.groups[1].group_id = 2, 5
        at = geometry.suffixes(geometry.groups_of(c))
        self.assertEqual(at, {b"\0\0\0\2": 0, b"\0\0\0\5": 1})


class TestNamespace(Folder):
    def text(self, change: Any = None, **kw: Any) -> str:
        c = stand_in.config("s", GROUPS, **kw)
        if change is not None:
            change(c)
        return canonical(geometry.namespace(c))

    def test_differs(self) -> None:
        """Whatever makes bytes others makes another namespace."""

        def set_of(path: str, value: Any) -> Any:
            def change(c: Any) -> None:
                *parents, name = path.split(".")
                for p in parents:
                    c = c[int(p)] if p.isdigit() else getattr(c, p)
                setattr(c, name, value)

            return change

        changes = [
            *(("model.dtype", "fp8"), ("parallel.tp_size", 2)),
            *(("parallel.pp_size", 2), ("parallel.pcp_size", 2)),
            *(("parallel.dcp_size", 2), ("cache.blocks_per_chunk", 2)),
            *(("cache.tokens_per_hash", 16), ("kv_cache_layout", "LBHNC")),
            *(("groups.0.tokens_per_block", 16), ("groups.1.layer_names", ("x",))),
        ]
        texts = [self.text(), self.text(weights_id="other"), self.text(weights_id="")]
        texts.append(self.text(set_of("model.name", "other"), weights_id=""))
        texts += [self.text(set_of(path, value)) for path, value in changes]
        self.assertEqual(len(set(texts)), len(texts))

    def test_same(self) -> None:
        """Ranks, engines and sockets share one; so do the stages of a pipeline."""
        want = self.text()
        self.assertEqual(self.text(engine="other"), want)
        elsewhere = self.text(lambda c: setattr(c.model, "name", "/elsewhere"))
        self.assertEqual(elsewhere, want)  # weights_id names them
        rank = self.text(lambda c: setattr(c.parallel, "rank", 1))
        self.assertEqual(rank, want)

        def stage(*names: str) -> str:
            def change(c: Any) -> None:
                c.parallel.pp_size = 2
                c.groups[0].layer_names = names

            return self.text(change)

        self.assertEqual(stage(ATTENTION.format(0)), stage(ATTENTION.format(2)))

    def test_engine_id(self) -> None:
        for said in ("e", "x" * 95):
            self.assertEqual(geometry.engine_id(SimpleNamespace(engine_id=said)), said)
        for said in ("x" * 96, "é" * 48, ""):
            cut = geometry.engine_id(SimpleNamespace(engine_id=said))
            self.assertTrue(0 < len(cut.encode()) <= 95)
            self.assertNotEqual(cut, said)

    def test_settings(self) -> None:
        self.assertEqual(geometry.socket_of({"kvlift_socket": "/x"}), "/x")
        with mock.patch("os.geteuid", return_value=0):
            self.assertEqual(geometry.socket_of({}), "/run/kvlift/default.sock")
        env = {"XDG_RUNTIME_DIR": "/run/user/7"}
        with mock.patch("os.geteuid", return_value=7), mock.patch("os.environ", env):
            self.assertEqual(geometry.socket_of({}), "/run/user/7/kvlift/default.sock")
        for said, want in ((None, 5), ("x", 5), (0, 0.1), (7.5, 7.5), (10**9, 1000)):
            got = geometry.deadline_of({"kvlift_deadline_ms": said})
            self.assertAlmostEqual(got, want / 1000)

    def test_line(self) -> None:
        """What an arena holds, of full groups, windows and states."""
        c = stand_in.config(
            "s",
            ((32, ("a",), None), (32, ("b",), 4), (288, ("c.mamba",), 1)),
            release="0.33.0",
        )
        parts = [[4096, 4096], [8192, 8192], [100, 100]]
        line = geometry.describe(geometry.groups_of(c), parts, 1 << 20, 3200)
        # 100 × 8 KiB + 4 × 16 KiB + 8 KiB = 872 KiB
        self.assertIn("1.00 MiB hold 3,757 tokens in 1.2 documents of 3,200", line)
        self.assertIn("872.0 KiB each", line)
        self.assertIn("g1 window of 4 chunks: 32 tokens in 16.0 KiB", line)
        self.assertIn("g2 state: 288 tokens in 8.0 KiB, 8.0 KiB", line)


class TestWeights(Folder):
    def test_digest(self) -> None:
        """One changed byte in a sampled block or the header is seen."""
        path = self.folder / "m.safetensors"
        self.assertIsNone(weights.identity(self.model(a=1)))
        data = bytearray(300 * 4096)
        data[:8] = (100).to_bytes(8, "little")
        path.write_bytes(data)
        first = weights.identity(str(self.folder))
        assert first is not None
        self.assertTrue(first.startswith("digest:"))
        self.assertEqual(weights.identity(str(self.folder)), first)
        seen = {first}
        for at in (50, 4096 * (300 * 10 // 64) + 7, len(data) - 1):
            data[at] ^= 1
            path.write_bytes(data)
            seen.add(str(weights.identity(str(self.folder))))
            data[at] ^= 1
        path.write_bytes(data[:-1])
        seen.add(str(weights.identity(str(self.folder))))
        path.write_bytes(data)
        seen.add(str(weights.identity(self.model(a=2))))
        self.assertEqual(len(seen), 6)

    def test_hub(self) -> None:
        """A snapshot of the hub's cache is known by its commit, two by nothing."""
        snapshots = self.folder / "models--org--m" / "snapshots"
        for n, commit in enumerate(("1" * 40, "2" * 40)):
            (snapshots / commit).mkdir(parents=True)
            (snapshots / commit / "config.json").write_text("{}")
            with mock.patch.dict("os.environ", {"HF_HUB_CACHE": str(self.folder)}):
                got = weights.identity("org/m")
            self.assertEqual(got, None if n else "commit:" + commit)
        for odd in ("org/none", "nobody", "../m", "/no/such/folder", ""):
            self.assertIsNone(weights.identity(odd))

    def test_file(self) -> None:
        """A model that is one file."""
        path = self.folder / "m.gguf"
        path.write_bytes(b"GGUF" * 5000)
        self.assertTrue(str(weights.identity(str(path))).startswith("digest:"))


class TestProbe(unittest.TestCase):
    def misfits(self, release: str, change: Any = lambda base: None) -> list[str]:
        m = stand_in.load(release, change)
        self.addCleanup(stand_in.unload)
        ours = (("OffloadingManager", m.manager.KvliftManager),)
        return probe.misfits(m.base, ours)

    def test_releases(self) -> None:
        for release in stand_in.RELEASES:
            with self.subTest(release):
                self.assertEqual(self.misfits(release), [])
                self.assertFalse(probe.untested(release))

    def test_named(self) -> None:
        """A release that does not fit is told what of it does not."""

        m = stand_in.load("0.33.0")
        self.addCleanup(stand_in.unload)
        ours = (("OffloadingManager", m.manager.KvliftManager),)
        base = m.base
        base.OffloadingManager = type(
            "OffloadingManager",
            (stand_in.Manager33,),
            {
                "lookup_all": lambda self, keys: None,
                "touch": lambda self, keys, req_context, rank: None,
            },
        )
        base.OffloadingManager.__abstractmethods__ = frozenset({"lookup_all"})
        got = probe.misfits(base, ours)
        self.assertTrue(any("lookup_all is new" in x for x in got), got)
        self.assertTrue(any("new argument 'rank'" in x for x in got), got)
        del base.PrepareStoreOutput
        self.assertEqual(probe.misfits(base, ours), ["PrepareStoreOutput is missing"])

    def test_unserved(self) -> None:
        c = stand_in.config("s")
        self.assertEqual(probe.unserved(c), [])
        c.kv_cache_layout = "BLHNC"
        c.canonical_layout = True
        self.assertEqual(len(probe.unserved(c)), 2)

    def test_untested(self) -> None:
        for version, want in (
            *(("0.27.1", False), ("0.30.0+cpu", False), ("0.33.0", False)),
            *(("0.27.0", True), ("0.33.1", True), ("1.0", True), ("unknown", True)),
        ):
            self.assertEqual(probe.untested(version), want, version)


class TestDocument(unittest.TestCase):
    def test_metrics(self) -> None:
        """docs/adapter.md has every metric and its labels, and no others."""
        page = Path(__file__).resolve().parents[2] / "docs" / "adapter.md"
        text = page.read_text(encoding="utf-8")
        table = text.split("## Metrics")[1].split("\n## ")[0]
        rows = [r.split("|") for r in table.splitlines() if r.startswith("| `")]
        told = {r[1].strip(" `"): r[2].strip(" `") for r in rows}
        m = stand_in.load("0.33.0")
        self.addCleanup(stand_in.unload)
        metrics = m.spec.stats.definitions(m.base)
        prefix = m.spec.stats.PREFIX
        want = {
            n.removeprefix(prefix): ",".join(d.labelnames) for n, d in metrics.items()
        }
        self.assertEqual(told, want)


class TestSmall(unittest.TestCase):
    def test_breaker(self) -> None:
        b = Breaker()
        for n in range(LIMIT):
            self.assertTrue(b.allows(n))
            b.late(n)
        at = LIMIT - 1
        self.assertTrue(b.open)
        self.assertFalse(b.allows(at + PAUSE / 2))
        self.assertTrue(b.allows(at + PAUSE))
        b.late(at + PAUSE)  # the one that was let through
        self.assertFalse(b.allows(at + 1.5 * PAUSE))
        b.in_time()
        self.assertTrue(b.allows(at))

    def test_places(self) -> None:
        """Each rank's part begins at a page of its own, wherever the pages lie."""
        s = Slots([[5000, 4096], [1, 1]])
        pages = b"".join(n.to_bytes(4, "little") for n in (7, 1, 20, 5))
        self.assertEqual(s.places(0, pages), [7 * 4096, 21 * 4096])
        self.assertEqual(s.places(1, pages), [7 * 4096, 20 * 4096])
        self.assertEqual(s.places(0, pages[:8]), [7 * 4096])


if __name__ == "__main__":
    unittest.main()
