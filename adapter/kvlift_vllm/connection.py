"""A connection to the daemon as frames.

A Connection belongs to one thread at a time; only ``interrupt`` may be called
from another. Nothing here waits unless it is told how long.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from typing import Any

from .wire import (
    ERROR,
    HEADER,
    HELLO,
    MAJOR,
    MINOR,
    NAMES,
    WELCOME,
    Header,
    Malformed,
    encode_json,
    parse_header,
    parse_json,
)

MAX_BACKLOG = 8 << 20  # bytes that may wait for a daemon that does not read
SPIN = 50e-6  # seconds that an answer is looked for before the thread sleeps
_CHUNK = 256 << 10  # bytes that a read asks for
_MAX_FDS = 4


class Unreachable(Exception):
    """No daemon answers at the socket, or it has gone."""


class Refused(Exception):
    """The daemon's last word on the connection: code, message and hint."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.code, self.message, self.hint = code, message, hint

    @property
    def final(self) -> bool:
        """Whether trying again is of no use (docs/protocol.md, "Errors")."""
        return self.code not in ("busy", "failed")


class Late(Exception):
    """What was waited for did not come in time."""


class Connection:
    """Frames to and from the daemon over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over and sets it to not blocking."""
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray(_CHUNK)
        self._view = memoryview(self._in)
        self._lo = self._hi = 0  # in[lo:hi] is read and not handed out
        self._out = bytearray()  # queued, not sent
        self._sequence = 0
        self._fds: list[int] = []  # that came and nobody has taken
        self._close = threading.Lock()  # of the closing, against interrupt
        self._closed = False
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    @classmethod
    def dial(cls, path: str, timeout: float) -> Connection:
        """Connects to the socket at path within timeout seconds, or Unreachable."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(timeout, 1e-3))
            sock.connect(path)
        except (OSError, ValueError) as e:  # a path that is too long is a ValueError
            sock.close()
            raise Unreachable(f"no daemon answers at {path}: {e}") from None
        return cls(sock)

    def hello(
        self, message: dict[str, Any], timeout: float
    ) -> tuple[dict[str, Any], list[int]]:
        """Introduces this process and waits for the welcome, timeout seconds.

        The message gets the protocol's version. Returns the welcome and the
        descriptors that came with it, which are the caller's to close: the
        arena's when ``arena_fd`` is true, then the session page's when
        ``session_page`` is. Raises what ``await_frame`` does, and Refused
        (code "version") for a daemon of another major version.
        """
        self.queue(HELLO, encode_json({"protocol": [MAJOR, MINOR], **message}))
        gone: Unreachable | None = None
        try:
            self.flush()
        except Unreachable as e:
            gone = e  # a daemon that closes at once says why before it does
        try:
            _, payload = self.await_frame(WELCOME, timeout)
        except Unreachable:
            raise gone or Unreachable("the daemon closed the connection") from None
        welcome = parse_json(bytes(payload))
        version = welcome.get("protocol")
        if not isinstance(version, list) or len(version) != 2:
            raise Malformed("welcome without a protocol version")
        if version[0] != MAJOR:
            raise Refused(
                "version",
                f"the daemon speaks protocol {version[0]}.{version[1]}, "
                f"this adapter {MAJOR}.{MINOR}",
                "install the adapter of the daemon's version",
            )
        fds, self._fds = self._fds, []
        return welcome, fds

    def queue(self, type_: int, payload: bytes = b"") -> int:
        """Appends a frame to what the next flush sends; returns its sequence."""
        self._sequence += 1
        self._out += HEADER.pack(len(payload), type_, 0, self._sequence)
        self._out += payload
        return self._sequence

    @property
    def unsent(self) -> int:
        """Bytes that are queued and that the socket has not taken yet."""
        return len(self._out)

    def flush(self) -> None:
        """Sends what the socket takes without waiting.

        Unreachable when the daemon has gone, or has not read MAX_BACKLOG bytes.
        """
        while self._out:
            try:
                n = self._sock.send(self._out, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if len(self._out) > MAX_BACKLOG:
                    raise Unreachable("the daemon does not read") from None
                return
            except OSError as e:
                raise Unreachable(f"send: {e}") from None
            del self._out[:n]

    def receive(self, timeout: float = 0.0) -> bool:
        """Reads what is there, and waits up to timeout seconds for something.

        Returns whether something came. Unreachable at the end of the stream.
        Frames that were handed out before are not valid afterwards.
        """
        self._make_room()
        began = time.monotonic() if timeout > 0 else 0.0
        while True:
            try:
                if self._sequence <= 1:  # only the first answer carries descriptors
                    n = self._receive_fds()
                else:
                    n = self._sock.recv_into(self._view[self._hi :])
            except BlockingIOError:
                waited = time.monotonic() - began if timeout > 0 else 0.0
                if waited >= timeout:
                    return False
                if waited < SPIN or timeout - waited < 1e-3:
                    os.sched_yield()  # the daemon may wait for this processor
                    continue
                self._sleep(timeout - waited)
                continue
            except OSError as e:
                raise Unreachable(f"receive: {e}") from None
            if n == 0:
                raise Unreachable("the daemon closed the connection")
            self._hi += n
            return True

    def frames(self) -> Iterator[tuple[Header, memoryview]]:
        """Yields the whole frames that have been received, without waiting.

        It reads what is there first. A payload is valid until the next
        ``receive`` or ``frames``. Unreachable at the end of the stream, but
        only behind the frames that came before it.
        """
        gone: Unreachable | None = None
        more = True
        while more:
            try:
                more = self.receive()
            except Unreachable as e:
                gone, more = e, False
            while (f := self.next_frame()) is not None:
                yield f
        if gone is not None:
            raise gone

    def next_frame(self) -> tuple[Header, memoryview] | None:
        """The next whole frame of what ``receive`` has read, or None.

        Its payload is valid until the next ``receive`` or ``frames``.
        """
        if self._hi - self._lo < HEADER.size:
            return None
        h = parse_header(self._in, self._lo)
        end = self._lo + HEADER.size + h.length
        if self._hi < end:
            return None
        payload = self._view[self._lo + HEADER.size : end]
        self._lo = end
        return h, payload

    def await_frame(self, type_: int, timeout: float) -> tuple[Header, memoryview]:
        """Waits up to timeout seconds for a frame of this type.

        Another type is Malformed, the daemon's last word Refused, silence Late,
        the end of the stream Unreachable.
        """
        deadline = time.monotonic() + timeout
        while True:
            if (f := self.next_frame()) is not None:
                if f[0].type == type_:
                    return f
                raise unexpected(*f)
            left = deadline - time.monotonic()
            if left <= 0:
                raise Late(f"no {NAMES[type_ - 1]} within {timeout:g} s")
            self.receive(left)

    def fileno(self) -> int:
        """The socket's descriptor, to wait for with others; -1 once closed."""
        return self._sock.fileno()

    def interrupt(self) -> None:
        """Ends a wait in another thread with Unreachable. Idempotent."""
        with self._close, contextlib.suppress(OSError):
            if not self._closed:
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket and the descriptors that nobody took. Idempotent."""
        with self._close:
            self._closed = True
            for fd in self._fds:
                os.close(fd)
            self._fds = []
            self._sock.close()

    def _make_room(self) -> None:
        """Moves what is unread to the front, and makes the buffer larger when full."""
        if self._lo == self._hi:
            self._lo = self._hi = 0
        elif self._lo > 0:
            rest = bytes(self._view[self._lo : self._hi])
            self._view[: len(rest)] = rest
            self._lo, self._hi = 0, len(rest)
        if self._hi == len(self._in):  # a longer frame than ever: at most MAX_FRAME
            grown = bytearray(2 * len(self._in))
            grown[: self._hi] = self._view[: self._hi]
            self._in, self._view = grown, memoryview(grown)

    def _receive_fds(self) -> int:
        fds = array("i")
        space = socket.CMSG_LEN(_MAX_FDS * fds.itemsize)
        n, ancillary, _, _ = self._sock.recvmsg_into(
            [self._view[self._hi :]], space, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        self._fds += fds
        return n

    def _sleep(self, timeout: float) -> None:
        """Sleeps until something came, or what is unsent can go on."""
        fd = self._sock.fileno()
        if fd < 0:
            raise Unreachable("closed")
        wanted = select.POLLIN | (select.POLLOUT if self._out else 0)
        self._poll.modify(fd, wanted)
        for _, events in self._poll.poll(int(timeout * 1000)):  # it would round up
            if events & select.POLLOUT:
                self.flush()


def unexpected(header: Header, payload: memoryview) -> Exception:
    """What a frame that nobody waits for means: the daemon's last word, or nonsense."""
    if header.type != ERROR:
        return Malformed(f"unexpected {header.name}")
    said = parse_json(bytes(payload))
    code, message, hint = (str(said.get(k, "")) for k in ("code", "message", "hint"))
    return Refused(code, message, hint)
