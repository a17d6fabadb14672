"""Copy plans against a slow copy that follows the words of docs/protocol.md block by block."""

from __future__ import annotations

import importlib.util
import random
import sys
import unittest
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
if HAS_NUMPY:
    import numpy as np

    from kvlift_vllm.copies import (
        BadJob,
        Layout,
        Runs,
        Tensor,
        copy_host,
        mark_place,
        plan,
        rows,
    )

PAGE = 4096


@dataclass
class Slots:
    groups: list[int]
    extents: list[tuple[int, int]]
    offsets: list[int]
    starts: list[list[int]]

    def __post_init__(self) -> None:
        self.groups = np.array(self.groups, np.int64)
        self.extents = np.array(self.extents, np.int64).reshape(-1, 2)
        self.offsets = np.array(self.offsets, np.int64)
        self.starts = np.array(self.starts, np.int64)


class Engine:
    """Tensors, an arena and one job, drawn at random."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.per_chunk = draw.choice((1, 1, 2, 3, 4))
        self.world = draw.choice((1, 1, 2, 3))
        self.rank = draw.randrange(self.world)
        self.blocks = draw.randrange(20, 60)
        self.tensors, layout = [], []
        for _ in range(draw.randrange(1, 5)):
            stride = draw.choice((64, 100, 2048, 3000))
            t = np.frombuffer(draw.randbytes(self.blocks * stride), np.uint8).copy()
            self.tensors.append(t.reshape(self.blocks, stride))
            layout.append(Tensor(t.ctypes.data, self.blocks, stride))
        refs = []
        for _ in range(draw.randrange(1, 4)):
            some = draw.sample(range(len(layout)), draw.randrange(1, len(layout) + 1))
            refs.append(
                tuple(
                    (i, draw.choice((layout[i].stride, layout[i].stride // 2)))
                    for i in some
                )
            )
        self.layout = Layout(tuple(layout), tuple(refs), self.per_chunk)
        self.pages = 1800
        self.arena = np.frombuffer(draw.randbytes(self.pages * PAGE), np.uint8).copy()
        self.free = set(range(self.pages))

    def part(self, group: int, rank: int) -> int:
        """Pages of a rank in a slot; other ranks may hold more, as stages do."""
        return -(-self.layout.parts[group] * (1 + abs(rank - self.rank)) // PAGE)

    def job(self, whole: bool) -> tuple[Slots, list[int], list[int], list[int]]:
        draw = self.draw
        groups, sizes, indices, ids = [], [], [], []
        for g in range(len(self.layout.refs)):
            chunks = draw.randrange(4)
            size = chunks * self.per_chunk
            skip = 0
            if chunks and not whole:
                skip = draw.randrange(self.per_chunk)
                size = max(size - skip - draw.randrange(self.per_chunk), 1)
                chunks = -(-(size + skip) // self.per_chunk)
            sizes.append(size)
            indices.append(draw.randrange(9) * self.per_chunk + skip)
            first = draw.randrange(self.blocks - size)
            mine = list(range(first, first + size))
            if draw.random() < 0.5:
                draw.shuffle(mine)
            ids += mine
            groups += [g] * chunks
        extents, offsets = [], [0]
        for g in groups:
            need = sum(self.part(g, r) for r in range(self.world))
            while need > 0:
                n = need if draw.random() < 0.6 else draw.randrange(1, need + 1)
                at = draw.randrange(self.pages - n)
                if self.free >= (run := set(range(at, at + n))):
                    self.free -= run
                    extents.append((at, n))
                    need -= n
            offsets.append(len(extents))
        starts = [
            [sum(self.part(g, r) for r in range(k)) for k in range(self.world)]
            for g in range(len(self.layout.refs))
        ]
        return Slots(groups, extents, offsets, starts), ids, sizes, indices

    def slowly(
        self, slots: Slots, ids: list[int], sizes: list[int], indices: list[int]
    ):
        """Yields (tensor, block, bytes, arena offsets) for every copied block."""
        chunk, at = 0, 0
        for g, size in enumerate(sizes):
            skip = indices[g] % self.per_chunk
            for j in range(size):
                c, sub = (
                    chunk + (skip + j) // self.per_chunk,
                    (skip + j) % self.per_chunk,
                )
                pages = [
                    page + i
                    for page, n in slots.extents[
                        slots.offsets[c] : slots.offsets[c + 1]
                    ]
                    for i in range(n)
                ]
                before = 0
                for t, length in self.layout.refs[g]:
                    start = slots.starts[g][self.rank] * PAGE + before + sub * length
                    where = [
                        pages[b // PAGE] * PAGE + b % PAGE
                        for b in range(start, start + length)
                    ]
                    yield t, ids[at], length, where
                    before += self.per_chunk * length
                at += 1
            chunk += -(-(size + skip) // self.per_chunk) if size else 0


@unittest.skipUnless(HAS_NUMPY, "needs NumPy")
class TestPlan(unittest.TestCase):
    def test_like_the_words(self) -> None:
        """A random job copies what the rule says, both ways, and nothing else."""
        split = strided = 0
        for seed in range(80):
            draw = random.Random(seed)
            e = Engine(draw)
            store = draw.random() < 0.5
            slots, ids, sizes, indices = e.job(store)
            runs = plan(
                e.layout, e.rank, slots, np.array(ids), sizes, indices, e.pages, store
            )
            split += bool((slots.offsets[1:] - slots.offsets[:-1] > 1).any())
            strided += bool((rows(runs).count > 1).any())
            want = [t.copy() for t in e.tensors]
            arena = e.arena.copy()
            for t, block, length, where in e.slowly(slots, ids, sizes, indices):
                if store:
                    arena[where] = want[t][block, :length]
                else:
                    want[t][block, :length] = arena[where]
            if draw.random() < 0.5:
                runs = runs.split(draw.choice((PAGE, 3 * PAGE)))
            copy_host(runs, e.arena.ctypes.data, not store)
            with self.subTest(seed=seed, store=store):
                self.assertTrue((arena == e.arena).all(), "the arena")
                for i, t in enumerate(e.tensors):
                    self.assertTrue((want[i] == t).all(), f"tensor {i}")
        self.assertGreater(split, 5, "no slot of several extents was drawn")
        self.assertGreater(strided, 5, "no copy of two dimensions was drawn")

    def test_a_dense_job_is_few_copies(self) -> None:
        """46 blocks of two tensors, side by side on both sides: two copies."""
        t = (Tensor(1 << 40, 100, 16384), Tensor(1 << 41, 100, 16384))
        layout = Layout(t, (((0, 16384), (1, 16384)),), 1)
        slots = Slots([0] * 46, [(8 * i, 8) for i in range(46)], list(range(47)), [[0]])
        runs = plan(layout, 0, slots, np.arange(3, 49), [46], [0], 4096, True)
        self.assertEqual(runs.bytes, 46 * 32768)
        self.assertEqual(rows(runs).count.tolist(), [46, 46])

    def test_a_whole_chunk_is_one_run(self) -> None:
        """Blocks of a chunk that lie side by side in their tensor are one run."""
        layout = Layout((Tensor(1 << 40, 64, 4096),), (((0, 4096),),), 16)
        slots = Slots([0, 0], [(100, 16), (32, 16)], [0, 1, 2], [[0]])
        runs = plan(layout, 0, slots, np.arange(16, 48), [32], [0], 128, True)
        self.assertEqual(runs.lengths.tolist(), [65536, 65536])
        self.assertEqual(runs.arena.tolist(), [100 * PAGE, 32 * PAGE])

    def test_refused(self) -> None:
        """Whatever does not fit is refused before anything is copied."""
        layout = Layout(
            (Tensor(1 << 40, 8, 4096),), (((0, 4096),), ((0, 100),)), 2
        )  # parts of 8192 and 200 bytes

        def run(
            ids=(1, 2, 3, 4), sizes=(4, 0), indices=(0, 0), whole=True, rank=0, **change
        ) -> Runs:
            slots = Slots(
                **{
                    "groups": [0, 0],
                    "extents": [(0, 4), (4, 4)],
                    "offsets": [0, 1, 2],
                    "starts": [[0, 2], [0, 1]],
                    **change,
                }
            )
            return plan(
                layout, rank, slots, np.array(ids, np.int32), sizes, indices, 8, whole
            )

        self.assertEqual(run().bytes, 16384)
        self.assertEqual(run(rank=1).bytes, 16384)
        for name, change in {
            "a chunk too many is given": {
                "groups": [0, 0, 0],
                "offsets": [0, 1, 2, 3],
                "extents": [(0, 4), (4, 2), (6, 2)],
            },
            "a chunk too few": {"groups": [0], "offsets": [0, 1], "extents": [(0, 4)]},
            "another group": {"groups": [0, 1]},
            "no such group": {"groups": [0, 2]},
            "a negative group": {"groups": [0, -1]},
            "half a chunk": {"ids": (1, 2, 3), "sizes": (3, 0)},
            "from within a chunk": {
                "ids": (1, 2, 3),
                "sizes": (3, 0),
                "indices": (1, 0),
            },
            "a block too many": {"ids": (1, 2, 3, 8)},
            "a negative block": {"ids": (1, 2, 3, -1)},
            "sizes of others": {"sizes": (2, 0)},
            "three groups": {"sizes": (4, 0, 0), "indices": (0, 0, 0)},
            "beyond the arena": {"extents": [(0, 4), (5, 4)]},
            "before the arena": {"extents": [(0, 4), (-1, 4)]},
            "an empty extent": {"extents": [(0, 4), (4, 0)]},
            "a slot too small": {"extents": [(0, 4), (4, 3)], "rank": 1},
            "no extent": {"offsets": [0, 2, 2]},
            "an extent of nobody": {"extents": [(0, 4), (4, 2), (6, 2)]},
            "no such rank": {"rank": 2},
            "starts of one group": {"starts": [[0, 2]]},
        }.items():
            with self.subTest(name), self.assertRaises(BadJob):
                run(**change)
        # A load may begin and end within a chunk.
        self.assertEqual(
            run(ids=(1, 2), sizes=(2, 0), indices=(5, 0), whole=False).bytes, 8192
        )

    def test_mark(self) -> None:
        """Each rank's mark lies where its part of the first key begins."""
        layout = Layout((Tensor(1 << 40, 8, 4096),), (((0, 4096),),), 2)
        slots = Slots([0], [(7, 1), (20, 3)], [0, 2], [[0, 2]])
        self.assertEqual(mark_place(layout, 0, slots, 64), 7 * PAGE)
        self.assertEqual(mark_place(layout, 1, slots, 64), 21 * PAGE)
        with self.assertRaises(BadJob):
            mark_place(layout, 0, Slots([], [], [0], [[0, 2]]), 64)

    def test_an_empty_group_has_a_part(self) -> None:
        """A stage without layers of a group says one byte and copies none."""
        layout = Layout((Tensor(1 << 40, 8, 64),), (((0, 64),), ()), 1)
        self.assertEqual(layout.parts, [64, 1])
        slots = Slots([1], [(3, 1)], [0, 1], [[0], [0]])
        self.assertEqual(
            plan(layout, 0, slots, np.array([5]), [0, 1], [0, 0], 8, True).bytes, 0
        )


if __name__ == "__main__":
    unittest.main()
