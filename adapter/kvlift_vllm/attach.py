"""Attaching a manager to the daemon: at the start, and after every loss.

It takes three steps, so that no step of the engine waits for it: the session
writes down what is open (a listing, under its mutex), a thread connects and
reads the snapshot (here), and the session takes what came outside a window.
While a connection is away nothing can be promised that the listing lacks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .connection import Connection, Late, Refused, Unreachable, unexpected
from .jobs import Jobs, Listed
from .mirror import Mirror
from .page import SessionPage
from .wire import FLAG_LAST, READY, SNAPSHOT, Header, Malformed, parse_json

ENDS = (Unreachable, Refused, Malformed, Late, OSError)  # of a connection


@dataclass(frozen=True)
class Config:
    """How a manager finds the daemon and what it says of its engine."""

    socket: str
    engine_id: str  # at most 95 bytes; the same from manager and ranks
    world_size: int
    namespace: dict[str, Any]
    groups: Mapping[bytes, int]  # the end of a key: the position of its group
    client: str = "kvlift_vllm"
    deadline: float = 0.005  # seconds that a step waits for a reserve
    attach_timeout: float = 10.0  # seconds for a welcome, and between snapshots
    timer: float = 0.05  # seconds between acknowledgements outside of steps


@dataclass
class Listing:
    """What a manager says of itself and of its jobs, and what that was."""

    message: dict[str, Any]
    arena: str = ""  # that it maps
    jobs: Listed = field(default_factory=Listed)


def listing(config: Config, session: str, arena: str, jobs: Jobs) -> Listing:
    """Writes down a hello (R9). The caller holds the session."""
    message: dict[str, Any] = {
        "client": config.client,
        "role": "manager",
        "engine_id": config.engine_id,
        "world_size": config.world_size,
        "namespace": config.namespace,
    }
    if not session:
        return Listing(message)
    fields, listed = jobs.describe()
    message.update(session=session, arena_id=arena, **fields)
    return Listing(message, arena, listed)


@dataclass
class Attachment:
    """A connection whose snapshot has been read."""

    listed: Listing
    connection: Connection
    session: str
    arena: str
    arena_bytes: int
    payload: list[int]  # bytes of one chunk over all ranks, for each group
    parts: list[list[int]]  # of these, each rank's, for each group
    arena_fd: int | None  # None when this process has it already
    page: SessionPage | None
    mirror: Mirror

    def close(self) -> None:
        """Gives everything back that nobody has taken."""
        self.connection.close()
        if self.page is not None:
            self.page.close()
        if self.arena_fd is not None:
            os.close(self.arena_fd)


class OtherArena(Refused):
    """The daemon serves another arena than the one that this engine maps."""

    def __init__(self) -> None:
        super().__init__(
            "malformed",
            "the daemon serves another arena than the one that this engine maps",
            "restart the engine",
        )


def attach(
    config: Config,
    listed: Listing,
    dialled: Callable[[Connection], None],
    stop: threading.Event,
) -> Attachment:
    """Connects, says hello and reads the snapshot; any of ENDS when it fails.

    It waits without end for the ranks (R11), as long as the daemon holds the
    connection; ``dialled`` is told the connection first, whose ``interrupt``
    ends the wait, and stop is looked at between messages.
    """
    connection = Connection.dial(config.socket, config.attach_timeout)
    a: Attachment | None = None
    fds: list[int] = []
    try:
        dialled(connection)
        welcome, fds = connection.hello(listed.message, config.attach_timeout)
        a = _welcomed(listed, connection, welcome, fds)
        if listed.arena and listed.arena != a.arena:
            raise OtherArena()
        _, payload = _await(connection, READY, None, stop)
        ready = parse_json(bytes(payload))
        a.payload = _numbers(ready.get("payload_bytes"))
        a.parts = [_numbers(rank) for rank in ready.get("parts") or []]
        _check(config, a)
        a.mirror = Mirror(int(ready.get("epoch", 0)))
        while True:
            header, payload = _await(connection, SNAPSHOT, config.attach_timeout, stop)
            a.mirror.read(bytes(payload))
            if header.flags & FLAG_LAST:
                return a
    except BaseException:
        if a is not None:
            a.close()
        else:
            connection.close()
            for fd in fds:
                os.close(fd)
        raise


def _welcomed(
    listed: Listing, connection: Connection, welcome: dict[str, Any], fds: list[int]
) -> Attachment:
    """Takes a welcome apart and the descriptors over, which leave fds."""
    try:
        session, arena = str(welcome["session"]), str(welcome["arena_id"])
        size = int(welcome["arena_bytes"])
    except (KeyError, ValueError, TypeError) as e:
        raise Malformed(f"welcome: {e!r}") from None
    wanted = int(bool(welcome.get("arena_fd"))) + int(bool(welcome.get("session_page")))
    if len(fds) != wanted:
        raise Malformed(f"welcome with {len(fds)} descriptors instead of {wanted}")
    if not welcome.get("arena_fd") and not listed.arena:
        raise Malformed("welcome without the arena's descriptor")
    page = None
    if welcome.get("session_page"):
        page = SessionPage(fds[-1])
        os.close(fds.pop())
    fd = fds.pop() if fds else None
    return Attachment(
        listed, connection, session, arena, size, [], [], fd, page, Mirror()
    )


def _check(config: Config, a: Attachment) -> None:
    """Refuses a geometry that is not this engine's."""
    groups = len(config.namespace["groups"])
    if (
        len(a.payload) != groups
        or [len(p) for p in a.parts] != [config.world_size] * groups
    ):
        raise Malformed("ready: parts of other groups or ranks")


def _numbers(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(n, int) for n in value):
        raise Malformed("ready: not a list of numbers")
    return value


def _await(
    connection: Connection, type_: int, timeout: float | None, stop: threading.Event
) -> tuple[Header, memoryview]:
    """Waits for a message, without end when timeout is None, until stop is set."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        if (f := connection.next_frame()) is not None:
            if f[0].type == type_:
                return f
            raise unexpected(*f)
        if stop.is_set():
            raise Unreachable("the engine ends")
        left = 1.0 if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise Late(f"nothing from the daemon within {timeout:g} s")
        connection.receive(min(left, 1.0))
