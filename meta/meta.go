// Package meta is the format of the meta file: everything the daemon knows about the arena, in a mapped file that
// survives the daemon. docs/formats.md has the byte tables; the constants here are the same numbers.
//
//	┌──────────┬──────────┬───────────────┬──────────────┬─────────────┬──────────────────┐
//	│ header A │ header B │ namespaces    │ sessions     │ entries     │ overflow extents │
//	│ 4 KiB    │ 4 KiB    │ 64 × 16 KiB   │ 1024 × 256 B │ n × 128 B   │ m × 64 B         │
//	└──────────┴──────────┴───────────────┴──────────────┴─────────────┴──────────────────┘
//
// Everything is little-endian. The file is written by one process through a shared mapping and read again by the next
// one after a kill at any instruction, so the order of stores is the whole transaction: a record's body and its CRC
// are written while its state word says FREE, and the state word is stored last, in one aligned 64-bit store.
// A body that was torn by a kill therefore belongs to a record that is still FREE.
//
// The package does no I/O: it works on a byte slice. It is not safe for concurrent use; the engine's mutex guards it.
package meta

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// These constants are part of the file format and must not be changed without a new Version.
const (
	Version = 1

	HeaderSize     = 4096
	NamespaceSize  = 16384
	SessionSize    = 256
	EntrySize      = 128
	OverflowSize   = 64
	MaxNamespaces  = 64
	MaxSessions    = 1024
	MaxGroups      = 64   // groups of one namespace
	MaxParts       = 1472 // groups × ranks of one namespace
	MaxDescription = 8176 // bytes of a namespace's canonical description that are kept
	MaxName        = 63
	InlineExtents  = 4
	OverflowSlots  = 6

	headerMagic    = "KVLIFTM\x01"
	namespaceMagic = 0x534e564b // "KVNS"
	sessionMagic   = 0x5353564b // "KVSS"

	// usedWord marks a namespace or session record that is used; zero is free. The second byte is the complement of the
	// first, so that no single flipped bit makes one of the other.
	usedWord = 0xfe01
)

var le = binary.LittleEndian

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Errors of opening a meta file. Each is wrapped with what was found.
var (
	ErrNotMeta   = errors.New("not a kvlift meta file")
	ErrVersion   = errors.New("meta file of another version")
	ErrTruncated = errors.New("meta file is truncated")
	ErrDamaged   = errors.New("meta file is damaged")
)

// Layout is where the parts of a meta file lie, in bytes from its start.
type Layout struct {
	Entries    uint32 // records of the entry table
	Overflow   uint32 // records of the overflow table
	namespaces int
	sessions   int
	entries    int
	overflow   int
	Size       int64 // of the file, a multiple of 4 KiB
}

// NewLayout places a table of so many entries and overflow records. Entries may be at most 2^31.
func NewLayout(entries, overflow uint32) Layout {
	l := Layout{Entries: entries, Overflow: overflow}
	l.namespaces = 2 * HeaderSize
	l.sessions = l.namespaces + MaxNamespaces*NamespaceSize
	l.entries = l.sessions + MaxSessions*SessionSize
	l.overflow = l.entries + int(entries)*EntrySize
	l.Size = (int64(l.overflow) + int64(overflow)*OverflowSize + 4095) &^ 4095
	return l
}

// Header is the description of the whole file. Two copies alternate by Generation; a reader takes the newest valid one.
type Header struct {
	Generation uint64
	Clean      bool // the last daemon drained and ended by itself
	ArenaPages uint32
	Entries    uint32
	Overflow   uint32
	ArenaID    [16]byte // random, made with the arena; engines name it when they come back
	ArenaInode uint64   // of the arena file; a copy or a replacement has another
	HugePage   uint64   // bytes, 0 unless the arena lies on hugetlbfs
	CreatedMS  uint64   // Unix milliseconds
	Name       string
}

// header: offset of each field, see docs/formats.md
const (
	hMagic, hVersion, hSize, hGeneration        = 0, 8, 12, 16
	hFlags, hPageSize, hPages, hEntries         = 24, 28, 32, 36
	hOverflow, hNamespaces, hSessions           = 40, 44, 48
	hArenaID, hInode, hHuge, hCreated           = 56, 72, 80, 88
	hNameLen, hName, hCRC, hEnd                 = 96, 97, 4092, 4096
	flagClean                            uint32 = 1
)

func encodeHeader(b []byte, h *Header) {
	clear(b[:HeaderSize])
	copy(b[hMagic:], headerMagic)
	le.PutUint32(b[hVersion:], Version)
	le.PutUint32(b[hSize:], HeaderSize)
	le.PutUint64(b[hGeneration:], h.Generation)
	if h.Clean {
		le.PutUint32(b[hFlags:], flagClean)
	}
	le.PutUint32(b[hPageSize:], 4096)
	le.PutUint32(b[hPages:], h.ArenaPages)
	le.PutUint32(b[hEntries:], h.Entries)
	le.PutUint32(b[hOverflow:], h.Overflow)
	le.PutUint32(b[hNamespaces:], MaxNamespaces)
	le.PutUint32(b[hSessions:], MaxSessions)
	copy(b[hArenaID:hInode], h.ArenaID[:])
	le.PutUint64(b[hInode:], h.ArenaInode)
	le.PutUint64(b[hHuge:], h.HugePage)
	le.PutUint64(b[hCreated:], h.CreatedMS)
	n := copy(b[hName:hName+MaxName], h.Name)
	b[hNameLen] = byte(n)
	le.PutUint32(b[hCRC:], crc32.Checksum(b[:hCRC], castagnoli))
}

// DecodeHeader reads one header copy: magic, then version, then checksum, so that the error names the first thing that
// does not fit. b must hold at least HeaderSize bytes, else ErrTruncated.
func DecodeHeader(b []byte) (Header, error) {
	var h Header
	if len(b) < HeaderSize {
		return h, fmt.Errorf("%w: %d bytes", ErrTruncated, len(b))
	}
	b = b[:HeaderSize]
	if string(b[:7]) != headerMagic[:7] {
		return h, ErrNotMeta
	}
	switch v := le.Uint32(b[hVersion:]); {
	case v == 0: // no kvlift has it: the copy was torn between magic and version, and the other one counts
		return h, fmt.Errorf("%w: header without a version", ErrDamaged)
	case v != Version:
		return h, fmt.Errorf("%w: the file has version %d, this kvlift writes %d", ErrVersion, v, Version)
	}
	if got, want := crc32.Checksum(b[:hCRC], castagnoli), le.Uint32(b[hCRC:]); got != want {
		return h, fmt.Errorf("%w: header checksum %08x, computed %08x", ErrDamaged, want, got)
	}
	if string(b[:8]) != headerMagic || le.Uint32(b[hSize:]) != HeaderSize || le.Uint32(b[hPageSize:]) != 4096 ||
		le.Uint32(b[hNamespaces:]) != MaxNamespaces || le.Uint32(b[hSessions:]) != MaxSessions || b[hNameLen] > MaxName {
		return h, fmt.Errorf("%w: header fields that no kvlift writes", ErrDamaged)
	}
	h = Header{
		Generation: le.Uint64(b[hGeneration:]),
		Clean:      le.Uint32(b[hFlags:])&flagClean != 0,
		ArenaPages: le.Uint32(b[hPages:]),
		Entries:    le.Uint32(b[hEntries:]),
		Overflow:   le.Uint32(b[hOverflow:]),
		ArenaInode: le.Uint64(b[hInode:]),
		HugePage:   le.Uint64(b[hHuge:]),
		CreatedMS:  le.Uint64(b[hCreated:]),
		Name:       string(b[hName : hName+int(b[hNameLen])]),
	}
	copy(h.ArenaID[:], b[hArenaID:])
	return h, nil
}

// Table is a meta file in memory. The slice that it was made from stays its memory until the caller drops both.
type Table struct {
	Layout
	Header Header
	b      []byte
	// OnWrite, when set, hears of every store after it was made: offset and length in bytes. Crash tests replay the
	// stores from it; nil costs a branch.
	OnWrite func(off, n int)
}

// Create formats b, which must be zero and at least NewLayout(h.Entries, h.Overflow).Size long, and returns its table.
func Create(b []byte, h Header) (*Table, error) {
	l := NewLayout(h.Entries, h.Overflow)
	if int64(len(b)) < l.Size {
		return nil, fmt.Errorf("%w: %d bytes for a table of %d", ErrTruncated, len(b), l.Size)
	}
	if len(h.Name) > MaxName {
		return nil, fmt.Errorf("name of %d bytes: at most %d", len(h.Name), MaxName)
	}
	t := &Table{Layout: l, Header: h, b: b}
	t.SetHeader(h.Clean)
	return t, nil
}

// Open reads the headers of b and checks that the file is as long as they say. It does not look at records: Check does.
func Open(b []byte) (*Table, error) {
	if len(b) < 2*HeaderSize {
		return nil, fmt.Errorf("%w: %d bytes are less than its two headers", ErrTruncated, len(b))
	}
	ha, errA := DecodeHeader(b)
	hb, errB := DecodeHeader(b[HeaderSize:])
	h := ha
	switch {
	case errA != nil && errB != nil:
		// One copy of a young file is zero: then the other one's error is the one that tells.
		if errors.Is(errA, ErrNotMeta) && !errors.Is(errB, ErrNotMeta) {
			return nil, errB
		}
		return nil, errA
	case errors.Is(errA, ErrVersion):
		return nil, errA
	case errors.Is(errB, ErrVersion):
		return nil, errB
	case errA != nil || errB == nil && hb.Generation > ha.Generation:
		h = hb
	}
	l := NewLayout(h.Entries, h.Overflow)
	if int64(len(b)) != l.Size {
		return nil, fmt.Errorf("%w: %d bytes, its header says %d", ErrTruncated, len(b), l.Size)
	}
	return &Table{Layout: l, Header: h, b: b}, nil
}

// SetHeader writes the other header copy with the next generation and the given clean mark.
func (t *Table) SetHeader(clean bool) {
	t.Header.Generation++
	t.Header.Clean = clean
	off := int(t.Header.Generation%2) * HeaderSize
	encodeHeader(t.b[off:off+HeaderSize], &t.Header)
	t.wrote(off, HeaderSize)
}

func (t *Table) wrote(off, n int) {
	if t.OnWrite != nil {
		t.OnWrite(off, n)
	}
}
