package engine

import (
	"time"

	"kvlift/meta"
	"kvlift/restore"
)

// Cause of an eviction.
type Cause int

const (
	ByStore Cause = iota // a store took the page in its own reply
	Ahead                // announced before it was needed, since several engines share the keys
	ByReset              // an engine reset its cache
	ByEnd                // a private generation lost its only session
	lastCause
)

func (c Cause) String() string { return [...]string{"store", "ahead", "reset", "end"}[c] }

// Causes lists all causes, Reasons all reasons of a refusal.
func Causes() []Cause { return []Cause{ByStore, Ahead, ByReset, ByEnd} }

// Reasons lists the reasons for which a batch may be cut.
func Reasons() []Reason {
	return []Reason{NoRoom, TooYoung, Waiting, NoRecords, TooBig, Draining, OverQuota}
}

// Counters only grow while the daemon lives.
type Counters struct {
	Stored       uint64 // keys committed
	StoredBytes  uint64
	Loads        uint64 // keys pinned for a load
	Aborted      uint64 // reservations that ended without a payload
	RefusedKeys  uint64
	Refused      [lastReason]uint64 // batches by reason
	Evicted      [lastCause]uint64  // keys by cause
	Requests     uint64             // finished
	PromptTokens uint64
	HitTokens    uint64
	Fenced       uint64 // times a silent session was fenced
}

// SessionStats are a session's own.
type SessionStats struct {
	Requests, PromptTokens, HitTokens, Fenced uint64
}

func (st *SessionStats) add(c *Counters, f Finished) {
	st.Requests++
	st.PromptTokens += uint64(f.PromptTokens)
	st.HitTokens += uint64(min(f.HitTokens, f.PromptTokens))
	c.Requests++
	c.PromptTokens += uint64(f.PromptTokens)
	c.HitTokens += uint64(min(f.HitTokens, f.PromptTokens))
}

// Status is the state of the engine at one moment, except for ages, which are read in pieces.
type Status struct {
	Policy       string
	MinIdle      time.Duration
	ArenaPages   uint64
	FreePages    uint64
	LongestRun   uint64 // longest run of free pages
	ReadyPages   uint64
	PendingPages uint64 // of announced removals
	// ReadyPages by what they are worth: of running requests and of restore points, of restore points that a deeper one
	// makes optional, of none.
	WorthPages   [restore.Useless + 1]uint64
	Records      uint64
	FreeRecords  uint64
	ReadyKeys    uint64
	ReservedKeys uint64
	Epoch        uint64
	Unresolved   int
	Draining     bool
	Counters     Counters
	Namespaces   []NamespaceStatus
	Sessions     []SessionStatus
}

// NamespaceStatus is one namespace. Payload bytes count the groups' own bytes, Bytes the pages that hold them.
type NamespaceStatus struct {
	Index       int // in the namespace table: stable while it exists
	ID          [32]byte
	Private     bool
	Description string
	Sessions    int
	Groups      []GroupStatus
	Quota       *QuotaStatus // nil when it has none
}

// QuotaStatus is what counts against a namespace's quota: its own pages and those of private generations that resets made
// of it, which show the same.
type QuotaStatus struct {
	Pages     uint64
	UsedPages uint64 // of records that are not free
	Refused   uint64 // batches
}

// GroupStatus is the residency of one group.
type GroupStatus struct {
	Kind         meta.GroupKind
	ChunkTokens  uint32
	PayloadBytes uint32 // of one chunk
	Keys         uint64
	Tokens       uint64 // keys × chunk tokens
	Bytes        uint64 // pages × 4096
	OldestMS     int64  // age of the least recently used key, -1 without keys
}

// SessionStatus is one session.
type SessionStatus struct {
	ID        uint64
	EngineID  string
	State     SessionState
	Namespace int // its index, -1 without one
	PID       uint32
	Ranks     int
	World     int
	Jobs      int
	Requests  int
	Behind    uint64 // removals that it has not acknowledged
	Fenced    bool   // it is silent and owes no acknowledgement
	SinceMS   int64
	Stats     SessionStats
}

// Status reads everything that the status command and the metrics show. The ages of a large table are gathered in
// pieces, so that no reserve waits for long.
func (e *Engine) Status() Status {
	st, index := e.snapshotStatus()
	const piece = 8192
	for lo := 0; lo < len(e.slots); lo += piece {
		e.ages(lo, min(lo+piece, len(e.slots)), &st, &index)
	}
	return st
}

func (e *Engine) snapshotStatus() (Status, [meta.MaxNamespaces]int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	st := Status{
		Policy: e.order.Name(), MinIdle: e.opts.MinIdle,
		ArenaPages: uint64(e.pages.Len()), FreePages: uint64(e.pages.Free()), LongestRun: uint64(e.pages.Longest()),
		ReadyPages: uint64(e.used), PendingPages: e.pending, Records: uint64(len(e.slots)), FreeRecords: uint64(len(e.freeEntries)),
		ReadyKeys: uint64(e.ready), Epoch: e.epoch, Unresolved: e.unknown, Draining: e.draining, Counters: e.counters,
	}
	st.ReservedKeys = uint64(e.index.Len()) - st.ReadyKeys
	st.WorthPages = e.idle
	st.WorthPages[restore.Needed] = st.ReadyPages - e.idle[restore.Optional] - e.idle[restore.Useless]
	var index [meta.MaxNamespaces]int
	for i, ns := range e.spaces {
		index[i] = -1
		if ns == nil {
			continue
		}
		index[i] = len(st.Namespaces)
		n := NamespaceStatus{Index: i, ID: ns.ID, Private: ns.Private, Description: ns.Description, Sessions: len(ns.sessions)}
		for g, v := range ns.groups {
			n.Groups = append(n.Groups, GroupStatus{Kind: ns.Groups[g].Kind, ChunkTokens: ns.Groups[g].ChunkTokens, PayloadBytes: v.payload,
				Keys: v.keys, Tokens: v.keys * uint64(ns.Groups[g].ChunkTokens), Bytes: v.keys * uint64(v.pages) * 4096, OldestMS: -1})
		}
		if a := ns.account; a != nil && a.limit != noLimit {
			n.Quota = &QuotaStatus{Pages: a.limit, UsedPages: a.used, Refused: a.refused}
		}
		st.Namespaces = append(st.Namespaces, n)
	}
	for _, s := range e.sessions {
		v := SessionStatus{ID: s.id, EngineID: s.engineID, State: s.state, Namespace: -1, Ranks: len(s.ranks), World: s.world,
			Jobs: len(s.jobs), Requests: len(s.requests), Fenced: s.fenced, SinceMS: s.sinceMS, Stats: s.stats}
		if s.ns != nil {
			v.Namespace = int(s.ns.index)
			for _, ev := range s.ns.evicting {
				if ev.epoch > e.heard(s) {
					v.Behind++
				}
			}
		}
		if s.manager != nil {
			v.PID = s.manager.pid
		}
		st.Sessions = append(st.Sessions, v)
	}
	return st, index
}

func (e *Engine) ages(lo, hi int, st *Status, index *[meta.MaxNamespaces]int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.now()
	for id := lo; id < hi; id++ {
		if e.slots[id].state != meta.Ready {
			continue
		}
		ns, g, _, _ := e.table.Place(uint32(id))
		at := index[ns]
		if at < 0 || int(g) >= len(st.Namespaces[at].Groups) {
			continue
		}
		tick := e.table.Tick(uint32(id))
		if tick < closedTicks { // when it was used is not known any more
			continue
		}
		v := &st.Namespaces[at].Groups[g]
		v.OldestMS = max(v.OldestMS, now-int64(tick>>tickShift), 0)
	}
}
