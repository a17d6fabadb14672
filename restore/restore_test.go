package restore

import (
	"testing"

	"pgregory.net/rapid"

	"kvlift/meta"
)

var hybrid = []Group{{Kind: meta.Full, Chunk: 100}, {Kind: meta.StateG, Chunk: 100}, {Kind: meta.Window, Chunk: 50, Window: 3}}

func full(n int, f func(*Item)) (out []Item) {
	for i := 1; i <= n; i++ {
		it := Item{Position: uint32(i) * 100}
		if f != nil {
			f(&it)
		}
		out = append(out, it)
	}
	return out
}

func TestClassify(t *testing.T) {
	state := func(pos uint32) Item { return Item{Group: 1, Position: pos} }
	window := func(pos uint32) Item { return Item{Group: 2, Position: pos} }
	cases := []struct {
		name    string
		groups  []Group
		items   []Item
		running bool
		deepest uint32
		want    string // N, O, U per item
	}{
		{"dense", hybrid[:1], full(3, nil), false, 300, "NNN"},
		{"dense behind a gap", hybrid[:1], append(full(2, nil), Item{Position: 400}), false, 200, "NNU"},
		{"dense whose head is missing", hybrid[:1], full(2, func(i *Item) { i.Gap = i.Position == 100 }), false, 0, "UU"},
		{"state at the end", hybrid[:2], append(full(3, nil), state(300)), false, 300, "NNNN"},
		{"chunks behind the last state", hybrid[:2], append(full(3, nil), state(200)), false, 200, "NNUN"},
		{"older state", hybrid[:2], append(full(3, nil), state(100), state(300)), false, 300, "NNNON"},
		{"older state at a fork", hybrid[:2], append(full(3, func(i *Item) { i.Fork = i.Position == 100 }), state(100), state(300)), false, 300, "NNNNN"},
		{"state at no boundary", hybrid[:2], append(full(2, nil), state(150), state(200)), false, 200, "NNUN"},
		{"state before its chunk, running", hybrid[:2], append(full(1, nil), state(200)), true, 0, "NN"},
		{"overtaken, running", hybrid[:2], append(full(3, nil), state(100), state(200)), true, 200, "NNNON"},
		{"windows", hybrid, append(full(2, nil), state(200), window(50), window(100), window(150), window(200)), false, 200, "NNNUNNN"},
		{"short prompt needs fewer window chunks", hybrid, append(full(1, nil), state(100), window(50), window(100)), false, 100, "NNNN"},
		{"a window chunk is missing", hybrid, append(full(2, nil), state(200), window(100), window(200)), false, 0, "UUUUU"},
		{"states and windows never meet", hybrid, append(full(3, nil), state(200), window(200), window(250), window(300)), false, 0, "UUUUUUU"},
		{"window of unknown width counts as full", []Group{{Kind: meta.Full, Chunk: 100}, {Kind: meta.Window, Chunk: 100}},
			[]Item{{Position: 100}, {Position: 200}, {Group: 1, Position: 100}}, false, 100, "NNN"},
	}
	for _, c := range cases {
		out := make([]Class, len(c.items))
		got := Classify(c.groups, c.items, out, c.running)
		text := ""
		for _, x := range out {
			text += string("NOU"[x])
		}
		if got != c.deepest || text != c.want {
			t.Errorf("%s: %s with deepest %d, want %s with %d", c.name, text, got, c.want, c.deepest)
		}
	}
}

// TestDropping checks the promise of the classes: without the useless items the restore points are the same, and without
// the optional ones the deepest is.
func TestDropping(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		groups := []Group{{Kind: meta.Full, Chunk: 4}}
		for range rapid.IntRange(0, 2).Draw(t, "more groups") {
			kind := rapid.SampledFrom([]meta.GroupKind{meta.Full, meta.StateG, meta.Window, meta.Draft}).Draw(t, "kind")
			groups = append(groups, Group{Kind: kind, Chunk: rapid.SampledFrom([]uint32{2, 4, 8}).Draw(t, "chunk"), Window: rapid.Uint32Range(0, 3).Draw(t, "window")})
		}
		var items []Item
		for g := range groups {
			for p := groups[g].Chunk; p <= 40; p += groups[g].Chunk {
				if rapid.IntRange(0, 9).Draw(t, "there") > 0 {
					items = append(items, Item{Group: uint16(g), Position: p, Fork: rapid.IntRange(0, 9).Draw(t, "fork") == 0})
				}
			}
		}
		mark(groups, items)
		out := make([]Class, len(items))
		deepest := Classify(groups, items, out, false)
		keep := func(worst Class) []Item {
			var k []Item
			for i := range items {
				if out[i] <= worst {
					k = append(k, items[i])
				}
			}
			return k
		}
		if newChain(groups, items).mixed {
			all, less := newChain(groups, items).points(), newChain(groups, keep(Optional)).points()
			if len(all) != len(less) {
				t.Fatalf("restore points %v became %v without the useless items", all, less)
			}
		}
		k := keep(Needed)
		if got := Classify(groups, k, make([]Class, len(k)), false); got != deepest {
			t.Fatalf("deepest restore point %d became %d when only what it needs is kept", deepest, got)
		}
		for i := range k { // and nothing of that can be spared, but for forks
			if k[i].Fork {
				return
			}
		}
		hasFork := false
		for i := range items {
			hasFork = hasFork || items[i].Fork
		}
		if hasFork || deepest == 0 {
			return
		}
		for i := range k {
			less := append(append([]Item(nil), k[:i]...), k[i+1:]...)
			mark(groups, less)
			if got := Classify(groups, less, make([]Class, len(less)), false); got >= deepest && newChain(groups, items).mixed {
				t.Fatalf("item %+v is not needed for %d", k[i], deepest)
			}
		}
	})
}

// mark says of each group's first item whether its head is missing.
func mark(groups []Group, items []Item) {
	for g := range groups {
		for i := range items {
			if int(items[i].Group) == g {
				items[i].Gap = items[i].Position != groups[g].Chunk
				break
			}
		}
	}
}
