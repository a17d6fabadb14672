"""One rank's connection to the daemon: it maps the arena and reports the ends of jobs.

All of it happens in a thread of its own. The engine's threads only leave a
number and go on, whether or not a daemon is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from .arena import Arena
from .connection import Connection, Late, Refused, Unreachable, unexpected
from .wire import BYE, ENDED, ENDED_ACK, MAPPED, NUMBER, Malformed, parse_number

DIAL_TIMEOUT = 1.0  # seconds until somebody has to have accepted the connection
HELLO_TIMEOUT = 5.0  # seconds until the daemon has to have answered a hello
MIN_PAUSE, MAX_PAUSE = 0.05, 1.0  # seconds between attempts to connect


class Rank:
    """A worker's side of the protocol (docs/protocol.md, rules R12 and R13).

    ``report`` and ``arena`` may be used from any thread.
    """

    def __init__(
        self,
        socket: str,
        hello: dict[str, Any],
        log: logging.Logger,
        prepare: Callable[[Arena], None] = lambda arena: None,
    ) -> None:
        """Says what to say; ``start`` begins.

        ``hello`` is the message without what the connection knows itself:
        protocol, session and arena. ``prepare`` is called once, in the rank's
        thread, between the mapping of the arena and the word that it is mapped.
        """
        self._socket, self._hello, self._log = socket, hello, log
        self._prepare = prepare
        self.arena: Arena | None = None  # from the first attachment on, for good
        self.tried = threading.Event()  # the first attempt is over, well or not
        self._session = ""
        self._lock = threading.Lock()  # of what follows
        self._owed: dict[tuple[str, int], None] = {}  # reports without acknowledgement
        self._fresh: list[tuple[str, int]] = []  # of these, not sent yet
        self._stop = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._run, name="kvlift-rank", daemon=True
        )

    def start(self) -> None:
        """Begins to connect. Call it once."""
        self._thread.start()

    def report(self, session: str, job: int) -> None:
        """Tells the daemon that this rank's copies of a job are over (R12).

        It never waits. The report is repeated on every connection until it is
        acknowledged, or until the session is another one: numbers of jobs mean
        nothing beyond their session.
        """
        with self._lock:
            if (session, job) not in self._owed:
                self._owed[session, job] = None
                self._fresh.append((session, job))
        self._ring()

    @property
    def owed(self) -> int:
        """How many reports wait for their acknowledgement."""
        with self._lock:
            return len(self._owed)

    def close(self, timeout: float = 2.0) -> None:
        """Unmaps the arena, says goodbye and ends the thread, within timeout seconds.

        No copy may be under way. Idempotent. A daemon that does not answer
        learns the same from the arena's lock.
        """
        self._stop = True
        self._ring()
        if self._thread.ident is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return  # it holds the mapping; the end of the process ends both
        if self.arena is not None:
            self.arena.close()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _ring(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # it rings already
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        pause, silent = MIN_PAUSE, False
        while not self._stop:
            began = time.monotonic()
            try:
                conn = self._attach()
                self.tried.set()
                self._log.info("kvlift: rank %s attached", self._hello.get("rank"))
                silent = False
                self._serve(conn)
                return
            except Refused as e:
                if e.final:
                    self._log.error(
                        "kvlift: the daemon at %s refused this rank: %s; nothing is "
                        "cached until the engine is restarted",
                        self._socket,
                        e,
                    )
                    return
                reason: Exception = e
            except (Unreachable, Late, Malformed, OSError, ValueError) as e:
                reason = e
            except Exception:  # noqa: BLE001 - a thread must not end without a word
                self._log.exception("kvlift: this rank gives up its connection")
                return
            finally:
                self.tried.set()
            if not silent:
                self._log.warning("kvlift: %s; trying again", reason)
                silent = True
            if time.monotonic() - began > 10:
                pause = MIN_PAUSE  # it had been well for a while
            self._sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    def _attach(self) -> Connection:
        """Connects, maps the arena unless it is mapped, and says so."""
        conn = Connection.dial(self._socket, DIAL_TIMEOUT)
        try:
            message = dict(self._hello)
            if self.arena is not None:
                message |= {"session": self._session, "arena_id": self.arena.id}
            welcome, fds = conn.hello(message, HELLO_TIMEOUT)
            self._take(welcome, fds)
            conn.queue(MAPPED)
            with self._lock:  # what another session was told is of no use to this one
                self._owed = {k: None for k in self._owed if k[0] == self._session}
                self._fresh = list(self._owed)
            conn.flush()
        except BaseException:
            conn.close()
            raise
        return conn

    def _take(self, welcome: dict[str, Any], fds: list[int]) -> None:
        """Takes over what a welcome brings; every descriptor gets an owner."""
        arena_fd = fds.pop(0) if fds and welcome.get("arena_fd") is True else -1
        for fd in fds:
            os.close(fd)
        try:
            session, arena_id = str(welcome["session"]), str(welcome["arena_id"])
            size = int(welcome["arena_bytes"])
            huge = int(welcome.get("huge_page_size", 0))
            if self.arena is not None and self.arena.id != arena_id:
                raise Refused("malformed", "the arena is another one")
            if self.arena is None and arena_fd < 0:
                raise Malformed("a welcome without the arena's descriptor")
        except (KeyError, TypeError, ValueError) as e:
            _close(arena_fd)
            raise Malformed(f"welcome: {e}") from None
        except BaseException:
            _close(arena_fd)
            raise
        if self.arena is None:
            arena = Arena(arena_fd, arena_id, size, huge)
            self._prepare(arena)
            self.arena = arena
        elif arena_fd >= 0:
            # The daemon knew nothing of this process: this descriptor's lock counts.
            self.arena.renew(arena_fd)
        self._session = session

    def _serve(self, conn: Connection) -> None:
        """Sends reports and reads acknowledgements until the end of the connection."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(conn.fileno(), select.POLLIN)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                if self._stop:
                    self._leave(conn)
                    return
                with self._lock:
                    fresh, self._fresh = self._fresh, []
                for session, job in fresh:
                    if session == self._session:
                        conn.queue(ENDED, NUMBER.pack(job))
                conn.flush()
                for header, payload in conn.frames():
                    if header.type != ENDED_ACK:
                        raise unexpected(header, payload)
                    with self._lock:
                        self._owed.pop(
                            (self._session, parse_number(bytes(payload))), None
                        )
                wanted = select.POLLIN | (select.POLLOUT if conn.unsent else 0)
                poll.modify(conn.fileno(), wanted)
                if not self._fresh and not self._stop:
                    poll.poll()
        finally:
            conn.close()

    def _leave(self, conn: Connection) -> None:
        """Lets go of the arena, then says goodbye."""
        if self.arena is not None:
            self.arena.close()
        conn.queue(BYE)
        with contextlib.suppress(Unreachable):
            conn.flush()

    def _sleep(self, seconds: float) -> None:
        """Waits, but not longer than until somebody rings for the end."""
        until = time.monotonic() + seconds
        while not self._stop and (left := until - time.monotonic()) > 0:
            if select.select([self._wake], [], [], left)[0]:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
