package meta

import (
	"fmt"
	"hash/crc32"

	"kvlift/block"
)

// State of an entry. A record goes Free → Reserved → Ready → (Evicting | Removed) → Free.
type State uint8

const (
	Free     State = iota
	Reserved       // pages are given out, an engine writes them
	Ready          // the payload is whole and may be loaded
	Evicting       // its removal is announced; the bytes are still whole
	Removed        // its removal by a reset is announced; never served again
	lastState
)

func (s State) String() string {
	if s >= lastState {
		return fmt.Sprintf("state %d", uint8(s))
	}
	return [...]string{"FREE", "RESERVED", "READY", "EVICTING", "REMOVED"}[s]
}

// entry: offset of each field, see docs/formats.md
const (
	eWord, eTick, eCRC, eNamespace, eGroup = 0, 8, 16, 20, 22
	eKeyLen, eInline, eFlags, ePosition    = 24, 25, 26, 28
	eParent, eParentGen, eKey, ePages      = 32, 36, 40, 80
	eExtents, eOverflow, ePayload, eInl    = 84, 88, 92, 96
)

// marks are what the policy remembers of a record: bit 0 frequent, bits 1-2 the class of package restore.
type marks uint8

func (m marks) frequent() bool { return m&1 != 0 }
func (m marks) class() uint8   { return uint8(m >> 1) }

func makeMarks(frequent bool, class uint8) marks {
	m := marks(class&3) << 1
	if frequent {
		m |= 1
	}
	return m
}

// word: bits 0-7 state, 8-15 its complement (zero for Free, so that a zeroed file is all free), 16-18 marks, 32-63 generation
func makeWord(s State, m marks, gen uint32) uint64 {
	w := uint64(s) | uint64(m)<<16 | uint64(gen)<<32
	if s != Free {
		w |= uint64(^uint8(s)) << 8
	}
	return w
}

func splitWord(w uint64) (s State, m marks, gen uint32, ok bool) {
	s, m, gen = State(w), marks(w>>16&7), uint32(w>>32)
	return s, m, gen, s < lastState && m.class() < 3 && w == makeWord(s, m, gen)
}

// Entry is the content of a record.
type Entry struct {
	State     State
	Gen       uint32
	Frequent  bool   // the policy counts it among the often used (arc)
	Class     uint8  // what it is worth to a restore point: the value of restore.Class
	Tick      uint64 // recency: Unix milliseconds << 22, counted up within one; equal in one request, where the deeper position is colder
	Namespace uint16
	Group     uint16
	Position  uint32 // tokens from the start of the prompt to the end of the chunk; 0 when unknown
	Parent    block.Ref
	Key       block.Key
	Payload   uint32 // bytes of all rank parts, not rounded
	Pages     uint32 // pages that the extents hold
	Extents   []block.Extent
}

func (t *Table) entryOff(id uint32) int { return t.entries + int(id)*EntrySize }

// Word returns state and generation of a record; ok is false when the word is none that a daemon writes.
func (t *Table) Word(id uint32) (s State, gen uint32, ok bool) {
	s, _, gen, ok = splitWord(le.Uint64(t.b[t.entryOff(id):]))
	return s, gen, ok
}

// SetState moves a record to another state, keeping generation and marks. One store.
func (t *Table) SetState(id uint32, s State) {
	off := t.entryOff(id)
	_, m, gen, _ := splitWord(le.Uint64(t.b[off:]))
	if s == Free {
		m = 0
	}
	storeWord(t.b, off, makeWord(s, m, gen))
	t.wrote(off, 8)
}

// SetMarks notes for the policy of the next daemon whether a record is often used and what it is worth. It has no effect
// on a free record.
func (t *Table) SetMarks(id uint32, frequent bool, class uint8) {
	off := t.entryOff(id)
	s, old, gen, _ := splitWord(le.Uint64(t.b[off:]))
	m := makeMarks(frequent, class)
	if s == Free || m == old {
		return
	}
	storeWord(t.b, off, makeWord(s, m, gen))
	t.wrote(off, 8)
}

// Frequent tells whether a record is marked as often used.
func (t *Table) Frequent(id uint32) bool {
	_, m, _, _ := splitWord(le.Uint64(t.b[t.entryOff(id):]))
	return m.frequent()
}

// Tick returns the recency stamp of a record.
func (t *Table) Tick(id uint32) uint64 { return le.Uint64(t.b[t.entryOff(id)+eTick:]) }

// SetTick writes the recency stamp. It is outside the checksum, so that a touch is one store; a stamp that was lost
// costs an entry its place in the eviction order and nothing else.
func (t *Table) SetTick(id uint32, tick uint64) {
	off := t.entryOff(id) + eTick
	storeWord(t.b, off, tick)
	t.wrote(off, 8)
}

// KeyEqual tells whether the record's key and namespace are these.
func (t *Table) KeyEqual(id uint32, ns uint16, k *block.Key) bool {
	b := t.b[t.entryOff(id) : t.entryOff(id)+EntrySize]
	return le.Uint16(b[eNamespace:]) == ns && b[eKeyLen] == k.Len && [block.MaxKeyLen]byte(b[eKey:eKey+block.MaxKeyLen]) == k.Bytes
}

// Key returns a copy of the record's key.
func (t *Table) Key(id uint32) block.Key {
	b := t.b[t.entryOff(id) : t.entryOff(id)+EntrySize]
	return block.Key{Len: b[eKeyLen], Bytes: [block.MaxKeyLen]byte(b[eKey : eKey+block.MaxKeyLen])}
}

// Parent returns the record that the record's chunk continues; its entry is block.NoEntry when that is not known.
func (t *Table) Parent(id uint32) block.Ref {
	b := t.b[t.entryOff(id) : t.entryOff(id)+EntrySize]
	return block.Ref{Entry: le.Uint32(b[eParent:]), Gen: le.Uint32(b[eParentGen:])}
}

// Place returns namespace, group, position and pages of a record.
func (t *Table) Place(id uint32) (ns, group uint16, position, pages uint32) {
	b := t.b[t.entryOff(id) : t.entryOff(id)+EntrySize]
	return le.Uint16(b[eNamespace:]), le.Uint16(b[eGroup:]), le.Uint32(b[ePosition:]), le.Uint32(b[ePages:])
}

// Reserve fills a free record and makes it Reserved with the next generation, which it returns. overflow must hold
// OverflowNeeded(len(e.Extents)) free overflow records; they belong to the record until it is free again.
// The body is written first, then the checksum, then the state word.
func (t *Table) Reserve(id uint32, e *Entry, overflow []uint32) uint32 {
	off := t.entryOff(id)
	_, _, gen, _ := splitWord(le.Uint64(t.b[off:]))
	gen++
	b := t.b[off : off+EntrySize]
	inline := min(len(e.Extents), InlineExtents)
	next := block.NoEntry
	// The chain is written from its end, each record complete before the one that points to it.
	for i := len(overflow) - 1; i >= 0; i-- {
		lo := InlineExtents + i*OverflowSlots
		t.writeOverflow(overflow[i], id, gen, next, e.Extents[lo:min(lo+OverflowSlots, len(e.Extents))])
		next = overflow[i]
	}
	le.PutUint64(b[eTick:], e.Tick)
	le.PutUint16(b[eNamespace:], e.Namespace)
	le.PutUint16(b[eGroup:], e.Group)
	b[eKeyLen], b[eInline] = e.Key.Len, byte(inline)
	le.PutUint16(b[eFlags:], 0)
	le.PutUint32(b[ePosition:], e.Position)
	le.PutUint32(b[eParent:], e.Parent.Entry)
	le.PutUint32(b[eParentGen:], e.Parent.Gen)
	copy(b[eKey:eKey+block.MaxKeyLen], e.Key.Bytes[:])
	le.PutUint32(b[ePages:], e.Pages)
	le.PutUint32(b[eExtents:], uint32(len(e.Extents)))
	le.PutUint32(b[eOverflow:], next)
	le.PutUint32(b[ePayload:], e.Payload)
	for i := range InlineExtents {
		var x block.Extent
		if i < inline {
			x = e.Extents[i]
		}
		le.PutUint32(b[eInl+8*i:], x.Page)
		le.PutUint32(b[eInl+8*i+4:], x.Count)
	}
	le.PutUint32(b[eCRC:], entryCRC(b, gen))
	t.wrote(off+8, EntrySize-8)
	storeWord(t.b, off, makeWord(Reserved, 0, gen))
	t.wrote(off, 8)
	return gen
}

// entryCRC covers everything behind the checksum and starts from the generation, so that a body is bound to it; state,
// mark and tick change without it.
func entryCRC(b []byte, gen uint32) uint32 {
	return crc32.Update(gen, castagnoli, b[eNamespace:EntrySize])
}

// Entry reads a whole record. Extents are appended to buf, which may be nil. A free record comes back with state and
// generation only. The error wraps ErrDamaged when a checksum, a count or the overflow chain does not fit.
func (t *Table) Entry(id uint32, buf []block.Extent) (Entry, error) {
	off := t.entryOff(id)
	b := t.b[off : off+EntrySize]
	var e Entry
	var ok bool
	var m marks
	if e.State, m, e.Gen, ok = splitWord(le.Uint64(b)); !ok {
		return e, fmt.Errorf("%w: entry %d: state word %016x", ErrDamaged, id, le.Uint64(b))
	}
	if e.State == Free {
		return e, nil
	}
	e.Frequent, e.Class = m.frequent(), m.class()
	if want, got := le.Uint32(b[eCRC:]), entryCRC(b, e.Gen); want != got {
		return e, fmt.Errorf("%w: entry %d: checksum %08x, computed %08x", ErrDamaged, id, want, got)
	}
	e.Tick = le.Uint64(b[eTick:])
	e.Namespace, e.Group = le.Uint16(b[eNamespace:]), le.Uint16(b[eGroup:])
	e.Position = le.Uint32(b[ePosition:])
	e.Parent = block.Ref{Entry: le.Uint32(b[eParent:]), Gen: le.Uint32(b[eParentGen:])}
	e.Key = t.Key(id)
	e.Payload, e.Pages = le.Uint32(b[ePayload:]), le.Uint32(b[ePages:])
	n, inline := le.Uint32(b[eExtents:]), int(b[eInline])
	if e.Key.Len == 0 || e.Key.Len > block.MaxKeyLen || inline > InlineExtents || uint32(inline) != min(n, InlineExtents) || n > e.Pages ||
		uint64(n) > InlineExtents+uint64(t.Overflow)*OverflowSlots {
		return e, fmt.Errorf("%w: entry %d: key of %d bytes, %d extents of which %d inline", ErrDamaged, id, e.Key.Len, n, inline)
	}
	for _, c := range e.Key.Bytes[e.Key.Len:] {
		if c != 0 { // engines compare whole keys, and refuse a frame that holds such a one
			return e, fmt.Errorf("%w: entry %d: bytes behind its key", ErrDamaged, id)
		}
	}
	e.Extents = buf
	for i := range inline {
		e.Extents = append(e.Extents, block.Extent{Page: le.Uint32(b[eInl+8*i:]), Count: le.Uint32(b[eInl+8*i+4:])})
	}
	var err error
	if e.Extents, err = t.readOverflow(id, e.Gen, le.Uint32(b[eOverflow:]), int(n)-inline, e.Extents); err != nil {
		return e, err
	}
	total := uint64(0)
	for _, x := range e.Extents[len(buf):] {
		if x.Count == 0 || uint64(x.Page)+uint64(x.Count) > uint64(t.Header.ArenaPages) {
			return e, fmt.Errorf("%w: entry %d: extent %d+%d outside an arena of %d pages", ErrDamaged, id, x.Page, x.Count, t.Header.ArenaPages)
		}
		total += uint64(x.Count)
	}
	if total != uint64(e.Pages) || uint64(e.Payload) > total*block.PageSize {
		return e, fmt.Errorf("%w: entry %d: %d pages in extents, %d expected for %d bytes", ErrDamaged, id, total, e.Pages, e.Payload)
	}
	return e, nil
}

// Extents appends the extents of a record that is known to be sound (it is the engine's own) and returns them.
func (t *Table) Extents(id uint32, dst []block.Extent) []block.Extent {
	b := t.b[t.entryOff(id) : t.entryOff(id)+EntrySize]
	n := int(le.Uint32(b[eExtents:]))
	for i := range min(n, InlineExtents) {
		dst = append(dst, block.Extent{Page: le.Uint32(b[eInl+8*i:]), Count: le.Uint32(b[eInl+8*i+4:])})
	}
	n -= InlineExtents
	for o := le.Uint32(b[eOverflow:]); n > 0; n -= OverflowSlots {
		v := t.b[t.overflowOff(o):]
		for i := range min(n, OverflowSlots) {
			dst = append(dst, block.Extent{Page: le.Uint32(v[oExtents+8*i:]), Count: le.Uint32(v[oExtents+8*i+4:])})
		}
		o = le.Uint32(v[oNext:])
	}
	return dst
}

// Overflow appends the numbers of the overflow records of a sound record.
func (t *Table) OverflowOf(id uint32, dst []uint32) []uint32 {
	b := t.b[t.entryOff(id) : t.entryOff(id)+EntrySize]
	n := int(le.Uint32(b[eExtents:])) - InlineExtents
	for o := le.Uint32(b[eOverflow:]); n > 0; n -= OverflowSlots {
		dst = append(dst, o)
		o = le.Uint32(t.b[t.overflowOff(o)+oNext:])
	}
	return dst
}
