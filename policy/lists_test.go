package policy

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestLists compares many lists in one pair of arrays with as many slices.
func TestLists(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const entries, lists = 10, 4
		stamp := map[uint32]int{}
		o := NewLists(entries, lists, func(a, b uint32) bool { return stamp[a] < stamp[b] })
		var m [lists][]uint32
		in := func(id uint32) int {
			return slices.IndexFunc(m[:], func(l []uint32) bool { return slices.Contains(l, id) })
		}
		n := 0
		t.Repeat(map[string]func(*rapid.T){
			"push or remove": func(t *rapid.T) {
				id := rapid.Uint32Range(0, entries-1).Draw(t, "entry")
				if l := in(id); l >= 0 {
					o.Remove(id)
					m[l] = slices.DeleteFunc(m[l], func(v uint32) bool { return v == id })
					return
				}
				l, lane := rapid.IntRange(0, lists-1).Draw(t, "list"), rapid.SampledFrom([]Lane{Recent, Aged, Closed}).Draw(t, "lane")
				n++
				stamp[id] = stampOf(lane, n)
				o.Push(l, id, lane)
				m[l] = append(m[l], id)
				slices.SortStableFunc(m[l], func(a, b uint32) int { return stamp[a] - stamp[b] })
			},
			"": func(t *rapid.T) {
				mask, maxSkip := rapid.Uint32().Draw(t, "usable"), rapid.IntRange(0, 3).Draw(t, "most")
				usable := func(id uint32) bool { return mask>>id&1 != 0 }
				for l := range lists {
					var got []uint32
					if whole := o.Walk(l, func(id uint32) bool { got = append(got, id); return true }); !whole || !slices.Equal(got, m[l]) {
						t.Fatalf("list %d is %v, want %v", l, got, m[l])
					}
					want := slices.IndexFunc(m[l], usable)
					if maxSkip > 0 && want >= maxSkip {
						want = -1
					}
					if id, ok := o.Coldest(l, usable, maxSkip); ok != (want >= 0) || ok && id != m[l][want] {
						t.Fatalf("Coldest of %v by mask %b = %d, %v, want that at %d", m[l], mask, id, ok, want)
					}
				}
			},
		})
	})
}

// TestListsStop: a walk that is told to stop says so, and what the caller must not do is noticed.
func TestListsStop(t *testing.T) {
	o := NewLists(3, 2, nil)
	o.Push(1, 0, Recent)
	o.Push(1, 2, Recent)
	seen := 0
	if o.Walk(1, func(uint32) bool { seen++; return false }) || seen != 1 {
		t.Errorf("a walk that was stopped visited %d entries and says that it was whole", seen)
	}
	if !o.Walk(0, func(uint32) bool { return false }) {
		t.Error("a walk over nothing was stopped")
	}
	for what, f := range map[string]func(){"twice in a list": func() { o.Push(0, 2, Recent) }, "out of none": func() { o.Remove(1) },
		"too many lists": func() { NewLists(1, MaxEntries, nil) }, "too many entries": func() { NewLists(-1, 1, nil) }} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", what)
				}
			}()
			f()
		}()
	}
}
