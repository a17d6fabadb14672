package wire

import (
	"fmt"

	"kvlift/block"
)

// Sizes of the fixed records, in bytes.
const (
	KeySize      = 48 // key 40, length u8, pad u8, group u16, position u32
	RefSize      = 8  // entry u32, generation u32
	ExtentSize   = 8  // page u32, count u32
	AddedSize    = KeySize + RefSize + 8
	GoneSize     = KeySize + RefSize
	SlotSize     = 16 // outcome u8, pad 3, extents u32, ref 8
	deltaHead    = 24
	reserveHead  = 24
	reservedHead = 24
	refsHead     = 24
	maxExtents   = 1 << 16
)

func appendKey(dst []byte, k *block.Key, group uint16, position uint32) []byte {
	dst = append(dst, k.Bytes[:]...)
	dst = append(dst, k.Len, 0)
	dst = le.AppendUint16(dst, group)
	return le.AppendUint32(dst, position)
}

// parseKey reads a key record. Bytes behind the key must be zero, so that equal keys are equal records.
func parseKey(b []byte) (k block.Key, group uint16, position uint32, ok bool) {
	k = block.Key{Len: b[40], Bytes: [block.MaxKeyLen]byte(b[:block.MaxKeyLen])}
	if k.Len == 0 || k.Len > block.MaxKeyLen || b[41] != 0 {
		return k, 0, 0, false
	}
	for _, c := range k.Bytes[k.Len:] {
		if c != 0 {
			return k, 0, 0, false
		}
	}
	return k, le.Uint16(b[42:]), le.Uint32(b[44:]), true
}

func appendRef(dst []byte, r block.Ref) []byte {
	return le.AppendUint32(le.AppendUint32(dst, r.Entry), r.Gen)
}

func parseRef(b []byte) block.Ref { return block.Ref{Entry: le.Uint32(b), Gen: le.Uint32(b[4:])} }

func appendExtents(dst []byte, xs []block.Extent) []byte {
	for _, x := range xs {
		dst = le.AppendUint32(le.AppendUint32(dst, x.Page), x.Count)
	}
	return dst
}

func parseExtents(b []byte, n int, dst []block.Extent) ([]block.Extent, bool) {
	for i := range n {
		x := block.Extent{Page: le.Uint32(b[8*i:]), Count: le.Uint32(b[8*i+4:])}
		if x.Count == 0 || uint64(x.Page)+uint64(x.Count) > 1<<32 {
			return dst, false
		}
		dst = append(dst, x)
	}
	return dst, true
}

func malformed(t Type, b []byte) error {
	return fmt.Errorf("%w: %v of %d bytes", ErrMalformed, t, len(b))
}

// AddedKey is a key that may be loaded now.
type AddedKey struct {
	block.Offer
	Ref     block.Ref
	Extents int // how many of Delta.Extents, in order, are its own
}

// GoneKey is a key that may not be promised any more.
type GoneKey struct {
	block.Offer
	Ref block.Ref
}

// Delta tells what changed: first the removed keys go, then the added ones come. Epoch is the last removal in it or
// before it; a manager acknowledges it once the whole message is applied.
type Delta struct {
	Epoch   uint64
	Removed []GoneKey
	Added   []AddedKey
	Extents []block.Extent
}

// DeltaSize returns the payload bytes of a delta of so many keys and extents, so that a sender can stop below MaxFrame.
func DeltaSize(removed, added, extents int) int {
	return deltaHead + removed*GoneSize + added*AddedSize + extents*ExtentSize
}

// AppendDelta appends the payload: epoch, counts, then the arrays.
func AppendDelta(dst []byte, d *Delta) []byte {
	dst = le.AppendUint64(dst, d.Epoch)
	dst = le.AppendUint32(dst, uint32(len(d.Removed)))
	dst = le.AppendUint32(dst, uint32(len(d.Added)))
	dst = le.AppendUint32(dst, uint32(len(d.Extents)))
	dst = le.AppendUint32(dst, 0)
	for i := range d.Removed {
		g := &d.Removed[i]
		dst = appendRef(appendKey(dst, &g.Key, g.Group, g.Position), g.Ref)
	}
	for i := range d.Added {
		a := &d.Added[i]
		dst = appendRef(appendKey(dst, &a.Key, a.Group, a.Position), a.Ref)
		dst = le.AppendUint32(dst, uint32(a.Extents))
		dst = le.AppendUint32(dst, 0)
	}
	return appendExtents(dst, d.Extents)
}

// Parse reads the payload into d, whose slices are reused.
func (d *Delta) Parse(b []byte) error {
	d.Removed, d.Added, d.Extents = d.Removed[:0], d.Added[:0], d.Extents[:0]
	if len(b) < deltaHead {
		return malformed(TDelta, b)
	}
	d.Epoch = le.Uint64(b)
	removed, added, extents := int(le.Uint32(b[8:])), int(le.Uint32(b[12:])), int(le.Uint32(b[16:]))
	if max(removed, added, extents) > MaxFrame || le.Uint32(b[20:]) != 0 || len(b) != DeltaSize(removed, added, extents) {
		return malformed(TDelta, b)
	}
	b = b[deltaHead:]
	for ; removed > 0; removed-- {
		k, g, p, ok := parseKey(b)
		if !ok {
			return malformed(TDelta, b)
		}
		d.Removed = append(d.Removed, GoneKey{block.Offer{Key: k, Group: g, Position: p}, parseRef(b[KeySize:])})
		b = b[GoneSize:]
	}
	sum := 0
	for ; added > 0; added-- {
		k, g, p, ok := parseKey(b)
		n := int(le.Uint32(b[KeySize+RefSize:]))
		if !ok || n == 0 || n > extents || le.Uint32(b[KeySize+RefSize+4:]) != 0 {
			return malformed(TDelta, b)
		}
		sum += n
		d.Added = append(d.Added, AddedKey{block.Offer{Key: k, Group: g, Position: p}, parseRef(b[KeySize:]), n})
		b = b[AddedSize:]
	}
	var ok bool
	if d.Extents, ok = parseExtents(b, extents, d.Extents); !ok || sum != extents {
		return malformed(TDelta, b)
	}
	return nil
}

// Reserve asks for room for an ordered batch of keys.
type Reserve struct {
	Job     uint64
	Request uint64
	Keys    []block.Offer
}

// MaxOffers is how many keys one reserve may hold.
const MaxOffers = (MaxFrame - reserveHead) / KeySize

// AppendReserve appends the payload.
func AppendReserve(dst []byte, r *Reserve) []byte {
	dst = le.AppendUint64(dst, r.Job)
	dst = le.AppendUint64(dst, r.Request)
	dst = le.AppendUint32(dst, uint32(len(r.Keys)))
	dst = le.AppendUint32(dst, 0)
	for i := range r.Keys {
		dst = appendKey(dst, &r.Keys[i].Key, r.Keys[i].Group, r.Keys[i].Position)
	}
	return dst
}

// Parse reads the payload into r, whose slice is reused.
func (r *Reserve) Parse(b []byte) error {
	r.Keys = r.Keys[:0]
	if len(b) < reserveHead {
		return malformed(TReserve, b)
	}
	n := int(le.Uint32(b[16:]))
	if n > MaxOffers || le.Uint32(b[20:]) != 0 || len(b) != reserveHead+n*KeySize {
		return malformed(TReserve, b)
	}
	r.Job, r.Request = le.Uint64(b), le.Uint64(b[8:])
	for b = b[reserveHead:]; len(b) > 0; b = b[KeySize:] {
		k, g, p, ok := parseKey(b)
		if !ok {
			return malformed(TReserve, b)
		}
		r.Keys = append(r.Keys, block.Offer{Key: k, Group: g, Position: p})
	}
	return nil
}

// Slot answers one offered key. Outcome has the values of the engine package: 0 accepted, 1 present, 2 in flight, 3 refused.
type Slot struct {
	Outcome uint8
	Ref     block.Ref
	Extents int
}

// Reserved answers a Reserve. The removed keys come first in time: they are gone when it is read.
type Reserved struct {
	Job     uint64
	Reason  uint8 // why the tail was refused; 0 when nothing was
	Slots   []Slot
	Removed []GoneKey
	Extents []block.Extent
}

// AppendReserved appends the payload.
func AppendReserved(dst []byte, r *Reserved) []byte {
	dst = le.AppendUint64(dst, r.Job)
	dst = le.AppendUint32(dst, uint32(len(r.Slots)))
	dst = le.AppendUint32(dst, uint32(len(r.Removed)))
	dst = le.AppendUint32(dst, uint32(len(r.Extents)))
	dst = append(dst, r.Reason, 0, 0, 0)
	for i := range r.Slots {
		s := &r.Slots[i]
		dst = append(dst, s.Outcome, 0, 0, 0)
		dst = le.AppendUint32(dst, uint32(s.Extents))
		dst = appendRef(dst, s.Ref)
	}
	for i := range r.Removed {
		g := &r.Removed[i]
		dst = appendRef(appendKey(dst, &g.Key, g.Group, g.Position), g.Ref)
	}
	return appendExtents(dst, r.Extents)
}

// Parse reads the payload into r, whose slices are reused.
func (r *Reserved) Parse(b []byte) error {
	r.Slots, r.Removed, r.Extents = r.Slots[:0], r.Removed[:0], r.Extents[:0]
	if len(b) < reservedHead {
		return malformed(TReserved, b)
	}
	slots, removed, extents := int(le.Uint32(b[8:])), int(le.Uint32(b[12:])), int(le.Uint32(b[16:]))
	if max(slots, removed, extents) > MaxFrame || b[21]|b[22]|b[23] != 0 ||
		len(b) != reservedHead+slots*SlotSize+removed*GoneSize+extents*ExtentSize {
		return malformed(TReserved, b)
	}
	r.Job, r.Reason = le.Uint64(b), b[20]
	b = b[reservedHead:]
	sum := 0
	for ; slots > 0; slots-- {
		s := Slot{Outcome: b[0], Extents: int(le.Uint32(b[4:])), Ref: parseRef(b[8:])}
		if s.Outcome > 3 || b[1]|b[2]|b[3] != 0 || s.Extents > extents || (s.Outcome == 0) != (s.Extents > 0) {
			return malformed(TReserved, b)
		}
		sum += s.Extents
		r.Slots = append(r.Slots, s)
		b = b[SlotSize:]
	}
	for ; removed > 0; removed-- {
		k, g, p, ok := parseKey(b)
		if !ok {
			return malformed(TReserved, b)
		}
		r.Removed = append(r.Removed, GoneKey{block.Offer{Key: k, Group: g, Position: p}, parseRef(b[KeySize:])})
		b = b[GoneSize:]
	}
	var ok bool
	if r.Extents, ok = parseExtents(b, extents, r.Extents); !ok || sum != extents {
		return malformed(TReserved, b)
	}
	return nil
}

// Refs names entries for a pin (Job is its number), a touch or a promotion (Job is 0).
type Refs struct {
	Job     uint64
	Request uint64
	Refs    []block.Ref
}

// MaxRefs is how many entries one message may name.
const MaxRefs = (MaxFrame - refsHead) / RefSize

// AppendRefs appends the payload.
func AppendRefs(dst []byte, r *Refs) []byte {
	dst = le.AppendUint64(dst, r.Job)
	dst = le.AppendUint64(dst, r.Request)
	dst = le.AppendUint32(dst, uint32(len(r.Refs)))
	dst = le.AppendUint32(dst, 0)
	for _, ref := range r.Refs {
		dst = appendRef(dst, ref)
	}
	return dst
}

// Parse reads the payload into r, whose slice is reused.
func (r *Refs) Parse(b []byte) error {
	r.Refs = r.Refs[:0]
	if len(b) < refsHead {
		return malformed(TPin, b)
	}
	n := int(le.Uint32(b[16:]))
	if n > MaxRefs || le.Uint32(b[20:]) != 0 || len(b) != refsHead+n*RefSize {
		return malformed(TPin, b)
	}
	r.Job, r.Request = le.Uint64(b), le.Uint64(b[8:])
	for b = b[refsHead:]; len(b) > 0; b = b[RefSize:] {
		r.Refs = append(r.Refs, parseRef(b))
	}
	return nil
}

// AppendJob appends the payload of the messages that name a job alone: unpin, commit, abort, ended, ended-ack.
func AppendJob(dst []byte, job uint64) []byte { return le.AppendUint64(dst, job) }

// ParseJob reads it.
func ParseJob(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, malformed(TCommit, b)
	}
	return le.Uint64(b), nil
}

// AppendStep appends the payload of a step: the epoch that was applied.
func AppendStep(dst []byte, epoch uint64) []byte { return le.AppendUint64(dst, epoch) }

// ParseStep reads it.
func ParseStep(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, malformed(TStep, b)
	}
	return le.Uint64(b), nil
}

// Begin opens a request. ClockMS is the request's own time, for daemons that run on a trace's clock. Name is what the
// engine calls the request; it is for people, at most MaxRequestName bytes.
type Begin struct {
	Request uint64
	ClockMS int64
	Name    string
}

// MaxRequestName is the longest request name in bytes; a longer one is cut by AppendBegin and refused by ParseBegin.
const MaxRequestName = 256

// AppendBegin appends the payload.
func AppendBegin(dst []byte, r *Begin) []byte {
	dst = le.AppendUint64(dst, r.Request)
	dst = le.AppendUint64(dst, uint64(r.ClockMS))
	return append(dst, r.Name[:min(len(r.Name), MaxRequestName)]...)
}

// ParseBegin reads it.
func ParseBegin(b []byte) (Begin, error) {
	if len(b) < 16 || len(b) > 16+MaxRequestName {
		return Begin{}, malformed(TBegin, b)
	}
	return Begin{le.Uint64(b), int64(le.Uint64(b[8:])), string(b[16:])}, nil
}

// Hint says what an engine knows of a session's future.
type Hint uint8

const (
	NoHint Hint = iota
	Active      // more requests of this conversation are near
	Idle        // its next request is some time away
	Closed      // there will be none
	lastHint
)

// Finish ends a request.
type Finish struct {
	Request      uint64
	PromptTokens uint32
	HitTokens    uint32
	Hint         Hint
}

// AppendFinish appends the payload.
func AppendFinish(dst []byte, f *Finish) []byte {
	dst = le.AppendUint64(dst, f.Request)
	dst = le.AppendUint32(dst, f.PromptTokens)
	dst = le.AppendUint32(dst, f.HitTokens)
	return append(dst, byte(f.Hint), 0, 0, 0, 0, 0, 0, 0)
}

// ParseFinish reads it.
func ParseFinish(b []byte) (Finish, error) {
	if len(b) != 24 || b[16] >= byte(lastHint) || le.Uint64(b[16:])>>8 != 0 {
		return Finish{}, malformed(TFinish, b)
	}
	return Finish{le.Uint64(b), le.Uint32(b[8:]), le.Uint32(b[12:]), Hint(b[16])}, nil
}
