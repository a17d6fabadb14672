package policy

import "fmt"

// Lists are many orders by recency over one set of entries: each idle entry stands in one of them, or in none. They rank
// the parts of a whole that an Order ranks, in two arrays that all of them share. Every method is O(1) but for the walks,
// whatever stands in the other lists. It is not safe for concurrent use.
type Lists struct {
	l     links
	first uint32
}

// NewLists returns empty lists, numbered from 0, of entries 0 to entries-1. older merges lanes, as in Order.Merge. It panics
// when there are too many of either.
func NewLists(entries, lists int, older func(a, b uint32) bool) *Lists {
	checkEntries(entries)
	if lists < 0 || lists*int(lanes) > maxEnds {
		panic(fmt.Sprintf("policy: %d lists: want 0 to %d", lists, maxEnds/int(lanes)))
	}
	o := &Lists{l: makeLinks(entries, lists), first: uint32(entries)}
	o.l.setOlder(older)
	return o
}

func (o *Lists) end(list int) uint32 { return o.first + uint32(list)*uint32(lanes) }

// Push makes an entry that stands in no list the hottest of a lane of this one.
func (o *Lists) Push(list int, id uint32, lane Lane) {
	want(o.l.next[id] == absent, "Push", id, "absent")
	o.l.pushHot(o.end(list)+uint32(lane), id)
}

// Remove takes an entry out of the list in which it stands.
func (o *Lists) Remove(id uint32) {
	want(o.l.idle(id), "Remove", id, "in a list")
	o.l.remove(id, absent)
}

// Coldest returns the coldest entry of a list for which usable is true, false when there is none. A nil usable means all.
// maxSkip, when it is not 0, bounds the unusable entries that it looks at.
func (o *Lists) Coldest(list int, usable func(id uint32) bool, maxSkip int) (uint32, bool) {
	return o.l.firstUsable(o.end(list), usable, maxSkip)
}

// Walk calls f for the entries of a list, the coldest first, until f returns false. It reports whether f never did. f must
// not change the lists.
func (o *Lists) Walk(list int, f func(id uint32) bool) bool {
	m := o.l.merge(o.end(list))
	for i, ok := m.next(); ok; i, ok = m.next() {
		if !f(i) {
			return false
		}
	}
	return true
}
