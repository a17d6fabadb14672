package server_test

import (
	"bufio"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/engine"
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
	e.Finish(1, 0, 0, wire.NoHint)
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
