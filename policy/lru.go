package policy

// LRU evicts the entry released longest ago. With chains released from the tail to the head it is the leaf-first LRU of
// a radix tree. On agent traces no plain policy beats that by more than a thousandth once the tier holds a few chains.
type LRU struct {
	l   links
	end uint32
}

// NewLRU returns an LRU order of entries 0 to entries-1, all absent. It panics when entries is not in 0 to MaxEntries.
func NewLRU(entries int) *LRU {
	checkEntries(entries)
	return &LRU{l: makeLinks(entries, 1), end: uint32(entries)}
}

// Name is "lru".
func (o *LRU) Name() string { return "lru" }

// Offer does nothing: LRU does not learn from misses.
func (o *LRU) Offer(uint64, uint32) {}

// Add makes an absent entry resident and held. Its fingerprint and weight do not matter to LRU.
func (o *LRU) Add(id uint32, _ uint64, _ uint32) {
	want(o.l.next[id] == absent, "Add", id, "absent")
	o.l.next[id] = held
}

// Hold takes an idle entry out of the list.
func (o *LRU) Hold(id uint32) {
	want(o.l.idle(id), "Hold", id, "idle")
	o.l.remove(id, held)
}

// Use does nothing: to LRU every Release is a use.
func (o *LRU) Use(id uint32) { want(o.l.next[id] == held, "Use", id, "held") }

// Release makes a held entry the hottest.
func (o *LRU) Release(id uint32) { o.ReleaseTo(id, Recent) }

// ReleaseTo makes a held entry the hottest of a lane.
func (o *LRU) ReleaseTo(id uint32, lane Lane) {
	want(o.l.next[id] == held, "Release", id, "held")
	o.l.pushHot(o.end+uint32(lane), id)
}

// Merge says how the lanes are one order.
func (o *LRU) Merge(older func(a, b uint32) bool) { o.l.setOlder(older) }

// Coldest returns the usable idle entry released longest ago.
func (o *LRU) Coldest(usable func(id uint32) bool, maxSkip int) (uint32, bool) {
	return o.l.firstUsable(o.end, usable, maxSkip)
}

// Evict makes an idle entry absent.
func (o *LRU) Evict(id uint32) {
	want(o.l.idle(id), "Evict", id, "idle")
	o.l.remove(id, absent)
}

// Drop makes a held or idle entry absent.
func (o *LRU) Drop(id uint32) {
	want(o.l.next[id] != absent, "Drop", id, "resident")
	if o.l.idle(id) {
		o.l.remove(id, absent)
	} else {
		o.l.next[id] = absent
	}
}

// Frequent is always false.
func (o *LRU) Frequent(uint32) bool { return false }

// Walk calls f for the idle entries, the one released longest ago first, until f returns false.
func (o *LRU) Walk(f func(id uint32) bool) {
	m := o.l.merge(o.end)
	for i, ok := m.next(); ok && f(i); i, ok = m.next() {
	}
}
