package engine

import (
	"kvlift/block"
	"kvlift/meta"
	"kvlift/restore"
)

// evictNow takes a victim inside the reply to the only session that could know it: old FREE, then new RESERVED, then the
// reply (R17, R18). When the victim has exactly the pages that are wanted, they go to the new key as they are: it returns
// true, and they stand at the end of out.Extents.
func (e *Engine) evictNow(s *Session, id, want uint32, out *Reply) (handedOver bool) {
	ref := block.Ref{Entry: id, Gen: e.slots[id].gen}
	n := e.slots[id].ns
	known := len(e.spaces[n].sessions) > 0 // by the asker; the others can promise nothing
	pages := e.leaveReady(id, true)
	first := len(out.Extents)
	if pages == want {
		out.Extents = e.table.Extents(id, out.Extents)
	}
	if got := len(out.Extents) - first; got > 0 && got <= meta.InlineExtents {
		e.freeRecord(id, got)
		handedOver = true
	} else {
		out.Extents = out.Extents[:first]
		e.free(id)
	}
	e.counters.Evicted[ByStore]++
	if known && n == s.ns.index {
		out.Removed = append(out.Removed, Gone{Key: e.key, Ref: ref})
	}
	e.tell(e.spaces[n], s, ref)
	return handedOver
}

// leaveReady takes a READY record out of index, order and sums and leaves its key in e.key. It keeps its
// pages, whose number is returned.
func (e *Engine) leaveReady(id uint32, victim bool) uint32 {
	n, g, _, pg := e.table.Place(id)
	e.unindex(id, n)
	if sl := &e.slots[id]; sl.holds == 0 {
		e.idle[sl.class] -= uint64(pg)
		e.delist(id)
		if victim {
			e.orderOf(id).Evict(id)
		} else {
			e.orderOf(id).Drop(id)
		}
		sl.class = restore.Needed
	} else {
		e.order.Drop(id)
	}
	e.spaces[n].groups[g].keys--
	e.ready--
	e.used -= pg
	return pg
}

// coldest is what should go first: of no use, then optional, then the coldest of the rest.
func (e *Engine) coldest(usable func(uint32) bool, maxSkip int) (uint32, bool) {
	for c := restore.Useless; c > restore.Needed; c-- {
		if id, ok := e.spare[c-1].Coldest(usable, maxSkip); ok {
			return id, true
		}
	}
	return e.order.Coldest(usable, maxSkip)
}

// walk visits idle entries in the order in which they would go.
func (e *Engine) walk(f func(id uint32) bool) {
	on := true
	for c := restore.Useless; c > restore.Needed && on; c-- {
		e.spare[c-1].Walk(func(id uint32) bool { on = f(id); return on })
	}
	if on {
		e.order.Walk(f)
	}
}

// announce starts a removal that sessions have to acknowledge (R15). The bytes stay whole until it ends.
func (e *Engine) announce(id uint32, to meta.State) {
	ns := e.spaces[e.slots[id].ns]
	ref := block.Ref{Entry: id, Gen: e.slots[id].gen}
	pages := uint64(e.leaveReady(id, to == meta.Evicting))
	e.pending += pages
	if ns.account != nil {
		ns.account.pending += pages
	}
	e.table.SetState(id, to)
	e.slots[id].state = to
	e.epoch++
	ns.evicting = append(ns.evicting, eviction{id, e.epoch})
	for _, s := range ns.sessions {
		if s.sink != nil {
			s.sink.Removed(e.epoch, ref, &e.key)
			s.told = e.epoch
		}
	}
	select {
	case e.opts.Stalled <- struct{}{}: // a nil channel takes nothing
	default:
	}
}

// settle ends the removals that nobody waits for any more, orphans of an earlier daemon, and private generations whose
// session has ended.
func (e *Engine) settle() {
	if e.unknown > 0 {
		return
	}
	for _, id := range e.orphans {
		e.dropReserved(id)
		e.counters.Aborted++
	}
	e.orphans = nil
	for i, ns := range e.spaces {
		if ns == nil {
			continue
		}
		abandoned := ns.Private && len(ns.sessions) == 0
		if abandoned { // nobody may ever join it: its keys are of no use
			e.clearNamespace(ns, nil)
		}
		e.settleNamespace(ns)
		if abandoned && ns.keys == 0 {
			e.table.DropNamespace(i)
			e.closeAccount(ns)
			e.spaces[i] = nil
		}
	}
}

func (e *Engine) settleNamespace(ns *namespace) {
	if e.unknown > 0 || ns == nil || len(ns.evicting) == 0 {
		return
	}
	upTo := e.epoch
	for _, s := range ns.sessions {
		upTo = min(upTo, e.heard(s))
	}
	e.release(ns, upTo)
}

// settleForAsker counts the asker's own missing acknowledgements as given: what it is about to read stands behind the
// removals in its stream.
func (e *Engine) settleForAsker(s *Session) {
	if e.unknown > 0 || s.sink == nil || len(s.ns.evicting) == 0 {
		return
	}
	upTo := e.epoch
	for _, o := range s.ns.sessions {
		if o != s {
			upTo = min(upTo, e.heard(o))
		}
	}
	e.release(s.ns, upTo)
}

func (e *Engine) release(ns *namespace, upTo uint64) {
	n := 0
	for n < len(ns.evicting) && ns.evicting[n].epoch <= upTo {
		id := ns.evicting[n].entry
		if e.slots[id].pins > 0 {
			e.slots[id].flags |= slotAcked
		} else {
			e.finishRemoval(id)
		}
		n++
	}
	ns.evicting = ns.evicting[:copy(ns.evicting, ns.evicting[n:])]
}

// finishRemoval frees a record whose removal everybody acknowledged and nobody copies.
func (e *Engine) finishRemoval(id uint32) {
	_, _, _, pg := e.table.Place(id)
	e.pending -= uint64(pg)
	if a := e.spaces[e.slots[id].ns].account; a != nil {
		a.pending -= uint64(pg)
	}
	e.free(id)
}

// clearNamespace removes everything that is stored in a namespace. by is the session that asked, which has forgotten
// its keys already; nil when the namespace has no session left.
func (e *Engine) clearNamespace(ns *namespace, by *Session) {
	reason := ByReset
	if by == nil {
		reason = ByEnd
	}
	for i := range e.slots {
		id := uint32(i)
		if e.slots[id].ns != ns.index {
			continue
		}
		switch e.slots[id].state {
		case meta.Ready:
			e.announce(id, meta.Removed)
			e.counters.Evicted[reason]++
		case meta.Evicting: // a start may not take it for READY again
			e.table.SetState(id, meta.Removed)
			e.slots[id].state = meta.Removed
		}
	}
}

// evictAhead announces removals while several sessions share keys, so that the next store finds free pages: at least the
// share of Options.EvictAhead, and what this batch did not get. Records count like pages: where payloads are small, they run
// out first.
func (e *Engine) evictAhead(s *Session, offers []block.Offer, out *Reply) {
	if e.unknown > 0 || e.draining {
		return
	}
	want := uint64(float64(e.pages.Len()) * e.opts.EvictAhead)
	wantRecords := int(float64(len(e.slots)) * e.opts.EvictAhead)
	refused, refusedRecords := uint64(0), 0
	for i, sl := range out.Slots {
		if sl.Outcome == Refused {
			for _, o := range offers[i:] {
				refused += uint64(s.ns.groups[o.Group].pages)
			}
			refusedRecords = len(offers) - i
			break
		}
	}
	if out.Reason == OverQuota { // others are not to make room for it
		e.evictOwnAhead(s, refused)
	} else {
		e.evictOwnAhead(s, 0)
		want += refused
		wantRecords += refusedRecords
	}
	records := len(e.freeEntries)
	for _, ns := range e.spaces {
		if ns != nil {
			records += len(ns.evicting)
		}
	}
	// Every pass looks for victims that a reply could not take; the others are taken when they are needed.
	for uint64(e.pages.Free())+e.pending < want || records < wantRecords {
		id, ok := e.coldest(e.oldEnough, coldestLimit)
		if !ok || e.inline(s, id) {
			return
		}
		e.announce(id, meta.Evicting)
		records++
		e.counters.Evicted[Ahead]++
	}
}
