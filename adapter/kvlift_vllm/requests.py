"""What the manager remembers of a request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from . import wire

PENDING = 2.0  # seconds after its first lookup in which a request waits for a snapshot
RETRIES = 3  # how often a request's store is offered again


class Transfer:
    """A job, or several, that vLLM gives back as a set of keys."""

    __slots__ = ("first", "jobs", "size")

    def __init__(self, jobs: tuple[int, ...], keys: Sequence[bytes]) -> None:
        """The daemon's jobs for these keys, at least one."""
        self.jobs, self.first, self.size = jobs, keys[0], len(keys)


class Request:
    """A request from its first to its last call. It is the engine's thread's alone."""

    __slots__ = (
        *("hash_at", "hit_tokens", "lists", "loads", "number", "positions"),
        *("prompt_tokens", "retries", "said", "stores", "waits_until"),
    )

    def __init__(self, number: int, positions: Mapping[bytes, int] | None) -> None:
        """Of a number that no request of the session had.

        positions are vLLM's own, which grow as it learns of keys; None up to 0.30.
        """
        self.number, self.positions = number, positions
        self.waits_until = 0.0  # no answer is pending after that; 0 not set yet
        self.retries = 0
        self.said = 0  # keys of the position list that were touched
        self.prompt_tokens = self.hit_tokens = 0
        self.loads: list[Transfer] = []
        self.stores: list[Transfer] = []
        # Before 0.31 vLLM says no positions: they come from what it touches.
        self.lists: dict[int, int] = {}  # per group: how many keys were touched
        self.hash_at: dict[bytes, int] = {}

    def waits(self, now: float) -> bool:
        """Whether a lookup may still be put off: one deadline, never renewed."""
        if not self.waits_until:
            self.waits_until = now + PENDING
        return now < self.waits_until

    def retry(self) -> bool:
        """Whether a store may be offered once more."""
        self.retries += 1
        return self.retries <= RETRIES

    def fresh(self) -> list[bytes]:
        """Keys of vLLM's positions that came since the last call."""
        at = self.positions
        if at is None or len(at) <= self.said:
            return []
        if not self.said:  # the prompt's; what is decoded comes later
            self.prompt_tokens = max(at.values())
        keys = list(islice(at, self.said, None))
        self.said = len(at)
        return keys

    def learn(
        self, group: int, keys: Sequence[bytes], chunk: int, whole: bool
    ) -> Sequence[bytes]:
        """Takes a touched list of a group in; returns what is new in it.

        The list of a group of which every chunk is kept (whole) begins with the
        request's first: so a hash has its position, in other groups too.
        """
        known = self.lists.get(group, 0)
        if len(keys) <= known:
            return ()
        self.lists[group] = len(keys)
        new = keys[known:]
        if whole:
            for i, key in enumerate(new, known + 1):
                self.hash_at[key[:-4]] = i * chunk
            self.prompt_tokens = max(self.prompt_tokens, len(keys) * chunk)
        return new


def take(transfers: list[Transfer], keys: Collection[bytes]) -> Transfer | None:
    """Takes the transfer of exactly these keys out of a list."""
    for i, t in enumerate(transfers):
        if t.size == len(keys) and t.first in keys:
            return transfers.pop(i)
    return None


def hint_of(params: Any) -> int:
    """What ``kv_transfer_params`` says of the conversation: an index of wire.HINTS.

    ``{"kvlift": {"session": "active"}}``, or "idle" or "closed"; else none.
    """
    ours = params.get("kvlift") if isinstance(params, dict) else None
    said = ours.get("session") if isinstance(ours, dict) else None
    return wire.HINTS.index(said) if said in wire.HINTS[1:] else 0
