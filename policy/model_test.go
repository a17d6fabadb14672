package policy

import (
	"maps"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

const (
	modelEntries  = 12
	modelCapacity = 24 // pages
)

// model is an Order told the slow way: lists are slices from cold to hot, and nothing is remembered twice.
type model struct {
	arc          bool
	lists        [2][]uint32 // idle entries of T1 and T2; LRU has only T1
	in           map[uint32]*modelEntry
	ghosts       [2][]modelGhost
	p            float64
	breakTieToT1 bool
}

type modelEntry struct {
	fp         uint64
	weight     uint32
	list       int
	held, used bool
	stamp      int // of its release: what merges lanes
}

// stampOf is when the release number n counts as a use, by its lane.
func stampOf(lane Lane, n int) int { return []int{2 * n, 2*n - 13, n - 1<<20}[lane] }

type modelGhost struct {
	fp     uint64
	weight uint32
}

func (m *model) resident(list int) (n uint64) {
	for _, e := range m.in {
		if e.list == list {
			n += uint64(e.weight)
		}
	}
	return n
}

func (m *model) ghostPages(list int) (n uint64) {
	for _, g := range m.ghosts[list] {
		n += uint64(g.weight)
	}
	return n
}

// takeGhost removes the ghost of a key and returns its list, or -1.
func (m *model) takeGhost(fp uint64) (list int, g modelGhost) {
	for list := range 2 {
		for i, g := range m.ghosts[list] {
			if g.fp == fp {
				m.ghosts[list] = slices.Delete(m.ghosts[list], i, i+1)
				return list, g
			}
		}
	}
	return -1, modelGhost{}
}

func (m *model) offer(fp uint64, weight uint32) {
	m.breakTieToT1 = false
	b1, b2 := float64(m.ghostPages(0)), float64(m.ghostPages(1))
	list, g := m.takeGhost(fp)
	switch list {
	case 0:
		m.p = min(modelCapacity, m.p+float64(weight)*max(1, b2/b1))
	case 1:
		m.p = max(0, m.p-float64(weight)*max(1, b1/b2))
		m.breakTieToT1 = true
	default:
		return
	}
	m.ghosts[list] = append(m.ghosts[list], g)
}

func (m *model) add(id uint32, fp uint64, weight uint32) {
	list := 0
	if l, _ := m.takeGhost(fp); l >= 0 {
		list = 1
	}
	m.in[id] = &modelEntry{fp: fp, weight: weight, list: list, held: true}
	for m.arc && m.resident(0)+m.ghostPages(0) > modelCapacity && len(m.ghosts[0]) > 0 {
		m.ghosts[0] = m.ghosts[0][1:]
	}
	for m.resident(0)+m.resident(1)+m.ghostPages(0)+m.ghostPages(1) > 2*modelCapacity {
		switch {
		case len(m.ghosts[1]) > 0:
			m.ghosts[1] = m.ghosts[1][1:]
		case len(m.ghosts[0]) > 0:
			m.ghosts[0] = m.ghosts[0][1:]
		default:
			return
		}
	}
}

func (m *model) unlist(id uint32) {
	for i := range m.lists {
		m.lists[i] = slices.DeleteFunc(m.lists[i], func(x uint32) bool { return x == id })
	}
}

func (m *model) release(id uint32, stamp int) {
	e := m.in[id]
	if e.used && m.arc {
		e.list = 1
	}
	e.held, e.used, e.stamp = false, false, stamp
	m.lists[e.list] = append(m.lists[e.list], id)
	slices.SortStableFunc(m.lists[e.list], func(a, b uint32) int { return m.in[a].stamp - m.in[b].stamp })
}

func (m *model) evict(id uint32) {
	e := m.in[id]
	m.unlist(id)
	delete(m.in, id)
	if m.arc {
		m.takeGhost(e.fp)
		m.ghosts[e.list] = append(m.ghosts[e.list], modelGhost{e.fp, e.weight})
	}
}

// coldest says no as ARC.Coldest does only when refuse is set.
func (m *model) coldest(usable func(uint32) bool, refuse bool) (uint32, bool) {
	lists := [][]uint32{m.lists[1], m.lists[0]}
	if n := float64(m.resident(0)); m.arc && (n > m.p || m.breakTieToT1 && n == m.p) {
		if refuse && len(m.lists[0]) == 0 && n > modelCapacity/8 {
			return 0, false
		}
		slices.Reverse(lists)
	}
	for _, l := range lists {
		for _, id := range l {
			if usable(id) {
				return id, true
			}
		}
	}
	return 0, false
}

// walk empties a copy of the model.
func (m *model) walk() []uint32 {
	c := *m
	c.in = maps.Clone(m.in)
	got := []uint32{}
	for {
		id, ok := c.coldest(func(uint32) bool { return true }, false)
		if !ok {
			return got
		}
		got = append(got, id)
		c.lists = [2][]uint32{slices.Clone(c.lists[0]), slices.Clone(c.lists[1])}
		c.unlist(id)
		delete(c.in, id)
	}
}

func checkModel(t *rapid.T, name string) {
	o, err := New(name, modelEntries, modelCapacity)
	if err != nil {
		t.Fatal(err)
	}
	m := &model{arc: name == "arc", in: map[uint32]*modelEntry{}}
	o.Merge(func(a, b uint32) bool { return m.in[a].stamp < m.in[b].stamp })
	releases := 0
	release := func(id uint32, lane Lane) {
		releases++
		m.release(id, stampOf(lane, releases))
		o.ReleaseTo(id, lane)
	}
	// pick draws an entry in a state, if there is one. Without, a step does nothing: rapid takes a run whose every action
	// skips for a failure, and a fuzzer finds such runs.
	pick := func(t *rapid.T, state string, in func(e *modelEntry) bool) (uint32, bool) {
		var ids []uint32
		for id := range uint32(modelEntries) {
			if in(m.in[id]) {
				ids = append(ids, id)
			}
		}
		if len(ids) == 0 {
			return 0, false
		}
		return rapid.SampledFrom(ids).Draw(t, state), true
	}
	isHeld := func(e *modelEntry) bool { return e != nil && e.held }
	isIdle := func(e *modelEntry) bool { return e != nil && !e.held }
	weights := rapid.Uint32Range(1, 4)
	// drawFP draws a fingerprint, more often than not one that has a ghost.
	drawFP := func(t *rapid.T) uint64 {
		known := []uint64{}
		for _, g := range slices.Concat(m.ghosts[0], m.ghosts[1]) {
			known = append(known, g.fp)
		}
		fps := rapid.Uint64Range(0, 19)
		if len(known) > 0 {
			fps = rapid.OneOf(fps, rapid.SampledFrom(known), rapid.SampledFrom(known))
		}
		return fps.Draw(t, "fp")
	}
	t.Repeat(map[string]func(*rapid.T){
		"offer": func(t *rapid.T) {
			fp, w := drawFP(t), weights.Draw(t, "weight")
			o.Offer(fp, w)
			m.offer(fp, w)
		},
		"add": func(t *rapid.T) { // beyond the capacity, too: that is for the engine to know
			id, ok := pick(t, "absent", func(e *modelEntry) bool { return e == nil })
			if !ok {
				return
			}
			fp, w := drawFP(t), weights.Draw(t, "weight")
			o.Add(id, fp, w)
			m.add(id, fp, w)
		},
		"store": func(t *rapid.T) {
			id, ok := pick(t, "absent", func(e *modelEntry) bool { return e == nil })
			if !ok {
				return
			}
			fp, w := drawFP(t), weights.Draw(t, "weight")
			o.Offer(fp, w)
			m.offer(fp, w)
			o.Add(id, fp, w)
			m.add(id, fp, w)
			release(id, Recent)
		},
		"hold": func(t *rapid.T) {
			id, ok := pick(t, "idle", isIdle)
			if !ok {
				return
			}
			o.Hold(id)
			m.unlist(id)
			m.in[id].held = true
		},
		"use": func(t *rapid.T) {
			id, ok := pick(t, "held", isHeld)
			if !ok {
				return
			}
			o.Use(id)
			m.in[id].used = true
		},
		"release": func(t *rapid.T) {
			id, ok := pick(t, "held", isHeld)
			if !ok {
				return
			}
			release(id, rapid.SampledFrom([]Lane{Recent, Recent, Aged, Closed}).Draw(t, "lane"))
		},
		"evict coldest": func(t *rapid.T) {
			if id, ok := o.Coldest(nil, 0); ok {
				o.Evict(id)
				m.evict(id)
			}
		},
		"evict any": func(t *rapid.T) {
			id, ok := pick(t, "idle", isIdle)
			if !ok {
				return
			}
			o.Evict(id)
			m.evict(id)
		},
		"drop": func(t *rapid.T) {
			id, ok := pick(t, "resident", func(e *modelEntry) bool { return e != nil })
			if !ok {
				return
			}
			o.Drop(id)
			m.unlist(id)
			delete(m.in, id)
		},
		"": func(t *rapid.T) {
			if got, want := order(o), m.walk(); !reflect.DeepEqual(got, want) {
				t.Fatalf("order of eviction %v, want %v", got, want)
			}
			mask := rapid.Uint32().Draw(t, "usable")
			usable := func(id uint32) bool { return mask>>id&1 != 0 }
			id, ok := o.Coldest(usable, 0)
			if want, wantOK := m.coldest(usable, true); id != want || ok != wantOK {
				t.Fatalf("Coldest = %d, %v, want %d, %v", id, ok, want, wantOK)
			}
			for id := range uint32(modelEntries) {
				e := m.in[id]
				if got, want := o.Frequent(id), m.arc && e != nil && (e.used || e.list == 1); got != want {
					t.Fatalf("Frequent(%d) = %v, want %v", id, got, want)
				}
			}
			if a, ok := o.(*ARC); ok {
				compareARC(t, a, m)
			}
		},
	})
}

// ghostsOf lists the ghosts of B1 or B2 from cold to hot.
func ghostsOf(a *ARC, list uint32) []modelGhost {
	var got []modelGhost
	if a.ghosts.byFP == nil {
		return got
	}
	for i := a.ghosts.l.next[list]; i != list; i = a.ghosts.l.next[i] {
		got = append(got, modelGhost{a.ghosts.fp[i], a.ghosts.weight[i]})
	}
	return got
}

func compareARC(t *rapid.T, a *ARC, m *model) {
	if a.p != m.p {
		t.Fatalf("p is %v, want %v", a.p, m.p)
	}
	if a.n1 != m.resident(0) || a.n2 != m.resident(1) {
		t.Fatalf("T1 and T2 hold %d and %d pages, want %d and %d", a.n1, a.n2, m.resident(0), m.resident(1))
	}
	for list := range 2 {
		got, want := ghostsOf(a, uint32(list)), m.ghosts[list]
		if !slices.Equal(got, want) {
			t.Fatalf("ghosts of B%d are %v, want %v", list+1, got, want)
		}
		if a.ghosts.size[list] != m.ghostPages(list) || a.ghosts.count[list] != len(want) {
			t.Fatalf("B%d counts %d ghosts of %d pages, has %v", list+1, a.ghosts.count[list], a.ghosts.size[list], want)
		}
	}
	if n := a.ghosts.count[0] + a.ghosts.count[1]; n != len(a.ghosts.byFP) || n > modelEntries+16 {
		t.Fatalf("%d ghosts, %d in the map, over %d entries", n, len(a.ghosts.byFP), modelEntries)
	}
}

func TestModel(t *testing.T) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			for range 10 { // a check is short and cheap
				rapid.Check(t, func(t *rapid.T) { checkModel(t, name) })
			}
		})
	}
}

// textbook is ARC as it was published, over keys of the same weight.
type textbook struct {
	c              int
	p              float64
	t1, t2, b1, b2 []uint64 // from cold to hot
}

func take(list *[]uint64, key uint64) bool {
	i := slices.Index(*list, key)
	if i >= 0 {
		*list = slices.Delete(*list, i, i+1)
	}
	return i >= 0
}

func shift(from, to *[]uint64) {
	if to != nil {
		*to = append(*to, (*from)[0])
	}
	*from = (*from)[1:]
}

func (b *textbook) replace(inB2 bool) {
	n := float64(len(b.t1))
	if n > 0 && (n > b.p || inB2 && n == b.p) || len(b.t2) == 0 {
		shift(&b.t1, &b.b1)
	} else {
		shift(&b.t2, &b.b2)
	}
}

func (b *textbook) use(key uint64) {
	n1, n2 := float64(len(b.b1)), float64(len(b.b2))
	switch {
	case take(&b.t1, key), take(&b.t2, key):
		b.t2 = append(b.t2, key)
	case slices.Contains(b.b1, key):
		b.p = min(float64(b.c), b.p+max(1, n2/n1))
		b.replace(false)
		take(&b.b1, key)
		b.t2 = append(b.t2, key)
	case slices.Contains(b.b2, key):
		b.p = max(0, b.p-max(1, n1/n2))
		b.replace(true)
		take(&b.b2, key)
		b.t2 = append(b.t2, key)
	default:
		l1, all := len(b.t1)+len(b.b1), len(b.t1)+len(b.t2)+len(b.b1)+len(b.b2)
		switch {
		case l1 == b.c && len(b.t1) == b.c:
			shift(&b.t1, nil)
		case l1 == b.c:
			shift(&b.b1, nil)
			b.replace(false)
		case all >= b.c:
			if all == 2*b.c {
				shift(&b.b2, nil)
			}
			b.replace(false)
		}
		b.t1 = append(b.t1, key)
	}
}

// keysOf lists the keys of T1 or T2 from cold to hot.
func keysOf(a *ARC, end uint32) []uint64 {
	var got []uint64
	for i := a.l.next[end]; i != end; i = a.l.next[i] {
		got = append(got, a.fp[i])
	}
	return got
}

func TestARCIsTextbook(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := rapid.IntRange(1, 9).Draw(t, "capacity")
		w := rapid.SampledFrom([]uint32{1, 2, 1 << 20}).Draw(t, "weight") // powers of two: p stays exact
		a, b := NewARC(c, uint64(c)*uint64(w)), &textbook{c: c}
		at := map[uint64]uint32{}
		for _, key := range rapid.SliceOfN(rapid.Uint64Range(0, uint64(2*c)), 50, 300).Draw(t, "keys") {
			b.use(key)
			id, ok := at[key]
			if ok {
				a.Hold(id)
				a.Use(id)
			} else {
				a.Offer(key, w)
				id = uint32(len(at))
				if len(at) == c {
					if id, ok = a.Coldest(nil, 0); !ok {
						t.Fatal("nothing to evict")
					}
					delete(at, a.fp[id])
					a.Evict(id)
				}
				a.Add(id, key, w)
				at[key] = id
			}
			a.Release(id)
			if a.p != b.p*float64(w) {
				t.Fatalf("after key %d p is %v, want %v", key, a.p, b.p*float64(w))
			}
			var b1, b2 []uint64
			for _, g := range ghostsOf(a, 0) {
				b1 = append(b1, g.fp)
			}
			for _, g := range ghostsOf(a, 1) {
				b2 = append(b2, g.fp)
			}
			got := [][]uint64{keysOf(a, a.t1), keysOf(a, a.t2), b1, b2}
			if want := [][]uint64{b.t1, b.t2, b.b1, b.b2}; !slices.EqualFunc(got, want, slices.Equal) {
				t.Fatalf("after key %d T1, T2, B1, B2 are %v, want %v", key, got, want)
			}
		}
	})
}

// Victims without Adds leave more ghosts than entries; they are bounded all the same.
func TestGhostsAreBounded(t *testing.T) {
	o := NewARC(2, 1000)
	for fp := range uint64(500) {
		o.Add(0, fp, 1)
		if fp%2 == 0 {
			o.Use(0)
		}
		o.Release(0)
		o.Evict(0)
	}
	if n := len(o.ghosts.byFP); n != 18 || len(o.ghosts.fp) != 20 {
		t.Errorf("%d ghosts in %d places, want 18 in 20", n, len(o.ghosts.fp))
	}
}

// Weights of zero and a capacity of zero are odd but must not upset the arithmetic.
func TestARCZero(t *testing.T) {
	for _, c := range []uint64{0, 1} {
		o := NewARC(1, c)
		for range 3 {
			for fp := range uint64(3) {
				o.Offer(fp, 0)
				o.Add(0, fp, 0)
				o.Release(0)
				o.Evict(0)
			}
		}
		if !(o.p >= 0 && o.p <= float64(c)) {
			t.Errorf("capacity %d: p is %v", c, o.p)
		}
	}
}
