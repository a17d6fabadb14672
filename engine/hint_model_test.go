package engine

import (
	"kvlift/block"
	"kvlift/meta"
)

// useWatch remembers who has used what since it was last idle, to say what a hint may do.
type useWatch struct {
	r      *rig
	by     map[block.Ref]map[any]bool
	unsure map[*request]bool // was touched, or met what was before a reconnect: it may take itself for another
	old    map[block.Ref]bool
}

func (w *useWatch) note(who any, refs ...block.Ref) {
	for _, ref := range refs {
		if s := &w.r.e.slots[ref.Entry]; s.gen != ref.Gen || s.holds == 0 {
			continue
		}
		if w.by[ref] == nil {
			w.by[ref] = map[any]bool{}
		}
		w.by[ref][who] = true
		if q, ok := who.(*request); ok && w.old[ref] {
			w.unsure[q] = true
		}
	}
}

// touching is called before a touch: one without an open request is nobody else's.
func (w *useWatch) touching(q *request, refs []block.Ref) {
	var who any = new(int)
	if q != nil && !q.finished {
		who = q
		w.unsure[q] = true
	}
	for _, ref := range refs {
		if s := &w.r.e.slots[ref.Entry]; s.gen == ref.Gen && s.state == meta.Ready && (s.holds > 0 || who == any(q)) {
			if w.by[ref] == nil {
				w.by[ref] = map[any]bool{}
			}
			w.by[ref][who] = true
		}
	}
}

// sweep forgets what is idle or gone.
func (w *useWatch) sweep() {
	for ref := range w.by {
		if s := &w.r.e.slots[ref.Entry]; s.gen != ref.Gen || s.holds == 0 {
			delete(w.by, ref)
		}
	}
	for ref := range w.old {
		if s := &w.r.e.slots[ref.Entry]; s.gen != ref.Gen || s.holds == 0 {
			delete(w.old, ref)
		}
	}
}

// forget is called when requests end that this does not know: by a reconnect, or with the daemon.
func (w *useWatch) forget() {
	if w.old == nil {
		w.old = map[block.Ref]bool{}
	}
	for i := range w.r.e.slots {
		if s := &w.r.e.slots[i]; s.holds > 0 {
			w.old[block.Ref{Entry: uint32(i), Gen: s.gen}] = true
		}
	}
	for _, s := range w.r.e.sessions {
		for _, q := range s.requests {
			w.unsure[q] = true
		}
	}
}

// finishing says what a hint has to do to a request's entries; the returned function compares it with what it did. A
// request whose jobs are open ends later, and is not looked at.
func (w *useWatch) finishing(q *request, h Hint) func() {
	e, t := w.r.e, w.r.t
	if q == nil || q.jobs > 0 {
		return func() {}
	}
	mine := map[block.Ref]bool{}
	for _, ref := range q.entries {
		if e.alive(ref) {
			mine[ref] = true
		}
	}
	others := map[block.Ref]bool{}
	for _, s := range e.sessions {
		qs := map[*request]bool{}
		for _, o := range s.requests {
			qs[o] = true
		}
		for _, j := range s.jobs {
			qs[j.req] = true
		}
		delete(qs, q)
		for o := range qs {
			for _, ref := range o.entries {
				others[ref] = true
			}
		}
	}
	for i := range e.slots {
		if ref := (block.Ref{Entry: uint32(i), Gen: e.slots[i].gen}); e.alive(ref) && !mine[ref] {
			others[e.table.Parent(ref.Entry)] = true
		}
	}
	upTo := uint32(0)
	for ref := range mine {
		for who := range w.by[ref] {
			others[ref] = others[ref] || who != any(q)
		}
		if _, _, pos, _ := e.table.Place(ref.Entry); others[ref] {
			upTo = max(upTo, pos)
		}
	}
	unsure := w.unsure[q]
	return func() {
		for ref := range mine {
			s := &e.slots[ref.Entry]
			if s.gen != ref.Gen || s.state != meta.Ready || s.holds > 0 {
				continue
			}
			_, _, pos, _ := e.table.Place(ref.Entry)
			age := e.now() - int64(e.table.Tick(ref.Entry)>>tickShift)
			shared := pos <= upTo
			switch {
			case (shared || h != Idle && h != Closed) && age > 0:
				t.Fatalf("entry %v at %d is %d ms old by hint %d, and others use the chain up to %d", ref, pos, age, h, upTo)
			case shared || unsure:
			case h == Idle && age != IdleAge.Milliseconds():
				t.Fatalf("entry %v at %d of an idle conversation is %d ms old; others use the chain up to %d", ref, pos, age, upTo)
			case h == Closed && e.table.Tick(ref.Entry) >= closedTicks:
				t.Fatalf("entry %v at %d of a closed conversation is %d ms old; others use the chain up to %d", ref, pos, age, upTo)
			}
		}
	}
}
