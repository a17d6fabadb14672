"""A manager's side of the protocol: the rules R1 to R11 and F1.

A window opens at a step's first lookup and closes at the first reserve or the
end of the step, whichever is first. In it the mirror does not change, nothing
is acknowledged and nobody reconnects, so a hit holds until it closes (R1, R2).

The engine calls from one thread. One mutex is between that thread and the two
of the session: a timer, which does what is due outside of steps, and one that
attaches. No call waits for the daemon but ``reserve``, and that no longer than
its deadline; what the daemon has said is applied for as long at most.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from . import wire
from .announcements import Announcements
from .attach import ENDS, Attachment, Config, Listing, listing
from .breaker import Breaker
from .connection import Connection, Unreachable, unexpected
from .jobs import Jobs
from .link import Link
from .mirror import Mirror, refs_of
from .page import SessionPage
from .reservation import Reservation, Skipped, accept
from .slots import Marks, Slots

NOTHING: Mapping[bytes, bytes] = {}  # what can be hit outside of a window


@dataclass
class Counters:
    """What the session saw. They only grow."""

    reserves: int = 0
    late: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # keys, by why
    failed: int = 0  # stores whose copy failed on a rank
    lost: int = 0  # connections
    attached: int = 0
    seconds: float = 0.0  # that reserves waited


class Session:
    """A manager's session. Its methods are for the engine's thread alone."""

    def __init__(
        self,
        config: Config,
        log: logging.Logger | None = None,
        clock: Callable[[], float] = time.monotonic,
        events: bool = False,
    ) -> None:
        """Does nothing yet: ``start`` begins to attach.

        With events, ``take_events`` has to be called now and then.
        """
        self.config = config
        self.counters = Counters()
        # What a lookup may hit: the mirror in a window, else nothing. Read
        # without the mutex, since no other thread changes it in a window.
        self.hits: Mapping[bytes, bytes] = NOTHING
        # Whether a window is open in which what is not hit is a miss for good.
        self.settled = False
        self.on_attached: Callable[[Attachment], None] | None = None
        self.session = self.arena = ""
        self.slots = Slots([])  # known once attached
        self._clock = clock
        self._mutex = threading.Lock()
        self._link = Link(
            *(config, self._mutex, clock, log or logging.getLogger("kvlift")),
            self._arrived,
        )
        self._stop = threading.Event()
        self._timer: threading.Thread | None = None
        self._connection: Connection | None = None
        self._page: SessionPage | None = None
        self._arena_fd: int | None = None  # it carries this process's lock
        self._mirror = Mirror()
        self._window = False
        self._read = 0  # of the page's sends
        self._acked = 0
        self._owed = 0  # sequence of a reserve whose answer is late, 0 none
        self._owed_job = 0
        self._reset = False  # asked for and not confirmed
        self._jobs = Jobs()
        self._breaker = Breaker()
        self._events = Announcements(events)
        self._marks = Marks()

    # Lookups and windows.

    def open(self) -> None:
        """Opens a window unless one is open: ``hits`` and ``settled`` are set."""
        with self._mutex:
            if self._window:
                return
            self._take_arrived()
            if self._news():
                self._pump()
            self._window = True
            fence = self._page.open() if self._page is not None else 0
            if (
                self._connection is not None
                and not self._owed
                and not self._reset
                and self._mirror.applied >= fence
            ):
                self.hits = self._mirror.copies
            self.settled = not self._expecting()

    def step_end(self) -> None:
        """Closes the window, applies what has come and acknowledges it (R5)."""
        with self._mutex:
            self._send()
            self._shut()
            self._rest(self._news())

    @property
    def expecting(self) -> bool:
        """Whether a first snapshot is on its way: a miss may soon be a hit."""
        with self._mutex:
            return self._expecting()

    @property
    def attached(self) -> bool:
        """Whether the daemon is there and its snapshot is applied."""
        return self._connection is not None

    @property
    def breaker_open(self) -> bool:
        """Whether reserves are left out because their answers came late."""
        return self._breaker.open

    @property
    def keys(self) -> int:
        """Stored keys of the namespace, as far as is known."""
        return len(self._mirror.copies)

    # Requests.

    def post(self, type_: int, payload: bytes) -> None:
        """Queues a message without an answer; it goes out with the next flush."""
        with self._mutex:
            self._post(type_, payload)

    def touch(self, request: int, keys: Iterable[bytes]) -> None:
        """Says that a request uses those of these keys that are stored."""
        with self._mutex:
            found = self._mirror.copies.get
            self._touch(request, [c for k in keys if (c := found(k)) is not None])

    def knows(self, key: bytes) -> bool:
        """Whether a key may be stored; outside of windows, and without a promise."""
        return key in self._mirror.copies

    def held(self, request: int, keys: Sequence[bytes]) -> bool:
        """Whether all of these keys are stored: then they are kept for the request.

        It closes the window, like the reserve that it makes needless.
        """
        with self._mutex:
            self._send()
            self._shut()
            found = self._mirror.copies.get
            copies = [c for k in keys if (c := found(k)) is not None]
            if len(copies) < len(keys) or self._reset:
                return False
            self._touch(request, copies)
            return True

    # Loads.

    def pin(self, request: int, copies: Sequence[bytes]) -> tuple[int, ...]:
        """Opens load jobs for copies that this window's lookups hit (R4).

        One job, or more when a message cannot name all. It must be called in
        the window of the hits: afterwards nobody vouches for the bytes, and
        RuntimeError is raised.
        """
        with self._mutex:
            if copies and not self._window:
                raise RuntimeError("a load outside of the window of its lookups")
            jobs = []
            for at in range(0, len(copies), wire.MAX_REFS):
                refs = refs_of(copies[at : at + wire.MAX_REFS])
                job = self._jobs.load(refs)
                jobs.append(job)
                self._post(wire.PIN, wire.encode_refs(job, request, refs))
            return tuple(jobs)

    def unpin(self, jobs: Sequence[int]) -> None:
        """Ends load jobs after every rank has copied (R6)."""
        with self._mutex:
            for job in jobs:
                self._unpin(self._jobs.unload(job))

    # Stores.

    def reserve(
        self, request: int, keys: Sequence[bytes], records: Sequence[bytes]
    ) -> Reservation | Skipped:
        """Asks for room, closes the window and waits up to the deadline (R7).

        records are the key records of keys, at most wire.MAX_OFFERS. A late
        answer is owed: lookups miss and nothing is reserved until it was read.
        """
        with self._mutex:
            began = self._clock()
            out = self._reserve(request, keys, records, began + self.config.deadline)
            self.counters.seconds += self._clock() - began
            if isinstance(out, Skipped):
                skipped = self.counters.skipped
                skipped[out.value] = skipped.get(out.value, 0) + len(keys)
            return out

    def commit(self, job: int, well: bool = True) -> bool:
        """Ends a store job after every rank has copied (R6), all of them well.

        Returns false when a rank's copy has failed: then the job is aborted
        (R8), and its keys are not stored.
        """
        with self._mutex:
            if not well or self._marked(job):
                self.counters.failed += 1
                self._abort(job)
                return False
            tell, loads = self._jobs.commit(job)
            if tell:
                self._post(wire.COMMIT, wire.encode_number(job))
            self._unpin(loads)
            return True

    def flush(self) -> None:
        """Sends what is queued, without waiting."""
        with self._mutex:
            self._send()

    # Reset.

    def reset(self) -> None:
        """Forgets everything: the same engine will make other bytes (R10).

        Lookups miss until the daemon has confirmed it, across reconnects.
        """
        with self._mutex:
            self._send()
            self._shut()
            self._jobs.reset()
            self._mirror.copies.clear()
            self._events.only(())
            self._reset = True
            self._post(wire.RESET, b"")
            self._send()

    def reset_flushed(self) -> None:
        """Every rank has ended every job from before the last reset."""
        with self._mutex:
            self._unpin(self._jobs.flushed())

    # Events.

    def announce(self, keys: Sequence[bytes]) -> None:
        """Lets an event say that these keys are stored, unless one has."""
        with self._mutex:
            self._events.stored(keys)

    def take_events(self) -> list[tuple[bool, bytes]]:
        """What was stored (true) and removed (false) since the last call, in order."""
        with self._mutex:
            return self._events.take()

    # Life.

    def give_up(self) -> None:
        """Lets go of the daemon for good: everything misses from here on."""
        with self._mutex:
            self._link.over = True
            self._shut()
            self._lose(Unreachable("an error of this adapter"))

    def start(self) -> None:
        """Starts to attach, and the timer."""
        with self._mutex:
            self._rest(True)
            self._timer = threading.Thread(
                target=self._tick, name="kvlift", daemon=True
            )
            self._timer.start()

    def close(self) -> None:
        """Says goodbye: this process holds no promise and no job. Idempotent."""
        self._stop.set()
        if self._timer is not None:
            self._timer.join(timeout=2.0)
        self._link.close()
        with self._mutex:
            self._shut()
            if self._page is not None:
                self._page.close()
                self._page = None
            if self._arena_fd is not None:
                os.close(self._arena_fd)
                self._arena_fd = None
            self._post(wire.BYE, b"")
            self._send()
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    # Below, the caller holds the mutex.

    def _expecting(self) -> bool:
        return self._link.talking and not self.counters.attached

    def _post(self, type_: int, payload: bytes) -> None:
        if self._connection is not None:
            self._connection.queue(type_, payload)

    def _touch(self, request: int, copies: Sequence[bytes]) -> None:
        for at in range(0, len(copies), wire.MAX_REFS):
            refs = refs_of(copies[at : at + wire.MAX_REFS])
            self._post(wire.TOUCH, wire.encode_refs(0, request, refs))

    def _send(self) -> None:
        """Flushes; the end of the connection waits for the end of a window (R9)."""
        if self._connection is not None:
            try:
                self._connection.flush()
            except ENDS as e:
                if not self._window:
                    self._lose(e)

    def _shut(self) -> None:
        """Closes the window; the page says so once everything in it is sent (F1)."""
        self.hits, self.settled, self._window = NOTHING, False, False
        if self._page is not None and (
            self._connection is None or not self._connection.unsent
        ):
            self._page.shut()

    def _news(self) -> bool:
        """Whether the daemon has sent something that was not read, as far as it says."""
        return self._page is None or self._page.sends != self._read

    def _rest(self, look: bool) -> None:
        """Does what may be done outside a window, and waits for nothing."""
        self._take_arrived()
        if self._connection is None:
            self._link.want(self._listing)
            return
        if look:
            self._pump()
        self._acknowledge()
        if self._connection is not None and self._connection.unsent:
            self._send()
            self._shut()  # what could not be sent before may be out now

    def _acknowledge(self) -> None:
        """Says which removals were applied, when there are new ones (R5)."""
        if self._connection is not None and self._mirror.applied > self._acked:
            self._acked = self._mirror.applied
            self._post(wire.STEP, wire.encode_number(self._acked))

    def _pump(self) -> None:
        """Applies what has come, for as long as the deadline at most."""
        connection = self._connection
        if connection is None:
            return
        until = self._clock() + self.config.deadline
        sends = self._page.sends if self._page is not None else 0
        try:
            while True:
                while (f := connection.next_frame()) is not None:
                    self._apply(*f)
                    if self._clock() >= until:
                        return
                if not connection.receive():
                    self._read = sends
                    return
        except ENDS as e:
            self._lose(e)

    def _apply(self, header: wire.Header, payload: memoryview) -> wire.Reserved | None:
        """Changes the mirror: only here (R3). Returns the answer to a reserve."""
        if header.type == wire.DELTA:
            delta = wire.parse_delta(bytes(payload))
            self._remove(delta.removed, delta.removed_refs)
            if delta.added:
                self._mirror.add(delta.added, delta.copies)
                self._events.stored(self._jobs.seen(delta.copies))
            self._mirror.applied = max(self._mirror.applied, delta.epoch)
        elif header.type == wire.RESERVED:
            answer = wire.parse_reserved(bytes(payload))
            self._remove(answer.removed, answer.removed_refs)
            if header.sequence == self._owed:  # nobody waits for it any more (R7)
                self._owed = 0
                if answer.extents:
                    self._post(wire.ABORT, wire.encode_number(self._owed_job))
            return answer
        elif header.type == wire.DONE:  # what came before is of the former generation
            self._reset = False
            self._mirror.copies.clear()
        else:
            raise unexpected(header, payload)
        return None

    def _remove(self, keys: Sequence[bytes], refs: Sequence[bytes]) -> None:
        if keys:
            self._events.removed(self._mirror.remove(keys, refs))

    def _marked(self, job: int) -> bool:
        """Whether a rank has left a store's mark in the arena."""
        places, arena = self._jobs.places(job), self._arena_fd
        return arena is not None and self._marks.left(job, arena, places)

    def _abort(self, job: int) -> None:
        """Gives back a store job that no rank copies for (R8)."""
        if self._jobs.abort(job):
            self._post(wire.ABORT, wire.encode_number(job))

    def _unpin(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            self._post(wire.UNPIN, wire.encode_number(job))

    def _reserve(
        self,
        request: int,
        keys: Sequence[bytes],
        records: Sequence[bytes],
        deadline: float,
    ) -> Reservation | Skipped:
        self._send()  # pins of the window that ends here
        self._shut()
        self._take_arrived()
        if self._owed or self._reset:
            self._pump()
            if self._owed or self._reset:
                return Skipped.AWAY if self._connection is None else Skipped.LATE
        connection = self._connection
        if connection is None:
            return Skipped.AWAY
        if not self._breaker.allows(self._clock()):
            return Skipped.BREAKER
        self._acknowledge()
        job = self._jobs.next()
        self.counters.reserves += 1
        try:
            message = wire.encode_reserve(job, request, records)
            sequence = connection.queue(wire.RESERVE, message)
            connection.flush()
            while True:
                while (f := connection.next_frame()) is not None:
                    answer = self._apply(*f)
                    if answer is not None and f[0].sequence == sequence:
                        self._breaker.in_time()
                        return self._accept(job, keys, answer)
                left = deadline - self._clock()
                if left <= 0:
                    self._owed, self._owed_job = sequence, job
                    self.counters.late += 1
                    self._breaker.late(self._clock())
                    return Skipped.LATE
                connection.receive(left)
        except ENDS as e:
            self._lose(e)
            return Skipped.AWAY

    def _accept(
        self, job: int, keys: Sequence[bytes], answer: wire.Reserved
    ) -> Reservation:
        """Turns an answer that was applied into the caller's."""
        out = accept(job, keys, answer)
        if out.job:
            own = int.from_bytes(out.counts[:4], "little") * wire.EXTENT_SIZE
            group = self.config.groups[out.keys[0][-4:]]
            places = self.slots.places(group, out.extents[:own])
            self._jobs.store(job, out.keys, out.refs, places)
            out.mark = self._marks.of(job)
        return out

    # Losing the daemon and coming back.

    def _lose(self, why: Exception) -> None:
        """Acts on the end of the connection: the mirror goes, jobs stay (R9)."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        self._mirror = Mirror()
        self._owed = 0
        self.counters.lost += 1
        self._link.lost(why)

    def _listing(self) -> Listing:
        return listing(self.config, self.session, self.arena, self._jobs)

    def _arrived(self) -> None:
        if not self._window:
            self._take_arrived()

    def _take_arrived(self) -> None:
        """Takes over what a thread has brought. No window is open."""
        a = self._link.take()
        if a is None:
            return
        if a.arena_fd is not None:
            if self._arena_fd is not None:
                os.close(self._arena_fd)
            self._arena_fd = a.arena_fd
        if self._page is not None:
            self._page.close()  # of a connection that is gone
        self._page, self._read = a.page, 0
        self.session, self.arena, self.slots = a.session, a.arena, Slots(a.parts)
        self._connection, self._mirror = a.connection, a.mirror
        self._acked = a.mirror.applied
        self.counters.attached += 1
        tell, kept = self._jobs.since(a.listed.jobs, self._mirror.copies)
        for type_, job in tell:
            self._post(type_, wire.encode_number(job))
        if self._reset:
            self._mirror.copies.clear()
            self._post(wire.RESET, b"")
        self._events.stored(kept)
        self._events.only(self._mirror.copies)
        self._send()
        if self.on_attached is not None:
            self.on_attached(a)

    def _tick(self) -> None:
        """The timer: it does what is due while no window is open (R2, R5)."""
        while not self._stop.wait(self.config.timer):
            with self._mutex:
                if not self._window:
                    self._rest(True)  # the end of a stream is no news
