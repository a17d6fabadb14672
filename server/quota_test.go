package server_test

import (
	"testing"
	"time"

	"kvlift/client"
	"kvlift/engine"
	"kvlift/wire"
)

// openModel attaches an engine that describes another model than those of open.
func (d *daemon) openModel(engineID, model string) *client.Engine {
	d.t.Helper()
	c := d.config(engineID, 8192)
	c.Namespace.Identity = map[string]any{"model": model}
	e, err := client.Open(d.t.Context(), c)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() {
		if err := e.Close(); err != nil {
			d.t.Error(err)
		}
	})
	return e
}

// storeAll stores keys of 8 KiB under a request of their own and ends it with a hint.
func storeAll(t *testing.T, e *client.Engine, req uint64, from, n int, hint wire.Hint) {
	t.Helper()
	if got := store(t, e, req, offers(from, n)); got != n {
		t.Fatalf("%d of %d accepted", got, n)
	}
	sync5(t, e)
	e.Finish(req, 0, 0, hint)
	e.StepEnd()
}

// TestQuota: two models on one daemon. The one that stores more than its share gets it from its own keys, and the other's
// all stay, though they are the older ones; what it holds is never a byte more than its quota, over a restart as well.
func TestQuota(t *testing.T) {
	dir := t.TempDir()
	s := setup{pages: 128, quotas: []engine.Quota{{Name: "big", Share: 0.5}}}
	d := start(t, dir, s)
	used := func() uint64 {
		for _, n := range d.eng.Status().Namespaces {
			if n.Quota != nil {
				if n.Quota.Pages != 64 || engine.Model(n.Description) != "big" {
					t.Fatalf("%+v of %s", n.Quota, n.Description)
				}
				return n.Quota.UsedPages
			}
		}
		t.Fatal("no namespace has a quota")
		return 0
	}
	small, big := d.openModel("small", "small"), d.openModel("big", "big")
	storeAll(t, small, 1, 0, 30, wire.NoHint)
	for i := range 10 {
		storeAll(t, big, uint64(10+i), 1000+8*i, 8, wire.NoHint)
		if n := used(); n > 64 || i >= 4 && n != 64 {
			t.Fatalf("%d of 64 pages after %d batches", n, i+1)
		}
	}
	// One request alone cannot have more than the quota either: the rest is refused with its reason.
	r := reserve(t, big, 99, 5000, 40)
	if len(r.Keys) != 32 || r.Refused != 8 || engine.Reason(r.Reason) != engine.OverQuota {
		t.Errorf("%d accepted, %d refused, %v", len(r.Keys), r.Refused, engine.Reason(r.Reason))
	}
	big.Abort(r.Job)
	for i := range 30 {
		holds(t, small, i)
	}
	small.StepEnd()
	if c := d.eng.Status().Counters; c.Refused[engine.OverQuota] != 1 || c.RefusedKeys != 8 {
		t.Errorf("counters: %+v", c)
	}
	storeAll(t, big, 100, 7000, 20, wire.NoHint)

	d.stop()
	d = start(t, dir, s)
	eventually(t, "both come back", func() bool {
		small.StepEnd()
		big.StepEnd()
		return small.Attached() && big.Attached()
	})
	before := used()
	storeAll(t, big, 200, 8000, 20, wire.NoHint)
	if n := used(); before != 40 || n != 64 {
		t.Errorf("%d pages after the restart, %d after 40 more", before, n)
	}
	for i := range 30 {
		holds(t, small, i)
	}
	small.StepEnd()
}

// TestHints: a closed conversation's keys go first, and of an idle one they go while --min-idle keeps everything else.
func TestHints(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64, idle: 30 * time.Second})
	e := d.open("e", 8192)
	storeAll(t, e, 1, 0, 8, wire.Active)
	storeAll(t, e, 2, 100, 8, wire.Idle)
	storeAll(t, e, 3, 200, 8, wire.Closed)
	storeAll(t, e, 4, 300, 8, wire.NoHint)
	for i, want := range [][4]int{{8, 8, 4, 8}, {8, 8, 0, 8}, {8, 4, 0, 8}, {8, 0, 0, 8}} {
		r := reserve(t, e, 9, 1000+4*i, 4)
		if len(r.Keys) != 4 {
			t.Fatalf("%d of 4 accepted, %v", len(r.Keys), engine.Reason(r.Reason))
		}
		write(e, 1000+4*i, r)
		e.Commit(r.Job)
		sync5(t, e)
		if got := [4]int{len(copies(e, 0, 8)), len(copies(e, 100, 8)), len(copies(e, 200, 8)), len(copies(e, 300, 8))}; got != want {
			t.Errorf("after %d keys %v are left of active, idle, closed and silent; want %v", 4*(i+1), got, want)
		}
		e.StepEnd()
	}
	if r := reserve(t, e, 9, 2000, 1); len(r.Keys) != 0 || engine.Reason(r.Reason) != engine.TooYoung {
		t.Errorf("%d accepted over what is young, %v", len(r.Keys), engine.Reason(r.Reason))
	}
}
