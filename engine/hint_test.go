package engine

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"kvlift/block"
)

// turn is a request that stores chunks, or finds them stored, and ends.
func (s *shelf) turn(req uint64, h Hint, chunks ...chunk) {
	s.t.Helper()
	s.store(req, chunks...)
	s.finishAs(req, h)
}

// touch says that a request has used a stored chunk.
func (s *shelf) touch(req uint64, c chunk) {
	s.t.Helper()
	k := c.key()
	id, ok := s.e.index.Find(s.e.index.Hash(s.s.ns.index, &k), s.s.ns.index, &k)
	if !ok {
		s.t.Fatalf("%+v is not stored", c)
	}
	if err := s.e.Touch(s.s, req, []block.Ref{{Entry: id, Gen: s.e.slots[id].gen}}); err != nil {
		s.t.Fatal(err)
	}
}

// order names the idle chunks of a shelf in the order in which they would go, as far as they are among these.
func (s *shelf) order(chunks ...chunk) string {
	names := map[block.Key]string{}
	for _, c := range chunks {
		names[c.key()] = fmt.Sprint(c.chain, c.end/100)
	}
	var out []string
	s.e.walk(func(id uint32) bool {
		if name, ok := names[s.e.table.Key(id)]; ok {
			out = append(out, name)
		}
		return true
	})
	return strings.Join(out, " ")
}

// TestHints: what goes first after conversations ended in this way or that, and that a next daemon agrees.
func TestHints(t *testing.T) {
	a, b, c := chain("a", 0, 100, 200, 100), chain("b", 0, 100, 200, 100), chain("c", 0, 100, 200, 100)
	onA := slices.Concat(a, chain("x", 0, 300, 400, 100)) // goes on from a's end
	all := slices.Concat(onA, b, c, chain("y", 0, 300, 400, 100))
	for _, v := range []struct {
		name string
		run  func(s *shelf)
		want string
	}{
		{"active is as without", func(s *shelf) {
			s.turn(1, NoHint, a...)
			s.turn(2, Active, b...)
			s.turn(3, NoHint, c...)
		}, "a2 a1 b2 b1 c2 c1"},
		{"an unknown hint is active", func(s *shelf) {
			s.turn(1, NoHint, a...)
			s.turn(2, Closed+1, b...)
			s.turn(3, 255, c...)
		}, "a2 a1 b2 b1 c2 c1"},
		{"closed goes first", func(s *shelf) {
			s.turn(1, NoHint, a...)
			s.turn(2, NoHint, b...)
			s.turn(3, Closed, c...)
		}, "c2 c1 a2 a1 b2 b1"},
		{"the first that closed goes first of the closed", func(s *shelf) {
			s.turn(1, Closed, a...)
			s.turn(2, NoHint, b...)
			s.turn(3, Closed, c...)
		}, "a2 a1 c2 c1 b2 b1"},
		{"idle goes where a minute ago is", func(s *shelf) {
			s.turn(1, NoHint, a...)
			s.clock = s.clock.Add(90 * time.Second)
			s.turn(2, NoHint, b...)
			s.turn(3, Idle, c...)
		}, "a2 a1 c2 c1 b2 b1"},
		{"idle goes before what is as old as it", func(s *shelf) {
			s.turn(1, NoHint, a...)
			s.turn(2, NoHint, b...)
			s.turn(3, Idle, c...)
		}, "c2 c1 a2 a1 b2 b1"},
		{"closed goes before idle, whatever came first", func(s *shelf) {
			s.turn(1, Idle, a...)
			s.clock = s.clock.Add(time.Hour)
			s.turn(2, Closed, b...)
			s.turn(3, Idle, c...)
		}, "b2 b1 a2 a1 c2 c1"},
		{"used again, it is as ever", func(s *shelf) {
			s.turn(1, Closed, a...)
			s.turn(2, Idle, b...)
			s.turn(3, NoHint, c...)
			s.turn(4, NoHint, b...)
			s.turn(5, NoHint, a...)
		}, "c2 c1 b2 b1 a2 a1"},
		{"a whole conversation is closed by its last turn", func(s *shelf) {
			s.turn(1, NoHint, a...)
			s.turn(2, NoHint, b...)
			s.turn(3, Closed, onA...)
		}, "x4 x3 a2 a1 b2 b1"},
		{"a head from which another conversation goes on stays", func(s *shelf) {
			s.turn(1, NoHint, onA...)
			s.turn(2, NoHint, b...)
			s.turn(3, Closed, slices.Concat(a, chain("y", 0, 300, 400, 100))...)
		}, "y4 y3 x4 x3 b2 b1 a2 a1"},
		{"and goes once it is alone", func(s *shelf) {
			s.turn(1, NoHint, onA...)
			s.turn(2, Closed, slices.Concat(a, chain("y", 0, 300, 400, 100))...)
			s.turn(3, NoHint, b...)
			s.turn(4, Closed, onA...)                                           // y still goes on from a
			s.store(5, chain("full", 0, 100, 100*(s.e.pages.Free()+2), 100)...) // until y has gone
			s.gone(chain("y", 0, 300, 400, 100)...)
			s.turn(6, Closed, onA...)
		}, "x4 x3 a2 a1 b2 b1"},
		{"a younger request of the same conversation keeps what it goes on from", func(s *shelf) {
			s.store(1, a...)
			s.turn(2, NoHint, onA...)
			s.turn(3, NoHint, b...)
			s.finishAs(1, Closed)
		}, "x4 x3 b2 b1 a2 a1"},
		{"what another request holds stays", func(s *shelf) {
			s.store(1, a...)
			s.store(2, a[:1]...)
			s.finishAs(1, Closed)
			s.turn(3, NoHint, b...)
			s.finish(2)
		}, "a2 b2 b1 a1"},
		{"what another request has used meanwhile stays, though it is closed, too", func(s *shelf) {
			s.store(1, a...)
			s.turn(2, Closed, a[:1]...)
			s.turn(3, NoHint, b...)
			s.finishAs(1, Closed)
		}, "a2 b2 b1 a1"},
		{"what another request has touched meanwhile stays, and what is before it", func(s *shelf) {
			s.store(1, onA...)
			s.touch(99, a[1])
			s.turn(3, NoHint, b...)
			s.finishAs(1, Idle)
		}, "x4 x3 b2 b1 a2 a1"},
		{"also when the other one runs", func(s *shelf) {
			s.store(1, onA...)
			s.store(2, b...)
			s.touch(2, a[1])
			s.turn(3, NoHint, c...)
			s.finishAs(1, Closed)
			s.finish(2)
		}, "x4 x3 c2 c1 a2 a1 b2 b1"},
		{"its own touch is nobody else's", func(s *shelf) {
			s.store(1, a...)
			s.touch(1, a[0])
			s.turn(3, NoHint, b...)
			s.finishAs(1, Closed)
		}, "a2 a1 b2 b1"},
	} {
		t.Run(v.name, func(t *testing.T) {
			s := newShelf(t, 64, attention)
			v.run(s)
			if got := s.order(all...); got != v.want {
				t.Errorf("order of eviction: %s, want %s", got, v.want)
			}
			before := s.order(all...)
			s.restart()
			if got := s.order(all...); got != before {
				t.Errorf("after a restart: %s, before it %s", got, before)
			}
			s.audit()
		})
	}
}

// TestIdleAfterUseless: an idle conversation's restore point goes after what serves nobody, and before younger ones.
func TestIdleAfterUseless(t *testing.T) {
	s := newShelf(t, 64, attention, state)
	at := func(name string, end uint32) []chunk { return []chunk{{name, 0, end}, {name, 1, end}} }
	s.turn(1, NoHint, slices.Concat(at("a", 100), chain("a", 0, 200, 300, 100))...) // behind its only state: useless
	s.turn(2, Idle, at("b", 100)...)
	if got, want := s.order(slices.Concat(chain("a", 0, 100, 300, 100), chain("b", 0, 100, 100, 100))...), "a3 a2 b1 a1"; got != want {
		t.Errorf("order of eviction: %s, want %s", got, want)
	}
}

// TestIdleMakesRoom: within --min-idle nothing may go but what an engine said is not needed soon.
func TestIdleMakesRoom(t *testing.T) {
	for _, v := range []struct {
		hint Hint
		want int
		why  Reason
	}{{NoHint, 0, TooYoung}, {Active, 0, TooYoung}, {Idle, 2, TooYoung}, {Closed, 2, TooYoung}} {
		s := newShelf(t, 4, attention)
		s.e.opts.MinIdle = 30 * time.Second
		s.turn(1, Active, chain("a", 0, 100, 200, 100)...)
		s.turn(2, v.hint, chain("b", 0, 100, 200, 100)...)
		if n := s.store(3, chain("c", 0, 100, 300, 100)...); n != v.want || s.reason != v.why {
			t.Errorf("hint %d: %d of 3 were stored, then %v; want %d", v.hint, n, s.reason, v.want)
		}
		s.worth(0, chain("a", 0, 100, 200, 100)...)
	}
}

// TestStampsAreUnique: requests that end as of the same millisecond, in one lane or in several, before a restart or after it,
// keep their order, which equal stamps would mix up.
func TestStampsAreUnique(t *testing.T) {
	a, b := chain("a", 0, 100, 200, 100), chain("b", 0, 100, 200, 100)
	for _, v := range []struct {
		name  string
		first Hint
		then  func(s *shelf)
		hint  Hint
	}{
		{"idle now, used a minute ago", NoHint, func(s *shelf) { s.clock = s.clock.Add(IdleAge - time.Second) }, Idle},
		{"idle before and after a restart", Idle, func(s *shelf) { s.restart(); s.clock = s.clock.Add(-time.Second) }, Idle},
		{"closed before and after a restart", Closed, func(s *shelf) { s.restart() }, Closed},
		{"used before and after a restart", NoHint, func(s *shelf) { s.restart(); s.clock = s.clock.Add(-time.Second) }, NoHint},
	} {
		s := newShelf(t, 64, attention)
		s.turn(1, v.first, a...)
		v.then(s)
		s.turn(2, v.hint, b...)
		for range 2 {
			if got, want := s.order(slices.Concat(a, b)...), "a2 a1 b2 b1"; got != want {
				t.Errorf("%s: %s, want %s", v.name, got, want)
			}
			s.restart()
		}
	}
}
