"""The golden vectors of the protocol, and its frames with nothing but struct.

The format of the vectors is told in testdata/wire/README.md, the bytes in
docs/formats.md. This is written from these two texts and shares nothing with the
adapter, so that a mistake in one is not a mistake in both.

Run as a program it writes the canonical texts of testdata/wire/canonical.json anew.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).resolve().parents[2] / "testdata" / "wire"

TYPES = (  # by number, from 1
    *("hello", "welcome", "mapped", "ready", "snapshot", "delta", "step"),
    *("begin", "finish", "touch", "pin", "unpin", "reserve", "reserved"),
    *("commit", "abort", "ended", "ended-ack", "reset", "done", "bye"),
    *("error", "status", "state", "promote"),
)
OUTCOMES = ("accepted", "present", "in flight", "refused")
HINTS = ("none", "active", "idle", "closed")

HEADER = struct.Struct("<IHHQ")  # length, type, flags, sequence
KEY = struct.Struct("<40sBxHI")  # key, its length, group, position
REF = struct.Struct("<II")  # entry, generation
EXTENTS_OF = struct.Struct("<II")  # extents of an added key, zero
EXTENT = struct.Struct("<II")  # page, count
SLOT = struct.Struct("<B3xIII")  # outcome, extents, entry, generation
DELTA = struct.Struct("<QIIII")  # epoch, removed, added, extents, zero
RESERVE = struct.Struct("<QQII")  # job, request, keys, zero
RESERVED = struct.Struct("<QIIIB3x")  # job, slots, removed, extents, reason
REFS = struct.Struct("<QQII")  # job, request, refs, zero
NUMBER = struct.Struct("<Q")  # a job, or the epoch of a step
BEGIN = struct.Struct("<Qq")  # request, clock; the name follows
FINISH = struct.Struct("<QIIB7x")  # request, prompt tokens, hit tokens, hint

Field = tuple[str, Any]
Fields = list[Field]


@dataclass
class Vector:
    """One frame and what it means."""

    file: str
    name: str
    direction: str = ""
    numbers: dict[str, int] = field(default_factory=dict)
    fields: Fields = field(default_factory=list)
    frame: bytes = b""

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def read_vectors(folder: Path = VECTORS) -> Iterator[Vector]:
    """Yields every vector of a folder."""
    for path in sorted(folder.glob("*.txt")):
        yield from _parse(path.stem, path.read_text(encoding="utf-8"))


def _parse(file: str, text: str) -> Iterator[Vector]:
    for block in text.split("\n\n"):
        vector: Vector | None = None
        section = ""
        for line in block.splitlines():
            name, colon, value = line.strip().partition(":")
            value = value.strip()
            if line.startswith("#"):
                continue
            if name == "vector" and vector is None:
                vector = Vector(file, value)
            elif vector is None:
                raise ValueError(f"{file}: {line!r} outside of a vector")
            elif line.startswith("  ") and section == "fields" and colon:
                vector.fields.append((name, json.loads(value)))
            elif line.startswith("  ") and section == "hex":
                vector.frame += bytes.fromhex(line)
            elif name in ("fields", "hex"):
                section = name
            elif name in ("type", "flags", "sequence"):
                vector.numbers[name] = int(value)
            elif name == "direction":
                vector.direction = value
            else:
                raise ValueError(f"{file}: {line!r}")
        if vector is not None:
            yield vector


class _Reader:
    """Takes records off a payload."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.at = 0

    def take(self, record: struct.Struct) -> tuple[Any, ...]:
        values = record.unpack_from(self.payload, self.at)
        self.at += record.size
        return values

    def key(self) -> dict[str, Any]:
        raw, length, group, position = self.take(KEY)
        if any(raw[length:]):
            raise ValueError("bytes behind a key")
        return {"key": raw[:length].hex(), "group": group, "position": position}

    def gone(self) -> dict[str, Any]:
        key = self.key()
        key["entry"], key["gen"] = self.take(REF)
        return key

    def extents(self, n: int) -> list[list[int]]:
        return [list(self.take(EXTENT)) for _ in range(n)]

    def end(self) -> None:
        if self.at != len(self.payload):
            raise ValueError(f"{len(self.payload) - self.at} bytes too many")


def decode(type_: int, payload: bytes) -> Fields:
    """Reads a payload into the fields of a vector."""
    name = TYPES[type_ - 1]
    r = _Reader(payload)
    fields: Fields = []
    if name in ("hello", "welcome", "ready", "error", "status"):
        return list(json.loads(payload).items())
    if name == "state":
        return [("text", payload.decode())]
    if name in ("delta", "snapshot"):
        epoch, removed, added, extents, zero = r.take(DELTA)
        fields = [("epoch", epoch)]
        fields += [("removed", r.gone()) for _ in range(removed)]
        owned: list[tuple[int, int]] = []
        for _ in range(added):
            fields.append(("added", r.gone()))
            count, pad = r.take(EXTENTS_OF)
            owned.append((count, pad))
        for (_, value), (count, pad) in zip(fields[1 + removed :], owned, strict=True):
            value["extents"] = r.extents(count)
            zero += pad
        if zero or sum(count for count, _ in owned) != extents:
            raise ValueError("counts do not fit")
    elif name == "reserve":
        job, request, n, _ = r.take(RESERVE)
        fields = [("job", job), ("request", request)]
        fields += [("key", r.key()) for _ in range(n)]
    elif name == "reserved":
        job, slots, removed, extents, reason = r.take(RESERVED)
        fields = [("job", job), ("reason", reason)]
        counts = []
        for _ in range(slots):
            outcome, count, entry, gen = r.take(SLOT)
            fields.append(
                ("slot", {"outcome": OUTCOMES[outcome], "entry": entry, "gen": gen})
            )
            counts.append(count)
        gone = [("removed", r.gone()) for _ in range(removed)]
        for (_, value), count in zip(fields[2:], counts, strict=True):
            value["extents"] = r.extents(count)
        fields += gone
        if sum(counts) != extents:
            raise ValueError("counts do not fit")
    elif name in ("touch", "pin", "promote"):
        job, request, n, _ = r.take(REFS)
        fields = [("job", job), ("request", request)]
        fields += [("ref", list(r.take(REF))) for _ in range(n)]
    elif name in ("unpin", "commit", "abort", "ended", "ended-ack"):
        fields = [("job", r.take(NUMBER)[0])]
    elif name == "step":
        fields = [("epoch", r.take(NUMBER)[0])]
    elif name == "begin":
        request, clock = r.take(BEGIN)
        return [
            ("request", request),
            ("clock_ms", clock),
            ("name", payload[r.at :].decode()),
        ]
    elif name == "finish":
        request, prompt, hit, hint = r.take(FINISH)
        fields = [
            ("request", request),
            ("prompt_tokens", prompt),
            ("hit_tokens", hit),
            ("hint", HINTS[hint]),
        ]
    r.end()
    return fields


def _key(value: dict[str, Any]) -> bytes:
    raw = bytes.fromhex(value["key"])
    return KEY.pack(raw, len(raw), value["group"], value["position"])


def _gone(value: dict[str, Any]) -> bytes:
    return _key(value) + REF.pack(value["entry"], value["gen"])


def _extents(values: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(EXTENT.pack(*x) for v in values for x in v["extents"])


def encode(type_: int, fields: Fields) -> bytes:
    """Builds the payload of a vector's fields."""
    name = TYPES[type_ - 1]
    one = dict(fields)

    def all_of(key: str) -> list[Any]:
        return [value for k, value in fields if k == key]

    if name in ("hello", "welcome", "ready", "error", "status"):
        return json.dumps(one, separators=(",", ":"), ensure_ascii=False).encode()
    if name == "state":
        return str(one["text"]).encode()
    if name in ("delta", "snapshot"):
        removed, added = all_of("removed"), all_of("added")
        total = sum(len(v["extents"]) for v in added)
        out = DELTA.pack(one["epoch"], len(removed), len(added), total, 0)
        out += b"".join(map(_gone, removed))
        out += b"".join(_gone(v) + EXTENTS_OF.pack(len(v["extents"]), 0) for v in added)
        return out + _extents(added)
    if name == "reserve":
        keys = all_of("key")
        return RESERVE.pack(one["job"], one["request"], len(keys), 0) + b"".join(
            map(_key, keys)
        )
    if name == "reserved":
        slots, removed = all_of("slot"), all_of("removed")
        total = sum(len(v["extents"]) for v in slots)
        out = RESERVED.pack(one["job"], len(slots), len(removed), total, one["reason"])
        for v in slots:
            out += SLOT.pack(
                OUTCOMES.index(v["outcome"]), len(v["extents"]), v["entry"], v["gen"]
            )
        return out + b"".join(map(_gone, removed)) + _extents(slots)
    if name in ("touch", "pin", "promote"):
        refs = all_of("ref")
        head = REFS.pack(one["job"], one["request"], len(refs), 0)
        return head + b"".join(REF.pack(*ref) for ref in refs)
    if name in ("unpin", "commit", "abort", "ended", "ended-ack"):
        return NUMBER.pack(one["job"])
    if name == "step":
        return NUMBER.pack(one["epoch"])
    if name == "begin":
        return BEGIN.pack(one["request"], one["clock_ms"]) + str(one["name"]).encode()
    if name == "finish":
        hint = HINTS.index(one["hint"])
        return FINISH.pack(
            one["request"], one["prompt_tokens"], one["hit_tokens"], hint
        )
    return b""


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


def read_canonical(folder: Path = VECTORS) -> list[dict[str, Any]]:
    """The cases of canonical.json: name, namespace, canonical."""
    cases: list[dict[str, Any]] = json.loads(
        (folder / "canonical.json").read_text(encoding="utf-8")
    )
    return cases


def write_canonical(cases: list[dict[str, Any]], folder: Path = VECTORS) -> None:
    """Writes canonical.json with the texts that this Python makes."""
    for case in cases:
        case["canonical"] = canonical(case["namespace"])
    text = json.dumps(cases, indent=1)  # in ASCII, so that odd characters can be seen
    (folder / "canonical.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_canonical(read_canonical())
