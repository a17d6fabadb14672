package engine

import (
	"fmt"

	"kvlift/meta"
	"kvlift/pages"
	"kvlift/restore"
)

// Audit compares the engine's sums with its records: pages that are neither free nor owned, keys that the index lacks.
// It is what tests call after every operation; it costs a pass over the whole table.
func (e *Engine) Audit() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.audit()
}

// audit compares what the engine believes with its records.
func (e *Engine) audit() error {
	m := pages.New(e.pages.Len())
	var byState [5]int
	var readyPages, pending uint64
	var idle [restore.Useless + 1]uint64
	children := make([]uint16, len(e.slots))
	overflow := len(e.freeOverflow)
	keys := map[uint16]int{}
	for i := range e.slots {
		id, s := uint32(i), &e.slots[i]
		v, err := e.table.Entry(id, nil)
		if err != nil {
			return err
		}
		if v.State != s.state || v.Gen != s.gen {
			return fmt.Errorf("entry %d: %v generation %d in the table, %v generation %d in memory", id, v.State, v.Gen, s.state, s.gen)
		}
		byState[v.State]++
		if s.holds == 0 && s.flags&slotShared != 0 {
			return fmt.Errorf("entry %d: shared, and nobody holds it", id)
		}
		if v.State == meta.Free {
			if s.holds != 0 || s.pins != 0 {
				return fmt.Errorf("entry %d is free, with %d holds and %d pins", id, s.holds, s.pins)
			}
			continue
		}
		keys[v.Namespace]++
		overflow += meta.OverflowNeeded(len(v.Extents))
		for _, x := range v.Extents {
			if err := m.Claim(x); err != nil {
				return fmt.Errorf("entry %d: %w", id, err)
			}
		}
		found, ok := e.index.Find(e.index.Hash(v.Namespace, &v.Key), v.Namespace, &v.Key)
		switch v.State {
		case meta.Ready, meta.Reserved:
			if !ok || found != id {
				return fmt.Errorf("entry %d: the index finds %d for its key", id, found)
			}
		default:
			pending += uint64(v.Pages)
			if ok && found == id {
				return fmt.Errorf("entry %d: %v and still in the index", id, v.State)
			}
		}
		if v.State == meta.Ready {
			readyPages += uint64(v.Pages)
			if s.holds == 0 {
				idle[s.class] += uint64(v.Pages)
				if restore.Class(v.Class) != s.class {
					return fmt.Errorf("entry %d: class %v in memory, %v in the table", id, s.class, restore.Class(v.Class))
				}
			}
		}
		if e.alive(v.Parent) {
			children[v.Parent.Entry]++
		}
	}
	for i := range e.slots {
		if e.slots[i].children != children[i] {
			return fmt.Errorf("entry %d: %d children, %d counted", i, children[i], e.slots[i].children)
		}
		if f := e.slots[i].flags; children[i] > 0 && f&slotContinued == 0 || children[i] > 1 && f&slotForked == 0 {
			return fmt.Errorf("entry %d: %d children, flags %#x", i, children[i], f)
		}
	}
	var walked [restore.Useless + 1]uint64
	last, lastClass := uint64(0), restore.Useless
	var disorder error
	e.walk(func(id uint32) bool {
		_, _, _, n := e.table.Place(id)
		walked[e.slots[id].class] += uint64(n)
		if c := e.slots[id].class; c != lastClass {
			last, lastClass = 0, c
		}
		if s := &e.slots[id]; s.state != meta.Ready || s.holds != 0 {
			disorder = fmt.Errorf("entry %d: %v with %d holds in the eviction order", id, s.state, s.holds)
		}
		if t := e.table.Tick(id); e.order.Name() == "lru" && t < last {
			disorder = fmt.Errorf("entry %d: stamp %d behind %d in the eviction order", id, t, last)
		} else {
			last = t
		}
		return disorder == nil
	})
	switch {
	case disorder != nil:
		return disorder
	case walked != idle || idle != e.idle:
		return fmt.Errorf("idle pages by class: %d in the orders, %d by records, %d counted", walked, idle, e.idle)
	case m.Free() != e.pages.Free():
		return fmt.Errorf("free pages: %d by records, %d in the map: %d leaked", m.Free(), e.pages.Free(), int64(m.Free())-int64(e.pages.Free()))
	case byState[meta.Free] != len(e.freeEntries):
		return fmt.Errorf("free records: %d, %d listed", byState[meta.Free], len(e.freeEntries))
	case overflow != int(e.table.Overflow):
		return fmt.Errorf("overflow records: %d of %d accounted for", overflow, e.table.Overflow)
	case byState[meta.Ready] != int(e.ready) || readyPages != uint64(e.used) || pending != e.pending:
		return fmt.Errorf("sums: %d ready, %d pages, %d pending; counted %d, %d, %d", byState[meta.Ready], readyPages, pending, e.ready, e.used, e.pending)
	case byState[meta.Ready]+byState[meta.Reserved] != e.index.Len():
		return fmt.Errorf("index holds %d keys of %d", e.index.Len(), byState[meta.Ready]+byState[meta.Reserved])
	}
	holds := make([]int, len(e.slots))
	for _, s := range e.sessions {
		open := 0
		for _, j := range s.jobs {
			open += len(j.refs)
		}
		requests := map[*request]bool{} // with those of jobs from before a reconnect
		for _, j := range s.jobs {
			if s.requests[j.req.id] != j.req {
				requests[j.req] = true
			}
		}
		for _, r := range s.requests {
			requests[r] = true
		}
		for r := range requests {
			open += len(r.entries)
			for _, ref := range r.entries {
				if v := &e.slots[ref.Entry]; v.gen == ref.Gen && v.state != meta.Free {
					holds[ref.Entry]++
				}
			}
		}
		if open != s.open {
			return fmt.Errorf("session %x: %d open refs, %d counted", s.id, open, s.open)
		}
	}
	for i := range e.slots {
		if int(e.slots[i].holds) != holds[i] {
			return fmt.Errorf("entry %d has %d holds, requests hold it %d times", i, e.slots[i].holds, holds[i])
		}
	}
	for i, ns := range e.spaces {
		if ns != nil && ns.keys != keys[uint16(i)] {
			return fmt.Errorf("namespace %d: %d records, %d counted", i, keys[uint16(i)], ns.keys)
		}
	}
	return e.auditAccounts()
}

// auditAccounts compares what counts against quotas, and the orders of the accounts, with the records.
func (e *Engine) auditAccounts() error {
	if e.own == nil {
		return nil
	}
	used, pending, idle := map[*account]uint64{}, map[*account]uint64{}, 0
	for i := range e.slots {
		s := &e.slots[i]
		if s.state == meta.Free {
			continue
		}
		_, _, _, n := e.table.Place(uint32(i))
		a := e.spaces[s.ns].account
		used[a] += uint64(n)
		switch {
		case s.state == meta.Evicting || s.state == meta.Removed:
			pending[a] += uint64(n)
		case s.state == meta.Ready && s.holds == 0:
			idle++
		}
	}
	spaces := map[*account]int{}
	for _, ns := range e.spaces {
		if ns != nil {
			spaces[ns.account]++
		}
	}
	for i, a := range e.accounts {
		if a == nil {
			continue
		}
		if a.number != i || a.spaces != spaces[a] || a.used != used[a] || a.pending != pending[a] {
			return fmt.Errorf("account %d: number %d of %d namespaces with %d pages, %d pending; by records %d, %d, %d", i, a.number, a.spaces, a.used, a.pending, spaces[a], used[a], pending[a])
		}
		delete(spaces, a)
		last, class := uint64(0), restore.Useless
		var disorder error
		e.walkOf(a, func(id uint32) bool {
			idle--
			s := &e.slots[id]
			if s.class != class {
				last, class = 0, s.class
			}
			if s.state != meta.Ready || s.holds != 0 || e.spaces[s.ns].account != a || e.table.Tick(id) < last {
				disorder = fmt.Errorf("account %d: entry %d: %v with %d holds, stamp %d behind %d", i, id, s.state, s.holds, e.table.Tick(id), last)
			}
			last = e.table.Tick(id)
			return disorder == nil
		})
		if disorder != nil {
			return disorder
		}
	}
	if len(spaces) != 0 || idle != 0 {
		return fmt.Errorf("%d accounts are not listed, %d idle entries stand in no order of an account", len(spaces), idle)
	}
	return nil
}
