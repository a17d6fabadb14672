package engine

import (
	"fmt"
	"slices"

	"pgregory.net/rapid"

	"kvlift/block"
	"kvlift/meta"
)

// drawQuotas makes quotas for the models m0 and m1 of TestModel, or none at all. A page is 4096 bytes, the arena has 40.
func drawQuotas(t *rapid.T) []Quota {
	var out []Quota
	for _, name := range []string{"m0", "*"} {
		if pages := rapid.IntRange(-12, 30).Draw(t, "quota of "+name); pages >= 0 {
			out = append(out, Quota{Name: name, Bytes: uint64(pages)*4096 + 4095})
		}
	}
	return out
}

// quotaWatch holds the engine to its quotas from outside: by the options alone it knows what they are.
type quotaWatch struct {
	r    *rig
	used map[[16]byte]uint64 // at the last look
}

func (w *quotaWatch) limit(model string) (pages uint64, ok bool) {
	for _, name := range []string{model, "*"} {
		for _, q := range w.r.opts.Quotas {
			if q.Name == name {
				return q.Bytes / 4096, true
			}
		}
	}
	return 0, false
}

// pages sums what the records of a model's namespaces hold, private ones among them.
func (w *quotaWatch) pages(model string) (n uint64) {
	e := w.r.e
	for i := range e.slots {
		if s := &e.slots[i]; s.state != meta.Free && Model(e.spaces[s.ns].Description) == model {
			_, _, _, pg := e.table.Place(uint32(i))
			n += uint64(pg)
		}
	}
	return n
}

// check: no namespace holds a page more than its quota, unless the quota was lowered below what it held; then it gains none.
func (w *quotaWatch) check() {
	used := map[[16]byte]uint64{}
	for _, ns := range w.r.e.spaces {
		if ns == nil {
			continue
		}
		id, model := [16]byte(ns.ID[:16]), Model(ns.Description)
		used[id] = w.pages(model)
		if limit, ok := w.limit(model); ok && used[id] > max(limit, w.used[id]) {
			w.r.t.Fatalf("%s holds %d pages of a quota of %d, %d before", model, used[id], limit, w.used[id])
		}
	}
	w.used = used
}

// idle is an entry in the order of its account before a reserve.
type idle struct {
	ref          block.Ref
	canGo, older bool
}

// reserving looks at the orders before a reserve; the returned function compares what the reserve did with them.
func (w *quotaWatch) reserving(s *Session, offers []block.Offer) func(*Reply) {
	e, t := w.r.e, w.r.t
	if e.own == nil {
		return func(*Reply) {}
	}
	e.asker = s
	orders := map[*account][]idle{}
	for _, a := range e.accounts {
		if a != nil {
			e.walkOf(a, func(id uint32) bool {
				orders[a] = append(orders[a], idle{block.Ref{Entry: id, Gen: e.slots[id].gen}, e.canGo(id), e.oldEnough(id)})
				return true
			})
		}
	}
	need := uint32(0)
	for i := range offers {
		need += s.ns.groups[offers[i].Group].pages
	}
	roomy := e.pages.Free() >= need && len(e.freeEntries) >= len(offers)
	a, shrinking, unknown := s.ns.account, s.ns.account.used > s.ns.account.limit, e.unknown
	return func(out *Reply) {
		if roomy || e.order.Name() == "lru" { // else arc has its own mind of what goes for others
			prefix(t, e, orders[a])
		}
		for other, order := range orders {
			for _, v := range order {
				if other != a && roomy && (e.slots[v.ref.Entry].gen != v.ref.Gen || e.slots[v.ref.Entry].state != meta.Ready) {
					t.Fatalf("entry %v of another account went though there was room", v.ref)
				}
			}
		}
		refused := slices.IndexFunc(out.Slots, func(sl Slot) bool { return sl.Outcome == Refused })
		limit, capped := w.limit(a.model)
		if refused < 0 || out.Reason != OverQuota {
			return
		}
		more := uint64(s.ns.groups[offers[refused].Group].pages)
		if !capped || w.pages(a.model)+more <= limit {
			t.Fatalf("refused for a quota of %d, %v: %d pages are held, %d wanted", limit, capped, w.pages(a.model), more)
		}
		spare := uint64(0)
		e.asker = s
		e.walkOf(a, func(id uint32) bool {
			if e.canGo(id) {
				_, _, _, n := e.table.Place(id)
				spare += uint64(n)
			}
			return true
		})
		if !shrinking && unknown == 0 && more <= limit && w.pages(a.model)+more-spare <= limit {
			t.Fatalf("refused for a quota of %d with %d pages held and %d wanted, though %d of its own may go", limit, w.pages(a.model), more, spare)
		}
	}
}

// prefix checks that what went of an order was its cold end, as far as it may go: in the reply what nobody else could
// know, announced what was old enough.
func prefix(t *rapid.T, e *Engine, order []idle) {
	var gone, announced, stays string
	for _, v := range order {
		s := &e.slots[v.ref.Entry]
		name := fmt.Sprint(v.ref)
		switch {
		case s.gen != v.ref.Gen || s.state == meta.Free:
			if gone += name; stays != "" || !v.canGo {
				t.Fatalf("%s went, may %v, and %s stayed; the order was %v", name, v.canGo, stays, order)
			}
		case s.state != meta.Ready:
			if announced += name; !v.older {
				t.Fatalf("%s was announced, and is too young; the order was %v", name, order)
			}
		case s.holds == 0 && v.canGo:
			stays += name
		}
	}
	waits := false
	for _, v := range order {
		s := &e.slots[v.ref.Entry]
		if s.gen != v.ref.Gen || s.holds > 0 {
			continue
		}
		if s.state == meta.Evicting && waits {
			t.Fatalf("%s were announced, and not from the cold end of %v", announced, order)
		}
		waits = waits || s.state == meta.Ready && v.older
	}
}
