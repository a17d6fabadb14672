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
	used := func(i Item) Item { i.Used = true; return i }
	light := []Group{{Kind: meta.Full, Chunk: 100, Pages: 1}, {Kind: meta.StateG, Chunk: 100, Pages: 1}}
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
		{"older state below a fork", hybrid[:2], append(full(4, func(i *Item) { i.Fork = i.Position == 300 }), state(100), state(200), state(400)), false, 400, "NNNNONN"},
		{"a fork below every state", hybrid[:2], append(full(3, func(i *Item) { i.Fork = i.Position == 100 }), state(200), state(300)), false, 300, "NNNON"},
		{"older state that was used", hybrid[:2], append(full(3, nil), used(state(100)), state(200), state(300)), false, 300, "NNNNON"},
		{"windows of which a load read all", hybrid, append(full(2, nil), used(state(100)), used(window(50)), used(window(100)), state(200), window(150), window(200)), false, 200, "NNNNNNNN"},
		{"windows of which a load read some", hybrid, append(full(2, nil), used(state(100)), window(50), used(window(100)), state(200), window(150), window(200)), false, 200, "NNOONNNN"},
		{"the one before the deepest weighs little", light, append(full(9, nil), state(700), state(800), state(900)), false, 900, "NNNNNNNNN" + "ONN"},
		{"the one before the deepest weighs too much", light, append(full(8, nil), state(700), state(800)), false, 800, "NNNNNNNN" + "ON"},
		{"older state that was used, running", hybrid[:2], append(full(3, nil), used(state(100)), state(200), state(300)), true, 300, "NNNOON"},
		{"the one before the deepest, running", light, append(full(9, nil), state(800), state(900)), true, 900, "NNNNNNNNN" + "ON"},
		{"part of a chunk", hybrid[:2], append(full(2, nil), state(100), state(200), Item{Position: 230}, state(230)), false, 230, "NNONNN"},
		{"two parts of a chunk", hybrid[:2], append(full(2, nil), state(200), Item{Position: 230}, state(230), Item{Position: 250}, state(250)), true, 250, "NNNNNNN"},
		{"part of a chunk, overtaken", hybrid[:2], append(full(3, nil), state(200), Item{Position: 230}, state(230), state(300)), false, 300, "NNNOOON"},
		{"part of a chunk without a state", hybrid[:2], append(full(2, nil), state(200), Item{Position: 230}), false, 200, "NNNU"},
		{"part of a chunk behind a gap", hybrid[:2], append(full(1, nil), state(100), Item{Position: 230}, state(230)), false, 100, "NNUU"},
		{"part of a chunk, dense", hybrid[:1], append(full(2, nil), Item{Position: 230}), false, 200, "NNN"},
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
		pages := rapid.Uint32Range(0, 2).Draw(t, "pages")
		groups := []Group{{Kind: meta.Full, Chunk: 4, Pages: pages}}
		for range rapid.IntRange(0, 2).Draw(t, "more groups") {
			kind := rapid.SampledFrom([]meta.GroupKind{meta.Full, meta.StateG, meta.Window, meta.Draft}).Draw(t, "kind")
			groups = append(groups, Group{Kind: kind, Chunk: rapid.SampledFrom([]uint32{2, 4, 8}).Draw(t, "chunk"), Window: rapid.Uint32Range(0, 3).Draw(t, "window"), Pages: pages})
		}
		var items []Item
		plain := pages == 0 // nothing but the deepest restore point is kept
		for g := range groups {
			for p := groups[g].Chunk; p <= 40; p += groups[g].Chunk {
				if rapid.IntRange(0, 9).Draw(t, "there") > 0 {
					it := Item{Group: uint16(g), Position: p, Fork: rapid.IntRange(0, 9).Draw(t, "fork") == 0, Used: rapid.IntRange(0, 9).Draw(t, "used") == 0}
					plain = plain && !it.Fork && !it.Used
					items = append(items, it)
				}
			}
		}
		if tail := rapid.Uint32Range(1, 40).Draw(t, "part of a chunk"); tail%4 != 0 {
			for g := range groups {
				if k := groups[g].kind(); k == meta.Full && tail%groups[g].Chunk != 0 || k == meta.StateG && tail%groups[g].Chunk != 0 {
					items = append(items, Item{Group: uint16(g), Position: tail})
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
			all, less := newChain(groups, items), newChain(groups, keep(Optional))
			all.points(false)
			less.points(false)
			if all, less := all.at, less.at; len(all) != len(less) {
				t.Fatalf("restore points %v became %v without the useless items", all, less)
			}
		}
		k := keep(Needed)
		if got := Classify(groups, k, make([]Class, len(k)), false); got != deepest {
			t.Fatalf("deepest restore point %d became %d when only what it needs is kept", deepest, got)
		}
		if !plain || deepest == 0 { // else nothing of that can be spared
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
