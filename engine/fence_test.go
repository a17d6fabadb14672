package engine

import (
	"testing"

	"pgregory.net/rapid"

	"kvlift/block"
	"kvlift/meta"
)

// fenceRig is two engines that share a full arena of 8 keys; b knows all of them.
type fenceRig struct {
	*rig
	a, b   *Session
	ma, mb *mirror
	pa, pb [2]*Process // manager and worker
	job    uint64
}

func newFenceRig(t *rapid.T) *fenceRig {
	r := &fenceRig{rig: newRig(t, 32, 16, Options{})}
	r.groups = []meta.Group{{ChunkTokens: 16}}
	r.a, r.pa[0], r.pa[1] = r.join("a", "m", 8192)
	r.ma = r.attach(r.a, nil)
	r.b, r.pb[0], r.pb[1] = r.join("b", "m", 8192)
	r.mb = r.attach(r.b, nil)
	if n, _ := r.store(0, 8); n != 8 {
		t.Fatalf("%d of 8 keys accepted", n)
	}
	r.mb.apply()
	return r
}

// store lets a store keys under a request of its own and returns how many were taken, and what for.
func (r *fenceRig) store(from, n int) (int, *Reply) {
	r.job++
	var offers []block.Offer
	for i := range n {
		offers = append(offers, block.Offer{Key: testKey(from + i), Position: uint32(i+1) * 16})
	}
	out := &Reply{}
	if err := r.e.Reserve(r.a, r.job, r.job, offers, out); err != nil {
		r.t.Fatal(err)
	}
	taken := 0
	for _, s := range out.Slots {
		if s.Outcome == Accepted {
			taken++
		}
	}
	if taken > 0 {
		if err := r.e.Commit(r.a, r.job); err != nil {
			r.t.Fatal(err)
		}
	}
	r.e.Finish(r.a, Finished{Request: r.job})
	r.ma.apply()
	return taken, out
}

// whole fails when a mirror holds a key that the table has no more.
func (r *fenceRig) whole(m *mirror) {
	for k, ref := range m.keys {
		if s := &r.e.slots[ref.Entry]; s.gen != ref.Gen || s.state != meta.Ready && s.state != meta.Evicting {
			r.t.Fatalf("key %v is promised in entry %d generation %d, the table has %v generation %d", k, ref.Entry, ref.Gen, s.state, s.gen)
		}
	}
}

// TestFence: a fenced session holds nothing back, for as long as it says nothing, and whatever it has read of its stream when
// it goes on, it reaches the fence only with what was given away meanwhile.
func TestFence(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newFenceRig(t)
		if r.e.Fence(r.b) {
			t.Fatal("a session that owes nothing is fenced: it may never say what ends that")
		}
		if n, out := r.store(100, 2); n != 0 || out.Reason != Waiting {
			t.Fatalf("%d keys accepted, %v: b may promise all", n, out.Reason)
		}
		if b := r.e.Behind(); len(b) != 2 { // a has not acknowledged by itself either
			t.Fatalf("%d sessions are behind", len(b))
		}
		if err := r.e.Step(r.a, r.ma.applied); err != nil {
			t.Fatal(err)
		}
		if b := r.e.Behind(); len(b) != 1 || b[r.b] != r.b.acked || !r.e.Fence(r.b) || r.e.Fence(r.b) || len(r.e.Behind()) != 0 {
			t.Fatalf("b is behind, and is fenced once: %v", b)
		}
		rounds := rapid.IntRange(1, 20).Draw(t, "rounds")
		for i := range rounds {
			if n, out := r.store(200+4*i, 4); n != 4 {
				t.Fatalf("round %d: %d of 4 keys accepted, %v", i, n, out.Reason)
			}
			if err := r.e.Audit(); err != nil {
				t.Fatal(err)
			}
		}
		st := r.e.Status()
		if st.PendingPages != 0 || st.Counters.Fenced != 1 || st.Counters.Refused[Waiting] != 1 || st.Counters.Evicted[ByStore] == 0 {
			t.Fatalf("%d pages pending, counters %+v", st.PendingPages, st.Counters)
		}
		ahead := rapid.Bool().Draw(t, "it reads before it says something")
		var epoch uint64
		if !ahead {
			epoch = r.e.Unfence(r.b)
		}
		for len(r.mb.unread) > 0 {
			r.mb.applyFirst(1)
			if !ahead && r.mb.applied >= epoch {
				r.whole(r.mb)
			}
		}
		if ahead {
			epoch = r.e.Unfence(r.b)
		}
		if r.mb.applied != epoch {
			t.Fatalf("all is applied, up to %d, and the fence stands at %d", r.mb.applied, epoch)
		}
		r.whole(r.mb)
		// From here on it counts again.
		for range 2 {
			if n, out := r.store(900, 4); n != 0 || out.Reason != Waiting {
				t.Fatalf("%d keys accepted, %v: b may promise all again", n, out.Reason)
			}
		}
		r.mb.apply()
		if err := r.e.Step(r.b, r.mb.applied); err != nil {
			t.Fatal(err)
		}
		if n, out := r.store(900, 4); n != 4 {
			t.Fatalf("%d of 4 keys accepted, %v", n, out.Reason)
		}
	})
}

// TestFencedSessionLeaves: a fence outlasts the connection, since what the session may promise has not changed, and ends with
// a new one, or with the session. Its load keeps its pages until then.
func TestFencedSessionLeaves(t *testing.T) {
	for _, end := range []string{"comes back", "dies"} {
		rapid.Check(t, func(t *rapid.T) {
			r := newFenceRig(t)
			pinned := r.mb.keys[testKey(7)]
			if err := r.e.Pin(r.b, 1, 1, []block.Ref{pinned}); err != nil {
				t.Fatal(err)
			}
			r.store(100, 2)
			if err := r.e.Step(r.a, r.ma.applied); err != nil {
				t.Fatal(err)
			}
			if !r.e.Fence(r.b) {
				t.Fatal("b is not fenced")
			}
			r.e.Detach(r.b, r.mb)
			for i := range rapid.IntRange(1, 10).Draw(t, "rounds") {
				if n, out := r.store(200+4*i, 4); n != 4 {
					t.Fatalf("round %d: %d of 4 keys accepted, %v", i, n, out.Reason)
				}
			}
			for _, s := range r.e.Status().Sessions {
				if s.EngineID == "b" && (!s.Fenced || s.Jobs != 1 || s.Behind != 0) {
					t.Fatalf("b: %+v", s)
				}
			}
			if n, out := r.store(300, 8); n != 7 || out.Reason != NoRoom {
				t.Fatalf("%d of 8 keys accepted, %v: one is being loaded", n, out.Reason)
			}
			if end == "comes back" {
				m := r.attach(r.b, &Resume{Loads: []OpenJob{{Job: 1, Refs: []block.Ref{pinned}}}})
				if r.mb = m; m.keys[testKey(7)] != pinned {
					t.Fatal("what it loads is lost")
				}
				r.whole(m)
				if n, out := r.store(400, 4); n != 0 || out.Reason != Waiting {
					t.Fatalf("%d keys accepted, %v: b may promise all", n, out.Reason)
				}
			} else {
				r.e.ProcessEnded(r.pb[0])
				r.e.ProcessEnded(r.pb[1])
				if n, out := r.store(400, 8); n != 8 {
					t.Fatalf("%d of 8 keys accepted, %v", n, out.Reason)
				}
			}
			if err := r.e.Audit(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestFenceBesideOthers: a fence speaks for its own session. What a third one may promise waits for that one.
func TestFenceBesideOthers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newFenceRig(t)
		r.store(100, 2)
		if err := r.e.Step(r.a, r.ma.applied); err != nil {
			t.Fatal(err)
		}
		if !r.e.Fence(r.b) {
			t.Fatal("b is not fenced")
		}
		c, _, _ := r.join("c", "m", 8192)
		mc := r.attach(c, nil)
		if n, out := r.store(150, 2); n != 2 { // what the fence has set free
			t.Fatalf("%d of 2 keys accepted, %v", n, out.Reason)
		}
		for i := range rapid.IntRange(1, 10).Draw(t, "rounds") {
			if n, out := r.store(200+4*i, 4); n != 0 || out.Reason != Waiting {
				t.Fatalf("round %d: %d keys accepted, %v: c may promise all", i, n, out.Reason)
			}
			r.whole(mc)
			mc.apply()
			if err := r.e.Step(c, mc.applied); err != nil {
				t.Fatal(err)
			}
			if n, out := r.store(200+4*i, 4); n != 4 {
				t.Fatalf("round %d: %d of 4 keys accepted, %v: c has acknowledged, b is fenced", i, n, out.Reason)
			}
			mc.apply()
			if err := r.e.Step(c, mc.applied); err != nil {
				t.Fatal(err)
			}
			if err := r.e.Audit(); err != nil {
				t.Fatal(err)
			}
		}
		epoch := r.e.Unfence(r.b)
		if r.mb.apply(); r.mb.applied != epoch {
			t.Fatalf("all is applied, up to %d, and the fence stands at %d", r.mb.applied, epoch)
		}
		r.whole(r.mb)
	})
}
