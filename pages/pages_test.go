package pages

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"kvlift/block"
)

// model is the map as it would be without a tree: one bool a page, true when free.
type model []bool

func (f model) free() (n uint32) {
	for _, b := range f {
		if b {
			n++
		}
	}
	return n
}

// runs lists the maximal free runs, lowest first.
func (f model) runs() (runs []block.Extent) {
	for i := 0; i < len(f); i++ {
		if !f[i] {
			continue
		}
		e := block.Extent{Page: uint32(i)}
		for ; i < len(f) && f[i]; i++ {
			e.Count++
		}
		runs = append(runs, e)
	}
	return runs
}

func (f model) longest() (n uint32) {
	for _, r := range f.runs() {
		n = max(n, r.Count)
	}
	return n
}

func (f model) all(e block.Extent, free bool) bool {
	if e.Count == 0 || uint64(e.Page)+uint64(e.Count) > uint64(len(f)) {
		return false
	}
	for _, b := range f[e.Page:][:e.Count] {
		if b != free {
			return false
		}
	}
	return true
}

func (f model) fill(e block.Extent, free bool) {
	for i := range e.Count {
		f[e.Page+i] = free
	}
}

// alloc does by plain search what Alloc promises.
func (f model) alloc(n uint32, maxExtents int) ([]block.Extent, bool) {
	if n > f.free() {
		return nil, false
	}
	g := slices.Clone(f)
	var got []block.Extent
	for n > 0 {
		if maxExtents > 0 && len(got) == maxExtents {
			return nil, false
		}
		want := min(n, g.longest())
		for _, r := range g.runs() {
			if r.Count < want {
				continue
			}
			at := r.Page
			if aligned := (at + 15) / 16 * 16; want >= 16 && aligned+want <= r.Page+r.Count {
				at = aligned
			}
			e := block.Extent{Page: at, Count: want}
			g.fill(e, false)
			got = append(got, e)
			n -= want
			break
		}
	}
	copy(f, g)
	return got, true
}

func drawExtent(t *rapid.T, size int) block.Extent {
	return block.Extent{
		Page:  uint32(rapid.IntRange(0, size+2).Draw(t, "page")),
		Count: uint32(rapid.OneOf(rapid.IntRange(0, 3), rapid.IntRange(0, size+2)).Draw(t, "count")),
	}
}

// checkModel runs random operations on a Map and on the model and compares all that can be seen.
func checkModel(t *rapid.T) {
	size := rapid.OneOf(
		rapid.SampledFrom([]int{0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 513, 1000}),
		rapid.IntRange(1, 700),
	).Draw(t, "size")
	m, free := New(uint32(size)), make(model, size)
	for i := range free {
		free[i] = true
	}
	owned := make([]int, size) // the number of the allocation that owns the page, or 0
	var held [][]block.Extent
	prefix := []block.Extent{{Page: 1, Count: 2}, {Page: 3, Count: 4}}

	t.Repeat(map[string]func(*rapid.T){
		"alloc": func(t *rapid.T) {
			n := uint32(rapid.OneOf(rapid.IntRange(0, 20), rapid.IntRange(0, 140), rapid.IntRange(0, size+1)).Draw(t, "n"))
			limit := rapid.IntRange(-1, 5).Draw(t, "maxExtents")
			want, wantOK := free.alloc(n, limit)
			dst, ok := m.Alloc(slices.Clone(prefix), n, limit)
			if !slices.Equal(dst[:len(prefix)], prefix) {
				t.Fatalf("Alloc(%d) changed what dst held: %v", n, dst)
			}
			got := dst[len(prefix):]
			if ok != wantOK || !slices.Equal(got, want) {
				t.Fatalf("Alloc(%d, max %d) = %v, %v, want %v, %v", n, limit, got, ok, want, wantOK)
			}
			if !ok || n == 0 {
				return
			}
			held = append(held, slices.Clone(got))
			for _, e := range got {
				for p := e.Page; p < e.Page+e.Count; p++ {
					if owned[p] != 0 {
						t.Fatalf("page %d given to allocation %d belongs to %d", p, len(held), owned[p])
					}
					owned[p] = len(held)
				}
			}
		},
		"release": func(t *rapid.T) {
			if len(held) == 0 {
				return // not Skip: a fuzzer's input that draws this action only would count as a failure
			}
			i := rapid.IntRange(0, len(held)-1).Draw(t, "allocation")
			for _, e := range held[i] {
				for p := e.Page; p < e.Page+e.Count; p++ {
					if owned[p] == i+1 { // the rest was given back by release-any
						if err := m.Release(block.Extent{Page: p, Count: 1}); err != nil {
							t.Fatal(err)
						}
						free[p], owned[p] = true, 0
					}
				}
			}
		},
		"release-any": func(t *rapid.T) {
			e := drawExtent(t, size)
			want := free.all(e, false)
			if err := m.Release(e); (err == nil) != want {
				t.Fatalf("Release(%v) = %v, want success: %v", e, err, want)
			}
			if want {
				free.fill(e, true)
				for i := range e.Count {
					owned[e.Page+i] = 0
				}
			}
		},
		"claim-any": func(t *rapid.T) {
			e := drawExtent(t, size)
			want := free.all(e, true)
			if err := m.Claim(e); (err == nil) != want {
				t.Fatalf("Claim(%v) = %v, want success: %v", e, err, want)
			}
			if want {
				free.fill(e, false)
			}
		},
		"": func(t *rapid.T) {
			if got, want := m.Free(), free.free(); got != want {
				t.Fatalf("Free() = %d, want %d", got, want)
			}
			if got, want := m.Longest(), free.longest(); got != want {
				t.Fatalf("Longest() = %d, want %d", got, want)
			}
			if got := m.Len(); got != uint32(size) {
				t.Fatalf("Len() = %d, want %d", got, size)
			}
		},
	})
}

func TestModel(t *testing.T) { rapid.Check(t, checkModel) }

func FuzzModel(f *testing.F) { f.Fuzz(rapid.MakeFuzz(checkModel)) }

func TestOutside(t *testing.T) {
	m := New(100)
	for _, e := range []block.Extent{
		{Page: 0, Count: 0},
		{Page: 0, Count: 101},
		{Page: 100, Count: 1},
		{Page: 99, Count: 2},
		{Page: ^uint32(0), Count: ^uint32(0)},
		{Page: 1, Count: ^uint32(0)},
	} {
		if m.Claim(e) == nil {
			t.Errorf("Claim(%v) succeeded in an arena of 100 pages", e)
		}
		if m.Release(e) == nil {
			t.Errorf("Release(%v) succeeded in an arena of 100 pages", e)
		}
	}
	if m.Free() != 100 || m.Longest() != 100 {
		t.Errorf("after refused calls: %d free, longest %d, want 100, 100", m.Free(), m.Longest())
	}
}

// TestEveryFit puts a run of every length up to 200 at every start, and asks for exactly that much.
func TestEveryFit(t *testing.T) {
	const size = 330
	for start := uint32(0); start < size; start++ {
		for n := uint32(1); n <= 200 && start+n <= size; n++ {
			m := New(size)
			if start > 0 {
				if err := m.Claim(block.Extent{Page: 0, Count: start}); err != nil {
					t.Fatal(err)
				}
			}
			if rest := size - start - n; rest > 0 {
				if err := m.Claim(block.Extent{Page: start + n, Count: rest}); err != nil {
					t.Fatal(err)
				}
			}
			if m.Longest() != n {
				t.Fatalf("longest of the run %d+%d is %d", start, n, m.Longest())
			}
			if got := m.find(n); got != start {
				t.Fatalf("find(%d) = %d, want %d", n, got, start)
			}
		}
	}
}

// TestLargest reaches the highest page number there is, where a node of the root's level no longer fits into 32 bits.
func TestLargest(t *testing.T) {
	if os.Getenv("KVLIFT_TEST_LARGE") == "" {
		t.Skip("takes 1.3 GB of memory; set KVLIFT_TEST_LARGE=1 to run it")
	}
	const size = ^uint32(0)
	m := New(size)
	if m.Longest() != size || m.Free() != size {
		t.Fatalf("longest %d, free %d, want %d", m.Longest(), m.Free(), size)
	}
	if err := m.Claim(block.Extent{Page: 0, Count: size - 17}); err != nil {
		t.Fatal(err)
	}
	got, ok := m.Alloc(nil, 16, 1)
	if want := (block.Extent{Page: size - 17, Count: 16}); !ok || got[0] != want {
		t.Fatalf("Alloc(16) = %v, %v, want %v", got, ok, want)
	}
	if err := m.Release(block.Extent{Page: 0, Count: size - 1}); err != nil {
		t.Fatal(err)
	}
	if got, ok := m.Alloc(nil, size, 0); !ok || len(got) != 1 {
		t.Fatalf("Alloc of everything = %v, %v", got, ok)
	}
}

func TestMemory(t *testing.T) {
	const arena = 512 << 30
	for _, size := range []uint32{arena / block.PageSize, arena/block.PageSize - 1000} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		m := New(size)
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 80e6 {
			t.Errorf("the map of %d pages takes %d bytes, want at most 80 MB", m.Len(), got)
		}
	}
}

func TestNoAllocs(t *testing.T) {
	m := fragmented(1 << 16)
	dst := make([]block.Extent, 0, 64)
	for _, n := range []uint32{1, 16, 256, 3500} {
		got := testing.AllocsPerRun(100, func() {
			dst, _ = m.Alloc(dst[:0], n, cap(dst))
			for _, e := range dst {
				if err := m.Release(e); err != nil {
					t.Fatal(err)
				}
			}
		})
		if got != 0 {
			t.Errorf("Alloc and Release of %d pages: %v allocations, want 0", n, got)
		}
	}
}

// fragmented is a map with about half its pages taken: free and taken runs take turns, with lengths from 1 to 8192
// pages spread evenly over their logarithm.
func fragmented(size uint32) *Map {
	m, rng := New(size), rand.New(rand.NewPCG(1, 2))
	length := func() uint32 { return 1<<rng.IntN(13) + rng.Uint32N(1<<rng.IntN(13)) }
	for at := length(); ; at += length() {
		n := length()
		if at+n > size {
			return m
		}
		if err := m.Claim(block.Extent{Page: at, Count: n}); err != nil {
			panic(err)
		}
		at += n
	}
}

// BenchmarkAllocRelease keeps 64 payloads in flight and replaces the oldest, so that each round works elsewhere.
func BenchmarkAllocRelease(b *testing.B) {
	for _, n := range []uint32{1, 16, 256, 3500} {
		b.Run(fmt.Sprintf("pages=%d", n), func(b *testing.B) {
			m := fragmented(2 << 20)
			var held [64][]block.Extent
			for i := range held {
				held[i], _ = m.Alloc(make([]block.Extent, 0, 16), n, 1)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				h := &held[i%len(held)]
				for _, e := range *h {
					if err := m.Release(e); err != nil {
						b.Fatal(err)
					}
				}
				var ok bool
				if *h, ok = m.Alloc((*h)[:0], n, 1); !ok {
					b.Fatal("no room")
				}
			}
		})
	}
}

// BenchmarkScattered takes 3,500 pages where no free run is longer than 255.
func BenchmarkScattered(b *testing.B) {
	m := New(2 << 20)
	for at := uint32(0); at < m.Len(); at += 512 {
		if err := m.Claim(block.Extent{Page: at + at/512%256, Count: 257}); err != nil {
			b.Fatal(err)
		}
	}
	dst := make([]block.Extent, 0, 64)
	b.ReportAllocs()
	for b.Loop() {
		var ok bool
		if dst, ok = m.Alloc(dst[:0], 3500, cap(dst)); !ok {
			b.Fatal("no room")
		}
		for _, e := range dst {
			if err := m.Release(e); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(len(dst)), "extents")
}
