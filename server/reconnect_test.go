package server_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvlift/arena"
	"kvlift/block"
	"kvlift/client"
	"kvlift/engine"
	"kvlift/meta"
	"kvlift/wire"
)

// TestReconnect: a daemon ends and another one comes. One engine has a load, a store and an unseen commit open and comes
// back with them; another one stays away for a while, and nothing that it may promise moves meanwhile.
func TestReconnect(t *testing.T) {
	dir := t.TempDir()
	d := start(t, dir, setup{pages: 64})
	a, b := d.open("a", 8192), d.open("b", 8192)
	fill(t, a, 20)
	eventually(t, "b hears of the keys", func() bool { b.StepEnd(); return len(copies(b, 0, 20)) == 20 })
	b.StepEnd()
	pinned := holds(t, a, 19)
	load := a.PrepareLoad(2, []client.Copy{pinned})
	writing := reserve(t, a, 3, 100, 3)
	unseen := reserve(t, a, 4, 200, 2)
	write(a, 200, unseen)
	if len(writing.Keys) != 3 || len(unseen.Keys) != 2 {
		t.Fatalf("%d and %d accepted", len(writing.Keys), len(unseen.Keys))
	}
	a.Commit(unseen.Job) // it waits for the next message, which does not come
	d.stop()

	d = start(t, dir, setup{pages: 64})
	if rep := d.report; rep.Ready != 20 || rep.Reserved != 5 || rep.Sessions != 2 {
		t.Fatalf("adopted %+v", rep)
	}
	eventually(t, "a comes back", func() bool { a.StepEnd(); return a.Attached() && a.Counters().Reconnects == 1 })
	st := d.eng.Status()
	if st.Unresolved != 1 || st.ReadyKeys != 22 || st.ReservedKeys != 3 {
		t.Errorf("%d unresolved, %d ready, %d reserved; want 1, 22, 3", st.Unresolved, st.ReadyKeys, st.ReservedKeys)
	}
	for i := range 20 {
		holds(t, a, i)
	}
	holds(t, a, 200)
	holds(t, a, 201)
	for i := range 3 {
		if _, ok := find(a, 100+i); ok {
			t.Errorf("key %d is a hit before its commit", 100+i)
		}
	}
	a.StepEnd()
	write(a, 100, writing)
	a.Commit(writing.Job)
	sync5(t, a)
	for i := range 3 {
		holds(t, a, 100+i)
	}
	a.StepEnd()
	// 25 keys are stored, 14 pages are free. Nothing else moves while b may promise anything.
	if n := store(t, a, 5, offers(300, 10)); n != 7 {
		t.Errorf("%d of 10 accepted, want the 7 for which there are free pages", n)
	}
	sync5(t, a)
	if r := reserve(t, a, 6, 400, 1); len(r.Keys) != 0 || engine.Reason(r.Reason) != engine.Waiting {
		t.Errorf("%+v, reason %v", r, engine.Reason(r.Reason))
	}
	check(t, a, key(19), pinned)
	eventually(t, "b comes back", func() bool { b.StepEnd(); return b.Attached() && b.Counters().Reconnects == 1 })
	if st := d.eng.Status(); st.Unresolved != 0 {
		t.Errorf("%d unresolved", st.Unresolved)
	}
	for _, q := range []uint64{3, 4, 5} {
		a.Finish(q, 0, 0, wire.NoHint)
	}
	// Now the rest may go, but for what is being loaded.
	got := 0
	eventually(t, "stores go on", func() bool {
		got += store(t, a, 7, offers(500+got, 1))
		sync5(t, a)
		a.StepEnd()
		b.StepEnd()
		return got >= 20
	})
	check(t, a, key(19), pinned)
	a.CompleteLoad(load)
	a.Finish(7, 0, 0, wire.NoHint)
	a.StepEnd()
	eventually(t, "no job is open", func() bool { return d.eng.OpenJobs() == 0 })
	for _, e := range []*client.Engine{a, b} { // their first daemon is gone, this one is to hear the goodbye
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "sessions end", func() bool { return len(d.sessions()) == 0 })
}

// TestDamageUnderEngines: what is given up is free for the next store, so nothing is given up while an engine may copy.
func TestDamageUnderEngines(t *testing.T) {
	dir := t.TempDir()
	d := start(t, dir, setup{pages: 64})
	a := d.open("a", 8192)
	fill(t, a, 8)
	d.stop()
	path := filepath.Join(dir, "arena", "meta")
	sound, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	entries := 2*meta.HeaderSize + meta.MaxNamespaces*meta.NamespaceSize + meta.MaxSessions*meta.SessionSize
	sessions := entries - meta.MaxSessions*meta.SessionSize
	adopt := func(at int) error {
		b := slices.Clone(sound)
		for b[at] == 0 {
			at += 64 // records are multiples of it, and the next used one will do
		}
		b[at+40] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := arena.Open(t.Context(), arena.Config{Name: "test", Dir: filepath.Join(dir, "arena"), AnyFS: true})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		e, _, err := engine.Adopt(f.Table, engine.Options{DropDamaged: true, SessionID: func() uint64 { return 1 }}, f.Held)
		if err == nil {
			err = e.Audit()
		}
		return err
	}
	for _, at := range []int{entries, sessions, 2 * meta.HeaderSize} {
		if err := adopt(at); err == nil || !strings.Contains(err.Error(), "engines hold the arena") {
			t.Errorf("damage at %d, an engine lives: %v", at, err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int{entries, sessions, 2 * meta.HeaderSize} {
		if err := adopt(at); err != nil {
			t.Errorf("damage at %d, nobody lives: %v", at, err)
		}
		f, err := arena.Open(t.Context(), arena.Config{Name: "test", Dir: filepath.Join(dir, "arena"), AnyFS: true})
		if err != nil {
			t.Fatal(err)
		}
		if rep := engine.Check(f.Table); len(rep.Problems) > 0 {
			t.Errorf("damage at %d is still there after it was given up: %v", at, rep.Problems)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestGoodbyeTooEarly: a process that says goodbye while it holds the arena is believed when its lock is free, and
// leaves nothing behind.
func TestGoodbyeTooEarly(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	before := pidfds(t)
	w := d.raw(t)
	b, err := wire.AppendJSON(wire.AppendHeader(nil, wire.THello, 0, 1), helloOf("worker", "early", nil))
	if err != nil {
		t.Fatal(err)
	}
	wire.Seal(b, 0)
	w.write(b)
	fd := w.rights()
	w.send(wire.TBye, nil)
	if _, _, err := w.frame(); err == nil {
		t.Error("an answer to a goodbye")
	}
	eventually(t, "its connection ends", func() bool { return d.server.Connections() == 0 })
	if !slices.Equal(d.sessions(), []string{"early"}) {
		t.Errorf("sessions: %v", d.sessions())
	}
	if err := fd.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its session ends with its lock", func() bool { return len(d.sessions()) == 0 })
	eventually(t, "nobody watches it any more", func() bool { return pidfds(t) == before })
}

// TestLargeReply: one large key takes the place of more small ones than an answer can name.
func TestLargeReply(t *testing.T) {
	const pages = 20480
	d := start(t, t.TempDir(), setup{pages: pages, keys: pages})
	e := d.open("a", 4096, pages*4096)
	for at := 0; at < pages; at += 4096 {
		if n := store(t, e, uint64(at), offers(at, 4096)); n != 4096 {
			t.Fatalf("%d of 4096 accepted", n)
		}
		e.Finish(uint64(at), 0, 0, wire.NoHint)
	}
	sync5(t, e)
	e.StepEnd()
	holds(t, e, 0)
	e.StepEnd()
	var r client.Reservation
	if err := e.Reserve(1<<40, []block.Offer{{Key: key(pages), Group: 1}}, &r); err != nil || len(r.Keys) != 1 {
		t.Fatalf("%d keys accepted, %v", len(r.Keys), err)
	}
	e.Commit(r.Job)
	sync5(t, e)
	left := 0
	e.Keys(func(block.Key, client.Copy) bool { left++; return true })
	if left != 1 {
		t.Errorf("%d keys are left, want the large one", left)
	}
	if c := e.Counters(); c.Lost != 0 {
		t.Errorf("the connection was lost: %+v", c)
	}
	e.Finish(1<<40, 0, 0, wire.NoHint)
	e.StepEnd()
	// And as many small ones as a message can offer.
	if n := store(t, e, 1<<41, offers(0, pages)); n != pages {
		t.Errorf("%d of %d accepted", n, pages)
	}
	sync5(t, e)
}

// TestOtherArena: an engine that maps another arena than the daemon serves stays off until its own restart (R24). Its
// mapping, and the copies it is making, are none of the daemon's concern.
func TestOtherArena(t *testing.T) {
	dir := t.TempDir()
	d := start(t, dir, setup{pages: 64})
	a := d.open("a", 8192)
	fill(t, a, 4)
	c := holds(t, a, 2)
	job := a.PrepareLoad(2, []client.Copy{c})
	a.StepEnd()
	d.stop()
	if err := os.RemoveAll(filepath.Join(dir, "arena")); err != nil {
		t.Fatal(err)
	}
	d = start(t, dir, setup{pages: 64})
	b := d.open("b", 8192)
	fill(t, b, 32)
	lost := a.Counters().Lost
	for range 50 {
		a.StepEnd()
		if _, ok := find(a, 2); ok {
			t.Fatal("a hit in another arena")
		}
		check(t, a, key(2), c)
	}
	var r client.Reservation
	if err := a.Reserve(3, offers(900, 1), &r); !errors.Is(err, client.ErrAway) {
		t.Errorf("reserve: %v", err)
	}
	a.CompleteLoad(job)
	if n := a.Counters(); n.Lost != lost+1 && n.Lost != 1 || n.Reconnects != 0 {
		t.Errorf("counters: %+v", n)
	}
	if !slices.Equal(d.sessions(), []string{"b"}) {
		t.Errorf("sessions: %v", d.sessions())
	}
	for i := range 32 {
		holds(t, b, i)
	}
}

// TestComesBackTwice: a load and a store that outlast two connections are ended once, and leave nothing held.
func TestComesBackTwice(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	w := d.raw(t)
	w.json(wire.THello, helloOf("worker", "twice", nil))
	defer w.rights().Close()
	w.send(wire.TMapped, nil)
	h := helloOf("manager", "twice", nil)
	m := d.raw(t)
	m.json(wire.THello, h)
	life := m.rights()
	m.want(wire.TReady)
	stored := m.reserve(1, 0).Slots[0].Ref
	m.send(wire.TCommit, wire.AppendJob(nil, 1))
	m.want(wire.TDelta)
	storing := m.reserve(2, 1).Slots[0].Ref
	m.send(wire.TPin, wire.AppendRefs(nil, &wire.Refs{Job: 3, Request: 1, Refs: []block.Ref{stored}}))
	h.Session, h.ArenaID = fmt.Sprintf("%016x", d.eng.Status().Sessions[0].ID), fmt.Sprintf("%x", d.arena.Table.Header.ArenaID)
	h.Loads = []wire.OpenJob{{Job: 3, Refs: pairs([]block.Ref{stored})}}
	h.Stores = []wire.OpenJob{{Job: 2, Refs: pairs([]block.Ref{storing})}}
	for range 3 {
		if err := m.c.Close(); err != nil {
			t.Fatal(err)
		}
		m = d.raw(t)
		m.json(wire.THello, h)
		m.want(wire.TReady)
		if err := d.eng.Audit(); err != nil {
			t.Error(err)
		}
	}
	m.send(wire.TUnpin, wire.AppendJob(nil, 3))
	m.send(wire.TCommit, wire.AppendJob(nil, 2))
	eventually(t, "no job is open", func() bool { return d.eng.OpenJobs() == 0 })
	// Everything can go now. One more key is asked for than there are pages beside the two.
	m.send(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: 9, Request: 9, Keys: offers(100, 64)}))
	var r wire.Reserved
	if err := r.Parse(m.want(wire.TReserved)); err != nil || r.Reason != 0 || len(r.Removed) != 2 {
		t.Errorf("reason %v, %d removed, %v", engine.Reason(r.Reason), len(r.Removed), err)
	}
	if err := errors.Join(m.c.Close(), w.c.Close(), life.Close()); err != nil {
		t.Error(err)
	}
}

// TestSuperseded: what a manager said on a connection that it has given up, and that was not read yet when it came back,
// counts no more. Its list of open jobs was made after it.
func TestSuperseded(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	w := d.raw(t)
	w.json(wire.THello, helloOf("worker", "twice", nil))
	defer w.rights().Close()
	w.send(wire.TMapped, nil)
	h := helloOf("manager", "twice", nil)
	m := d.raw(t)
	m.json(wire.THello, h)
	defer m.rights().Close()
	m.want(wire.TReady)
	stored := m.reserve(1, 0).Slots[0].Ref
	m.send(wire.TCommit, wire.AppendJob(nil, 1))
	m.want(wire.TDelta)
	h.Session, h.ArenaID = fmt.Sprintf("%016x", d.eng.Status().Sessions[0].ID), fmt.Sprintf("%x", d.arena.Table.Header.ArenaID)
	for round := range uint64(20) {
		var burst []byte
		for job := range uint64(3000) {
			burst = wire.Append(burst, wire.TPin, 0, 1, wire.AppendRefs(nil, &wire.Refs{Job: 10000*round + job, Request: 1, Refs: []block.Ref{stored}}))
		}
		m.write(burst)
		m = d.raw(t)
		m.json(wire.THello, h)
		m.want(wire.TReady)
		eventually(t, "the former connection ends", func() bool { return d.server.Connections() == 2 })
		if n := d.eng.OpenJobs(); n != 0 {
			t.Fatalf("round %d: %d jobs are open, none was listed", round, n)
		}
	}
}

// TestForgedResume: a manager that comes back lists what it had open. A list that cannot be true is refused as a whole:
// the daemon neither forgets what the session has nor takes from others, and everything comes back at its end.
func TestForgedResume(t *testing.T) {
	for _, c := range []struct {
		name   string
		resume func(h *wire.Hello, mine, theirs []block.Ref)
		code   string // empty: it is accepted
	}{
		{"truth", func(h *wire.Hello, mine, _ []block.Ref) {
			h.Stores = []wire.OpenJob{{Job: 1, Refs: pairs(mine)}}
		}, ""},
		{"nothing", func(*wire.Hello, []block.Ref, []block.Ref) {}, ""},
		{"a load of nothing", func(h *wire.Hello, _, _ []block.Ref) { h.Loads = []wire.OpenJob{{Job: 7}} }, ""},
		{"a store that was given up long ago", func(h *wire.Hello, mine, _ []block.Ref) {
			h.Stores = []wire.OpenJob{{Job: 1, Refs: pairs(mine)}, {Job: 8, Refs: [][2]uint32{{40, 3}}, Done: true}}
		}, ""},
		{"a job twice", func(h *wire.Hello, mine, _ []block.Ref) {
			h.Stores = []wire.OpenJob{{Job: 1, Refs: pairs(mine[:1])}, {Job: 1, Refs: pairs(mine[1:])}}
		}, "refused"},
		{"a load twice", func(h *wire.Hello, _, _ []block.Ref) { h.Loads = []wire.OpenJob{{Job: 7}, {Job: 7}} }, "refused"},
		{"a job as load and store", func(h *wire.Hello, mine, _ []block.Ref) {
			h.Loads, h.Stores = []wire.OpenJob{{Job: 1}}, []wire.OpenJob{{Job: 1, Refs: pairs(mine)}}
		}, "refused"},
		{"an entry twice", func(h *wire.Hello, mine, _ []block.Ref) {
			h.Stores = []wire.OpenJob{{Job: 1, Refs: append(pairs(mine), pairs(mine)...), Done: true}}
		}, "refused"},
		{"an entry in two stores", func(h *wire.Hello, mine, _ []block.Ref) {
			h.Stores = []wire.OpenJob{{Job: 1, Refs: pairs(mine), Done: true}, {Job: 2, Refs: pairs(mine)}}
		}, "refused"},
		{"what another engine stores", func(h *wire.Hello, mine, theirs []block.Ref) {
			h.Stores = []wire.OpenJob{{Job: 1, Refs: pairs(mine)}, {Job: 2, Refs: pairs(theirs), Done: true}}
		}, "refused"},
		{"a load of what another engine stores", func(h *wire.Hello, _, theirs []block.Ref) {
			h.Loads = []wire.OpenJob{{Job: 2, Refs: pairs(theirs)}}
		}, "refused"},
		{"a load of what was never there", func(h *wire.Hello, _, _ []block.Ref) {
			h.Loads = []wire.OpenJob{{Job: 2, Refs: [][2]uint32{{3, 99}}}}
		}, "refused"},
		{"an entry outside the table", func(h *wire.Hello, _, _ []block.Ref) {
			h.Stores = []wire.OpenJob{{Job: 2, Refs: [][2]uint32{{1<<32 - 1, 1}}}}
		}, "refused"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := start(t, t.TempDir(), setup{pages: 64})
			a := d.open("a", 8192)
			their := reserve(t, a, 1, 100, 2)
			var mine, theirs []block.Ref
			for _, k := range their.Keys {
				theirs = append(theirs, k.Ref)
			}
			m, w := d.attach(t, "forger", nil)
			m.send(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: 1, Request: 1, Keys: offers(0, 3)}))
			var got wire.Reserved
			if err := got.Parse(m.want(wire.TReserved)); err != nil {
				t.Fatal(err)
			}
			for _, s := range got.Slots {
				mine = append(mine, s.Ref)
			}
			h := helloOf("manager", "forger", nil)
			for _, s := range d.eng.Status().Sessions {
				if s.EngineID == "forger" {
					h.Session = fmt.Sprintf("%016x", s.ID)
				}
			}
			h.ArenaID = fmt.Sprintf("%x", d.arena.Table.Header.ArenaID)
			c.resume(h, mine, theirs)
			again := d.raw(t)
			again.json(wire.THello, h)
			if c.code == "" {
				again.want(wire.TReady)
			} else {
				d.refuses(t, again, func(*raw) {}, c.code, "")
				// What it has is still its own: the true list is taken.
				if err := d.eng.Audit(); err != nil {
					t.Error(err)
				}
				h.Loads, h.Stores = nil, []wire.OpenJob{{Job: 1, Refs: pairs(mine), Done: true}}
				again = d.raw(t)
				again.json(wire.THello, h)
				again.want(wire.TReady)
				if st := d.eng.Status(); st.ReadyKeys != 3 || st.ReservedKeys != 2 {
					t.Errorf("%d ready, %d reserved; want 3, 2", st.ReadyKeys, st.ReservedKeys)
				}
			}
			for _, r := range []*raw{m, w, again} {
				_ = r.c.Close() // the daemon has closed the first
			}
			eventually(t, "its session ends", func() bool { return slices.Equal(d.sessions(), []string{"a"}) })
			if st := d.eng.Status(); st.ReservedKeys != 2 {
				t.Errorf("%d keys are reserved, the other engine has 2", st.ReservedKeys)
			}
			if err := d.eng.Audit(); err != nil {
				t.Error(err)
			}
			write(a, 100, their)
			a.Commit(their.Job)
			sync5(t, a)
			holds(t, a, 100)
			holds(t, a, 101)
			a.Finish(1, 0, 0, wire.NoHint)
			a.StepEnd()
			if n := store(t, a, 2, offers(200, 32)); n != 32 {
				t.Errorf("%d of 32 accepted: something was kept", n)
			}
		})
	}
}

func pairs(refs []block.Ref) [][2]uint32 {
	var out [][2]uint32
	for _, r := range refs {
		out = append(out, [2]uint32{r.Entry, r.Gen})
	}
	return out
}
