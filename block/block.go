// Package block holds the vocabulary that the other packages share: keys, groups, extents and record numbers.
//
// It imports nothing of the project and does no I/O.
//
//	key        names one chunk of one KV-cache group: vLLM's OffloadKey
//	group      a set of layers that share a chunk size, with a payload size of its own
//	page       4 KiB of the arena, the unit of space
//	extent     consecutive pages; a key's payload is a list of extents
//	entry      the number of a record in the entry table; with its generation it names one stored payload for ever
package block

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

const (
	// PageSize is the unit of space in the arena, in bytes.
	PageSize = 4096
	// MaxKeyLen is the longest key in bytes: a 32-byte hash, a 4-byte group number, and 4 bytes to spare.
	MaxKeyLen = 40
	// NoEntry is the entry number that names no record.
	NoEntry = ^uint32(0)
)

// Key is an offload key: the block hash that ends the chunk (16 or 32 bytes), then the group as four big-endian bytes.
// Bytes beyond Len are zero, so that two keys are equal exactly when the values are. It is a value: copy it freely.
type Key struct {
	Len   uint8
	Bytes [MaxKeyLen]byte
}

// MakeKey copies b into a Key. It fails when b is empty or longer than MaxKeyLen.
func MakeKey(b []byte) (Key, error) {
	if len(b) == 0 || len(b) > MaxKeyLen {
		return Key{}, fmt.Errorf("key of %d bytes: want 1 to %d", len(b), MaxKeyLen)
	}
	k := Key{Len: uint8(len(b))}
	copy(k.Bytes[:], b)
	return k, nil
}

// HashKey builds the key of a block hash and a group as vLLM's make_offload_key does. hash must leave room for the group.
func HashKey(hash []byte, group uint32) (Key, error) {
	if len(hash) == 0 || len(hash) > MaxKeyLen-4 {
		return Key{}, fmt.Errorf("block hash of %d bytes: want 1 to %d", len(hash), MaxKeyLen-4)
	}
	k := Key{Len: uint8(len(hash) + 4)}
	copy(k.Bytes[:], hash)
	binary.BigEndian.PutUint32(k.Bytes[len(hash):], group)
	return k, nil
}

// Slice returns the bytes of the key; they alias k.
func (k *Key) Slice() []byte { return k.Bytes[:k.Len] }

// String is the key in hex.
func (k Key) String() string { return hex.EncodeToString(k.Bytes[:k.Len]) }

// Extent is a run of consecutive pages of the arena.
type Extent struct {
	Page  uint32 // first page
	Count uint32 // number of pages, at least 1
}

// Ref names one stored payload: the record and how often it had been given away before. A Ref never names another
// payload later, whatever becomes of the record.
type Ref struct {
	Entry uint32
	Gen   uint32
}

// Offer is one key that an engine wants to store, in the order of the prompt within its group.
type Offer struct {
	Key      Key
	Group    uint16
	Position uint32 // tokens from the start of the prompt to the end of the chunk; 0 unknown
}

// Pages returns how many pages hold n bytes.
func Pages(n uint64) uint64 { return (n + PageSize - 1) / PageSize }
