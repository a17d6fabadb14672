"""What one job copies, as runs of bytes, and the copying between memory and memory.

A chunk's slot in the arena holds each rank's part at a page of its own, rank 0's
first. Inside a part the group's tensors follow each other in the order of its
refs, and of each tensor the chunk's blocks: blocks of a chunk that lie side by
side in a tensor are one run. The adapter's ``FORMAT`` names this order.

Everything is computed with NumPy for a whole job; no loop goes over blocks.
Nothing here imports torch: addresses are plain numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .arena import PAGE

FORMAT = 1  # of a part's bytes; another order of them is another number
MARK_BYTES = 16  # of the mark that a failed store leaves (docs/protocol.md)

Ints = np.ndarray  # of int64, as everywhere here


class BadJob(ValueError):
    """A job whose numbers do not fit: nothing of it may be copied."""


class Slots(Protocol):
    """Where a job's keys lie: what the manager tells all ranks alike."""

    groups: np.ndarray  # of each key: the group's position
    extents: np.ndarray  # of all keys in order: rows of first page and pages
    offsets: np.ndarray  # of each key's extents in them; one more than keys
    starts: np.ndarray  # [group, rank]: first page of a rank's part in a slot


@dataclass(frozen=True)
class Tensor:
    """One KV tensor of the engine: ``blocks`` blocks, ``stride`` bytes apart."""

    address: int
    blocks: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """How a rank's blocks and its part of each slot are laid out."""

    tensors: tuple[Tensor, ...]
    refs: tuple[
        tuple[tuple[int, int], ...], ...
    ]  # per group: (tensor, bytes of a block)
    blocks_per_chunk: int

    @property
    def parts(self) -> list[int]:
        """Bytes of this rank in one chunk, for each group by position.

        At least 1, as the protocol wants it: a stage of a pipeline may have no
        layer of a group.
        """
        return [
            max(1, sum(size for _, size in g) * self.blocks_per_chunk)
            for g in self.refs
        ]


@dataclass(frozen=True)
class Runs:
    """Byte runs to copy, one for each index; lengths are above 0.

    ``memory`` are addresses of the engine's side, ``arena`` offsets of the other.
    """

    memory: Ints
    arena: Ints
    lengths: Ints

    @property
    def bytes(self) -> int:
        """Of all runs together."""
        return int(self.lengths.sum())

    def split(self, piece: int) -> Runs:
        """The same bytes in runs of which none crosses a multiple of piece in the arena."""
        first = self.arena // piece
        n = (self.arena + self.lengths - 1) // piece - first + 1
        if (n == 1).all():
            return self
        of = np.repeat(np.arange(len(n)), n)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(n) - n, n)
        lo = np.maximum((first[of] + nth) * piece, self.arena[of])
        hi = np.minimum(
            (first[of] + nth + 1) * piece, self.arena[of] + self.lengths[of]
        )
        return Runs(self.memory[of] + lo - self.arena[of], lo, hi - lo)


@dataclass(frozen=True)
class Rows:
    """Runs of one length at steady distances, one copy of two dimensions for each index."""

    memory: Ints
    arena: Ints
    lengths: Ints
    count: Ints
    memory_step: Ints  # 0 where count is 1
    arena_step: Ints


def plan(
    layout: Layout,
    rank: int,
    slots: Slots,
    block_ids: np.ndarray,
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    pages: int,
    whole: bool,
) -> Runs:
    """The runs of one job on this rank.

    ``block_ids``, ``group_sizes`` and ``block_indices`` are vLLM's: blocks group
    by group, and for each group the number of its first block in the request.
    ``pages`` is the arena's size. ``whole`` is for stores, which have to fill
    their chunks: where blocks of a chunk are missing, vLLM's numbers do not say
    which, and half a chunk must not be taken for one.

    BadJob when the chunks that the blocks need are not those that the slots
    give, or anything lies outside of its tensor or of the arena.
    """
    n_groups, per_chunk = len(layout.refs), layout.blocks_per_chunk
    if len(group_sizes) != n_groups or len(block_indices) != n_groups:
        raise BadJob(
            f"sizes of {len(group_sizes)} groups and indices of "
            f"{len(block_indices)}, there are {n_groups}"
        )
    ids = np.asarray(block_ids).astype(np.int64, copy=False)
    sizes = [int(s) for s in group_sizes]
    if min(sizes, default=0) < 0 or sum(sizes) != len(ids):
        raise BadJob(f"{len(ids)} blocks in groups of {sizes}")
    place = _Slots(layout, rank, slots, pages)
    memory: list[Ints] = []
    virtual: list[Ints] = []
    lengths: list[Ints] = []
    chunk = at = 0
    for g, size in enumerate(sizes):
        if size == 0:
            continue
        skip = int(block_indices[g]) % per_chunk
        if whole and (skip or size % per_chunk):
            raise BadJob(
                f"group {g}: {size} blocks from {block_indices[g]} do not fill chunks of {per_chunk}"
            )
        chunks = -(-(size + skip) // per_chunk)
        if not (
            place.groups[chunk : chunk + chunks] == g
        ).all() or chunk + chunks > len(place.groups):
            raise BadJob(f"group {g}: {chunks} chunks are needed, others are given")
        mine, nth = ids[at : at + size], np.arange(skip, skip + size)
        base = place.start[chunk + nth // per_chunk]
        sub = nth % per_chunk
        for t, length in layout.refs[g]:
            tensor = layout.tensors[t]
            if mine.min() < 0 or mine.max() >= tensor.blocks:
                raise BadJob(f"group {g}: a block outside of {tensor.blocks}")
            memory.append(tensor.address + mine * tensor.stride)
            virtual.append(base + sub * length)
            lengths.append(np.full(size, length, np.int64))
            base = base + per_chunk * length
        chunk, at = chunk + chunks, at + size
    if chunk != len(place.groups):
        raise BadJob(f"{chunk} chunks are needed, {len(place.groups)} are given")
    if not memory:
        none = np.zeros(0, np.int64)
        return Runs(none, none, none)
    return _merge(
        place.resolve(
            np.concatenate(memory), np.concatenate(virtual), np.concatenate(lengths)
        )
    )


def mark_place(layout: Layout, rank: int, slots: Slots, pages: int) -> int:
    """Arena offset of the mark that a failed store leaves on this rank.

    BadJob when the job's first key has no such place.
    """
    place = _Slots(layout, rank, slots, pages)
    if not len(place.groups):
        raise BadJob("a job without keys")
    return int(place.segment[0])


class _Slots:
    """A rank's parts of a job's slots, end to end, as one space of its own.

    ``start`` is where each key's part begins in it, ``segment`` the arena offset
    of each stretch that lies in one extent, ``begin`` where the stretch begins.
    """

    def __init__(self, layout: Layout, rank: int, slots: Slots, pages: int) -> None:
        groups = np.asarray(slots.groups).astype(np.int64, copy=False)
        extents = np.asarray(slots.extents).astype(np.int64, copy=False)
        extents = extents.reshape(-1, 2)
        offsets = np.asarray(slots.offsets).astype(np.int64, copy=False)
        starts = np.asarray(slots.starts).astype(np.int64, copy=False)
        n = len(groups)
        self.groups = groups
        if starts.ndim != 2 or len(starts) != len(layout.refs):
            raise BadJob(f"starts of shape {starts.shape}, {len(layout.refs)} groups")
        if not 0 <= rank < starts.shape[1]:
            raise BadJob(f"rank {rank} of {starts.shape[1]}")
        if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(extents):
            raise BadJob("extents that belong to no key")
        owned = np.diff(offsets)
        if n and ((owned < 1).any() or groups.min() < 0):
            raise BadJob("a key without extents or without a group")
        if n and groups.max() >= len(layout.refs):
            raise BadJob(f"group {groups.max()} of {len(layout.refs)}")
        page, count = extents[:, 0], extents[:, 1]
        if n and ((page < 0) | (count < 1) | (page + count > pages)).any():
            raise BadJob(f"an extent outside of the arena's {pages} pages")
        part = -(-np.asarray(layout.parts, np.int64) // PAGE)
        first = starts[groups, rank]  # of each key's slot: this rank's pages
        need = part[groups]
        # Cut this rank's pages out of the extents of each slot.
        of = np.repeat(np.arange(n), owned)
        ends = np.cumsum(count)
        before = ends - count  # pages of all extents before
        slot_page = before - before[offsets[:-1]][of]  # page in the slot
        lo = np.maximum(first[of], slot_page)
        hi = np.minimum((first + need)[of], slot_page + count)
        taken = np.maximum(hi - lo, 0)
        got = np.zeros(n, np.int64)
        np.add.at(got, of, taken)
        if (got != need).any():
            raise BadJob("a slot that is smaller than the parts in it")
        self.start = (np.cumsum(need) - need) * PAGE
        keep = taken > 0
        self.segment = ((page + lo - slot_page) * PAGE)[keep]
        length = taken[keep] * PAGE
        self.begin = np.cumsum(length) - length

    def resolve(self, memory: Ints, virtual: Ints, lengths: Ints) -> Runs:
        """Runs in the arena for runs in this space, cut where an extent ends."""
        begin = self.begin
        first = np.searchsorted(begin, virtual, "right") - 1
        last = np.searchsorted(begin, virtual + lengths - 1, "right") - 1
        if (first == last).all():
            return Runs(memory, self.segment[first] + virtual - begin[first], lengths)
        n = last - first + 1
        of = np.repeat(np.arange(len(n)), n)
        seg = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(n) - n, n)
        end = np.append(begin[1:], np.iinfo(np.int64).max)
        lo = np.maximum(virtual[of], begin[seg])
        hi = np.minimum((virtual + lengths)[of], end[seg])
        return Runs(
            memory[of] + lo - virtual[of], self.segment[seg] + lo - begin[seg], hi - lo
        )


def _merge(r: Runs) -> Runs:
    """Joins neighbours that go on where the one before ends, on both sides."""
    if len(r.lengths) < 2:
        return r
    goes_on = (r.memory[:-1] + r.lengths[:-1] == r.memory[1:]) & (
        r.arena[:-1] + r.lengths[:-1] == r.arena[1:]
    )
    if not goes_on.any():
        return r
    at = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    return Runs(r.memory[at], r.arena[at], np.add.reduceat(r.lengths, at))


def rows(r: Runs) -> Rows:
    """Groups runs of one length that follow each other at steady distances."""
    n = len(r.lengths)
    step_m, step_a = np.diff(r.memory), np.diff(r.arena)
    # Pair i is runs i and i+1. Rows of one copy have one length and lie apart.
    fits = (
        (r.lengths[1:] == r.lengths[:-1])
        & (step_m >= r.lengths[:-1])
        & (step_a >= r.lengths[:-1])
    )
    new = np.ones(max(n - 1, 0), bool)  # a pair with other steps than the one before
    new[1:] = (step_m[1:] != step_m[:-1]) | (step_a[1:] != step_a[:-1])
    new[1:] |= ~(fits[1:] & fits[:-1])
    series = np.cumsum(new) - 1
    steady = fits & (np.bincount(series, minlength=1)[series] > 1)
    # A run goes on with the one before it, unless that one has ended a series and
    # would begin the next as well.
    goes_on = np.zeros(n, bool)
    goes_on[1:] = steady
    goes_on[2:] &= ~(new[1:] & steady[:-1])
    at = np.flatnonzero(~goes_on)
    count = np.diff(np.append(at, n))
    many = count > 1
    first = np.where(many, at, 0)
    return Rows(
        r.memory[at],
        r.arena[at],
        r.lengths[at],
        count,
        np.where(many, step_m[first], 0) if n > 1 else np.zeros(n, np.int64),
        np.where(many, step_a[first], 0) if n > 1 else np.zeros(n, np.int64),
    )


def copy_host(r: Runs, base: int, load: bool) -> None:
    """Copies between the engine's host memory and the arena mapped at base.

    To the engine when load, else from it. Done when it returns. The addresses
    must be those of a plan: they are not checked again.
    """
    w = rows(r)
    columns = (
        w.memory,
        base + w.arena,
        w.lengths,
        w.count,
        w.memory_step,
        w.arena_step,
    )
    for memory, arena, length, count, memory_step, arena_step in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        dst, src = (memory, arena) if load else (arena, memory)
        if count == 1:
            ctypes.memmove(dst, src, length)
            continue
        dst_step, src_step = (
            (memory_step, arena_step) if load else (arena_step, memory_step)
        )
        np.copyto(
            _matrix(dst, count, length, dst_step), _matrix(src, count, length, src_step)
        )


def _matrix(address: int, count: int, length: int, step: int) -> np.ndarray:
    span = (count - 1) * step + length
    memory = (ctypes.c_uint8 * span).from_address(address)
    return np.ndarray((count, length), np.uint8, memoryview(memory), 0, (step, 1))
