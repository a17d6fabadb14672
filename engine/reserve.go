package engine

import (
	"fmt"
	"slices"

	"kvlift/block"
	"kvlift/meta"
	"kvlift/restore"
)

// Outcome of one offered key.
type Outcome uint8

const (
	Accepted Outcome = iota // reserved for the caller: write it, then commit
	Present                 // stored already
	InFlight                // another job is storing it
	Refused                 // not stored; the reply's reason says why, and everything behind it in the batch is refused too
)

// Reason why the rest of a batch was refused.
type Reason uint8

const (
	Fits      Reason = iota // nothing was refused
	NoRoom                  // everything that could go is held by running requests or pinned
	TooYoung                // what could go was used within the idle guard
	Waiting                 // pages are on their way, but other engines have not acknowledged yet
	NoRecords               // no record or overflow record is free
	TooBig                  // the payload is larger than the arena
	Draining                // the daemon is shutting down
	OverQuota               // the namespace is at its quota, and nothing of its own may go
	lastReason
)

func (r Reason) String() string {
	if r >= lastReason {
		return fmt.Sprintf("reason %d", uint8(r))
	}
	return [...]string{"fits", "no-room", "too-young", "waiting", "no-records", "too-big", "draining", "quota"}[r]
}

// Slot is the answer for one offered key.
type Slot struct {
	Outcome Outcome
	Ref     block.Ref // Accepted and Present
	Extents int       // Accepted: how many of Reply.Extents, in order, are its own
}

// Reply answers a Reserve. The caller owns it and may hand it in again to save allocations.
type Reply struct {
	Reason  Reason
	Slots   []Slot         // one per offer
	Extents []block.Extent // of the accepted keys, one after the other
	Removed []Gone         // keys whose pages were reused at once: the asker alone could know them (R17)
}

// Gone is a key that is no longer stored.
type Gone struct {
	Key block.Key
	Ref block.Ref
}

// Reserve gives records and pages to the longest head of the batch that fits after eviction; the rest is refused and
// counted. The answer depends on the daemon alone: no engine is ever waited for (L1). Keys that are stored already are
// held for the request like those it stores. ref. design section 6.
func (e *Engine) Reserve(s *Session, id, req uint64, offers []block.Offer, out *Reply) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	out.Reason, out.Slots, out.Extents, out.Removed = Fits, out.Slots[:0], out.Extents[:0], out.Removed[:0]
	r, err := e.request(s, req)
	if err != nil {
		return err
	}
	for i := range offers {
		if int(offers[i].Group) >= len(s.ns.groups) || offers[i].Key.Len == 0 {
			return fmt.Errorf("%w: group %d of %d", ErrGeometry, offers[i].Group, len(s.ns.groups))
		}
	}
	j, err := s.newJob(id, r, len(offers))
	if err != nil {
		return err
	}
	j.store = true
	j.refs = make([]block.Ref, 0, len(offers))
	r.entries = slices.Grow(r.entries, len(offers))
	r.jobs++
	e.hashes = e.hashes[:0]
	for i := range offers {
		h := e.index.Hash(s.ns.index, &offers[i].Key)
		e.hashes = append(e.hashes, h)
		e.warmed += e.index.Touch(h)
	}
	e.shrink(s, out)
	for i := range offers {
		out.Slots = append(out.Slots, e.offer(s, r, j, &offers[i], e.hashes[i], out))
	}
	if len(j.refs) == 0 {
		delete(s.jobs, id)
		r.jobs--
	}
	if out.Reason != Fits {
		e.counters.Refused[out.Reason]++
		if out.Reason == OverQuota {
			s.ns.account.refused++
		}
	}
	e.evictAhead(s, offers, out)
	return nil
}

func (e *Engine) offer(s *Session, r *request, j *job, o *block.Offer, h uint64, out *Reply) Slot {
	ns := s.ns
	if id, ok := e.index.Find(h, ns.index, &o.Key); ok {
		sl := &e.slots[id]
		ref := block.Ref{Entry: id, Gen: sl.gen}
		if sl.state == meta.Reserved || sl.holds >= 1<<15 {
			return Slot{Outcome: InFlight}
		}
		e.take(r, ns, id, o.Group)
		return Slot{Outcome: Present, Ref: ref}
	}
	g, first, handedOver := &ns.groups[o.Group], len(out.Extents), false
	if out.Reason == Fits {
		out.Reason, handedOver = e.makeRoom(s, r, h, g, out)
	}
	if out.Reason != Fits {
		e.counters.RefusedKeys++
		return Slot{Outcome: Refused}
	}
	if !handedOver {
		// Pages are there; only an arena so crumbled that the overflow table cannot describe the key is left to refuse.
		limit := min(meta.InlineExtents+len(e.freeOverflow)*meta.OverflowSlots, max(1, MaxExtents-len(out.Extents)))
		var ok bool
		if out.Extents, ok = e.pages.Alloc(out.Extents, g.pages, limit); !ok {
			out.Reason = NoRecords
			e.counters.RefusedKeys++
			return Slot{Outcome: Refused}
		}
	}
	xs := out.Extents[first:]
	id := e.freeEntries[len(e.freeEntries)-1]
	e.freeEntries = e.freeEntries[:len(e.freeEntries)-1]
	over := e.freeOverflow[len(e.freeOverflow)-meta.OverflowNeeded(len(xs)):]
	e.freeOverflow = e.freeOverflow[:len(e.freeOverflow)-len(over)]
	parent := block.Ref{Entry: block.NoEntry}
	if r.tails != nil {
		parent = r.tails[o.Group]
	}
	gen := e.table.Reserve(id, &meta.Entry{Tick: r.tick, Namespace: ns.index, Group: o.Group, Position: o.Position, Parent: parent,
		Key: o.Key, Payload: g.payload, Pages: g.pages, Extents: xs}, over)
	e.slots[id] = slot{gen: gen, ns: ns.index, state: meta.Reserved, holds: 1}
	ns.keys++
	if ns.account != nil {
		ns.account.used += uint64(g.pages)
	}
	e.countChild(parent)
	e.index.Put(h, id)
	e.order.Add(id, h, g.pages)
	ref := block.Ref{Entry: id, Gen: gen}
	r.entries = append(r.entries, ref)
	s.open += 2
	r.follow(ns, o.Group, o.Position, ref)
	j.refs = append(j.refs, ref)
	return Slot{Outcome: Accepted, Ref: ref, Extents: len(xs)}
}

// makeRoom sees that pages and a record are free for one more key of the group, taking victims for it. Nothing is taken
// when it would not be enough. handedOver tells that a victim's own pages stand at the end of out.Extents for it.
func (e *Engine) makeRoom(s *Session, q *request, h uint64, g *groupState, out *Reply) (r Reason, handedOver bool) {
	if e.draining {
		return Draining, false
	}
	if g.pages > e.pages.Len() {
		return TooBig, false
	}
	e.order.Offer(h, g.pages)
	if e.atQuota(s, g.pages) {
		if r, handedOver = e.makeOwnRoom(s, q, g.pages, out); r != Fits || handedOver {
			return r, handedOver
		}
	}
	if e.pages.Free() >= g.pages && len(e.freeEntries) > 0 {
		return Fits, false
	}
	if e.unknown > 0 {
		return Waiting, false // a session from before our start might promise anything (R22)
	}
	e.settleForAsker(s)
	e.asker = s
	for first := true; e.pages.Free() < g.pages || len(e.freeEntries) == 0; first = false {
		id, ok := e.coldest(e.canGo, coldestLimit)
		if (!ok || e.slots[id].class == restore.Needed) && e.trim(q) { // first what the request itself has overtaken
			id, ok = e.coldest(e.canGo, coldestLimit)
		}
		if !ok {
			return e.why(s), false
		}
		if first {
			if _, _, _, n := e.table.Place(id); e.pages.Free()+n < g.pages {
				if r := e.enough(s, g.pages); r != Fits {
					return r, false
				}
			}
		}
		want := g.pages
		if !first || e.pages.Free() >= g.pages {
			want = 0 // several victims, or a record alone, is what is missing
		}
		if e.evictNow(s, id, want, out) {
			return Fits, true
		}
	}
	return Fits, false
}

// coldestLimit bounds how many entries of other engines are looked at for one victim.
const coldestLimit = 4096

// inline tells whether nobody but the asker could promise the entry, so that a reply to the asker may reuse its page.
func (e *Engine) inline(s *Session, id uint32) bool {
	for _, o := range e.spaces[e.slots[id].ns].sessions {
		if o != s && !o.fenced {
			return false
		}
	}
	return true
}

// enough looks ahead whether the victims that may go now hold pages enough.
func (e *Engine) enough(s *Session, need uint32) Reason {
	have := uint64(e.pages.Free())
	if have+e.idle[0]+e.idle[1]+e.idle[2] < uint64(need) {
		return e.why(s)
	}
	found, looked := false, 0
	e.walk(func(id uint32) bool {
		if !e.inline(s, id) || !e.oldEnough(id) { // behind young ones of a lower class may stand older ones of a higher
			looked++
			return looked < coldestLimit
		}
		_, _, _, n := e.table.Place(id)
		have += uint64(n)
		found = true
		return have < uint64(need)
	})
	if !found || have < uint64(need) {
		return e.why(s)
	}
	return Fits
}

// why names the reason for which nothing more can go.
func (e *Engine) why(s *Session) Reason {
	if e.pending > 0 {
		return Waiting
	}
	id, ok := e.coldest(nil, 0)
	switch {
	case !ok && len(e.freeEntries) == 0:
		return NoRecords
	case !ok:
		return NoRoom
	case !e.oldEnough(id):
		return TooYoung
	case !e.inline(s, id):
		return Waiting
	}
	return NoRoom
}
