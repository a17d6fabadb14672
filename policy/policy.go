// Package policy decides which cache entry goes next.
//
// An Order ranks entries that are known by small integers, 0 to entries-1: the numbers of the records in the engine's
// table. It knows nothing of payloads, keys, tiers or time, takes no locks and does no I/O: its caller serialises every
// call, normally under the mutex that guards the record table.
//
// An entry is absent, held or idle:
//
//	         Add              Release
//	absent ───────▶  held  ◀───────────▶  idle ─── Evict ──▶ absent
//	   ▲              │        Hold         │
//	   └──── Drop ────┴─────────────────────┘
//
// A held entry is in use by a running request or a transfer. It is in no list, so that the walk for a victim never meets
// it, but it still counts as resident. An idle entry is in a list and may be evicted.
//
// Keys form prefix chains: a chunk is worth nothing when the chunk before it is gone. No tree is needed to respect that.
// The engine holds the whole chain of a request and releases it from the tail to the head, so in every list a parent is
// hotter than its children and the cold end is always a leaf. Holding the chain also keeps a request from evicting its
// own head to store its tail.
//
// An engine may say of what it releases that it is not needed soon, or not any more. Such entries go to lanes of their own,
// which are merged with the rest when a victim is looked for: no list is searched to put them in their place.
//
// Storage is a handful of arrays sized once: 8 bytes an entry for LRU and for Lists, 21 for ARC, and for ARC's ghosts 21
// bytes and a map slot each, taken as they are needed.
package policy

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// MaxEntries is the largest number of entries an Order can rank; the numbers above it mark states and list ends.
const MaxEntries = math.MaxUint32 - 2 - maxEnds

// Order ranks the idle entries from the one to lose first to the one to lose last. It is not safe for concurrent use.
// Weights are in pages. Every method is O(1) but for the walks. A call that the entry's state does not allow, or an
// entry number out of range, is a bug of the caller and panics.
type Order interface {
	// Name is the name that New takes.
	Name() string
	// Offer tells that a key is about to be added, before anything is evicted for it. fp is a 64-bit fingerprint of the
	// key, the same each time. An Order that learns from what it evicted learns here. No Add need follow.
	Offer(fp uint64, weight uint32)
	// Add makes an absent entry resident and held.
	Add(id uint32, fp uint64, weight uint32)
	// Hold takes an idle entry out of the walks.
	Hold(id uint32)
	// Use notes that a held entry was asked for again since it was added. It takes effect at Release. After Add it
	// restores an entry that was Frequent before a restart.
	Use(id uint32)
	// Release makes a held entry idle, as the hottest of its list. Chains are released from the tail to the head.
	Release(id uint32)
	// ReleaseTo is Release to a lane of the list: the hottest of that lane. Release is that of Recent.
	ReleaseTo(id uint32, lane Lane)
	// Merge says how the lanes of a list are one order: older reports whether an idle entry was used before another one of
	// another lane. It must agree with the order of the releases within each lane, and be given before the first ReleaseTo
	// another lane than Recent.
	Merge(older func(a, b uint32) bool)
	// Coldest returns the idle entry that should go next among those for which usable is true. It returns false when
	// there is none, or when the Order would rather not have the key offered last than lose any of them. It changes
	// nothing. A nil usable means all. maxSkip, when it is not 0, bounds the unusable entries it looks at in each list.
	Coldest(usable func(id uint32) bool, maxSkip int) (id uint32, ok bool)
	// Evict makes an idle entry absent as a victim; the Order may remember its fingerprint.
	Evict(id uint32)
	// Drop makes a held or idle entry absent and remembers nothing: the store was aborted, or the tier was reset.
	Drop(id uint32)
	// Frequent reports whether a resident entry counts as used more than once. It is the only state of an entry worth
	// keeping over a restart. An Order that makes no such distinction returns false.
	Frequent(id uint32) bool
	// Walk calls f for every idle entry, in the order in which Coldest and Evict, repeated, would take them, until f
	// returns false. f must not call the Order.
	Walk(f func(id uint32) bool)
}

// Names returns the names that New takes, the default first.
func Names() []string { return []string{"lru", "arc"} }

// New returns the named Order for entries 0 to entries-1. capacityPages is the space that the entries share; LRU does
// not need it. It fails for an unknown name and when entries is negative or above MaxEntries.
func New(name string, entries int, capacityPages uint64) (Order, error) {
	if !slices.Contains(Names(), name) {
		return nil, fmt.Errorf("unknown eviction policy %q: want %s", name, strings.Join(Names(), " or "))
	}
	if entries < 0 || uint64(entries) > MaxEntries {
		return nil, fmt.Errorf("eviction policy over %d entries: want 0 to %d", entries, uint64(MaxEntries))
	}
	if name == "arc" {
		return NewARC(entries, capacityPages), nil
	}
	return NewLRU(entries), nil
}

// maxEnds bounds the ends of lists, which are numbered behind the entries.
const maxEnds = 1022

// Values of links.next for elements that are in no list.
const (
	absent = math.MaxUint32
	held   = math.MaxUint32 - 1
)

// links stores circular doubly linked lists over array indexes. A list is known by its end, an index of its own that is
// no element: the next of the end is the coldest element, the previous the hottest.
type links struct {
	next, prev []uint32
	older      func(a, b uint32) bool // of elements in different lanes
}

// makeLinks returns links for elements 0 to n-1, all absent, and empty lists. Their ends are n, n+lanes, ...; those of a
// list's other lanes follow its own.
func makeLinks(n, lists int) links {
	ends := lists * int(lanes)
	l := links{next: make([]uint32, n+ends), prev: make([]uint32, n+ends)}
	for i := range n {
		l.next[i] = absent
	}
	for e := n; e < n+ends; e++ {
		l.next[e], l.prev[e] = uint32(e), uint32(e)
	}
	return l
}

// idle reports whether element i is in a list.
func (l *links) idle(i uint32) bool { return l.next[i] < held }

// pushHot puts element i, which is in no list, at the hot end of the list that ends at end.
func (l *links) pushHot(end, i uint32) {
	hot := l.prev[end]
	l.next[i], l.prev[i] = end, hot
	l.next[hot], l.prev[end] = i, i
}

// remove takes element i out of its list and gives it the state s, held or absent.
func (l *links) remove(i, s uint32) {
	n, p := l.next[i], l.prev[i]
	l.next[p], l.prev[n] = n, p
	l.next[i] = s
}

// checkEntries panics unless an Order can rank n entries.
func checkEntries(n int) {
	if n < 0 || uint64(n) > MaxEntries {
		panic(fmt.Sprintf("policy: %d entries: want 0 to %d", n, uint64(MaxEntries)))
	}
}

// want panics unless ok: the caller broke the state machine in the package comment.
func want(ok bool, op string, id uint32, state string) {
	if !ok {
		panic(fmt.Sprintf("policy: %s of entry %d, which is not %s", op, id, state))
	}
}

// firstUsable walks the list that ends at end from the cold side; see Order.Coldest.
func (l *links) firstUsable(end uint32, usable func(uint32) bool, maxSkip int) (uint32, bool) {
	skipped := 0
	if !l.plain(end) {
		m := l.merge(end)
		for i, ok := m.next(); ok; i, ok = m.next() {
			if usable == nil || usable(i) {
				return i, true
			}
			if skipped++; skipped == maxSkip {
				break
			}
		}
		return 0, false
	}
	for i := l.next[end]; i != end; i = l.next[i] {
		if usable == nil || usable(i) {
			return i, true
		}
		if skipped++; skipped == maxSkip {
			break
		}
	}
	return 0, false
}
