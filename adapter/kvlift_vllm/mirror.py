"""What is stored in a namespace, as its scheduler knows it.

A mirror maps a key to its *copy*: 8 bytes of ref (entry and generation, the name
of one stored payload for ever), then 8 bytes for each extent. It changes by the
daemon's messages alone, in their order (rule R3). A mirror has no lock: it is
its owner's, and a snapshot is read into a new one that nobody else has yet.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence

from .wire import REF_SIZE, Malformed, parse_delta

_PAUSE = 50e-6  # seconds that reading a snapshot leaves to other threads between frames


class Mirror:
    """The stored keys and the last removal that was applied."""

    __slots__ = ("applied", "copies")

    def __init__(self, applied: int = 0) -> None:
        """An empty mirror whose removals up to the epoch applied count as applied."""
        self.copies: dict[bytes, bytes] = {}
        self.applied = applied

    def remove(self, keys: Iterable[bytes], refs: Iterable[bytes]) -> list[bytes]:
        """Takes keys out, unless they have another payload by now; says which went."""
        copies = self.copies
        gone = []
        for key, ref in zip(keys, refs, strict=True):
            copy = copies.get(key)
            if copy is not None and copy.startswith(ref):
                del copies[key]
                gone.append(key)
        return gone

    def add(self, keys: Iterable[bytes], copies: Iterable[bytes]) -> None:
        """Puts keys in."""
        self.copies.update(zip(keys, copies, strict=True))

    def read(self, payload: bytes) -> None:
        """Puts in what a piece of a snapshot says, and pauses for other threads."""
        delta = parse_delta(payload)
        if delta.removed:
            raise Malformed("a snapshot that removes keys")
        self.add(delta.added, delta.copies)
        time.sleep(_PAUSE)  # whoever schedules must not wait for the interpreter


def refs_of(copies: Sequence[bytes]) -> bytes:
    """The refs of copies, as a message names them."""
    return b"".join([c[:REF_SIZE] for c in copies])


def extents_of(copies: Sequence[bytes]) -> tuple[bytes, bytes]:
    """How many extents each copy has (u32, little-endian), and all their bytes."""
    joined = b"".join([c[REF_SIZE:] for c in copies])
    n = len(copies)
    if len(joined) == 8 * n:  # a copy has one at least
        return ONE * n, joined
    counts = [(len(c) - REF_SIZE) // 8 for c in copies]
    return struct.pack(f"<{n}I", *counts), joined


ONE = struct.pack("<I", 1)
