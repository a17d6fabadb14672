"""Keeping a manager attached: a thread for each attempt, with growing pauses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .attach import ENDS, Attachment, Config, Listing, attach
from .connection import Connection, Refused
from .wire import Malformed

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between attempts


class Link:
    """Brings attachments to a session.

    The session calls it under its own mutex, which is given at the start and
    taken by the thread that attaches too.
    """

    def __init__(
        self,
        config: Config,
        mutex: threading.Lock,
        clock: Callable[[], float],
        log: logging.Logger,
        arrived: Callable[[], None],
    ) -> None:
        """Does nothing until ``want``; arrived is called under the mutex."""
        self.over = False  # the daemon has refused for good
        self._config, self._mutex, self._clock, self._log = config, mutex, clock, log
        self._arrived = arrived
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._dialled: Connection | None = None
        self._brought: Attachment | None = None
        self._retry_at = 0.0
        self._pause = FIRST_PAUSE
        self._told = ""  # the last trouble that was logged

    @property
    def talking(self) -> bool:
        """Whether a daemon has answered a dial and its snapshot is awaited."""
        return self._dialled is not None or self._brought is not None

    def want(self, listing: Callable[[], Listing]) -> None:
        """Starts an attempt when none is under way and it is time for one."""
        if self._thread is not None or self.over or self._stop.is_set():
            return
        if self._brought is not None or self._clock() < self._retry_at:
            return
        self._thread = threading.Thread(
            target=self._run, args=(listing(),), name="kvlift-attach", daemon=True
        )
        self._thread.start()

    def take(self) -> Attachment | None:
        """What an attempt has brought; it is the caller's."""
        a, self._brought = self._brought, None
        if a is not None:
            self._told = ""
        return a

    def lost(self, why: Exception) -> None:
        """A connection has ended: the next attempt may come at once."""
        self._retry_at, self._pause = self._clock(), FIRST_PAUSE
        self._trouble("the daemon is gone", why)

    def close(self) -> None:
        """Ends attempts and waits for their thread. The mutex is not held."""
        self._stop.set()
        with self._mutex:
            thread = self._thread
            if self._dialled is not None:
                self._dialled.interrupt()
        if thread is not None:
            thread.join(timeout=2.0)
        with self._mutex:
            if (a := self.take()) is not None:
                a.close()

    def _run(self, listing: Listing) -> None:
        """An attempt, in a thread of its own."""
        found: Attachment | None = None
        why: Exception | None = None
        try:
            found = attach(self._config, listing, self._talk, self._stop)
        except ENDS as e:
            why = e
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            why = Malformed(f"{type(e).__name__}: {e}")
        with self._mutex:
            self._thread = self._dialled = None
            self._brought = found
            if found is not None:
                self._arrived()
                return
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._retry_at = self._clock() + self._pause
            if why is not None and not self._stop.is_set():
                self._trouble("the daemon is away", why)

    def _talk(self, connection: Connection) -> None:
        with self._mutex:
            self._dialled = connection
        if self._stop.is_set():
            connection.interrupt()

    def _trouble(self, what: str, why: Exception) -> None:
        """Logs a trouble once, until it is another one or over."""
        if isinstance(why, Refused):
            self.over = self.over or why.final
            what = f"the daemon refuses this engine ({why.code})"
        if str(why) != self._told:
            self._told = str(why)
            until = "its restart" if self.over else "that has changed"
            text = "kvlift: %s: %s; this engine goes on without the tier until %s"
            self._log.warning(text, what, why, until)
