// Package engine decides what is kept: it joins the entry table, the page map, the key index and the eviction order,
// and keeps the promises that engines were given. The rules R1 to R24 that it names are those of docs/protocol.md.
//
// The life of a record:
//
//	         Reserve            Commit            announce            every session acknowledged, no pin
//	FREE ───────────► RESERVED ────────► READY ──────────► EVICTING ──────────────────────────────────► FREE
//	  ▲                  │                 │
//	  └── abort, end ────┘                 └── victim inside the reply of the only session that could know it ──► FREE
//
// An entry is held while a running request uses it, and pinned while a load job copies it. Held entries are outside the
// eviction order; pinned pages are never reused, even when their removal was announced.
//
// All methods may be called concurrently; one mutex guards everything and is never held across I/O.
package engine

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"kvlift/block"
	"kvlift/index"
	"kvlift/meta"
	"kvlift/pages"
	"kvlift/policy"
	"kvlift/restore"
)

// Errors that a caller may meet. They concern one session only.
var (
	ErrClosed     = errors.New("the session has ended")
	ErrBusy       = errors.New("too many open requests or jobs in one session")
	ErrBadRef     = errors.New("the entry was never promised to this session")
	ErrBadJob     = errors.New("no such job, or one of another kind")
	ErrNamespaces = errors.New("the namespace table is full")
	ErrGeometry   = errors.New("payload sizes differ from those of the namespace")
	ErrSessions   = errors.New("the session table is full")
)

// Options of an engine. The zero value of a field means its default.
type Options struct {
	Policy     string           // "lru" (default) or "arc"
	MinIdle    time.Duration    // a store may not evict what was used within this time; 0 turns it off
	Quotas     []Quota          // caps of namespaces; no name stands twice
	EvictAhead float64          // share of pages and records kept free or on their way when several sessions share keys
	Now        func() time.Time // default time.Now
	TraceClock bool             // time is what Begin says (replays)
	SessionID  func() uint64    // random identities; must be given
	// Stalled is sent to, without waiting, when pages are announced that other sessions have to acknowledge; may be nil.
	Stalled chan<- struct{}
	// Drop tells that damaged records are given up instead of refused.
	DropDamaged bool
}

// Limits that bound what one session can make the daemon remember.
const (
	MaxRequests = 1 << 16
	MaxJobs     = 1 << 16
	MaxExtents  = 1 << 15 // of one reply, before keys of several extents are refused: the reply is one message
	MaxOpen     = 1 << 22 // entries that its open jobs and requests name, each as often as it is named
)

// Sink is told what changes in a session's namespace, in order, under the engine's mutex: it must neither block nor call
// the engine. Extents and keys belong to the engine and are valid during the call only.
type Sink interface {
	Added(ref block.Ref, key *block.Key, group uint16, position uint32, extents []block.Extent)
	Removed(epoch uint64, ref block.Ref, key *block.Key)
}

// Flags of a slot. The last two stay until the record is free, whatever became of what went on from it.
const (
	slotAcked     = 1 << iota // EVICTING, and every session has acknowledged it: only pins keep the page
	slotShared                // more than one request has used it since it was last idle
	slotContinued             // a chunk went on from this one
	slotForked                // another one, too
)

// slot is what the engine remembers of a record besides the record.
type slot struct {
	gen      uint32
	holds    uint16
	pins     uint16
	ns       uint16
	children uint16 // records that continue its chain; maxChildren means that or more
	state    meta.State
	flags    uint8
	class    restore.Class // of an idle entry: the order that it stands in
}

const maxChildren = 1<<16 - 1

// Engine is the daemon's mind. Make one with Adopt.
type Engine struct {
	mu sync.Mutex // guards everything below

	opts  Options
	table *meta.Table
	pages *pages.Map
	index *index.Index
	order policy.Order                 // of what restore points need, and of everything that is held
	spare [restore.Useless]*policy.LRU // of what they do not need: optional, useless
	own   *policy.Lists                // the same entries by account and class; nil without quotas
	slots []slot
	// Free records and overflow records, taken from the end.
	freeEntries  []uint32
	freeOverflow []uint32

	spaces   [meta.MaxNamespaces]*namespace
	accounts [meta.MaxNamespaces]*account
	sessions map[uint64]*Session
	procs    [meta.MaxSessions]*Process
	orphans  []uint32 // RESERVED records of a daemon before us that nobody has claimed yet
	unknown  int      // sessions from before our start that are not resolved

	epoch      uint64 // the last announced removal
	tick       uint64 // the last stamp, and those of the other lanes
	agedTick   uint64
	closedTick uint64
	traceMS    int64
	draining   bool
	readOnly   bool // Check: the table is only read

	ready    uint32                      // READY records
	used     uint32                      // pages of READY records
	pending  uint64                      // pages of EVICTING and REMOVED records
	idle     [restore.Useless + 1]uint64 // pages of idle records, by class
	counters Counters

	extents  []block.Extent      // scratch
	overflow []uint32            // scratch
	hashes   []uint64            // scratch: of the offered keys
	warmed   uint64              // keeps the compiler from dropping the reads that warm the index
	key      block.Key           // scratch: what sinks are shown
	held     func(slot int) bool // whether somebody holds the byte lock of a slot
	asker    *Session            // of the reserve under way
	canGo    func(id uint32) bool
}

type namespace struct {
	index uint16
	meta.Namespace
	sessions []*Session // all that could know its keys, whatever their state
	evicting []eviction // announced, oldest first
	groups   []groupState
	keys     int      // records that are not free
	account  *account // nil without quotas
	mixed    bool     // there are groups that are not full: chains are judged while their requests run
}

type eviction struct {
	entry uint32
	epoch uint64
}

type groupState struct {
	payload uint32
	pages   uint32
	keys    uint64 // READY
}

func (e *Engine) now() int64 {
	if e.opts.TraceClock {
		return e.traceMS
	}
	return e.opts.Now().UnixMilli()
}

// tickShift is how far milliseconds stand above the counter in a recency stamp.
const tickShift = 22

// oldEnough tells whether a store may take the entry away now as far as time is concerned. The guard keeps prompts from
// pushing each other out in turn; what no prompt needs is not worth refusing one for.
func (e *Engine) oldEnough(id uint32) bool {
	if e.opts.MinIdle <= 0 || e.slots[id].class != restore.Needed {
		return true
	}
	return e.now()-int64(e.table.Tick(id)>>tickShift) >= e.opts.MinIdle.Milliseconds()
}

// hold takes an entry for a request. The caller holds mu.
func (e *Engine) hold(id uint32) {
	s := &e.slots[id]
	if s.holds == 0 && s.state == meta.Ready {
		_, _, _, n := e.table.Place(id)
		e.idle[s.class] -= uint64(n)
		e.delist(id)
		if s.class == restore.Needed {
			e.order.Hold(id)
		} else { // somebody uses it: then it is needed
			e.spare[s.class-1].Drop(id)
			k := e.table.Key(id)
			e.order.Add(id, e.index.Hash(s.ns, &k), n)
			e.setClass(id, restore.Needed)
		}
	}
	s.holds++
}

// unhold gives an entry back; the last one puts it at the hot end of a lane of the order of its class. The caller holds mu
// and calls tail first.
func (e *Engine) unhold(id uint32, class restore.Class, lane policy.Lane) {
	s := &e.slots[id]
	s.holds--
	if s.holds > 0 {
		return
	}
	s.flags &^= slotShared
	if s.state != meta.Ready {
		return
	}
	_, _, _, n := e.table.Place(id)
	if class == restore.Needed {
		e.order.ReleaseTo(id, lane)
	} else {
		e.order.Drop(id)
		e.spare[class-1].Add(id, 0, n)
		e.spare[class-1].ReleaseTo(id, lane)
		e.setClass(id, class)
	}
	e.idle[class] += uint64(n)
	e.enlist(id, class, lane)
}

func (e *Engine) setClass(id uint32, class restore.Class) {
	e.slots[id].class = class
	e.table.SetMarks(id, e.table.Frequent(id), uint8(class))
}

// orderOf is the eviction order in which an idle entry stands.
func (e *Engine) orderOf(id uint32) policy.Order {
	if c := e.slots[id].class; c != restore.Needed {
		return e.spare[c-1]
	}
	return e.order
}

// free gives record and pages back. The caller has taken it out of index and order.
func (e *Engine) free(id uint32) {
	e.extents = e.table.Extents(id, e.extents[:0])
	e.freeRecord(id, len(e.extents))
	for _, x := range e.extents {
		if err := e.pages.Release(x); err != nil {
			panic(fmt.Sprintf("engine: entry %d: %v", id, err)) // an invariant of our own: two owners of one page
		}
	}
}

// freeRecord gives a record of so many extents back, and leaves its pages to the caller.
func (e *Engine) freeRecord(id uint32, extents int) {
	s := &e.slots[id]
	if extents > meta.InlineExtents {
		e.freeOverflow = e.table.OverflowOf(id, e.freeOverflow)
	}
	if p := e.table.Parent(id); e.alive(p) {
		if c := &e.slots[p.Entry].children; *c < maxChildren {
			*c--
		}
	}
	if a := e.spaces[s.ns].account; a != nil {
		_, _, _, n := e.table.Place(id)
		a.used -= uint64(n)
	}
	e.table.SetState(id, meta.Free)
	e.spaces[s.ns].keys--
	*s = slot{gen: s.gen}
	e.freeEntries = append(e.freeEntries, id)
}

// alive tells whether a ref still names what it named.
func (e *Engine) alive(r block.Ref) bool {
	return r.Entry < uint32(len(e.slots)) && e.slots[r.Entry].gen == r.Gen && e.slots[r.Entry].state != meta.Free
}

// countChild counts a record as a child of the one that it continues.
func (e *Engine) countChild(parent block.Ref) {
	if !e.alive(parent) {
		return
	}
	s := &e.slots[parent.Entry]
	if s.children < maxChildren {
		s.children++
	}
	if s.flags&slotContinued != 0 {
		s.flags |= slotForked
	}
	s.flags |= slotContinued
}

// unindex takes a record's key out of the index and leaves it in e.key.
func (e *Engine) unindex(id uint32, ns uint16) {
	e.key = e.table.Key(id)
	e.index.Remove(e.index.Hash(ns, &e.key), id)
}

// dropReserved ends a reservation without a payload.
func (e *Engine) dropReserved(id uint32) {
	ns, _, _, _ := e.table.Place(id)
	e.unindex(id, ns)
	e.order.Drop(id)
	e.free(id)
}

// Drain makes every later Reserve refuse, so that what is under way can end.
func (e *Engine) Drain() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.draining = true
}

// OpenJobs counts loads and stores that engines have not ended yet.
func (e *Engine) OpenJobs() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, s := range e.sessions {
		n += len(s.jobs)
	}
	return n
}

// MarkClean writes the clean mark; the caller stops using the engine.
func (e *Engine) MarkClean() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.table.SetHeader(true)
}
