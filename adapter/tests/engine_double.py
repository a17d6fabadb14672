"""An engine without a model: vLLM's scheduler and its ranks, call by call.

Ranks really map the arena. A store writes bytes that follow from the key, the
rank and the version of the weights, and a load compares every one of them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import stand_in
from real_daemon import Daemon

from kvlift_vllm import geometry, wire
from kvlift_vllm.connection import Connection
from kvlift_vllm.slots import MARK_BYTES

SLACK = 1.0  # seconds that a busy machine may add to a call
LIMIT = 20.0  # seconds that anything may take that has to happen


def until(what: str, happened: Callable[[], Any]) -> None:
    """Waits until something has happened."""
    limit = time.monotonic() + LIMIT
    while not happened():
        if time.monotonic() > limit:
            raise AssertionError(f"not within {LIMIT:g} s: {what}")
        time.sleep(0.002)


class Rank:
    """A worker as the daemon sees it."""

    def __init__(self, config: Any, rank: int, parts: Sequence[int]) -> None:
        self.config, self.rank, self.parts = config, rank, parts
        self.connection: Connection | None = None
        self.map: mmap.mmap | None = None
        self.fd = -1
        self.session = self.arena = ""

    def attach(self) -> None:
        """Connects, maps the arena unless it is mapped, and says so."""
        if self.connection is not None:
            self.connection.close()
        c = Connection.dial(geometry.socket_of(self.config.extra_config), LIMIT)
        hello = {
            "client": "test",
            "role": "worker",
            "engine_id": geometry.engine_id(self.config),
            "rank": self.rank,
            "world_size": self.config.parallel.world_size,
            "namespace": geometry.namespace(self.config),
            "parts": list(self.parts),
        }
        if self.map is not None:
            hello |= {"session": self.session, "arena_id": self.arena}
        welcome, fds = c.hello(hello, LIMIT)
        self.session, self.arena = welcome["session"], welcome["arena_id"]
        if fds:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = fds[0]
        if self.map is None:
            self.map = mmap.mmap(self.fd, welcome["arena_bytes"])
        c.queue(wire.MAPPED)
        c.flush()
        self.connection = c

    def ended(self, job: int) -> None:
        """Reports a job's end and waits for the acknowledgement (R12)."""
        assert self.connection is not None
        self.connection.queue(wire.ENDED, wire.encode_number(job))
        self.connection.flush()
        self.connection.await_frame(wire.ENDED_ACK, LIMIT)

    def close(self) -> None:
        """Ends without a word, as a killed process would."""
        if self.connection is not None:
            self.connection.close()
        if self.map is not None:
            self.map.close()
            os.close(self.fd)
            self.map, self.fd = None, -1


class Engine:
    """A manager of one release with its ranks, and what a scheduler does with it.

    ``before`` is called with the number of each call of the manager, before it.
    """

    def __init__(
        self,
        daemon: Daemon,
        release: str = "0.32.0",
        attach: bool = True,
        parts: Sequence[int] = (5000,),
        world: int = 1,
        modules: SimpleNamespace | None = None,
        **config: Any,
    ) -> None:
        self.m = modules or stand_in.load(release)
        self.minor = stand_in.minor(release)
        self.config = stand_in.config(
            daemon.socket, world=world, release=release, **config
        )
        self.ranks = [Rank(self.config, r, parts) for r in range(world)]
        self.daemon = daemon
        self.version = 0  # of the weights
        self.reports = True  # whether ranks report the ends of jobs
        self.calls = 0
        self.before: Callable[[int], None] = lambda n: None
        self.slowest = 0.0
        self.loaded: list[bytes] = []
        if attach:
            for r in self.ranks:
                r.attach()
        events = self.config.enable_kv_cache_events
        self.manager = self.m.spec.manager_of(self.config, events)
        self.session = self.manager._session
        if attach:
            until("attached", lambda: self.session.attached)
        self.attached = self.session.counters.attached  # how often, so far

    # Calls of the manager.

    def call(self, name: str, *args: Any) -> Any:
        """Calls the manager as vLLM does, and looks at how long that took."""
        self.before(self.calls)
        self.calls += 1
        began = time.monotonic()
        out = getattr(self.manager, name)(*args)
        took = time.monotonic() - began
        self.slowest = max(self.slowest, took)
        limit = self.session.config.deadline + SLACK
        assert took < limit, f"{name} took {took:.3f} s"
        return out

    def context(self, name: str, params: Any = None) -> Any:
        """A request's context; the call on_new_request is not made."""
        return self.m.base.ReqContext(req_id=name, kv_transfer_params=params)

    def lookup(self, key: bytes, ctx: Any) -> str:
        """HIT, MISS or RETRY."""
        return str(self.call("lookup", key, ctx).name)

    def end_step(self, *new: str) -> None:
        """on_schedule_end."""
        self.call("on_schedule_end", self.m.base.ScheduleEndContext(list(new), ()))

    def store(self, keys: Sequence[bytes], ctx: Any) -> Any:
        """prepare_store; what it says is checked against what was offered."""
        out = self.call("prepare_store", list(keys), ctx)
        if out is not None:
            rest = iter(keys)
            assert all(k in rest for k in out.keys_to_store), "no ordered subset"
            assert len(out.store_spec) == len(out.keys_to_store)
        return out

    # Bytes.

    def content(self, key: bytes, rank: int, size: int) -> bytes:
        """What a key's part holds on a rank."""
        seed = hashlib.sha256(key + bytes((rank, self.version))).digest()
        return (seed * (size // len(seed) + 1))[:size]

    def places(self, spec: Any) -> list[tuple[int, list[int]]]:
        """For each key of a spec its group and its pages, in order."""
        counts = struct.unpack(f"<{len(spec)}I", spec._counts)
        extents = list(wire.PAIR.iter_unpack(spec._extents))
        groups = struct.unpack(f"<{len(spec)}H", spec._groups)
        out = []
        for g, n in zip(groups, counts, strict=True):
            own, extents = extents[:n], extents[n:]
            pages = [p + i for p, count in own for i in range(count)]
            out.append((g, pages))
        assert not extents
        return out

    def part(self, spec: Any, group: int, pages: list[int], rank: int) -> list[int]:
        """The pages of a rank's part."""
        world = len(self.ranks)
        starts = struct.unpack(f"<{len(spec._starts) // 4}I", spec._starts)
        first = starts[group * world + rank]
        return pages[first : first + -(-self.ranks[rank].parts[group] // 4096)]

    def write(self, spec: Any, keys: Sequence[bytes], ranks: Any = None) -> None:
        """Copies of a store, on all ranks or on some."""
        for key, (g, pages) in zip(keys, self.places(spec), strict=True):
            for r in self.ranks if ranks is None else ranks:
                data = self.content(key, r.rank, r.parts[g])
                for i, page in enumerate(self.part(spec, g, pages, r.rank)):
                    piece = data[i * 4096 : (i + 1) * 4096]
                    r.map[page * 4096 : page * 4096 + len(piece)] = piece

    def check(self, spec: Any, keys: Sequence[bytes]) -> None:
        """Copies of a load: every byte is compared."""
        for key, (g, pages) in zip(keys, self.places(spec), strict=True):
            for r in self.ranks:
                size = r.parts[g]
                got = b"".join(
                    r.map[page * 4096 : (page + 1) * 4096]
                    for page in self.part(spec, g, pages, r.rank)
                )[:size]
                assert got == self.content(key, r.rank, size), "wrong bytes"

    def mark(self, spec: Any, rank: int) -> None:
        """A rank's copy of a store fails."""
        g, pages = self.places(spec)[0]
        at = self.part(spec, g, pages, rank)[0] * 4096
        assert len(spec.mark) == MARK_BYTES
        self.ranks[rank].map[at : at + MARK_BYTES] = spec.mark  # type: ignore[index]

    # Life.

    def reattach(self) -> None:
        """What the ranks do after a restart of the daemon; then everything is back."""
        for r in self.ranks:
            r.attach()
        n, self.attached = self.attached, self.attached + 1
        until("attached again", lambda: self.session.counters.attached > n)

    def settled(self) -> None:
        """Waits until the daemon has handled what was sent: no job is open."""

        def idle() -> bool:
            self.session.flush()
            engines = self.daemon.status()["engines"] or []
            return all(e["jobs"] == 0 for e in engines)

        until("no job is open", idle)

    def close(self) -> None:
        """Ends the engine as it would end by itself."""
        self.manager.shutdown()
        for r in self.ranks:
            r.close()
