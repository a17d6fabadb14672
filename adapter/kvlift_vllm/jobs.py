"""The jobs of a manager that are not over, and what a hello says of them.

A job is open from its pin or reserve until the daemon knows its end. A table of
jobs has no lock: it is its session's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from .wire import ABORT, COMMIT, REF_SIZE, UNPIN


@dataclass
class Store:
    """A store job from its reserve until its keys were read as added."""

    keys: list[bytes]
    refs: list[bytes]
    places: list[int]  # where a rank whose copy failed leaves the mark
    doomed: bool = False  # from before a reset: it is never committed
    done: bool = False  # committed
    seen: int = 0  # of a committed one, keys that were read as added


@dataclass
class Listed:
    """Which jobs a hello has listed, as they were then."""

    loads: list[int] = field(default_factory=list)
    stores: dict[int, tuple[bool, bool]] = field(default_factory=dict)  # doomed, done


class Jobs:
    """The open jobs of a session."""

    def __init__(self) -> None:
        """No job; their numbers count up from 1."""
        self._last = 0
        self._loads: dict[int, bytes] = {}  # refs
        self._stores: dict[int, Store] = {}
        self._unseen: deque[int] = deque()  # committed stores, in order
        self._floor = 0  # jobs up to here are from before the last reset
        self._stale: list[int] = []  # loads of these

    def next(self) -> int:
        """A number that no job had."""
        self._last += 1
        return self._last

    def load(self, refs: bytes) -> int:
        """Opens a load of these refs and returns its number."""
        job = self.next()
        self._loads[job] = refs
        return job

    def unload(self, job: int) -> list[int]:
        """Ends a load; returns those whose end the daemon has to be told."""
        known = self._loads.pop(job, None) is not None
        return [*([job] if known else ()), *self._later(job)]

    def store(
        self, job: int, keys: list[bytes], refs: list[bytes], places: list[int]
    ) -> None:
        """Opens a store of keys, whose marks would be at these places."""
        self._stores[job] = Store(keys, refs, places)

    def places(self, job: int) -> list[int]:
        """Where the marks of a store that may be committed would be."""
        store = self._stores.get(job)
        return store.places if store is not None and not store.doomed else []

    def commit(self, job: int) -> tuple[bool, list[int]]:
        """Ends a store well: whether to tell, and loads whose end to tell."""
        store = self._stores.get(job)
        if store is None or store.done or store.doomed:
            return False, []
        self._commit(job, store)
        return True, self._later(job)

    def abort(self, job: int) -> bool:
        """Gives a store up that no rank copies for: whether to tell."""
        store = self._stores.get(job)
        if store is None or store.done or store.doomed:
            return False
        del self._stores[job]
        return True

    def seen(self, copies: Sequence[bytes]) -> list[bytes]:
        """Ends the stores whose copies were all read as added; returns their keys.

        They come in the order of commits, and of a store in that of its keys, so
        the first that is waited for is nearly always the one that comes.
        """
        waiting = self._unseen
        if not waiting:
            return []
        refs = [c[:REF_SIZE] for c in copies]
        out: list[bytes] = []
        at = 0
        while waiting and at < len(refs):
            job = waiting[0]
            store = self._stores[job]
            left = store.refs[store.seen :]
            if refs[at] != left[0]:
                at += 1  # another engine's
                continue
            n = min(len(left), len(refs) - at)
            if refs[at : at + n] != left[:n]:  # others' stand between
                n = 1
            at += n
            store.seen += n
            if store.seen == len(store.refs):
                waiting.popleft()
                del self._stores[job]
                out += store.keys
        return out

    def reset(self) -> None:
        """Dooms what is not committed; what is, is forgotten.

        The keys of a committed store may be removed before they are told.
        """
        for job, store in list(self._stores.items()):
            if store.done:
                del self._stores[job]
            else:
                store.doomed = True
        self._unseen.clear()
        self._stale = list(self._loads)
        self._floor = self._last

    def flushed(self) -> list[int]:
        """Every rank has ended the jobs from before the last reset.

        Returns the loads whose end the daemon has to be told; of the stores the
        ranks have told it themselves (R12).
        """
        for job in [j for j, s in self._stores.items() if s.doomed]:
            del self._stores[job]
        return self._unload_stale()

    def _later(self, job: int) -> list[int]:
        """Ends the loads from before a reset when a job from after it has ended.

        No completion comes for them. But the ranks end them before they start
        anything that was prepared later.
        """
        return self._unload_stale() if self._stale and job > self._floor else []

    def _unload_stale(self) -> list[int]:
        stale, self._stale = self._stale, []
        return [j for j in stale if self._loads.pop(j, None) is not None]

    def _commit(self, job: int, store: Store) -> None:
        store.done, store.seen = True, 0
        self._unseen.append(job)

    def describe(self) -> tuple[dict[str, Any], Listed]:
        """What a hello of a manager that comes back says of its jobs (R9)."""
        fields: dict[str, Any] = {
            "loads": [{"job": j, "refs": _pairs(r)} for j, r in self._loads.items()],
            "stores": [
                {
                    "job": job,
                    "refs": _pairs(b"".join(s.refs)),
                    "doomed": s.doomed,
                    "done": s.done and not s.doomed,
                }
                for job, s in self._stores.items()
            ],
        }
        stores = {job: (s.doomed, s.done) for job, s in self._stores.items()}
        return fields, Listed(list(self._loads), stores)

    def since(
        self, listed: Listed, held: Collection[bytes]
    ) -> tuple[list[tuple[int, int]], list[bytes]]:
        """What happened to listed jobs meanwhile: (type, job) messages to send.

        Also which of the keys that were committed are among the held ones, so
        that their delta will not come.
        """
        tell = [(UNPIN, j) for j in listed.loads if j not in self._loads]
        kept: list[bytes] = []
        self._unseen.clear()
        for job, (doomed, done) in listed.stores.items():
            store = self._stores.get(job)
            if store is None:
                if not doomed:
                    tell.append((ABORT, job))
            elif store.doomed:
                continue
            elif done:  # its keys are in the snapshot, or gone again
                del self._stores[job]
                kept += [k for k in store.keys if k in held]
            elif store.done:
                self._commit(job, store)
                tell.append((COMMIT, job))
        return tell, kept


def _pairs(refs: bytes) -> list[list[int]]:
    numbers = memoryview(refs).cast("I").tolist() if refs else []
    return [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
