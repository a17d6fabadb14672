package policy

// Lane says as of when an entry is released. Every list is kept as one lane for each, so that what counts as used at some
// earlier time is put in its place without a search: within a lane, what is released later is hotter.
type Lane uint8

// The lanes of a list.
const (
	Recent Lane = iota // used now
	Aged               // counts as used some time ago, always as long
	Closed             // counts as used before everything that is in another lane
	lanes
)

// setOlder keeps the function that merges lanes; see Order.Merge.
func (l *links) setOlder(older func(a, b uint32) bool) { l.older = older }

// empty reports whether no lane of the list holds an element.
func (l *links) empty(end uint32) bool {
	return l.next[end] == end && l.plain(end)
}

// plain reports whether the list is nothing but its first lane: always so without hints.
func (l *links) plain(end uint32) bool {
	return l.next[end+uint32(Aged)] == end+uint32(Aged) && l.next[end+uint32(Closed)] == end+uint32(Closed)
}

// merged walks over the lanes of one list together, the coldest element first. The list must not change meanwhile.
type merged struct {
	l   *links
	end uint32
	at  [lanes]uint32
}

func (l *links) merge(end uint32) merged {
	m := merged{l: l, end: end}
	for i := range m.at {
		m.at[i] = l.next[end+uint32(i)]
	}
	return m
}

// next returns the coldest element that was not returned yet, false when there is none.
func (m *merged) next() (id uint32, ok bool) {
	best := 0
	for i, at := range m.at {
		if at != m.end+uint32(i) && (!ok || m.l.older(at, id)) {
			best, id, ok = i, at, true
		}
	}
	if ok {
		m.at[best] = m.l.next[id]
	}
	return id, ok
}
