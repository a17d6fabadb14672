// Package index finds the record of a key: an open hash table of record numbers. The keys themselves stay in the
// entry table; the index holds 8 bytes a slot and at most three quarters of its slots are used, so a record costs it
// 11 to 22 bytes.
//
// A slot holds 32 bits of the key's hash and the record number plus one; zero is empty. Probing is linear and a removal
// shifts the slots behind it back, so there are no tombstones and the table never needs a rebuild.
//
// The package is pure. It is not safe for concurrent use.
package index

import (
	"hash/maphash"
	"math/bits"

	"kvlift/block"
)

// Index maps (namespace, key) to a record number.
type Index struct {
	slots []uint64
	mask  uint32
	n     int
	seed  maphash.Seed
	equal func(entry uint32, ns uint16, k *block.Key) bool
}

// New makes an index for at most entries records. equal compares the key that a record holds; it is called for records
// that were put in and not removed since. The hash is seeded by the process, so nobody outside can aim collisions.
func New(entries uint32, equal func(entry uint32, ns uint16, k *block.Key) bool) *Index {
	size := uint64(8)
	if entries > 6 {
		size = 1 << bits.Len64((uint64(entries)*4+2)/3)
	}
	return &Index{slots: make([]uint64, size), mask: uint32(size - 1), seed: maphash.MakeSeed(), equal: equal}
}

// Len is the number of keys in the index.
func (x *Index) Len() int { return x.n }

// Hash returns the fingerprint of a key in a namespace: the same for equal arguments while the process lives.
func (x *Index) Hash(ns uint16, k *block.Key) uint64 {
	return maphash.Bytes(x.seed, k.Bytes[:k.Len]) ^ uint64(ns)*0x9e3779b97f4a7c15
}

// Find returns the record of the key.
func (x *Index) Find(hash uint64, ns uint16, k *block.Key) (entry uint32, ok bool) {
	tag := uint32(hash >> 32)
	for i := tag & x.mask; ; i = (i + 1) & x.mask {
		s := x.slots[i]
		if s == 0 {
			return block.NoEntry, false
		}
		if uint32(s>>32) == tag && x.equal(uint32(s)-1, ns, k) {
			return uint32(s) - 1, true
		}
	}
}

// Touch reads the slot where a search for hash begins and returns something of it. A caller that knows many hashes before
// it searches the first touches all of them: the reads then wait for memory together instead of one after the other.
func (x *Index) Touch(hash uint64) uint64 { return x.slots[uint32(hash>>32)&x.mask] }

// Put adds a record whose key is not in the index.
func (x *Index) Put(hash uint64, entry uint32) {
	if uint64(x.n)*4 >= uint64(len(x.slots))*3 {
		panic("index: more records than it was made for")
	}
	tag := uint32(hash >> 32)
	i := tag & x.mask
	for x.slots[i] != 0 {
		i = (i + 1) & x.mask
	}
	x.slots[i] = uint64(tag)<<32 | uint64(entry+1)
	x.n++
}

// Remove takes a record out. It tells whether it was there.
func (x *Index) Remove(hash uint64, entry uint32) bool {
	tag := uint32(hash >> 32)
	want := uint64(tag)<<32 | uint64(entry+1)
	i := tag & x.mask
	for x.slots[i] != want {
		if x.slots[i] == 0 {
			return false
		}
		i = (i + 1) & x.mask
	}
	x.n--
	for j := i; ; {
		j = (j + 1) & x.mask
		s := x.slots[j]
		if s == 0 {
			break
		}
		// The slot may move back to i only if its home does not lie between i (exclusive) and j.
		if home := uint32(s>>32) & x.mask; (j-home)&x.mask >= (j-i)&x.mask {
			x.slots[i] = s
			i = j
		}
	}
	x.slots[i] = 0
	return true
}
