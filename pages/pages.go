// Package pages says which pages of an arena are free, and finds room for payloads.
//
// A Map is one bit a page (set when free) under a binary tree. Each node knows three numbers about the stretch of pages
// below it: how many are free at its start (prefix), how many at its end (suffix), and the longest free run anywhere in
// it. The lowest nodes cover two 64-page words and everything below them is read from the words themselves, so that the
// tree costs one 12-byte node for 64 pages: an arena of 512 GiB is 16 MiB of bits and 24 MiB of nodes.
//
//	                 root
//	       ┌──────────┴──────────┐
//	     node                  node          prefix, suffix, longest
//	  ┌────┴────┐           ┌────┴────┐
//	node      node        node      node     lowest level: 128 pages each
//	w0 w1     w2 w3       w4 w5     w6 w7    64 bits each
//
// The lowest run that holds n pages is found by one walk from the root: into the left child when it has such a run,
// else across the middle when the left suffix and the right prefix make one together, else into the right child. A
// change of a range fills the nodes inside it and recomputes the two at its edges, level by level up to the first level
// where nothing changed: for k pages k/64 stores and at most twice the height of the tree, not k walks.
package pages

import (
	"errors"
	"fmt"
	"math/bits"

	"kvlift/block"
)

// alignPages is the alignment that Alloc prefers for payloads of at least as many pages: 64 KiB, which is what a GPU's
// own page and a disk's large request want.
const alignPages = 16

// Map is the free map of an arena. It is not safe for concurrent use: its owner's mutex guards it. It holds no memory
// of its callers.
type Map struct {
	words []uint64 // a bit is set when the page is free; bits past size are clear; an even number of words
	nodes []node   // nodes[1] is the root, the children of i are 2i and 2i+1; nodes[0] is unused
	low   int      // index of the first node of the lowest level, a power of two
	size  uint32   // pages
	free  uint32   // pages free
}

// node sums up a stretch of pages. The zero node says that nothing is free, so stretches past the end need no set-up.
type node struct {
	prefix, suffix, longest uint32
}

// New makes the map of an arena of n pages, all free. It reserves 5/16 of a byte a page, and up to half a byte when n is
// not a power of two; nodes past the end are reserved but never touched.
func New(n uint32) *Map {
	words := (uint64(n) + 63) / 64
	pairs := max((words+1)/2, 1)
	low := 1 << bits.Len64(pairs-1)
	m := &Map{
		words: make([]uint64, 2*pairs),
		nodes: make([]node, 2*low),
		low:   low,
		size:  n,
	}
	if n > 0 {
		m.mark(block.Extent{Page: 0, Count: n}, true)
		m.free = n
	}
	return m
}

// Len is the number of pages in the arena, free or not.
func (m *Map) Len() uint32 { return m.size }

// Free is the number of pages that are free.
func (m *Map) Free() uint32 { return m.free }

// Longest is the number of pages in the longest free run: the most that Alloc gives as one extent.
func (m *Map) Longest() uint32 { return m.nodes[1].longest }

// Alloc takes n pages, appends their extents to dst and returns it. When fewer than n pages are free, or more than
// maxExtents extents would be needed (0 or less: any number will do), it takes nothing and returns dst and false.
//
// There is one extent when a free run is long enough: from the lowest such run, starting at a multiple of 16 pages if
// n is at least 16 and the run still holds it, else at the start of the run. Otherwise the longest runs are taken whole
// until what is left fits into one run, so no choice needs fewer extents. No two extents of one call are adjacent. It
// allocates memory only to grow dst.
func (m *Map) Alloc(dst []block.Extent, n uint32, maxExtents int) ([]block.Extent, bool) {
	if n == 0 {
		return dst, true
	}
	if n > m.free {
		return dst, false
	}
	limit := n
	if maxExtents > 0 && uint64(maxExtents) < uint64(n) {
		limit = uint32(maxExtents)
	}
	if uint64(limit)*uint64(m.Longest()) < uint64(n) {
		return dst, false // without trying: even if every run were as long as the longest
	}
	kept := len(dst)
	for left := n; left > 0; {
		if uint32(len(dst)-kept) == limit {
			for _, e := range dst[kept:] {
				m.mark(e, true)
			}
			m.free += n - left
			return dst[:kept], false
		}
		count := min(left, m.Longest())
		e := block.Extent{Page: m.fit(count), Count: count}
		m.mark(e, false)
		m.free -= count
		left -= count
		dst = append(dst, e)
	}
	return dst, true
}

// Release gives the pages of e back. It fails and changes nothing when e is empty or leaves the arena, or when one of
// its pages is free already. e need not be an extent that Alloc gave: any part will do.
func (m *Map) Release(e block.Extent) error {
	if err := m.check(e); err != nil {
		return fmt.Errorf("release pages %d+%d: %w", e.Page, e.Count, err)
	}
	if !m.all(e, false) {
		return fmt.Errorf("release pages %d+%d: not all taken", e.Page, e.Count)
	}
	m.mark(e, true)
	m.free += e.Count
	return nil
}

// Claim takes exactly the pages of e, as the adoption of an arena does after a crash. It fails and changes nothing when
// e is empty or leaves the arena, or when one of its pages is taken already.
func (m *Map) Claim(e block.Extent) error {
	if err := m.check(e); err != nil {
		return fmt.Errorf("claim pages %d+%d: %w", e.Page, e.Count, err)
	}
	if !m.all(e, true) {
		return fmt.Errorf("claim pages %d+%d: not all free", e.Page, e.Count)
	}
	m.mark(e, false)
	m.free -= e.Count
	return nil
}

func (m *Map) check(e block.Extent) error {
	if e.Count == 0 {
		return errors.New("empty")
	}
	if uint64(e.Page)+uint64(e.Count) > uint64(m.size) {
		return fmt.Errorf("outside the arena of %d pages", m.size)
	}
	return nil
}

// all reports whether every page of e, which lies in the arena, is free (or taken, when free is false).
func (m *Map) all(e block.Extent, free bool) bool {
	var want uint64
	if free {
		want = ^uint64(0)
	}
	words, head, tail := m.span(e)
	last := len(words) - 1
	if (words[0]^want)&head != 0 || (words[last]^want)&tail != 0 {
		return false
	}
	for i := 1; i < last; i++ {
		if words[i] != want {
			return false
		}
	}
	return true
}

// span is the words that hold the pages of e, with masks of those in the first and in the last word. When that is one
// word, both masks are the same.
func (m *Map) span(e block.Extent) (words []uint64, head, tail uint64) {
	last := e.Page + e.Count - 1
	words = m.words[e.Page>>6 : last>>6+1]
	head, tail = ^uint64(0)<<(e.Page&63), ^uint64(0)>>(63-last&63)
	if len(words) == 1 {
		head &= tail
		tail = head
	}
	return words, head, tail
}

// mark makes the pages of e free or taken and brings the tree up to date. The caller has seen to it that all of e lies in
// the arena and is in the opposite state, and counts free pages itself.
func (m *Map) mark(e block.Extent, free bool) {
	words, head, tail := m.span(e)
	words[0] ^= head
	if end := len(words) - 1; end > 0 {
		words[end] ^= tail
		fill(words[1:end], ^uint64(0), free)
	}
	// On each level only the first and the last node that e touches can hold other pages too. Those between are now
	// all free or all taken, which needs no look at what is below them.
	lo, hi := m.low+int(e.Page>>7), m.low+int((e.Page+e.Count-1)>>7)
	changed := m.set(lo, m.pair(lo))
	if hi > lo {
		changed = m.set(hi, m.pair(hi)) || changed
	}
	for span := uint32(128); ; span <<= 1 { // fits: below the root a node spans at most 2^31 pages
		if hi > lo+1 {
			fill(m.nodes[lo+1:hi], node{span, span, span}, free)
		}
		// With nodes in between the edges always change: the first one's suffix was all e's.
		if !changed || lo == 1 {
			return
		}
		lo, hi = lo>>1, hi>>1
		changed = m.set(lo, join(m.nodes[2*lo], m.nodes[2*lo+1], span))
		if hi > lo {
			changed = m.set(hi, join(m.nodes[2*hi], m.nodes[2*hi+1], span)) || changed
		}
	}
}

// fill sets s to what says that all is free, or to zero values, which say that all is taken.
func fill[T uint64 | node](s []T, allFree T, free bool) {
	if !free {
		clear(s)
		return
	}
	for i := range s {
		s[i] = allFree
	}
}

// pair sums up the two words below node i of the lowest level.
func (m *Map) pair(i int) node {
	w := 2 * (i - m.low)
	return join(wordNode(m.words[w]), wordNode(m.words[w+1]), 64)
}

func (m *Map) set(i int, n node) (changed bool) {
	if m.nodes[i] == n {
		return false
	}
	m.nodes[i] = n
	return true
}

// fit is where Alloc puts n pages, which the longest run must hold.
func (m *Map) fit(n uint32) uint32 {
	at := m.find(n)
	if n < alignPages {
		return at
	}
	// at is the start of its run, and the run holds n pages from there: only the pages that the shift adds at the
	// end are in question.
	shift := -at % alignPages
	if shift == 0 || uint64(at)+uint64(n)+uint64(shift) > uint64(m.size) ||
		!m.all(block.Extent{Page: at + n, Count: shift}, true) {
		return at
	}
	return at + shift
}

// find is the start of the lowest run of at least n free pages; n is at least 1 and at most Longest.
func (m *Map) find(n uint32) uint32 {
	i, at := 1, uint32(0)
	for half := uint32(m.low) * 64; i < m.low; half >>= 1 {
		l, r := &m.nodes[2*i], &m.nodes[2*i+1]
		switch {
		case l.longest >= n:
			i = 2 * i
		case l.suffix+r.prefix >= n:
			return at + half - l.suffix
		default:
			i, at = 2*i+1, at+half
		}
	}
	w := 2 * (i - m.low)
	l, r := m.words[w], m.words[w+1]
	if s := starts(l, n); s != 0 {
		return at + uint32(bits.TrailingZeros64(s))
	}
	if ls := uint32(bits.LeadingZeros64(^l)); ls+uint32(bits.TrailingZeros64(^r)) >= n {
		return at + 64 - ls
	}
	return at + 64 + uint32(bits.TrailingZeros64(starts(r, n)))
}

// join sums up two neighbours of span pages each.
func join(l, r node, span uint32) node {
	n := node{prefix: l.prefix, suffix: r.suffix, longest: max(l.longest, r.longest, l.suffix+r.prefix)}
	if l.prefix == span {
		n.prefix += r.prefix
	}
	if r.suffix == span {
		n.suffix += l.suffix
	}
	return n
}

// wordNode sums up one word.
func wordNode(w uint64) node {
	switch w {
	case 0:
		return node{}
	case ^uint64(0):
		return node{prefix: 64, suffix: 64, longest: 64}
	}
	return node{
		prefix:  uint32(bits.TrailingZeros64(^w)),
		suffix:  uint32(bits.LeadingZeros64(^w)),
		longest: longestRun(w),
	}
}

// longestRun is the length of the longest run of ones in w, which is not 0. s holds the starts of the runs of at least n
// ones: n doubles while any is left, and is then refined by halves.
func longestRun(w uint64) uint32 {
	s, n := w, uint32(1)
	for {
		t := s & (s >> n)
		if t == 0 {
			break
		}
		s, n = t, 2*n
	}
	for step := n / 2; step > 0; step /= 2 {
		if t := s & (s >> step); t != 0 {
			s, n = t, n+step
		}
	}
	return n
}

// starts has a bit for each place in w where at least n ones follow each other; none when n is more than 64.
func starts(w uint64, n uint32) uint64 {
	for n > 1 && w != 0 {
		step := n / 2
		w &= w >> step
		n -= step
	}
	return w
}
