"""Frames and messages of the protocol between engines and the daemon.

docs/formats.md has the byte tables, docs/protocol.md says when each message is
sent; the constants here are the same numbers. Packed records stay bytes as far
as they can: a ref is its 8 bytes, extents are their bytes, and what an engine
keeps of a stored key, its *copy*, is its ref followed by its extents.

The module does no I/O and holds no state; every function may be called from any
thread. What does not parse raises Malformed, and parsers accept exactly what
the encoders of the other side write.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import Any, NamedTuple

MAJOR, MINOR = 1, 0

HEADER = struct.Struct("<IHHQ")  # length of the payload, type, flags, sequence
MAX_FRAME = 1 << 20  # the longest payload in bytes
FLAG_LAST = 1  # the last frame of a message that needs several
PAGE_SIZE = 4096  # bytes that an extent counts in

HELLO, WELCOME, MAPPED, READY, SNAPSHOT = 1, 2, 3, 4, 5
DELTA, STEP, BEGIN, FINISH, TOUCH = 6, 7, 8, 9, 10
PIN, UNPIN, RESERVE, RESERVED, COMMIT = 11, 12, 13, 14, 15
ABORT, ENDED, ENDED_ACK, RESET, DONE = 16, 17, 18, 19, 20
BYE, ERROR, STATUS, STATE, PROMOTE = 21, 22, 23, 24, 25

NAMES = (  # by type, from 1
    *("hello", "welcome", "mapped", "ready", "snapshot", "delta", "step"),
    *("begin", "finish", "touch", "pin", "unpin", "reserve", "reserved"),
    *("commit", "abort", "ended", "ended-ack", "reset", "done", "bye"),
    *("error", "status", "state", "promote"),
)

ACCEPTED, PRESENT, IN_FLIGHT, REFUSED = range(4)  # outcomes of an offered key
REASONS = (  # why keys were refused, by number
    *("fits", "no-room", "too-young", "waiting", "no-records", "too-big"),
    "draining",
)
WAITING = 3  # of these: room is on its way

HINTS = ("none", "active", "idle", "closed")  # of a finish, by number

MAX_KEY = 40
KEY_SIZE, REF_SIZE, EXTENT_SIZE, SLOT_SIZE = 48, 8, 8, 16
REMOVED_SIZE, ADDED_SIZE = KEY_SIZE + REF_SIZE, KEY_SIZE + REF_SIZE + 8

KEY = struct.Struct("<40sBxHI")  # key, its length, group, position
SLOT = struct.Struct("<II8s")  # outcome and three bytes of zero, extents, ref
DELTA_HEAD = struct.Struct("<QIIII")  # epoch, removed, added, extents, zero
RESERVE_HEAD = struct.Struct("<QQII")  # job, request, keys, zero
RESERVED_HEAD = struct.Struct("<QIIIB3s")  # job, slots, removed, extents, reason
REFS_HEAD = struct.Struct("<QQII")  # job, request, refs, zero
NUMBER = struct.Struct("<Q")  # a job, or the epoch of a step
BEGIN_HEAD = struct.Struct("<Qq")  # request, clock in ms; the name follows
FINISH_BODY = struct.Struct("<QIIB7s")  # request, prompt, hit tokens, hint, zero
PAIR = struct.Struct("<II")  # of a ref: entry, generation; of an extent: page, count

MAX_OFFERS = (MAX_FRAME - RESERVE_HEAD.size) // KEY_SIZE  # keys of one reserve
MAX_REFS = (MAX_FRAME - REFS_HEAD.size) // REF_SIZE  # refs of one message
MAX_NAME = 256  # bytes of a request's name

_ZERO3, _ZERO7 = bytes(3), bytes(7)


class Malformed(Exception):
    """The bytes are no message of the protocol."""


class Header(NamedTuple):
    """The header of a frame; length counts the payload alone."""

    length: int
    type: int
    flags: int
    sequence: int

    @property
    def name(self) -> str:
        """What the message is called, for people."""
        known = 1 <= self.type <= len(NAMES)
        return NAMES[self.type - 1] if known else f"type {self.type}"


def parse_header(data: bytes | bytearray | memoryview, at: int = 0) -> Header:
    """Reads the header at an offset, behind which HEADER.size bytes must lie.

    A length above MAX_FRAME is Malformed, before anybody allocates for it.
    """
    h = Header(*HEADER.unpack_from(data, at))
    if h.length > MAX_FRAME:
        raise Malformed(f"{h.name}: {h.length} bytes, at most {MAX_FRAME}")
    return h


def frame(type_: int, sequence: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A whole frame."""
    return HEADER.pack(len(payload), type_, flags, sequence) + payload


def _fail(what: str, n: int) -> Malformed:
    return Malformed(f"{what}: {n} bytes that do not fit together")


class Delta(NamedTuple):
    """What changed, column by column. The removals come first in time."""

    epoch: int  # of the last removal in this message or before it
    removed: Sequence[bytes]  # keys
    removed_refs: Sequence[bytes]  # a copy with another ref stays
    added: Sequence[bytes]  # keys
    copies: Sequence[bytes]  # theirs
    groups: Sequence[int]
    positions: Sequence[int]


class Reserved(NamedTuple):
    """The answer to a reserve. The removals are in force when it is read."""

    job: int
    reason: int  # why keys were refused: an index of REASONS
    outcomes: list[int]  # of the offered keys, in their order
    counts: list[int]  # how many extents are each one's own
    refs: list[bytes]  # of those that are accepted or present
    removed: Sequence[bytes]  # keys
    removed_refs: Sequence[bytes]
    extents: bytes  # of the accepted slots, in their order


# Records as an engine's keys of one length make them: key, padding, length, zero,
# group, position, ref and, of added ones, extents and zero. Columns of equal
# values are compared as wholes, so that no check runs for each key.
_Records = tuple[struct.Struct, bytes]


def _records_of(length: int) -> tuple[_Records, _Records]:
    padding = MAX_KEY - length
    fields = f"<{length}s{padding}sBBHI8s"
    pad = bytes(padding)
    return (struct.Struct(fields), pad), (struct.Struct(fields + "II"), pad)


_BY_LENGTH = [_records_of(length) for length in range(MAX_KEY + 1)]


def _columns(records: bytes, added: bool) -> list[Sequence[Any]]:
    """The columns of key records: keys, groups, positions, refs and what follows."""
    size = ADDED_SIZE if added else REMOVED_SIZE
    n, length = len(records) // size, records[MAX_KEY]
    if not 0 < length <= MAX_KEY:
        raise _fail("keys", len(records))
    record, padding = _BY_LENGTH[length][added]
    keys, pads, lengths, zeros, *rest = zip(*record.iter_unpack(records), strict=True)
    if lengths.count(length) != n:  # of keys of several lengths
        if n == 1:
            raise _fail("keys", len(records))
        parts = [
            _columns(records[i : i + size], added) for i in range(0, n * size, size)
        ]
        return [[x for (x,) in column] for column in zip(*parts, strict=True)]
    if pads.count(padding) != n or any(zeros):
        raise _fail("keys", len(records))
    return [keys, *rest]


def _removed(
    payload: bytes, at: int, n: int
) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Keys and refs of n removed records at an offset."""
    if not n:
        return (), ()
    records = payload[at : at + n * REMOVED_SIZE]
    keys, groups, positions, refs = _columns(records, added=False)
    if any(groups) or any(positions):
        raise _fail("removed keys", len(payload))
    return keys, refs


def _check_extents(extents: bytes) -> None:
    """Refuses extents of no page, or that end behind the last page number."""
    numbers = memoryview(extents).cast("I").tolist()
    firsts, counts = numbers[0::2], numbers[1::2]
    if 0 in counts or max(map(add, firsts, counts), default=0) > 1 << 32:
        raise _fail("extents", len(extents))


def parse_delta(payload: bytes) -> Delta:
    """Reads a delta or a piece of a snapshot."""
    if len(payload) < DELTA_HEAD.size:
        raise _fail("delta", len(payload))
    epoch, removed, added, extents, zero = DELTA_HEAD.unpack_from(payload)
    first = DELTA_HEAD.size + removed * REMOVED_SIZE
    end = first + added * ADDED_SIZE
    if zero or len(payload) != end + extents * EXTENT_SIZE or (extents and not added):
        raise _fail("delta", len(payload))
    gone, gone_refs = _removed(payload, DELTA_HEAD.size, removed)
    if not added:
        return Delta(epoch, gone, gone_refs, (), (), (), ())
    columns = _columns(payload[first:end], added=True)
    keys, groups, positions, refs, owned, zeros = columns
    tail = payload[end:]
    if any(zeros) or 0 in owned or sum(owned) != extents:
        raise _fail("added keys", len(payload))
    _check_extents(tail)
    if extents == added:  # the usual key lies in one piece
        places = [tail[i : i + EXTENT_SIZE] for i in range(0, len(tail), EXTENT_SIZE)]
    else:
        ends = [n * EXTENT_SIZE for n in accumulate(owned, initial=0)]
        places = [tail[i:j] for i, j in pairwise(ends)]
    copies = list(map(add, refs, places))
    return Delta(epoch, gone, gone_refs, keys, copies, groups, positions)


def parse_reserved(payload: bytes) -> Reserved:
    """Reads the answer to a reserve."""
    if len(payload) < RESERVED_HEAD.size:
        raise _fail("reserved", len(payload))
    head = RESERVED_HEAD.unpack_from(payload)
    job, n, removed, extents, reason, zero = head
    at = RESERVED_HEAD.size + n * SLOT_SIZE
    end = at + removed * REMOVED_SIZE
    if zero != _ZERO3 or len(payload) != end + extents * EXTENT_SIZE:
        raise _fail("reserved", len(payload))
    slots = SLOT.iter_unpack(payload[RESERVED_HEAD.size : at])
    columns = list(zip(*slots, strict=True)) or [(), (), ()]
    outcomes, counts, refs = map(list, columns)
    if sum(counts) != extents or max(outcomes, default=0) > REFUSED:
        raise _fail("slots", len(payload))
    if any(outcomes):
        if any((not o) is not (c > 0) for o, c in zip(outcomes, counts, strict=True)):
            raise _fail("slot", len(payload))
    elif 0 in counts:
        raise _fail("slot", len(payload))
    gone, gone_refs = _removed(payload, at, removed)
    tail = payload[end:]
    _check_extents(tail)
    return Reserved(job, reason, outcomes, counts, refs, gone, gone_refs, tail)


def parse_number(payload: bytes) -> int:
    """Reads a job or an epoch."""
    if len(payload) != NUMBER.size:
        raise _fail("number", len(payload))
    return int(NUMBER.unpack(payload)[0])


def parse_json(payload: bytes) -> dict[str, Any]:
    """Reads a message in JSON: one object in UTF-8."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as e:
        raise Malformed(f"JSON: {e}") from None
    if not isinstance(value, dict):
        raise Malformed(f"JSON: {type(value).__name__} instead of an object")
    return value


def encode_json(value: dict[str, Any]) -> bytes:
    """A message in JSON."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


encode_number = NUMBER.pack  # a job, or the epoch of a step


def encode_key(key: bytes, group: int, position: int) -> bytes:
    """A key record of a reserve; position 0 is unknown."""
    return KEY.pack(key, len(key), group, position)


def encode_reserve(job: int, request: int, records: Sequence[bytes]) -> bytes:
    """Asks for room for at most MAX_OFFERS key records, in the order of the prompt."""
    return RESERVE_HEAD.pack(job, request, len(records), 0) + b"".join(records)


def encode_refs(job: int, request: int, refs: bytes) -> bytes:
    """A pin (of a job), or a touch or promotion (job 0) of at most MAX_REFS refs."""
    return REFS_HEAD.pack(job, request, len(refs) // REF_SIZE, 0) + refs


def encode_begin(request: int, clock_ms: int, name: str) -> bytes:
    """Opens a request; its name is cut to MAX_NAME bytes."""
    text = name.encode("utf-8", "replace")[:MAX_NAME]
    return BEGIN_HEAD.pack(request, clock_ms) + text


def encode_finish(request: int, prompt: int, hit: int, hint: int) -> bytes:
    """Ends a request of so many prompt tokens, of which hit were served."""
    return FINISH_BODY.pack(request, prompt, hit, hint, _ZERO7)


def canonical(namespace: dict[str, Any]) -> str:
    """The text whose SHA-256 names a namespace."""
    groups = [
        {
            "name": g.get("name", ""),
            "kind": g["kind"],
            "chunk_tokens": g["chunk_tokens"],
            "window_chunks": g.get("window_chunks", 0),
        }
        for g in namespace["groups"]
    ]
    value = {"identity": namespace["identity"], "groups": groups}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
