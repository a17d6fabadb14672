"""Where the bytes of a job lie in the arena: what the manager tells the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LoadStoreSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


class ArenaSpec(LoadStoreSpec):
    """The arena's side of one of vLLM's jobs, the same for every rank.

    Keys stand in the order in which they were given to ``prepare_load`` or
    accepted by ``prepare_store``: groups in the engine's order, chunks ascending.
    A key's extents hold rank 0's part, then rank 1's, each from a page of its
    own. The value never changes, may be pickled and read by any thread, and is
    little more than what it says: 8 bytes for an extent and 6 for a key.
    """

    def __init__(
        self,
        job: int,
        session: str,
        arena: str,
        mark: bytes,
        groups: bytes,
        counts: bytes,
        extents: bytes,
        starts: bytes,
        world: int,
    ) -> None:
        """Packs what is known of a job, everything little-endian.

        groups are u16 and counts u32, one for each key; extents are the wire's:
        pairs of u32, page and number of pages. starts are u32, for each group
        and in it for each of world ranks.
        """
        self.job = job  # the daemon's number of the job, for the report of its end
        self.session = session  # the session (hex) whose job it is
        self.arena = arena  # the arena (hex) that the pages are of
        self.mark = mark  # what a rank leaves when its store failed; b"" of a load
        self._groups, self._counts, self._extents = groups, counts, extents
        self._starts, self._world = starts, world

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._groups) // 2

    def __repr__(self) -> str:
        return f"ArenaSpec(job={self.job}, keys={len(self)}, arena={self.arena})"

    @property
    def groups(self) -> Ints:
        """Of each key, its group's position in the engine's list of groups."""
        return _ints(self._groups, "<u2")

    @property
    def extents(self) -> Ints:
        """All extents: an array of rows (page, pages), those of a key together."""
        return _ints(self._extents, "<u4").reshape(-1, 2)

    @property
    def offsets(self) -> Ints:
        """Of key i, its extents are rows offsets[i] to offsets[i+1] - 1."""
        import numpy as np

        counts = _ints(self._counts, "<u4")
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))

    @property
    def starts(self) -> Ints:
        """Where a rank's part of a key begins, in pages: an array [group, rank]."""
        return _ints(self._starts, "<u4").reshape(-1, self._world)


def _ints(packed: bytes, dtype: str) -> Ints:
    import numpy as np

    return np.frombuffer(packed, dtype).astype(np.int64)
