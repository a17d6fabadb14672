"""How a key's pages are divided between ranks, and the mark of a store that failed."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

from .wire import PAGE_SIZE, PAIR

MARK_BYTES = 16
_MARK = struct.Struct("<8sQ")  # random bytes of a session, the job


class Slots:
    """Where each rank's part of a key begins. It never changes."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        """parts are the bytes of each rank in one chunk, for each group."""
        self.world = len(parts[0]) if parts else 0
        self._starts: list[list[int]] = []
        for ranks in parts:
            at, starts = 0, []
            for size in ranks:
                starts.append(at)
                at += pages(size)
            self._starts.append(starts)
        flat = [s for starts in self._starts for s in starts]
        self.packed = struct.pack(f"<{len(flat)}I", *flat)

    def places(self, group: int, extents: bytes) -> list[int]:
        """Arena offsets in bytes of the ranks' parts of a key of these extents."""
        out = []
        for start in self._starts[group]:
            left = start
            for page, count in PAIR.iter_unpack(extents):
                if left < count:
                    out.append((page + left) * PAGE_SIZE)
                    break
                left -= count
        return out


def pages(size: int) -> int:
    """How many pages a part of so many bytes takes."""
    return -(-size // PAGE_SIZE)


class Marks:
    """The marks of one session: a rank whose copy failed leaves its job's.

    vLLM cannot be told that a store failed, so the job ends like any other. The
    rank has written the mark where its part of the first key begins, and the
    manager looks for it before it commits. With 64 random bits and the job's
    number no payload is taken for one.
    """

    def __init__(self) -> None:
        """Draws the random part."""
        self._secret = os.urandom(8)

    def of(self, job: int) -> bytes:
        """The mark of a job, MARK_BYTES long."""
        return _MARK.pack(self._secret, job)

    def left(self, job: int, arena: int, places: Sequence[int]) -> bool:
        """Whether a rank has left the job's mark at its place in the arena."""
        mark = self.of(job)
        return any(os.pread(arena, MARK_BYTES, at) == mark for at in places)
