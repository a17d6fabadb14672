package engine

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvlift/index"
	"kvlift/meta"
	"kvlift/pages"
	"kvlift/policy"
	"kvlift/restore"
)

// Report says what a start found in a meta file.
type Report struct {
	Ready      int
	Reserved   int // kept until every surviving session is resolved
	Revived    int // EVICTING taken for READY again
	Removed    int // removed by a reset, on their way out
	Sessions   int // unresolved
	Pages      uint64
	Problems   []error // damage; empty when sound
	Dropped    int     // damaged records that were given up
	Namespaces int
}

// maxProblems bounds the list; a scribbled file would give one per record.
const maxProblems = 100

func (r *Report) problem(err error) {
	if len(r.Problems) < maxProblems {
		r.Problems = append(r.Problems, err)
	}
}

// Adopt makes an engine of a meta table, new or left by a daemon that ended at any instruction. alive tells whether a
// process slot's byte lock is held. A damaged file is refused with the report of what is wrong, unless Options.DropDamaged.
func Adopt(t *meta.Table, o Options, alive func(slot int) bool) (*Engine, *Report, error) {
	if o.Policy == "" {
		o.Policy = "lru"
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	order, err := policy.New(o.Policy, int(t.Entries), uint64(t.Header.ArenaPages))
	if err != nil {
		return nil, nil, err
	}
	for i := range meta.MaxSessions {
		if !o.DropDamaged || !alive(i) {
			continue
		}
		// What is given up is free for the next store, and a living process may still copy from it.
		if rep := Check(t); len(rep.Problems) > 0 {
			return nil, rep, fmt.Errorf("%w: %d problems, and engines hold the arena: they must be stopped before anything is given up; the first: %w",
				meta.ErrDamaged, len(rep.Problems), rep.Problems[0])
		}
		break
	}
	e := &Engine{opts: o, table: t, pages: pages.New(t.Header.ArenaPages), order: order, slots: make([]slot, t.Entries), sessions: map[uint64]*Session{}}
	e.index = index.New(t.Entries, t.KeyEqual)
	e.spare = [...]*policy.LRU{policy.NewLRU(int(t.Entries)), policy.NewLRU(int(t.Entries))}
	for _, o := range []policy.Order{e.order, e.spare[0], e.spare[1]} {
		o.Merge(e.older)
	}
	if len(o.Quotas) > 0 {
		e.own = policy.NewLists(int(t.Entries), meta.MaxNamespaces*int(restore.Useless+1), e.older)
	}
	e.held = alive
	e.canGo = func(id uint32) bool { return e.inline(e.asker, id) && e.oldEnough(id) }
	rep := &Report{}
	e.adoptNamespaces(rep)
	e.adoptProcesses(rep, alive)
	e.adoptEntries(rep)
	if len(rep.Problems) > 0 && !o.DropDamaged {
		return nil, rep, fmt.Errorf("%w: %d problems, the first: %w", meta.ErrDamaged, len(rep.Problems), rep.Problems[0])
	}
	e.settle()
	return e, rep, nil
}

// Check reads a stopped daemon's meta file and reports every invariant that does not hold. It writes nothing.
func Check(t *meta.Table) *Report {
	e := &Engine{table: t, pages: pages.New(t.Header.ArenaPages), slots: make([]slot, t.Entries), order: policy.NewLRU(int(t.Entries)), sessions: map[uint64]*Session{},
		readOnly: true}
	e.spare = [...]*policy.LRU{policy.NewLRU(int(t.Entries)), policy.NewLRU(int(t.Entries))}
	e.index = index.New(t.Entries, t.KeyEqual)
	rep := &Report{}
	e.adoptNamespaces(rep)
	e.adoptProcesses(rep, nil)
	e.adoptEntries(rep)
	return rep
}

func (e *Engine) adoptNamespaces(rep *Report) {
	ids := map[[32]byte]int{}
	for i := range meta.MaxNamespaces {
		n, used, err := e.table.Namespace(i)
		if err != nil {
			rep.problem(err)
			if e.opts.DropDamaged && !e.readOnly {
				e.table.DropNamespace(i) // its entries are given up as those of no namespace
			}
			continue
		}
		if !used {
			continue
		}
		if first, twice := ids[n.ID]; twice {
			rep.problem(fmt.Errorf("%w: namespaces %d and %d are the same", meta.ErrDamaged, first, i))
		}
		ids[n.ID] = i
		e.spaces[i] = newNamespace(uint16(i), n)
		e.openAccount(e.spaces[i])
		rep.Namespaces++
	}
}

// adoptProcesses finds the sessions that survived their daemon (R22). alive is nil when nobody may be changed.
func (e *Engine) adoptProcesses(rep *Report, alive func(int) bool) {
	for i := range meta.MaxSessions {
		r, used, err := e.table.Process(i)
		if err == nil && used && r.Namespace != meta.NoNamespace && (int(r.Namespace) >= meta.MaxNamespaces || e.spaces[r.Namespace] == nil) {
			err = fmt.Errorf("%w: session record %d names namespace %d", meta.ErrDamaged, i, r.Namespace)
		}
		if err != nil {
			rep.problem(err)
			if e.opts.DropDamaged && !e.readOnly { // nobody holds its lock: Adopt has looked
				e.table.DropProcess(i)
			}
		}
		if !used || err != nil {
			continue
		}
		if alive == nil {
			rep.Sessions++
			continue
		}
		if !alive(i) {
			e.table.DropProcess(i)
			continue
		}
		s := e.sessions[r.Session]
		if s == nil {
			s = &Session{e: e, id: r.Session, engineID: r.EngineID, state: Unresolved, world: int(r.WorldSize),
				ranks: map[uint16]*Process{}, jobs: map[uint64]*job{}, requests: map[uint64]*request{}, parts: map[uint16][]uint32{}}
			s.sinceMS = e.opts.Now().UnixMilli()
			e.sessions[s.id] = s
			e.unknown++
			rep.Sessions++
		}
		if r.Namespace != meta.NoNamespace && s.ns == nil {
			s.ns = e.spaces[r.Namespace]
			s.ns.sessions = append(s.ns.sessions, s)
		}
		p := &Process{session: s, slot: i, role: r.Role, rank: r.Rank, pid: r.PID, mapped: true}
		e.procs[i] = p
		s.procs++
		if r.Role == meta.Worker {
			s.ranks[r.Rank] = p
		} else {
			s.manager = p
		}
	}
}

type adopted struct {
	tick     uint64
	position uint32
	id       uint32
	group    uint16
	frequent bool
	class    restore.Class
	pages    uint32
	hash     uint64
}

// adoptEntries rebuilds everything that is not in the file from the records: page map, index, eviction order.
func (e *Engine) adoptEntries(rep *Report) {
	var order []adopted
	var evicting []uint32
	owned := make([]uint64, (e.table.Overflow+63)/64)
	for i := int(e.table.Entries) - 1; i >= 0; i-- {
		id := uint32(i)
		st, gen, ok := e.table.Word(id)
		switch {
		case ok && st == meta.Free:
			e.slots[id].gen = gen
			e.freeEntries = append(e.freeEntries, id)
		case ok && st == meta.Evicting:
			evicting = append(evicting, id)
		default:
			order = e.adoptRecord(id, rep, owned, order)
		}
	}
	// A key may be stored again while its former record is on its way out: those come last, so that they find it.
	for _, id := range evicting {
		order = e.adoptRecord(id, rep, owned, order)
	}
	for o := int(e.table.Overflow) - 1; o >= 0; o-- {
		if owned[o/64]&(1<<(o%64)) == 0 {
			e.freeOverflow = append(e.freeOverflow, uint32(o))
		}
	}
	slices.SortFunc(order, func(a, b adopted) int { // a million of them: no comparison more than needed
		switch {
		case a.tick != b.tick:
			return cmp.Compare(a.tick, b.tick)
		case a.position != b.position:
			return cmp.Compare(b.position, a.position)
		case a.group != b.group:
			return cmp.Compare(b.group, a.group)
		}
		return cmp.Compare(a.id, b.id)
	})
	for i := range order {
		a := &order[i]
		e.order.Add(a.id, a.hash, a.pages)
		if a.frequent {
			e.order.Use(a.id)
		}
		e.slots[a.id].holds = 1
		e.unhold(a.id, min(a.class, restore.Useless), policy.Recent) // the stamps have merged the lanes
		e.tick = max(e.tick, a.tick)
		if a.tick < closedTicks {
			e.closedTick = a.tick // they come in their order
		} else if a.tick&1 != 0 {
			e.agedTick = a.tick
		}
	}
	for id := range e.slots {
		if e.slots[id].state != meta.Free {
			e.countChild(e.table.Parent(uint32(id)))
		}
	}
}

// adoptRecord takes one used record in, or reports why it cannot.
func (e *Engine) adoptRecord(id uint32, rep *Report, owned []uint64, order []adopted) []adopted {
	v, err := e.table.Entry(id, e.extents[:0])
	if cap(v.Extents) > cap(e.extents) {
		e.extents = v.Extents
	}
	if err == nil {
		err = e.adoptEntry(id, &v, owned)
	}
	if err != nil {
		rep.problem(err)
		if e.opts.DropDamaged && !e.readOnly {
			e.table.SetState(id, meta.Free)
			e.slots[id] = slot{gen: v.Gen}
			e.freeEntries = append(e.freeEntries, id)
			rep.Dropped++
		}
		return order
	}
	rep.Pages += uint64(v.Pages)
	switch e.slots[id].state {
	case meta.Ready:
		if v.State == meta.Evicting {
			rep.Revived++ // the bytes are whole: nobody writes before RESERVED is in the table
		}
		rep.Ready++
		order = append(order, adopted{v.Tick, v.Position, id, v.Group, v.Frequent, restore.Class(v.Class), v.Pages, e.index.Hash(v.Namespace, &v.Key)})
	case meta.Reserved:
		rep.Reserved++
		e.orphans = append(e.orphans, id)
	case meta.Removed:
		rep.Removed++
	}
	return order
}

var errTwice = errors.New("owned twice")

// adoptEntry takes a sound record's pages, overflow records and key.
func (e *Engine) adoptEntry(id uint32, v *meta.Entry, owned []uint64) error {
	if int(v.Namespace) >= meta.MaxNamespaces || e.spaces[v.Namespace] == nil || int(v.Group) >= len(e.spaces[v.Namespace].groups) {
		return fmt.Errorf("%w: entry %d: group %d of namespace %d", meta.ErrDamaged, id, v.Group, v.Namespace)
	}
	ns := e.spaces[v.Namespace]
	g := &ns.groups[v.Group]
	if v.Payload != g.payload || v.Pages != g.pages {
		return fmt.Errorf("%w: entry %d: %d bytes in %d pages, its group has %d in %d", meta.ErrDamaged, id, v.Payload, v.Pages, g.payload, g.pages)
	}
	to, h := v.State, e.index.Hash(v.Namespace, &v.Key)
	if to == meta.Evicting {
		to = meta.Ready
	}
	if other, ok := e.index.Find(h, v.Namespace, &v.Key); ok && to != meta.Removed {
		if v.State != meta.Evicting {
			return fmt.Errorf("%w: entries %d and %d hold the same key", meta.ErrDamaged, other, id)
		}
		to = meta.Removed
	}
	for i, x := range v.Extents {
		if err := e.pages.Claim(x); err != nil {
			for _, y := range v.Extents[:i] {
				_ = e.pages.Release(y) // just claimed
			}
			return fmt.Errorf("%w: entry %d: %w: %w", meta.ErrDamaged, id, errTwice, err)
		}
	}
	for _, o := range e.table.OverflowOf(id, e.overflow[:0]) {
		owned[o/64] |= 1 << (o % 64)
	}
	if to != v.State && !e.readOnly {
		e.table.SetState(id, to)
	}
	e.slots[id] = slot{gen: v.Gen, ns: v.Namespace, state: to}
	ns.keys++
	if ns.account != nil {
		ns.account.used += uint64(v.Pages)
	}
	switch to {
	case meta.Ready:
		e.index.Put(h, id)
		g.keys++
		e.ready++
		e.used += v.Pages
	case meta.Reserved:
		e.index.Put(h, id)
		e.order.Add(id, h, v.Pages)
	case meta.Removed:
		e.pending += uint64(v.Pages)
		if ns.account != nil {
			ns.account.pending += uint64(v.Pages)
		}
		e.epoch++
		ns.evicting = append(ns.evicting, eviction{id, e.epoch})
	}
	return nil
}
