package engine

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"kvlift/meta"
)

func identity(model string) string {
	return fmt.Sprintf(`{"groups":[],"identity":{"model":%q}}`, model)
}

// inPages is the bytes of a quota in a shelf, where a chunk of attention takes one.
func inPages(n int) uint64 { return uint64(n) * 4096 }

// newCapped is a shelf whose engine describes the model "mine".
func newCapped(t *testing.T, arena, records uint32, quotas ...Quota) *shelf {
	s := &shelf{t: t, wide: 1, clock: time.UnixMilli(1_700_000_000_000), groups: []meta.Group{attention}, opts: Options{Quotas: quotas}}
	s.file = make([]byte, meta.NewLayout(records, 16).Size)
	tb, err := meta.Create(s.file, meta.Header{ArenaPages: arena, Entries: records, Overflow: 16, Name: "shelf"})
	if err != nil {
		t.Fatal(err)
	}
	s.open(tb)
	s.s = s.enter("mine", identity("mine"), nobody{})
	return s
}

// as runs f with another engine's session.
func (s *shelf) as(o *Session, f func()) {
	mine := s.s
	s.s = o
	f()
	s.s = mine
}

func (s *shelf) quota() QuotaStatus {
	s.t.Helper()
	for _, n := range s.e.Status().Namespaces {
		if n.Index == int(s.s.ns.index) && n.Quota != nil {
			return *n.Quota
		}
	}
	s.t.Fatal("the namespace shows no quota")
	return QuotaStatus{}
}

// TestQuotaTakesItsOwn: at its quota a namespace loses its own coldest leaves, though others are colder and the arena has
// room; below it, it takes the coldest of all.
func TestQuotaTakesItsOwn(t *testing.T) {
	for _, policy := range []string{"lru", "arc"} {
		s := newCapped(t, 16, 64, Quota{Name: "mine", Bytes: inPages(8)})
		s.opts.Policy = policy
		s.restart()
		s.s = s.enter("mine", identity("mine"), nobody{})
		other := s.enter("other", identity("other"), nobody{})
		s.as(other, func() { s.turn(1, NoHint, chain("old", 0, 100, 400, 100)...) })
		s.turn(1, NoHint, chain("a", 0, 100, 600, 100)...)
		if n := s.store(2, chain("b", 0, 100, 500, 100)...); n != 5 || s.reason != Fits {
			t.Fatalf("%s: %d of 5 were stored, %v", policy, n, s.reason)
		}
		s.gone(chain("a", 0, 400, 600, 100)...)
		s.worth(0, chain("a", 0, 100, 300, 100)...)
		s.as(other, func() { s.worth(0, chain("old", 0, 100, 400, 100)...) })
		if q := s.quota(); q != (QuotaStatus{Pages: 8, UsedPages: 8}) {
			t.Errorf("%s: %+v", policy, q)
		}
		// The other one has no quota: it takes the rest of the arena and its own old keys, and then what is coldest, whosever
		// it is; that has to be heard of first.
		s.finish(2)
		s.as(other, func() {
			if n := s.store(2, chain("new", 0, 100, 900, 100)...); n != 8 || s.reason != Waiting || s.e.pending != 1 {
				t.Errorf("%s: %d of 9 were stored, %v, %d pages announced", policy, n, s.reason, s.e.pending)
			}
		})
		s.gone(chunk{"a", 0, 300})
	}
}

// TestQuotaRefuses: what is at its quota and has nothing that may go is refused with a reason of its own, counted for the
// daemon and for the namespace, with the head of the batch stored.
func TestQuotaRefuses(t *testing.T) {
	for _, v := range []struct {
		name  string
		quota Quota
		run   func(s *shelf)
		want  int // of 4
	}{
		{"held by the request itself", Quota{Name: "mine", Bytes: inPages(3)}, func(*shelf) {}, 3},
		{"a page less than one more", Quota{Name: "mine", Bytes: inPages(4) - 1}, func(*shelf) {}, 3},
		{"nothing at all", Quota{Name: "mine"}, func(*shelf) {}, 0},
		{"a share", Quota{Name: "*", Share: 0.125}, func(*shelf) {}, 2},
		{"too young", Quota{Name: "*", Bytes: inPages(3)}, func(s *shelf) {
			s.e.opts.MinIdle = 30 * time.Second
			s.turn(9, NoHint, chain("young", 0, 100, 200, 100)...)
		}, 1},
		{"being stored", Quota{Name: "*", Bytes: inPages(3)}, func(s *shelf) {
			var out Reply
			if err := s.e.Reserve(s.s, 77, 9, offersOf(chain("flight", 0, 100, 200, 100)...), &out); err != nil {
				t.Fatal(err)
			}
		}, 1},
		{"known to another engine", Quota{Name: "*", Bytes: inPages(3)}, func(s *shelf) {
			s.turn(9, NoHint, chain("both", 0, 100, 200, 100)...)
			s.enter("second", identity("mine"), nobody{})
		}, 1},
	} {
		s := newCapped(t, 16, 64, v.quota)
		v.run(s)
		if n := s.store(1, chain("a", 0, 100, 400, 100)...); n != v.want || s.reason != OverQuota || s.reason.String() != "quota" {
			t.Errorf("%s: %d of 4 were stored, %v; want %d", v.name, n, s.reason, v.want)
		}
		st := s.e.Status()
		if st.Counters.Refused[OverQuota] != 1 || st.Counters.RefusedKeys != uint64(4-v.want) || s.quota().Refused != 1 {
			t.Errorf("%s: counters %+v, quota %+v", v.name, st.Counters, s.quota())
		}
	}
}

// TestQuotaOfWideKeys: a key of more pages than the victims have takes several, or none when they are not enough.
func TestQuotaOfWideKeys(t *testing.T) {
	s := &shelf{t: t, wide: 3, clock: time.UnixMilli(1_700_000_000_000), groups: []meta.Group{attention, {Kind: meta.Full, ChunkTokens: 100}},
		opts: Options{Quotas: []Quota{{Name: "mine", Bytes: inPages(7)}}}}
	s.file = make([]byte, meta.NewLayout(64, 16).Size)
	tb, err := meta.Create(s.file, meta.Header{ArenaPages: 32, Entries: 64, Overflow: 16})
	if err != nil {
		t.Fatal(err)
	}
	s.open(tb)
	s.s = s.enter("mine", identity("mine"), nobody{})
	s.turn(1, NoHint, chain("small", 1, 100, 500, 100)...) // 5 pages
	if n := s.store(2, chain("wide", 0, 100, 200, 100)...); n != 2 {
		t.Fatalf("%d of 2 were stored, %v", n, s.reason)
	}
	s.gone(chain("small", 1, 200, 500, 100)...)
	s.worth(0, chunk{"small", 1, 100})
	if n := s.store(2, chain("wide", 0, 300, 300, 100)...); n != 0 || s.reason != OverQuota {
		t.Errorf("%d were stored over one page, %v", n, s.reason)
	}
	s.worth(0, chunk{"small", 1, 100})
}

// TestQuotaNames: an id goes before a model, more digits before fewer, and the star is for the rest.
func TestQuotaNames(t *testing.T) {
	id := fmt.Sprintf("%x", Describe(identity("mine"), nil).ID)
	for _, v := range []struct {
		quotas []Quota
		want   uint64 // pages, 0 none
	}{
		{[]Quota{{Name: "*", Bytes: inPages(5)}}, 5},
		{[]Quota{{Name: "*", Bytes: inPages(5)}, {Name: "mine", Bytes: inPages(6)}}, 6},
		{[]Quota{{Name: id[:8], Bytes: inPages(7)}, {Name: "mine", Bytes: inPages(6)}}, 7},
		{[]Quota{{Name: id[:8], Bytes: inPages(7)}, {Name: id, Bytes: inPages(8)}, {Name: id[:12], Bytes: inPages(9)}}, 8},
		{[]Quota{{Name: id[:7], Bytes: inPages(7)}, {Name: "min", Bytes: inPages(6)}, {Name: "0123456789", Bytes: inPages(3)}}, 0},
		{[]Quota{{Name: "*", Share: 0.29}}, 29},
		{[]Quota{{Name: "*", Share: 1}}, 100},
	} {
		s := newCapped(t, 100, 64, v.quotas...)
		got := uint64(0)
		for _, n := range s.e.Status().Namespaces {
			if n.Index == int(s.s.ns.index) && n.Quota != nil {
				got = n.Quota.Pages
			}
		}
		if got != v.want {
			t.Errorf("%+v: a quota of %d pages, want %d", v.quotas, got, v.want)
		}
	}
}

// TestQuotaLowered: what a namespace holds when its quota is lowered goes at its own reserves, so many at a time, and
// nothing is stored for it until it fits.
func TestQuotaLowered(t *testing.T) {
	s := newCapped(t, 1024, 1024)
	s.turn(1, NoHint, chain("a", 0, 100, 70_000, 100)...) // 700 pages
	other := s.enter("other", identity("other"), nobody{})
	s.as(other, func() { s.turn(1, NoHint, chain("o", 0, 100, 500, 100)...) })
	s.opts.Quotas = []Quota{{Name: "mine", Bytes: inPages(100)}}
	s.restart()
	s.s = s.enter("mine", identity("mine"), nobody{})
	if q := s.quota(); q != (QuotaStatus{Pages: 100, UsedPages: 700}) {
		t.Fatalf("after the start: %+v", q)
	}
	for i, want := range []struct {
		stored int
		used   uint64
	}{{0, 700 - shrinkLimit}, {0, 700 - 2*shrinkLimit}, {2, 100}} {
		if n := s.store(2, chain("b", 0, 100, 200, 100)...); n != want.stored || s.quota().UsedPages != want.used {
			t.Errorf("reserve %d: %d stored, %v, %+v; want %d, %d pages", i, n, s.reason, s.quota(), want.stored, want.used)
		}
	}
	s.worth(0, chain("a", 0, 100, 9800, 100)...)
	s.as(s.enter("other", identity("other"), nobody{}), func() { s.worth(0, chain("o", 0, 100, 500, 100)...) })
	// A quota that is gone is gone, and one that is higher gives room at once.
	s.opts.Quotas[0].Bytes = inPages(102)
	s.restart()
	s.s = s.enter("mine", identity("mine"), nobody{})
	if n := s.store(3, chain("c", 0, 100, 200, 100)...); n != 2 || s.quota().UsedPages != 102 {
		t.Errorf("%d of 2 were stored, %v, %+v", n, s.reason, s.quota())
	}
	s.worth(0, chain("a", 0, 100, 9800, 100)...)
}

// TestQuotaOfAReset: a private generation counts where its origin counts, also for a next daemon.
func TestQuotaOfAReset(t *testing.T) {
	s := newCapped(t, 64, 64, Quota{Name: "mine", Bytes: inPages(8)})
	second := s.enter("second", identity("mine"), nobody{})
	s.turn(1, NoHint, chain("a", 0, 100, 600, 100)...)
	if err := s.e.Reset(s.s, [32]byte{1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	// The second engine has not heard of it: the pages are not free, and count.
	if n := s.store(2, chain("p", 0, 100, 400, 100)...); n != 2 || s.reason != OverQuota || s.quota().UsedPages != 8 {
		t.Errorf("%d of 4 were stored, %v, %+v", n, s.reason, s.quota())
	}
	if err := s.e.Step(second, s.e.epoch); err != nil {
		t.Fatal(err)
	}
	if n := s.store(2, chain("p", 0, 300, 400, 100)...); n != 2 || s.quota().UsedPages != 4 {
		t.Errorf("%d of 2 were stored, %v, %+v", n, s.reason, s.quota())
	}
	s.finish(2)
	// Both generations store, and make room in one order: the private one's keys are the colder ones, but they are not
	// the second engine's to promise or to take.
	s.as(second, func() {
		if n := s.store(3, chain("s", 0, 100, 600, 100)...); n != 4 || s.reason != OverQuota || s.quota().UsedPages != 8 {
			t.Errorf("%d of 6 were stored, %v, %+v", n, s.reason, s.quota())
		}
		if n := s.store(3, chain("s", 0, 500, 600, 100)...); n != 0 {
			t.Errorf("%d stored before the removal was heard of", n)
		}
	})
	if q := s.quota(); q.UsedPages != 8 || s.e.pending != 2 {
		t.Errorf("%+v, %d pages are on their way", q, s.e.pending)
	}
	if err := s.e.Step(s.s, s.e.epoch); err != nil {
		t.Fatal(err)
	}
	s.as(second, func() {
		if n := s.store(3, chain("s", 0, 500, 600, 100)...); n != 2 || s.quota().UsedPages != 8 {
			t.Errorf("%d of 2 were stored, %v, %+v", n, s.reason, s.quota())
		}
	})
	tb, err := meta.Open(slices.Clone(s.file))
	if err != nil {
		t.Fatal(err)
	}
	o := s.opts
	o.SessionID = func() uint64 { return 1 }
	e, _, err := Adopt(tb, o, func(int) bool { return true }) // everybody is alive
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range e.Status().Namespaces {
		if Model(n.Description) == "mine" && (n.Quota == nil || n.Quota.UsedPages != 8) {
			t.Errorf("the next daemon: private %v, %+v", n.Private, n.Quota)
		}
	}
}

// TestQuotaShared: engines that share a namespace at its quota get room by removals that are announced, as many as the
// batch lacked and as Options.EvictAhead says, and never of others.
func TestQuotaShared(t *testing.T) {
	s := newCapped(t, 64, 64, Quota{Name: "mine", Bytes: inPages(20)})
	s.e.opts.EvictAhead = 0.1
	second := s.enter("second", identity("mine"), nobody{})
	other := s.enter("other", identity("other"), nobody{})
	s.as(other, func() { s.turn(1, NoHint, chain("o", 0, 100, 1000, 100)...) })
	s.turn(1, NoHint, chain("a", 0, 100, 1800, 100)...)
	if e := s.e; e.pending != 0 {
		t.Fatalf("%d pages were announced with a tenth of the quota free", e.pending)
	}
	s.turn(2, NoHint, chunk{"b", 0, 100})
	if s.e.pending != 1 { // a tenth of 20, less the one that is free
		t.Errorf("%d pages were announced", s.e.pending)
	}
	if n := s.store(3, chain("c", 0, 100, 300, 100)...); n != 1 || s.reason != OverQuota || s.e.pending != 4 {
		t.Errorf("%d of 3 were stored, %v, %d pages announced", n, s.reason, s.e.pending)
	}
	if err := s.e.Step(second, s.e.epoch); err != nil {
		t.Fatal(err)
	}
	if n := s.store(3, chain("c", 0, 200, 300, 100)...); n != 2 {
		t.Errorf("%d of 2 were stored, %v", n, s.reason)
	}
	s.gone(chain("a", 0, 1500, 1800, 100)...)
	s.as(other, func() { s.worth(0, chain("o", 0, 100, 1000, 100)...) })
}

// TestQuotaOfACutText: the model stands behind what the table keeps of a description; an engine that comes says it again.
func TestQuotaOfACutText(t *testing.T) {
	text := fmt.Sprintf(`{"groups":[],"identity":{"layers":%q,"model":"mine"}}`, strings.Repeat("x", meta.MaxDescription))
	s := newCapped(t, 64, 64, Quota{Name: "mine", Bytes: inPages(5)})
	s.s = s.enter("long", text, nobody{})
	s.turn(1, NoHint, chain("a", 0, 100, 300, 100)...)
	for range 2 {
		if q := s.quota(); q != (QuotaStatus{Pages: 5, UsedPages: 3}) {
			t.Errorf("%+v", q)
		}
		s.restart()
		s.s = s.enter("long", text, nobody{})
	}
}
