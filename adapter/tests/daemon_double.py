"""A daemon as one rank sees it: a listening socket, and an arena in memory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from frames import wire

PAGE = 4096


class Peer:
    """One accepted connection, read and written by the test."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(10)
        self.sock = sock

    def read(self) -> tuple[str, bytes]:
        """The next frame: its type's name and its payload. EOFError at the end."""
        header = self._exactly(wire.HEADER.size)
        length, type_, _, _ = wire.HEADER.unpack(header)
        return wire.NAMES[type_ - 1], self._exactly(length)

    def hello(self) -> dict[str, Any]:
        name, payload = self.read()
        assert name == "hello", name
        return json.loads(payload)

    def send(self, name: str, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        frame = wire.HEADER.pack(len(payload), wire.NAMES.index(name) + 1, 0, 0)
        socket.send_fds(self.sock, [frame + payload], list(fds))

    def welcome(self, fd: int = -1, **change: Any) -> None:
        said = {
            "protocol": [1, 0],
            "daemon": "double",
            "session": "00000000000000aa",
            "arena_id": "ab" * 16,
            "arena_bytes": 64 * PAGE,
            "page_size": PAGE,
            "huge_page_size": 0,
            "arena_fd": fd >= 0,
            **change,
        }
        self.send("welcome", json.dumps(said).encode(), (fd,) if fd >= 0 else ())

    def refuse(self, code: str) -> None:
        self.send("error", json.dumps({"code": code, "message": "no"}).encode())

    def close(self) -> None:
        self.sock.close()

    def _exactly(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            if not (more := self.sock.recv(n - len(data))):
                raise EOFError
            data += more
        return data


class Daemon(contextlib.ExitStack):
    """Listens in a folder of its own; ``arena`` is the descriptor of its pages."""

    def __init__(self) -> None:
        super().__init__()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.path = str(Path(folder) / "s")
        self.arena = os.memfd_create("arena")
        self.callback(os.close, self.arena)
        os.ftruncate(self.arena, 64 * PAGE)
        self.listen()

    def listen(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.callback(self.listener.close)
        self.listener.bind(self.path)
        self.listener.listen(8)
        self.listener.settimeout(10)

    def accept(self) -> Peer:
        peer = Peer(self.listener.accept()[0])
        self.callback(peer.close)
        return peer

    def go_away(self) -> None:
        self.listener.close()
        os.unlink(self.path)

    def attach(self, **change: Any) -> tuple[Peer, dict[str, Any]]:
        """Accepts a rank and hands it the arena; returns its hello."""
        peer = self.accept()
        hello = peer.hello()
        peer.welcome(self.arena, **change)
        assert peer.read()[0] == "mapped"
        return peer, hello
