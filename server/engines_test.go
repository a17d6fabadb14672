package server_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvlift/arena"
	"kvlift/block"
	"kvlift/client"
	"kvlift/engine"
	"kvlift/meta"
	"kvlift/wire"
)

// copies looks keys up until the first miss.
func copies(e *client.Engine, from, n int) []client.Copy {
	var keys []block.Key
	for i := range n {
		keys = append(keys, key(from+i))
	}
	return e.Prefix(keys, nil)
}

// find looks one key up.
func find(e *client.Engine, n int) (client.Copy, bool) {
	k := key(n)
	return e.Lookup(&k)
}

// holds fails unless the engine has the key with the right bytes.
func holds(t *testing.T, e *client.Engine, n int) client.Copy {
	t.Helper()
	c, ok := find(e, n)
	if !ok {
		t.Fatalf("key %d is a miss", n)
	}
	check(t, e, key(n), c)
	return c
}

func reserve(t *testing.T, e *client.Engine, req uint64, from, n int) client.Reservation {
	t.Helper()
	var r client.Reservation
	began := time.Now()
	if err := e.Reserve(req, offers(from, n), &r); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("a reserve took %v", took)
	}
	return r
}

// write puts the bytes of reserved keys where check looks for them.
func write(e *client.Engine, from int, r client.Reservation) {
	for _, k := range r.Keys {
		id := key(from + k.Index)
		for _, x := range k.Extents {
			for i, b := 0, e.Workers[0].Bytes(x); i < len(b); i++ {
				b[i] = id.Bytes[31] ^ byte(i)
			}
		}
	}
}

func sync5(t *testing.T, e *client.Engine) {
	t.Helper()
	if err := e.Sync(10 * time.Second); err != nil {
		t.Fatal(err)
	}
}

// fill stores keys 0 to n-1 of 8 KiB under one request and ends it.
func fill(t *testing.T, e *client.Engine, n int) {
	t.Helper()
	if got := store(t, e, 1, offers(0, n)); got != n {
		t.Fatalf("%d of %d accepted", got, n)
	}
	sync5(t, e)
	e.Finish(1, 0, 0)
	e.StepEnd()
}

// catchUp ends steps until an engine has acknowledged every removal.
func (d *daemon) catchUp(e *client.Engine, id string) {
	d.t.Helper()
	eventually(d.t, id+" acknowledges", func() bool { e.StepEnd(); return d.behind(id) == 0 })
}

func pagesOf(c client.Copy) []uint32 {
	var out []uint32
	for _, x := range c.Extents(nil) {
		for p := x.Page; p < x.Page+x.Count; p++ {
			out = append(out, p)
		}
	}
	return out
}

// TestRemoval follows a page from one key to the next while two engines share the keys: announced to both, whole as long
// as one of them may still promise or copies it, and reused only then.
func TestRemoval(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	a, b := d.open("a", 8192), d.open("b", 8192)
	fill(t, a, 32)
	eventually(t, "b hears of the keys", func() bool { b.StepEnd(); return len(copies(b, 0, 32)) == 32 })
	pinned := holds(t, b, 31) // the coldest: the deepest of its request

	// There is nothing free. The store is refused at once, and removals are announced.
	if r := reserve(t, a, 2, 100, 4); len(r.Keys) != 0 || r.Refused != 4 || engine.Reason(r.Reason) != engine.Waiting {
		t.Fatalf("%+v, reason %v", r, engine.Reason(r.Reason))
	}
	if c := d.eng.Status().Counters; c.Refused[engine.Waiting] != 1 || c.RefusedKeys != 4 || c.Evicted[engine.Ahead] < 4 {
		t.Errorf("counters: %+v", c)
	}
	d.catchUp(a, "a")
	var removed []int
	for i := range 32 {
		if _, ok := find(a, i); !ok {
			removed = append(removed, i)
		}
	}
	if len(removed) < 4 || removed[len(removed)-1] != 31 || removed[0] != 32-len(removed) {
		t.Fatalf("removed were %v: want the end of the chain", removed)
	}
	// b is in a window, so it has neither applied nor acknowledged anything: its hits hold, byte by byte, and no page moves.
	// What it has promised it may still pin.
	load := b.PrepareLoad(7, []client.Copy{pinned})
	var theirs []uint32
	for _, i := range removed {
		theirs = append(theirs, pagesOf(holds(t, b, i))...)
	}
	for range 20 {
		if r := reserve(t, a, 2, 100, 4); len(r.Keys) != 0 || engine.Reason(r.Reason) != engine.Waiting {
			t.Fatalf("%+v, reason %v", r, engine.Reason(r.Reason))
		}
		a.StepEnd()
	}
	for _, i := range removed {
		holds(t, b, i)
	}
	// It acknowledges; the key that it is loading stays whole all the same.
	d.catchUp(b, "b")
	for _, i := range removed {
		if _, ok := find(b, i); ok {
			t.Errorf("key %d is still a hit", i)
		}
	}
	r := reserve(t, a, 2, 100, len(removed)-1)
	if len(r.Keys) != len(removed)-1 {
		t.Fatalf("%d of %d accepted, reason %v", len(r.Keys), len(removed)-1, engine.Reason(r.Reason))
	}
	write(a, 100, r)
	for _, k := range r.Keys {
		for _, x := range k.Extents {
			if !slices.Contains(theirs, x.Page) || slices.Contains(pagesOf(pinned), x.Page) {
				t.Errorf("page %d was given out: %v were free, %v are being copied", x.Page, theirs, pagesOf(pinned))
			}
		}
	}
	check(t, b, key(31), pinned)
	a.Commit(r.Job)
	sync5(t, a)
	before := d.eng.Status().FreePages
	b.CompleteLoad(load)
	b.StepEnd()
	eventually(t, "the loaded key's pages come back", func() bool { return d.eng.Status().FreePages == before+2 })
}

// TestNeverAcknowledges: an engine that never ends its window costs the others what it may promise, and nothing else.
func TestNeverAcknowledges(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	a, b := d.open("a", 8192), d.open("b", 8192)
	fill(t, a, 32)
	eventually(t, "b hears of the keys", func() bool { b.StepEnd(); return len(copies(b, 0, 32)) == 32 })
	for i := range 100 {
		if r := reserve(t, a, uint64(10+i), 1000+4*i, 4); len(r.Keys) != 0 || engine.Reason(r.Reason) != engine.Waiting {
			t.Fatalf("%+v, reason %v", r, engine.Reason(r.Reason))
		}
		a.StepEnd()
		holds(t, a, 0)
		holds(t, b, 31)
	}
	st := d.eng.Status()
	if st.Counters.Refused[engine.Waiting] != 100 || st.Counters.RefusedKeys != 400 || st.ReservedKeys != 0 {
		t.Errorf("counters: %+v, %d reserved", st.Counters, st.ReservedKeys)
	}
	if a.Counters().Refused != 400 {
		t.Errorf("the engine counts %+v", a.Counters())
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "b ends", func() bool { return len(d.sessions()) == 1 })
	if n := store(t, a, 999, offers(2000, 20)); n != 20 {
		t.Errorf("%d of 20 accepted after its end", n)
	}
}

// TestKilled: what a killed engine had reserved and pinned comes back, as soon as the kernel says that it is gone.
func TestKilled(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 128})
	finish := d.witness()
	a := d.open("a", 8192)
	c := helper("engine", "SOCKET="+d.socket, "ENGINE=dies")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := c.StdinPipe() // held open: it waits on it
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("the helper says %q, %v", line, err)
	}
	finish() // its open jobs would be counted
	eventually(t, "the engine beside ends", func() bool { return len(d.sessions()) == 2 })
	eventually(t, "a hears of its keys", func() bool { a.StepEnd(); return len(copies(a, 500, 8)) == 8 })
	a.StepEnd()
	eventually(t, "its jobs are known", func() bool { return d.eng.OpenJobs() == 2 })
	if st := d.eng.Status(); st.ReservedKeys != 3 || len(d.sessions()) != 2 {
		t.Fatalf("%d reserved, sessions %v", st.ReservedKeys, d.sessions())
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // it was killed
	eventually(t, "its session ends", func() bool { return slices.Equal(d.sessions(), []string{"a"}) })
	if st := d.eng.Status(); st.ReservedKeys != 0 || d.eng.OpenJobs() != 0 || st.ReadyKeys != 8 {
		t.Errorf("%d reserved, %d jobs, %d keys", st.ReservedKeys, d.eng.OpenJobs(), st.ReadyKeys)
	}
	if err := d.eng.Audit(); err != nil {
		t.Error(err)
	}
	// Its keys stay; its reservation, and what it pinned, can be had again: the whole arena can.
	if n := store(t, a, 1, offers(0, 64)); n != 64 {
		t.Errorf("%d of 64 accepted", n)
	}
	sync5(t, a)
}

// TestReset: a store that is under way when the weights change is never served, and its pages come back when its rank
// has told that the copy is over, not before.
func TestReset(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	a, b := d.open("a", 8192), d.open("b", 8192)
	fill(t, a, 8)
	eventually(t, "b hears of the keys", func() bool { b.StepEnd(); return len(copies(b, 0, 8)) == 8 })
	b.StepEnd()
	r := reserve(t, a, 2, 100, 3)
	if len(r.Keys) != 3 {
		t.Fatalf("%d of 3 accepted", len(r.Keys))
	}
	a.Reset()
	if _, ok := find(a, 0); ok {
		t.Error("a hit before the reset is confirmed")
	}
	sync5(t, a)
	if n := len(copies(a, 0, 8)); n != 0 {
		t.Errorf("%d old keys hit after the reset", n)
	}
	a.StepEnd()
	write(a, 100, r) // the copy comes late: it must not land in anybody else's page
	a.Commit(r.Job)
	d.catchUp(b, "b")
	if n := len(copies(b, 0, 8)); n != 0 {
		t.Errorf("%d old keys hit in the other engine", n)
	}
	b.StepEnd()
	st := d.eng.Status()
	if st.ReadyKeys != 0 || st.ReservedKeys != 3 || st.FreePages != 64-6 || st.PendingPages != 0 {
		t.Errorf("%d ready, %d reserved, %d pages free, %d pending; want 0, 3, 58, 0", st.ReadyKeys, st.ReservedKeys, st.FreePages, st.PendingPages)
	}
	// Everything but those pages is given out again, under the same keys, to the private generation.
	n := store(t, a, 3, offers(100, 29))
	if n != 29 {
		t.Errorf("%d of 29 accepted while the copy goes on", n)
	}
	sync5(t, a)
	for i := range 29 {
		holds(t, a, 100+i)
	}
	a.StepEnd()
	if err := a.Ended(r.Job, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	if st := d.eng.Status(); st.ReservedKeys != 0 || st.FreePages != 6 {
		t.Errorf("%d reserved, %d pages free after the rank's report", st.ReservedKeys, st.FreePages)
	}
	// The generation is private: nobody else hears of it.
	d.catchUp(b, "b")
	if n := len(copies(b, 100, 29)); n != 0 {
		t.Errorf("%d keys of the private generation hit in another engine", n)
	}
	b.StepEnd()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the private generation goes with its session", func() bool {
		st := d.eng.Status()
		return st.FreePages == 64 && len(st.Namespaces) == 1
	})
}

// TestLate: a reserve whose answer is late makes every lookup a miss until the answer is read; what it took away is gone
// then, and what it was given goes back.
func TestLate(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	var gate atomic.Pointer[sync.RWMutex]
	d.arena.Table.OnWrite = func(int, int) {
		if g := gate.Load(); g != nil {
			g.RLock() // the daemon stands still in the middle of a reserve
			defer g.RUnlock()
		}
	}
	_ = d.eng.Status() // the hook is set before anybody connects
	first := d.open("first", 8192)
	fill(t, first, 32)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first engine ends", func() bool { return len(d.sessions()) == 0 })
	c := d.config("late", 8192)
	c.Deadline = time.Nanosecond
	e, err := client.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	if n := len(copies(e, 0, 32)); n != 32 {
		t.Fatalf("%d of 32 keys hit", n)
	}
	var stop sync.RWMutex
	stop.Lock()
	gate.Store(&stop)
	var r client.Reservation
	if err := e.Reserve(1, offers(100, 4), &r); !errors.Is(err, client.ErrDeadline) {
		t.Fatalf("reserve: %v", err)
	}
	for i := range 32 {
		if _, ok := find(e, i); ok {
			t.Errorf("key %d is a hit while an answer is owed", i)
		}
	}
	e.StepEnd()
	if err := e.Reserve(1, offers(200, 4), &r); !errors.Is(err, client.ErrDeadline) {
		t.Errorf("another reserve: %v", err)
	}
	if n := e.Counters(); n.Reserves != 1 || n.Late != 1 {
		t.Errorf("counters: %+v", n)
	}
	gate.Store(nil)
	stop.Unlock()
	eventually(t, "the answer is read", func() bool { e.StepEnd(); _, ok := find(e, 0); return ok })
	for i := range 28 {
		holds(t, e, i)
	}
	for _, i := range []int{28, 29, 30, 31, 100, 101, 102, 103, 200} {
		if _, ok := find(e, i); ok {
			t.Errorf("key %d is a hit", i)
		}
	}
	eventually(t, "its job is aborted", func() bool { e.StepEnd(); return d.eng.OpenJobs() == 0 })
	if st := d.eng.Status(); st.ReservedKeys != 0 || st.FreePages != 8 || st.Counters.Aborted != 4 {
		t.Errorf("%d reserved, %d pages free, %d aborted", st.ReservedKeys, st.FreePages, st.Counters.Aborted)
	}
}

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
		a.Finish(q, 0, 0)
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
	a.Finish(7, 0, 0)
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
		e.Finish(uint64(at), 0, 0)
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
	e.Finish(1<<40, 0, 0)
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
			a.Finish(1, 0, 0)
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
