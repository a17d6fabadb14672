"""The arena in this process: the pages that the daemon hands out, mapped by descriptor."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

PAGE = 4096  # bytes that an extent counts in


class Arena:
    """One shared mapping of all pages, and the descriptor that carries the life lock.

    The mapping stays where it is until ``close``: addresses that were computed
    once stay valid, and are valid for any thread. Not safe for concurrent calls
    of ``renew`` and ``close``.
    """

    def __init__(
        self, fd: int, arena_id: str, arena_bytes: int, huge_page: int = 0
    ) -> None:
        """Maps a descriptor, which belongs to the arena from here on.

        ``arena_bytes`` and ``huge_page`` are what ``welcome`` says. OSError or
        ValueError when it cannot be mapped whole; the descriptor is closed then.
        """
        self.id = arena_id
        self.bytes = arena_bytes
        self.pages = arena_bytes // PAGE
        length = arena_bytes
        if huge_page > 0:
            length = -(-arena_bytes // huge_page) * huge_page
        self._fd = fd
        try:
            if arena_bytes <= 0 or arena_bytes % PAGE:
                raise ValueError(f"an arena of {arena_bytes} bytes")
            self._map = mmap.mmap(
                fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except (OSError, ValueError):
            os.close(fd)
            raise
        with contextlib.suppress(OSError):  # an old kernel only lacks the advice
            # A child must not inherit what it does not answer for (R13).
            self._map.madvise(mmap.MADV_DONTFORK)
        self._view: np.ndarray | None = np.frombuffer(
            self._map, dtype=np.uint8, count=arena_bytes
        )
        self.base = int(self._view.ctypes.data)

    def renew(self, fd: int) -> None:
        """Takes a newer descriptor of the same arena over: its lock counts now."""
        old, self._fd = self._fd, fd
        os.close(old)

    def close(self) -> None:
        """Unmaps and gives the life lock up. Nothing may copy any more. Idempotent."""
        if self._view is None:
            return
        self._view = None
        # When somebody holds a view, the mapping goes with that one.
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)
