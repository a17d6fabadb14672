"""The protocol's golden vectors, read with struct and, where it is there, NumPy."""

from __future__ import annotations

import importlib.util
import struct
import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import frames

HAS_NUMPY = importlib.util.find_spec("numpy") is not None


class TestVectors(unittest.TestCase):
    def setUp(self) -> None:
        self.vectors = list(frames.read_vectors())

    def test_every_type_has_a_vector(self) -> None:
        self.assertEqual({v.file for v in self.vectors}, set(frames.TYPES))

    def test_header(self) -> None:
        for v in self.vectors:
            with self.subTest(str(v)):
                length, type_, flags, sequence = frames.HEADER.unpack_from(v.frame)
                self.assertEqual(length, len(v.frame) - frames.HEADER.size)
                self.assertEqual(
                    {"type": type_, "flags": flags, "sequence": sequence}, v.numbers
                )
                self.assertEqual(frames.TYPES[type_ - 1], v.file)

    def test_decode(self) -> None:
        for v in self.vectors:
            with self.subTest(str(v)):
                payload = v.frame[frames.HEADER.size :]
                self.assertEqual(frames.decode(v.numbers["type"], payload), v.fields)

    def test_encode(self) -> None:
        for v in self.vectors:
            with self.subTest(str(v)):
                payload = frames.encode(v.numbers["type"], v.fields)
                n = v.numbers
                header = frames.HEADER.pack(
                    len(payload), n["type"], n["flags"], n["sequence"]
                )
                self.assertEqual((header + payload).hex(), v.frame.hex())

    def test_prefixes(self) -> None:
        """A packed payload that is cut is an error, except where it ends with text."""
        for v in self.vectors:
            payload = v.frame[frames.HEADER.size :]
            for n in range(len(payload)):
                if v.file == "state" or (v.file == "begin" and n >= frames.BEGIN.size):
                    continue
                with (
                    self.subTest(str(v), bytes=n),
                    self.assertRaises((ValueError, struct.error)),
                ):
                    frames.decode(v.numbers["type"], payload[:n])


class TestCanonical(unittest.TestCase):
    def test_cases(self) -> None:
        cases = frames.read_canonical()
        self.assertTrue(cases)
        for case in cases:
            with self.subTest(case["name"]):
                self.assertEqual(frames.canonical(case["namespace"]), case["canonical"])
                case["canonical"].encode()  # it is hashed as UTF-8


@unittest.skipUnless(HAS_NUMPY, "NumPy is not installed")
class TestNumpy(unittest.TestCase):
    """The packed records are structured arrays as they are, read without a loop."""

    def test_arrays(self) -> None:
        import numpy as np

        ref_fields = [("entry", "<u4"), ("gen", "<u4")]
        key_fields = [
            ("key", "u1", 40),
            *(("length", "u1"), ("zero", "u1")),
            *(("group", "<u2"), ("position", "<u4")),
        ]
        slot_fields = [("outcome", "u1"), ("zero", "u1", 3), ("extents", "<u4")]
        ref = np.dtype(ref_fields)
        key = np.dtype(key_fields)
        gone = np.dtype([*key_fields, *ref_fields])
        added = np.dtype(
            [*key_fields, *ref_fields, ("extents", "<u4"), ("zero2", "<u4")]
        )
        slot = np.dtype([*slot_fields, *ref_fields])
        extent = np.dtype([("page", "<u4"), ("count", "<u4")])
        # Per message: where the count of an array stands, its records, its fields.
        delta = [(8, gone, "removed"), (12, added, "added"), (16, extent, "")]
        refs = [(16, ref, "ref")]
        layout: dict[str, list[tuple[int, Any, str]]] = {
            "delta": delta,
            "snapshot": delta,
            "touch": refs,
            "pin": refs,
            "promote": refs,
            "reserve": [(16, key, "key")],
            "reserved": [(8, slot, "slot"), (12, gone, "removed"), (16, extent, "")],
        }
        for v in frames.read_vectors():
            payload = v.frame[frames.HEADER.size :]
            at = 24  # each of these messages begins with as many bytes of numbers
            extents: list[tuple[int, int]] = []
            for count_at, dtype, name in layout.get(v.file, []):
                with self.subTest(str(v), array=name):
                    (n,) = struct.unpack_from("<I", payload, count_at)
                    array = np.frombuffer(payload, dtype, n, at)
                    at += array.nbytes
                    values = [value for k, value in v.fields if k == name]
                    if dtype is extent:
                        self.assertEqual(array.tolist(), extents)
                    elif dtype is ref:
                        self.assertEqual(array.tolist(), [tuple(r) for r in values])
                    else:
                        self.compare(array, values)
                        extents += [
                            tuple(x) for r in values for x in r.get("extents", [])
                        ]
            if v.file in layout:
                self.assertEqual(at, len(payload))

    def compare(self, array: Any, values: list[dict[str, Any]]) -> None:
        """Compares the columns of an array with the records of a vector."""
        self.assertEqual(len(array), len(values))
        want: list[Any]
        for column in array.dtype.names:
            got = array[column].tolist()
            if column == "key":
                want = [[*bytes.fromhex(v["key"]).ljust(40, b"\0")] for v in values]
            elif column == "length":
                want = [len(v["key"]) // 2 for v in values]
            elif column == "extents":
                want = [len(v["extents"]) for v in values]
            elif column == "outcome":
                want = [frames.OUTCOMES.index(v["outcome"]) for v in values]
            elif column.startswith("zero"):
                self.assertFalse(array[column].any())
                continue
            else:
                want = [v[column] for v in values]
            self.assertEqual(got, want, column)


if __name__ == "__main__":
    unittest.main()
