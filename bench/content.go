package bench

import (
	"encoding/binary"

	"kvlift/block"
)

// The content of a block follows from its key and its length alone, so every loaded byte can be compared with what it
// must be, and never with something that was stored beside it.

func seed(k *block.Key) uint64 { return binary.LittleEndian.Uint64(k.Bytes[:]) ^ uint64(k.Len) }

func word(seed, i uint64) uint64 {
	x := (seed + i*0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
	return x ^ x>>31
}

// Fill writes the content of a key from byte off on. len(b) and off are multiples of 8.
func Fill(b []byte, k *block.Key, off int) {
	s, i := seed(k), uint64(off/8)
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, word(s, i))
		i++
	}
}

// Check compares b with the content of a key from byte off on and returns the offset of the first byte that differs, -1
// when none does.
func Check(b []byte, k *block.Key, off int) int {
	s, i := seed(k), uint64(off/8)
	for n := 0; n+8 <= len(b); n += 8 {
		if got, want := binary.LittleEndian.Uint64(b[n:]), word(s, i); got != want {
			var w [8]byte
			binary.LittleEndian.PutUint64(w[:], want)
			for j := range 8 {
				if b[n+j] != w[j] {
					return off + n + j
				}
			}
		}
		i++
	}
	return -1
}
