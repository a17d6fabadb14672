"""The protocol's golden vectors, which the tests of package wire in Go read too."""

from __future__ import annotations

import struct
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import frames

from kvlift_vllm import wire


class TestVectors(unittest.TestCase):
    def setUp(self) -> None:
        self.vectors = list(frames.read_vectors())

    def test_every_type_has_a_vector(self) -> None:
        self.assertEqual({v.file for v in self.vectors}, set(wire.NAMES))

    def test_header(self) -> None:
        for v in self.vectors:
            with self.subTest(str(v)):
                h = wire.parse_header(v.frame)
                self.assertEqual(h.length, len(v.frame) - wire.HEADER.size)
                self.assertEqual(h._asdict(), v.numbers | {"length": h.length})
                self.assertEqual(h.name, v.file)

    def test_decode(self) -> None:
        for v in self.vectors:
            with self.subTest(str(v)):
                payload = v.frame[wire.HEADER.size :]
                self.assertEqual(frames.decode(v.numbers["type"], payload), v.fields)

    def test_encode(self) -> None:
        for v in self.vectors:
            with self.subTest(str(v)):
                payload = frames.encode(v.numbers["type"], v.fields)
                n = v.numbers
                frame = wire.frame(n["type"], n["sequence"], payload, n["flags"])
                self.assertEqual(frame.hex(), v.frame.hex())

    def test_prefixes(self) -> None:
        """A packed payload that is cut is an error, except where it ends with text."""
        for v in self.vectors:
            payload = v.frame[wire.HEADER.size :]
            for n in range(len(payload)):
                if v.file == "state" or (
                    v.file == "begin" and n >= wire.BEGIN_HEAD.size
                ):
                    continue
                with (
                    self.subTest(str(v), bytes=n),
                    self.assertRaises((wire.Malformed, struct.error)),
                ):
                    frames.decode(v.numbers["type"], payload[:n])


class TestCanonical(unittest.TestCase):
    def test_cases(self) -> None:
        cases = frames.read_canonical()
        self.assertTrue(cases)
        for case in cases:
            with self.subTest(case["name"]):
                self.assertEqual(wire.canonical(case["namespace"]), case["canonical"])
                case["canonical"].encode()  # it is hashed as UTF-8


class TestMalformed(unittest.TestCase):
    """What the daemon would never write is refused, and so is every extra byte."""

    def setUp(self) -> None:
        self.packed = [
            v for v in frames.read_vectors() if v.file in ("delta", "reserved")
        ]

    def test_longer(self) -> None:
        for v in self.packed:
            with self.subTest(str(v)), self.assertRaises(wire.Malformed):
                payload = v.frame[wire.HEADER.size :] + b"\0"
                frames.decode(v.numbers["type"], payload)

    def test_every_byte(self) -> None:
        """A changed byte is refused, or is read and written again as it came."""
        for v in self.packed:
            payload = bytearray(v.frame[wire.HEADER.size :])
            type_ = v.numbers["type"]
            for i in range(len(payload)):
                for bit in (1, 0x80):
                    payload[i] ^= bit
                    with self.subTest(str(v), byte=i):
                        try:
                            fields = frames.decode(type_, bytes(payload))
                        except wire.Malformed:
                            pass
                        else:
                            self.assertEqual(frames.encode(type_, fields), payload)
                    payload[i] ^= bit

    def test_too_long(self) -> None:
        header = wire.HEADER.pack(wire.MAX_FRAME + 1, wire.DELTA, 0, 0)
        with self.assertRaises(wire.Malformed):
            wire.parse_header(header)

    def test_json(self) -> None:
        for text in (b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000):
            with self.subTest(text[:8]), self.assertRaises(wire.Malformed):
                wire.parse_json(text)


if __name__ == "__main__":
    unittest.main()
