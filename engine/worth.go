package engine

import (
	"kvlift/block"
	"kvlift/meta"
	"kvlift/restore"
)

// worth says what the entries that a request holds are good for. nil means that all of them are needed: the usual answer
// for a dense model, found without looking further.
func (e *Engine) worth(r *request, running bool) map[block.Ref]restore.Class {
	ns := r.session.ns
	if ns == nil || e.unbroken(r, ns) {
		return nil
	}
	refs, items := make([]block.Ref, 0, len(r.entries)), make([]restore.Item, 0, len(r.entries))
	type place struct {
		group    uint16
		position uint32
	}
	seen := make(map[place]block.Ref, len(r.entries))
	for _, ref := range r.entries {
		if !e.alive(ref) || e.slots[ref.Entry].state != meta.Ready || e.slots[ref.Entry].ns != ns.index {
			continue
		}
		_, g, pos, _ := e.table.Place(ref.Entry)
		other, twice := seen[place{g, pos}]
		if twice && other == ref {
			continue
		}
		if twice || pos == 0 {
			return nil // not one chain, or one whose positions nobody has said
		}
		seen[place{g, pos}] = ref
		refs = append(refs, ref)
		items = append(items, restore.Item{Group: g, Position: pos, Fork: e.slots[ref.Entry].flags&slotForked != 0,
			Used: e.table.Frequent(ref.Entry), Gap: e.behindGap(ns, ref, g, pos)})
	}
	groups := make([]restore.Group, len(ns.Groups))
	for g, v := range ns.Groups {
		groups[g] = restore.Group{Kind: v.Kind, Chunk: v.ChunkTokens, Window: v.Window, Pages: ns.groups[g].pages}
	}
	class := make([]restore.Class, len(items))
	restore.Classify(groups, items, class, running)
	out := make(map[block.Ref]restore.Class, len(items))
	for i, ref := range refs {
		out[ref] = class[i]
	}
	return out
}

// unbroken tells whether a request of a dense model holds one chain without a gap, in order.
func (e *Engine) unbroken(r *request, ns *namespace) bool {
	if len(ns.groups) != 1 || ns.Groups[0].Kind != meta.Full {
		return false
	}
	chunk, last := ns.Groups[0].ChunkTokens, uint32(0)
	for i, ref := range r.entries {
		if !e.alive(ref) || e.slots[ref.Entry].ns != ns.index {
			return false
		}
		_, g, pos, _ := e.table.Place(ref.Entry)
		if i > 0 && pos != last+chunk || i == 0 && pos != 0 && e.behindGap(ns, ref, g, pos) {
			return pos == 0 // positions that nobody has said tell nothing
		}
		last = pos
	}
	return true
}

// behindGap tells whether the chunk before this one is known to be missing.
func (e *Engine) behindGap(ns *namespace, ref block.Ref, g uint16, pos uint32) bool {
	chunk := ns.Groups[g].ChunkTokens
	if pos <= chunk {
		return false
	}
	p := e.table.Parent(ref.Entry)
	if p.Entry == block.NoEntry {
		return false
	}
	if !e.alive(p) {
		return true
	}
	_, _, at, _ := e.table.Place(p.Entry)
	return at+chunk != pos
}

// trim lets go of what a running request has overtaken itself: older states and windows than its deepest restore point
// needs. It tells whether there was something. It looks again only after something has changed: it is asked for each victim,
// and what it looks through is the whole chain.
func (e *Engine) trim(r *request) bool {
	if !r.session.ns.mixed || !r.news {
		return false
	}
	r.news = false
	class := e.worth(r, true)
	var spare []block.Ref
	keep := r.entries[:0]
	for _, ref := range r.entries {
		if s := &e.slots[ref.Entry]; class[ref] != restore.Needed && s.holds == 1 && s.pins == 0 {
			spare = append(spare, ref)
		} else {
			keep = append(keep, ref)
		}
	}
	r.entries = keep
	r.session.open -= len(spare)
	e.letGo(spare, class)
	return len(spare) > 0
}
