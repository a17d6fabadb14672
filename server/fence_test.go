package server_test

import (
	"fmt"
	"slices"
	"testing"

	"kvlift/block"
	"kvlift/client"
	"kvlift/engine"
	"kvlift/wire"
)

// pair is two engines on one namespace with a full arena: a works, b is up to date and then says nothing more.
func pair(t *testing.T) (d *daemon, a, b *client.Engine) {
	d = start(t, t.TempDir(), setup{pages: 64, fence: true})
	a, b = d.open("a", 8192), d.open("b", 8192)
	fill(t, a, 32)
	eventually(t, "b hears of the keys", func() bool { b.StepEnd(); return len(copies(b, 0, 32)) == 32 })
	b.StepEnd()
	return d, a, b
}

// press stores new keys until some are accepted, and returns how many.
func press(t *testing.T, a *client.Engine, from int) (n int) {
	t.Helper()
	req := uint64(from)
	eventually(t, "pages come back", func() bool {
		req++
		r := reserve(t, a, req, from, 4)
		write(a, from, r)
		a.Commit(r.Job)
		a.Finish(req, 0, 0, wire.NoHint)
		a.StepEnd()
		n = len(r.Keys)
		return n > 0
	})
	sync5(t, a)
	return n
}

// TestFrozenEngineIsFenced: an engine that is stopped outside a window keeps no page from being reused (F2). When it goes
// on, it promises nothing that was reused meanwhile.
func TestFrozenEngineIsFenced(t *testing.T) {
	d, a, b := pair(t)
	for i := range 5 {
		press(t, a, 1000+100*i)
	}
	if st := d.eng.Status(); st.Counters.Fenced == 0 {
		t.Errorf("nobody was fenced: %+v", st.Counters)
	}
	for i := range 32 {
		if c, ok := find(b, i); ok {
			check(t, b, key(i), c)
		}
	}
	b.StepEnd()
	// It counts as up to date by its fence; what it has read tells its mirror.
	eventually(t, "b hears of the last key", func() bool { b.StepEnd(); _, ok := find(b, 1400); return ok })
	b.StepEnd()
	holds(t, a, 1400)
	holds(t, b, 1400)
}

// TestFenceHidesWhatWasNotHeard: behind a fence every lookup of the first window is a miss (F1), even if the mirror holds the
// key and its page is another's by now.
func TestFenceHidesWhatWasNotHeard(t *testing.T) {
	d, a, b := pair(t)
	press(t, a, 1000)
	eventually(t, "b is fenced", func() bool { return d.eng.Status().Counters.Fenced > 0 })
	hits := 0
	for i := range 32 {
		if c, ok := find(b, i); ok {
			check(t, b, key(i), c)
			hits++
		}
	}
	if hits > 0 {
		t.Errorf("b promises %d keys, and has not said yet that it goes on", hits)
	}
}

// TestOpenWindowIsNotFenced: an engine that is stopped inside a window may have promised anything; nothing is reused, and
// stores are refused and counted, while hits go on (F4).
func TestOpenWindowIsNotFenced(t *testing.T) {
	d, a, b := pair(t)
	promised := copies(b, 0, 32) // the window stays open
	if len(promised) != 32 {
		t.Fatalf("%d hits", len(promised))
	}
	for i := range 100 {
		r := reserve(t, a, uint64(10+i), 1000+4*i, 4)
		if len(r.Keys) != 0 || engine.Reason(r.Reason) != engine.Waiting {
			t.Fatalf("%+v, reason %v", r, engine.Reason(r.Reason))
		}
		a.Finish(uint64(10+i), 0, 0, wire.NoHint)
		a.StepEnd()
	}
	eventually(t, "the daemon has tried", func() bool { return d.behind("b") > 0 })
	for i, c := range promised {
		check(t, b, key(i), c)
	}
	holds(t, a, 0)
	if n := d.eng.Status().Counters.Fenced; n != 0 {
		t.Errorf("fenced %d times inside a window", n)
	}
	// It goes on, loads what it has promised itself, and ends its step: what it keeps then is its load alone.
	job := b.PrepareLoad(7, promised[28:])
	b.StepEnd()
	press(t, a, 9000)
	for i, c := range promised[28:] {
		check(t, b, key(28+i), c)
	}
	b.CompleteLoad(job)
	b.StepEnd()
}

// TestFenceKeepsPins: a fence ends promises, not copies: what a stopped engine has pinned keeps its bytes (F3).
func TestFenceKeepsPins(t *testing.T) {
	d, a, b := pair(t)
	all := copies(b, 0, 32)
	tail := all[len(all)-4:] // the deepest are the first to go
	b.PrepareLoad(7, tail)
	b.StepEnd()
	n := 0
	for i := range 5 {
		n = press(t, a, 1000+100*i)
	}
	if d.eng.Status().Counters.Fenced == 0 {
		t.Error("nobody was fenced")
	}
	for i, c := range tail {
		check(t, b, key(28+i), c)
	}
	var pinned []uint32
	for _, c := range tail {
		pinned = append(pinned, pagesOf(c)...)
	}
	for i := range n {
		for _, p := range pagesOf(holds(t, a, 1400+i)) {
			if slices.Contains(pinned, p) {
				t.Fatalf("page %d is pinned and was given away", p)
			}
		}
	}
}

// turns stores new keys in batches that are taken at once, until the arena has been written over so many times.
func turns(t *testing.T, a *client.Engine, from, pages, times int) (last int) {
	t.Helper()
	for at := from; at < from+pages*times/2; at += 4 {
		r := reserve(t, a, uint64(at), at, 4)
		if len(r.Keys) != 4 {
			t.Fatalf("%d of 4 accepted, reason %v", len(r.Keys), engine.Reason(r.Reason))
		}
		write(a, at, r)
		a.Commit(r.Job)
		a.Finish(uint64(at), 0, 0, wire.NoHint)
		a.StepEnd()
		last = at
	}
	sync5(t, a)
	return last
}

// TestFenceStands: one fence serves as long as the engine is silent. Nothing is refused meanwhile, however much is stored.
// Then it promises nothing before it has heard everything, and its acknowledgements count again.
func TestFenceStands(t *testing.T) {
	d, a, b := pair(t)
	press(t, a, 1000)
	if n := d.eng.Status().Counters.Fenced; n != 1 {
		t.Fatalf("fenced %d times", n)
	}
	last := turns(t, a, 2000, 64, 10)
	if st := d.eng.Status(); st.Counters.Fenced != 1 || st.PendingPages != 0 {
		t.Errorf("fenced %d times, %d pages pending", st.Counters.Fenced, st.PendingPages)
	}
	for _, s := range d.eng.Status().Sessions {
		if s.Fenced != (s.EngineID == "b") || s.EngineID == "b" && s.Behind != 0 {
			t.Errorf("session: %+v", s)
		}
	}
	if n := len(copies(b, 0, 32)); n != 0 {
		t.Errorf("%d hits in the first window after a fence", n)
	}
	if _, ok := find(b, last); ok {
		t.Error("a hit in the first window after a fence")
	}
	eventually(t, "b may promise again", func() bool { b.StepEnd(); _, ok := find(b, last); return ok })
	holds(t, b, last)
	b.StepEnd()
	for i := range 32 {
		if _, ok := find(b, i); ok {
			t.Errorf("key %d is a hit, its page was reused long ago", i)
		}
	}
	// Its window is open: now it is waited for, and not fenced.
	for at := 9000; ; at += 4 {
		if r := reserve(t, a, uint64(at), at, 4); len(r.Keys) < 4 {
			if engine.Reason(r.Reason) != engine.Waiting {
				t.Errorf("refused with %v", engine.Reason(r.Reason))
			}
			break
		} else if at > 9064 {
			t.Fatal("pages are reused inside a window")
		} else {
			a.Commit(r.Job)
			a.Finish(uint64(at), 0, 0, wire.NoHint)
		}
	}
	b.StepEnd()
}

// TestFenceOutlastsConnection: who was fenced when its connection ended (TestMute shows how one ends of silence alone) is not
// waited for afterwards either: it has promised nothing since. It comes back with what it loads, and to a snapshot.
func TestFenceOutlastsConnection(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64, fence: true})
	c := d.config("a", 8192)
	c.Namespace.Identity = map[string]any{"model": "raw"}
	a, err := client.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}()
	fill(t, a, 32)
	loaded := holds(t, a, 0)
	a.StepEnd()
	_, b := d.crew(t, "b", [][]uint32{{8192}})
	b.send(wire.TPin, wire.AppendRefs(nil, &wire.Refs{Job: 7, Request: 7, Refs: []block.Ref{loaded.Ref}}))
	eventually(t, "its load is known", func() bool { return d.eng.OpenJobs() == 1 })
	press(t, a, 1000)
	if s := d.session("b"); s.State != engine.Attached || !s.Fenced {
		t.Fatalf("session: %+v", s)
	}
	if err := b.c.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its connection ends", func() bool { return d.session("b").State == engine.Detached })
	last := turns(t, a, 2000, 64, 10)
	if s := d.session("b"); s.State != engine.Detached || !s.Fenced || s.Behind != 0 || s.Jobs != 1 {
		t.Errorf("session: %+v", s)
	}
	check(t, a, key(0), loaded)
	again := d.raw(t)
	again.json(wire.THello, partHello("b", -1, [][]uint32{{8192}}, func(h *wire.Hello) {
		h.Session, h.ArenaID = fmt.Sprintf("%016x", d.session("b").ID), fmt.Sprintf("%x", d.arena.Table.Header.ArenaID)
		h.Loads = []wire.OpenJob{{Job: 7, Refs: pairs([]block.Ref{loaded.Ref})}}
	}))
	var snapshot wire.Delta
	if err := snapshot.Parse(again.want(wire.TSnapshot)); err != nil {
		t.Fatal(err)
	}
	has := func(n int) bool {
		return slices.ContainsFunc(snapshot.Added, func(k wire.AddedKey) bool { return k.Key == key(n) })
	}
	if !has(0) || has(1) || !has(last) {
		t.Errorf("the snapshot has key 0, 1, %d: %v, %v, %v; want the first and the last", last, has(0), has(1), has(last))
	}
	if s := d.session("b"); s.State != engine.Attached || s.Fenced || s.Jobs != 1 {
		t.Errorf("session: %+v", s)
	}
	if r := reserve(t, a, 9000, 9000, 4); len(r.Keys) != 0 || engine.Reason(r.Reason) != engine.Waiting {
		t.Errorf("%d accepted, reason %v: b may promise all again", len(r.Keys), engine.Reason(r.Reason))
	}
}
