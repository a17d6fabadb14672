package policy

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// order lists the idle entries as Walk gives them.
func order(o Order) []uint32 {
	got := []uint32{}
	o.Walk(func(id uint32) bool { got = append(got, id); return true })
	return got
}

func TestNew(t *testing.T) {
	for _, name := range Names() {
		o, err := New(name, 4, 4)
		if err != nil || o.Name() != name {
			t.Errorf("New(%q) = %v, %v", name, o, err)
		}
		if _, err := New(name, -1, 4); err == nil {
			t.Errorf("New(%q, -1) succeeded", name)
		}
		if _, err := New(name, MaxEntries+1, 4); err == nil {
			t.Errorf("New(%q, MaxEntries+1) succeeded", name)
		}
	}
	if _, err := New("fifo", 4, 4); err == nil || !strings.Contains(err.Error(), `"fifo": want lru or arc`) {
		t.Errorf("New of an unknown policy: error %v does not name the known ones", err)
	}
}

// run does the steps of a script such as "+1 -1 h1 u1": + Add, - Release, h Hold, u Use, x Evict, d Drop, o Offer.
// The fingerprint of entry n is its number, and its weight 1.
func run(t *testing.T, o Order, script string) {
	t.Helper()
	for _, step := range strings.Fields(script) {
		var id uint32
		if _, err := fmt.Sscanf(step[1:], "%d", &id); err != nil {
			t.Fatalf("step %q: %v", step, err)
		}
		switch step[0] {
		case '+':
			o.Add(id, uint64(id), 1)
		case '-':
			o.Release(id)
		case 'h':
			o.Hold(id)
		case 'u':
			o.Use(id)
		case 'x':
			o.Evict(id)
		case 'd':
			o.Drop(id)
		case 'o':
			o.Offer(uint64(id), 1)
		default:
			t.Fatalf("step %q", step)
		}
	}
}

func TestScripts(t *testing.T) {
	for _, c := range []struct {
		name, script string
		lru, arc     []uint32 // in order of eviction
	}{
		{"nothing", "", []uint32{}, []uint32{}},
		{"added is held", "+1", []uint32{}, []uint32{}},
		{"tail released first goes first", "+0 +1 +2 -2 -1 -0", []uint32{2, 1, 0}, []uint32{2, 1, 0}},
		{"held leaves the walk", "+0 +1 +2 -2 -1 -0 h1", []uint32{2, 0}, []uint32{2, 0}},
		{"released is hottest", "+0 +1 +2 -2 -1 -0 h2 -2", []uint32{1, 0, 2}, []uint32{1, 0, 2}},
		{"use moves to T2", "+0 +1 +2 -2 -1 -0 h2 u2 -2", []uint32{1, 0, 2}, []uint32{1, 0, 2}},
		{"T1 goes before T2 while p is 0", "+0 +1 -1 -0 h1 u1 -1 +2 -2", []uint32{0, 1, 2}, []uint32{0, 2, 1}},
		{"use after add restores", "+0 u0 -0 +1 -1", []uint32{0, 1}, []uint32{1, 0}},
		{"used once is enough", "+0 u0 -0 h0 -0 +1 -1", []uint32{0, 1}, []uint32{1, 0}},
		{"dropped held", "+0 +1 -1 d0", []uint32{1}, []uint32{1}},
		{"dropped idle", "+0 +1 -1 -0 d1", []uint32{0}, []uint32{0}},
		{"evicted comes back", "+0 -0 x0 +0 -0", []uint32{0}, []uint32{0}},
		// The ghosts of 0 and 1 raise p to 2: T1 keeps two entries, and T2 goes before them.
		{"ghosts move the target", "+0 +1 +2 -2 -1 -0 x0 x1 o0 +0 -0 o1 +1 -1 +3 -3", []uint32{2, 0, 1, 3}, []uint32{0, 1, 2, 3}},
		// The ghost of 0 was dropped without trace: p stays 0 and 0 is in T1 again.
		{"dropped leaves no ghost", "+0 +1 u1 -1 -0 d0 o0 +0 -0", []uint32{1, 0}, []uint32{0, 1}},
	} {
		for _, p := range []struct {
			order Order
			want  []uint32
		}{{NewLRU(4), c.lru}, {NewARC(4, 4), c.arc}} {
			t.Run(c.name+"/"+p.order.Name(), func(t *testing.T) {
				run(t, p.order, c.script)
				if got := order(p.order); !reflect.DeepEqual(got, p.want) {
					t.Errorf("%q: order %v, want %v", c.script, got, p.want)
				}
				v, ok := p.order.Coldest(nil, 0)
				if ok != (len(p.want) > 0) || ok && v != p.want[0] {
					t.Errorf("%q: Coldest = %d, %v, want the first of %v", c.script, v, ok, p.want)
				}
			})
		}
	}
}

func TestColdestUsable(t *testing.T) {
	even := func(id uint32) bool { return id%2 == 0 }
	for _, c := range []struct {
		script  string
		maxSkip int
		want    uint32
		ok      bool
	}{
		{"+1 -1 +3 -3 +0 -0", 0, 0, true},
		{"+1 -1 +3 -3 +0 -0", 3, 0, true},
		{"+1 -1 +3 -3 +0 -0", 2, 0, false},
		{"+1 -1 +3 -3", 0, 0, false},
		{"+2 -2", 1, 2, true},
	} {
		for _, o := range []Order{NewLRU(4), NewARC(4, 4)} {
			run(t, o, c.script)
			before := order(o)
			if got, ok := o.Coldest(even, c.maxSkip); got != c.want || ok != c.ok {
				t.Errorf("%s %q: Coldest(even, %d) = %d, %v, want %d, %v", o.Name(), c.script, c.maxSkip, got, ok, c.want, c.ok)
			}
			if after := order(o); !reflect.DeepEqual(before, after) {
				t.Errorf("%s %q: Coldest changed the order from %v to %v", o.Name(), c.script, before, after)
			}
		}
	}
	// The bound counts in each list: entries of T1 that may not go do not hide those of T2.
	o := NewARC(4, 4)
	run(t, o, "+0 u0 -0 +1 -1 +3 -3")
	if got, ok := o.Coldest(even, 1); got != 0 || !ok {
		t.Errorf("Coldest(even, 1) = %d, %v, want 0 of T2", got, ok)
	}
}

func TestWalkStops(t *testing.T) {
	for _, o := range []Order{NewLRU(4), NewARC(4, 4)} {
		run(t, o, "+0 u0 -0 +1 -1 +2 -2 +3 u3 -3")
		for n := 1; n <= 4; n++ {
			calls := 0
			o.Walk(func(uint32) bool { calls++; return calls < n })
			if calls != n {
				t.Errorf("%s: walk went on for %d entries, stopped at %d", o.Name(), calls, n)
			}
		}
	}
}

func TestMisuse(t *testing.T) {
	for _, c := range []struct{ start, call string }{
		{"+0", "+0"}, {"+0 -0", "+0"}, {"", "h0"}, {"+0", "h0"}, {"", "u0"}, {"+0 -0", "u0"}, {"", "-0"}, {"+0 -0", "-0"},
		{"", "x0"}, {"+0", "x0"}, {"", "d0"}, {"", "+4"}, {"", "+9"},
	} {
		for _, o := range []Order{NewLRU(4), NewARC(4, 4)} {
			run(t, o, c.start)
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s: %q after %q did not panic", o.Name(), c.call, c.start)
					}
				}()
				run(t, o, c.call)
			}()
		}
	}
}

// turn is what one key costs in a full store: a hit, then a miss that evicts.
func turn(o Order, next uint64) {
	v, _ := o.Coldest(nil, 0)
	o.Hold(v)
	o.Use(v)
	o.Release(v)
	o.Offer(next, 1)
	v, _ = o.Coldest(nil, 0)
	o.Evict(v)
	o.Add(v, next, 1)
	o.Release(v)
}

func filled(o Order, n int) Order {
	for i := range n {
		o.Add(uint32(i), uint64(i), 1)
		o.Release(uint32(i))
	}
	return o
}

func TestLRUAllocatesNothing(t *testing.T) {
	const n = 64
	o, next := filled(NewLRU(n), n), uint64(n)
	if got := testing.AllocsPerRun(1000, func() { turn(o, next); next++ }); got != 0 {
		t.Errorf("%v allocations a turn, want 0", got)
	}
}

func BenchmarkTurn(b *testing.B) {
	const n = 100_000
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			o, err := New(name, n, n)
			if err != nil {
				b.Fatal(err)
			}
			filled(o, n)
			next := uint64(n)
			b.ReportAllocs()
			for b.Loop() {
				turn(o, next)
				next++
			}
		})
	}
}
