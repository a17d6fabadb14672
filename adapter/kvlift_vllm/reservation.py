"""What a reserve has come to."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .mirror import ONE
from .wire import ACCEPTED, EXTENT_SIZE, REFUSED, Malformed, Reserved


class Skipped(enum.Enum):
    """Why a reserve stored nothing, though a later one may."""

    AWAY = "away"  # no daemon
    LATE = "late"  # its answer did not come in time, or an earlier one is owed
    BREAKER = "breaker"  # the last answers were late


@dataclass
class Reservation:
    """The answer to a reserve. job is 0 when nothing was accepted."""

    job: int
    keys: list[bytes]  # of the offered ones those that were accepted, in their order
    refs: list[bytes]  # theirs
    counts: bytes  # of each accepted key, its number of extents (u32)
    extents: bytes  # all of them
    present: int  # stored already, or being stored
    refused: int  # because of reason, a number of wire.REASONS
    reason: int
    removed: Sequence[bytes]  # keys that went to make room
    mark: bytes = b""  # of a rank whose copy fails


def accept(job: int, keys: Sequence[bytes], answer: Reserved) -> Reservation:
    """Turns the answer to a job's reserve of keys into the caller's."""
    offered, outcomes = len(keys), answer.outcomes
    if len(outcomes) != offered or answer.job != job:
        raise Malformed("an answer to another reserve")
    n = outcomes.count(ACCEPTED)
    if n == offered:
        accepted, refs, owned = list(keys), answer.refs, answer.counts
    else:
        places = [i for i, o in enumerate(outcomes) if o == ACCEPTED]
        accepted = [keys[i] for i in places]
        refs = [answer.refs[i] for i in places]
        owned = [answer.counts[i] for i in places]
    refused = outcomes.count(REFUSED)
    one_each = len(answer.extents) == n * EXTENT_SIZE
    return Reservation(
        job=job if n else 0,
        keys=accepted,
        refs=refs,
        counts=ONE * n if one_each else struct.pack(f"<{n}I", *owned),
        extents=answer.extents,
        present=offered - n - refused,
        refused=refused,
        reason=answer.reason,
        removed=answer.removed,
    )
