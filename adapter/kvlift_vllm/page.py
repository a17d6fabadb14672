"""The page that a manager shares with the daemon (rules F1 and F2).

The manager writes that its window is open, then reads the fence. The daemon
writes the fence, lets a barrier pass on every processor, then reads the window:
its barrier (``membarrier``) orders the manager's two accesses as well, so none
is needed here.
"""

from __future__ import annotations

import mmap
import os

from .wire import PAGE_SIZE, Malformed


class SessionPage:
    """A mapped session page. It belongs to the thread that holds the session."""

    def __init__(self, fd: int) -> None:
        """Maps the page of a descriptor, which stays the caller's.

        Malformed when the file is shorter than a page, which would be a fault
        at the first access.
        """
        if os.fstat(fd).st_size < PAGE_SIZE:
            raise Malformed("a session page that is shorter than a page")
        self._map = mmap.mmap(fd, PAGE_SIZE)
        self._bytes = memoryview(self._map)
        self._window = self._bytes[0:4].cast("I")
        self._fence = self._bytes[8:16].cast("Q")
        self._sends = self._bytes[16:24].cast("Q")

    def open(self) -> int:
        """Says that a window is open; a hit needs removals applied up to the result."""
        self._window[0] = 1
        return self._fence[0]

    @property
    def sends(self) -> int:
        """How often the daemon has sent something: it lies in the socket already.

        Whoever has read everything at an equal number has nothing to read, but
        for the end of the stream.
        """
        return self._sends[0]

    def shut(self) -> None:
        """Says that no window is open and that what it promised has been sent."""
        self._window[0] = 0

    def close(self) -> None:
        """Unmaps the page."""
        for view in (self._window, self._fence, self._sends, self._bytes):
            view.release()
        self._map.close()
