package engine

import (
	"time"

	"kvlift/block"
	"kvlift/meta"
	"kvlift/policy"
	"kvlift/restore"
)

// Hint says what an engine knows of a conversation when one of its requests ends. Any other value means Active.
type Hint uint8

// The values of a hint, as they are on the wire.
const (
	NoHint Hint = iota // it says nothing
	Active             // the next request is near: as without a hint
	Idle               // the next one is some time away: what it used counts as used IdleAge ago
	Closed             // there will be none: what it used goes before everything else of its class
)

// IdleAge is by how much an idle conversation's entries are older than their use. Half of all pauses for a person's answer
// are longer than three times that, six of seven pauses for a tool's are shorter.
const IdleAge = time.Minute

// closedTicks is the first stamp that is not one of a closed conversation's: those count up from 1, below every time that a
// clock shows.
const closedTicks = 1024 << tickShift

// nextTick returns a stamp above all earlier ones. Its high bits are the time, so that an age can be read from it. It is
// even: those of another lane are odd, so that no two requests share one.
func (e *Engine) nextTick() uint64 {
	e.tick = max((e.tick|1)+1, uint64(max(e.now(), 0))<<tickShift)
	return e.tick
}

// tickIn returns the stamp of what is let go in a lane.
func (e *Engine) tickIn(lane policy.Lane) uint64 {
	switch lane {
	case policy.Aged:
		e.agedTick = max(e.agedTick+2, uint64(max(e.now()-IdleAge.Milliseconds(), 0))<<tickShift) | 1
		return e.agedTick
	case policy.Closed:
		e.closedTick = (e.closedTick + 2) | 1
		return e.closedTick
	}
	return e.nextTick()
}

// older merges the lanes of an eviction order: it goes by the stamps, as the next daemon's sorting will.
func (e *Engine) older(a, b uint32) bool { return e.table.Tick(a) < e.table.Tick(b) }

// letGoBy gives back what a finished request held, as its hint says. What somebody else uses as well is let go as ever: an
// idle or closed conversation says nothing of the others that share its head.
func (e *Engine) letGoBy(h Hint, refs []block.Ref, class map[block.Ref]restore.Class) {
	lane := policy.Recent
	switch h {
	case Idle:
		lane = policy.Aged
	case Closed:
		lane = policy.Closed
	}
	if lane != policy.Recent {
		var alone []block.Ref
		refs, alone = e.splitShared(refs)
		e.letGoTo(alone, class, lane)
	}
	e.letGo(refs, class)
}

// splitShared parts a request's entries into those that others use as well and those that it alone uses. Others use an
// entry when another request has taken or touched it while this one held it, or holds it still (slotShared), or when a
// stored chunk continues it that is none of this request's: another conversation's, or a younger request's of the same
// one. They use everything before it, too, since a chunk is worth nothing without those before it; the positions say which
// these are. With a position that nobody has said, one shared entry makes all of them shared.
func (e *Engine) splitShared(refs []block.Ref) (shared, alone []block.Ref) {
	mine := make(map[block.Ref]uint16, len(refs)) // how many of the request's own entries continue it
	for _, ref := range refs {
		if e.alive(ref) {
			mine[ref] = 0
		}
	}
	for ref := range mine {
		if p := e.table.Parent(ref.Entry); e.alive(p) {
			if n, ok := mine[p]; ok {
				mine[p] = n + 1
			}
		}
	}
	upTo, any, unknown := uint32(0), false, false
	for ref, own := range mine {
		_, _, pos, _ := e.table.Place(ref.Entry)
		unknown = unknown || pos == 0
		if s := &e.slots[ref.Entry]; s.flags&slotShared != 0 || s.children > own {
			upTo, any = max(upTo, pos), true
		}
	}
	for _, ref := range refs {
		if _, ok := mine[ref]; ok && any {
			if _, _, pos, _ := e.table.Place(ref.Entry); unknown || pos <= upTo {
				shared = append(shared, ref)
				continue
			}
		}
		alone = append(alone, ref)
	}
	return shared, alone
}

// noteShared marks an entry that a request is about to take or touch when another one holds it. The stamp tells: whoever
// took it last has left its own. A request that was touched since has another stamp than its earlier entries and takes
// itself for another when it meets them; that errs on the side of keeping.
func (e *Engine) noteShared(id uint32, tick uint64) {
	if s := &e.slots[id]; s.holds > 0 && s.state == meta.Ready && e.table.Tick(id) != tick {
		s.flags |= slotShared
	}
}
