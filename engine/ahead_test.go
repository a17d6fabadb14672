package engine

import (
	"testing"

	"pgregory.net/rapid"

	"kvlift/block"
	"kvlift/meta"
)

// TestRecordsRunOut: records are evicted ahead like pages: with small payloads they run out first, and then pages enough are
// free, but no key can be stored.
func TestRecordsRunOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := &fenceRig{rig: newRig(t, 8, 64, Options{EvictAhead: float64(rapid.IntRange(0, 1).Draw(t, "ahead")) * 0.25})}
		r.groups = []meta.Group{{ChunkTokens: 16}}
		r.a, _, _ = r.join("a", "m", 8192)
		r.ma = r.attach(r.a, nil)
		r.b, _, _ = r.join("b", "m", 8192)
		r.mb = r.attach(r.b, nil)
		r.store(0, 8)
		hear := func(s *Session, m *mirror) {
			m.apply()
			if err := r.e.Step(s, m.applied); err != nil {
				t.Fatal(err)
			}
		}
		for i := range rapid.IntRange(1, 20).Draw(t, "rounds") {
			n, out := r.store(100+4*i, 4)
			if n < 4 && out.Reason != Waiting {
				t.Fatalf("round %d: %d of 4 keys accepted, %v", i, n, out.Reason)
			}
			hear(r.a, r.ma)
			hear(r.b, r.mb)
			if n, out = r.store(100+4*i, 4); out.Reason != Fits {
				t.Fatalf("round %d: %d of 4 keys accepted, %v: all have acknowledged", i, n, out.Reason)
			}
			hear(r.a, r.ma)
			hear(r.b, r.mb)
			if err := r.e.Audit(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestLargeKeyAhead: what a batch did not get is evicted ahead in the sizes of its own groups.
func TestLargeKeyAhead(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		large := uint32(rapid.IntRange(1, 24).Draw(t, "pages"))
		r := &fenceRig{rig: newRig(t, 40, 32, Options{})}
		r.groups = []meta.Group{{ChunkTokens: 16}, {ChunkTokens: 16}}
		r.a, _, _ = r.join("a", "m", 4096, large*4096)
		r.ma = r.attach(r.a, nil)
		r.b, _, _ = r.join("b", "m", 4096, large*4096)
		r.mb = r.attach(r.b, nil)
		r.store(0, 32)
		for i := range 2 {
			var out Reply
			if err := r.e.Reserve(r.a, uint64(100+i), 100, []block.Offer{{Key: testKey(100), Group: 1, Position: 16}}, &out); err != nil {
				t.Fatal(err)
			}
			if i == 0 && out.Reason != Waiting || i == 1 && out.Reason != Fits {
				t.Fatalf("attempt %d: %v", i, out.Reason)
			}
			for s, m := range map[*Session]*mirror{r.a: r.ma, r.b: r.mb} {
				m.apply()
				if err := r.e.Step(s, m.applied); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}
