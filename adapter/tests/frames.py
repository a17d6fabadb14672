"""The golden vectors of the protocol, and the daemon's half of its frames.

The format of the vectors is told in testdata/wire/README.md, the bytes in
docs/formats.md. Package wire of the adapter reads what a daemon says and writes
what an engine says; here is the other half, with the records of the same tables.

Run as a program it writes the canonical texts of testdata/wire/canonical.json anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvlift_vllm import wire

VECTORS = Path(__file__).resolve().parents[2] / "testdata" / "wire"

OUTCOMES = ("accepted", "present", "in flight", "refused")
JSON = (wire.HELLO, wire.WELCOME, wire.READY, wire.ERROR, wire.STATUS)
NUMBERS = (wire.UNPIN, wire.COMMIT, wire.ABORT, wire.ENDED, wire.ENDED_ACK)
REFS = (wire.TOUCH, wire.PIN, wire.PROMOTE)

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


def pairs(packed: bytes) -> list[list[int]]:
    """Refs or extents as the vectors write them."""
    return [list(p) for p in wire.PAIR.iter_unpack(packed)]


def decode(type_: int, payload: bytes) -> Fields:
    """Reads a payload into the fields of a vector."""
    if type_ in JSON:
        return list(wire.parse_json(payload).items())
    if type_ == wire.STATE:
        return [("text", payload.decode())]
    if type_ in (wire.DELTA, wire.SNAPSHOT):
        return _delta(wire.parse_delta(payload))
    if type_ == wire.RESERVED:
        return _reserved(wire.parse_reserved(payload))
    if type_ in NUMBERS:
        return [("job", wire.parse_number(payload))]
    if type_ == wire.STEP:
        return [("epoch", wire.parse_number(payload))]
    return _from_engine(type_, payload)


def _key(key: bytes, group: int = 0, position: int = 0) -> dict[str, Any]:
    return {"key": key.hex(), "group": group, "position": position}


def _ref(ref: bytes) -> dict[str, int]:
    return dict(zip(("entry", "gen"), wire.PAIR.unpack(ref), strict=True))


def _gone(keys: Sequence[bytes], refs: Sequence[bytes]) -> Fields:
    pairs_ = zip(keys, refs, strict=True)
    return [("removed", _key(key) | _ref(ref)) for key, ref in pairs_]


def _delta(d: wire.Delta) -> Fields:
    fields: Fields = [("epoch", d.epoch), *_gone(d.removed, d.removed_refs)]
    rows = zip(d.added, d.copies, d.groups, d.positions, strict=True)
    for key, copy, group, position in rows:
        own = {"extents": pairs(copy[8:])}
        fields.append(("added", _key(key, group, position) | _ref(copy[:8]) | own))
    return fields


def _reserved(r: wire.Reserved) -> Fields:
    fields: Fields = [("job", r.job), ("reason", r.reason)]
    extents = pairs(r.extents)
    for outcome, n, ref in zip(r.outcomes, r.counts, r.refs, strict=True):
        slot = {"outcome": OUTCOMES[outcome], **_ref(ref), "extents": extents[:n]}
        fields.append(("slot", slot))
        extents = extents[n:]
    return fields + _gone(r.removed, r.removed_refs)


def _from_engine(type_: int, payload: bytes) -> Fields:
    """Reads what an engine says, as the daemon does."""
    if type_ == wire.BEGIN:
        request, clock = wire.BEGIN_HEAD.unpack_from(payload)
        name = payload[wire.BEGIN_HEAD.size :].decode()
        return [("request", request), ("clock_ms", clock), ("name", name)]
    if type_ == wire.FINISH:
        request, prompt, hit, hint, _ = wire.FINISH_BODY.unpack(payload)
        return [
            *(("request", request), ("prompt_tokens", prompt), ("hit_tokens", hit)),
            ("hint", wire.HINTS[hint]),
        ]
    if type_ == wire.RESERVE:
        job, request, n, _ = wire.RESERVE_HEAD.unpack_from(payload)
        records = payload[wire.RESERVE_HEAD.size :]
        if len(records) != n * wire.KEY_SIZE:
            raise wire.Malformed("reserve")
        keys = [
            ("key", _key(raw[:size], group, position))
            for raw, size, group, position in wire.KEY.iter_unpack(records)
        ]
        return [("job", job), ("request", request), *keys]
    if type_ in REFS:
        job, request, n, _ = wire.REFS_HEAD.unpack_from(payload)
        refs = pairs(payload[wire.REFS_HEAD.size :])
        if len(refs) != n:
            raise wire.Malformed("refs")
        return [("job", job), ("request", request), *(("ref", r) for r in refs)]
    if payload:
        raise wire.Malformed("a payload where none belongs")
    return []


def encode(type_: int, fields: Fields) -> bytes:
    """Builds the payload of a vector's fields."""
    one = dict(fields)

    def all_of(key: str) -> list[Any]:
        return [value for k, value in fields if k == key]

    if type_ in JSON:
        return wire.encode_json(one)
    if type_ == wire.STATE:
        return str(one["text"]).encode()
    if type_ in (wire.DELTA, wire.SNAPSHOT):
        removed, added = all_of("removed"), all_of("added")
        return encode_delta(one["epoch"], removed, added)
    if type_ == wire.RESERVED:
        slots, removed = all_of("slot"), all_of("removed")
        return encode_reserved(one["job"], one["reason"], slots, removed)
    if type_ in NUMBERS:
        return wire.encode_number(one["job"])
    if type_ == wire.STEP:
        return wire.encode_number(one["epoch"])
    if type_ == wire.RESERVE:
        keys = [
            wire.encode_key(bytes.fromhex(k["key"]), k["group"], k["position"])
            for k in all_of("key")
        ]
        return wire.encode_reserve(one["job"], one["request"], keys)
    if type_ in REFS:
        refs = b"".join(wire.PAIR.pack(*r) for r in all_of("ref"))
        return wire.encode_refs(one["job"], one["request"], refs)
    if type_ == wire.BEGIN:
        return wire.encode_begin(one["request"], one["clock_ms"], one["name"])
    if type_ == wire.FINISH:
        hint = wire.HINTS.index(one["hint"])
        numbers = (one["request"], one["prompt_tokens"], one["hit_tokens"])
        return wire.encode_finish(*numbers, hint)
    return b""


def _record(value: dict[str, Any]) -> bytes:
    raw = bytes.fromhex(value["key"])
    key = wire.encode_key(raw, value["group"], value["position"])
    return key + wire.PAIR.pack(value["entry"], value["gen"])


def _extents(values: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(wire.PAIR.pack(*x) for v in values for x in v["extents"])


def encode_delta(
    epoch: int, removed: Sequence[dict[str, Any]], added: Sequence[dict[str, Any]]
) -> bytes:
    """A delta or a piece of a snapshot, as the daemon writes it."""
    total = sum(len(v["extents"]) for v in added)
    out = wire.DELTA_HEAD.pack(epoch, len(removed), len(added), total, 0)
    out += b"".join(map(_record, removed))
    for v in added:
        out += _record(v) + wire.PAIR.pack(len(v["extents"]), 0)
    return out + _extents(added)


def encode_reserved(
    job: int,
    reason: int,
    slots: Sequence[dict[str, Any]],
    removed: Sequence[dict[str, Any]],
) -> bytes:
    """The answer to a reserve, as the daemon writes it."""
    total = sum(len(v["extents"]) for v in slots)
    counts = (len(slots), len(removed), total)
    out = wire.RESERVED_HEAD.pack(job, *counts, reason, bytes(3))
    for v in slots:
        ref = wire.PAIR.pack(v["entry"], v["gen"])
        own = len(v["extents"])
        out += wire.PAIR.pack(OUTCOMES.index(v["outcome"]), own) + ref
    return out + b"".join(map(_record, removed)) + _extents(slots)


def read_canonical(folder: Path = VECTORS) -> list[dict[str, Any]]:
    """The cases of canonical.json: name, namespace, canonical."""
    cases: list[dict[str, Any]] = json.loads(
        (folder / "canonical.json").read_text(encoding="utf-8")
    )
    return cases


def write_canonical(cases: list[dict[str, Any]], folder: Path = VECTORS) -> None:
    """Writes canonical.json with the texts that this Python makes."""
    for case in cases:
        case["canonical"] = wire.canonical(case["namespace"])
    text = json.dumps(cases, indent=1)  # in ASCII, so that odd characters can be seen
    (folder / "canonical.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_canonical(read_canonical())
