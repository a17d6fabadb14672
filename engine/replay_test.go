package engine_test

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvlift/block"
	"kvlift/engine"
	"kvlift/meta"
)

// TestCrashReplay drives engines at random, and then looks at the file as a next daemon would find it after a kill at
// every single store, and within every store of more than a word. Whatever the moment: the file is adopted, every page
// has one owner or none, what was READY is READY in the same place, and nothing stays reserved or on its way out once
// nobody is left.
func TestCrashReplay(t *testing.T) {
	for _, c := range []struct {
		policy  string
		engines int
		calls   int
		seed    uint64
	}{{"lru", 1, 350, 1}, {"lru", 2, 350, 2}, {"arc", 2, 350, 3}, {"arc", 1, 350, 4}} {
		t.Run(fmt.Sprintf("%s with %d engines", c.policy, c.engines), func(t *testing.T) {
			t.Parallel()
			if testing.Short() {
				c.calls /= 4
			}
			rig := newCrashRig(t, c.policy, c.seed)
			rig.run(c.engines, c.calls)
			rig.replay()
		})
	}
}

func (c *crashRig) replay() {
	at := slices.Clone(c.base) // the file after the stores so far
	work := slices.Clone(at)
	words := make([]record, crashEntries)
	kinds := map[meta.State]int{}
	crashes := 0
	check := func(i int, what string, alive bool) {
		crashes++
		if err := c.crashed(work, at, words, alive); err != nil {
			c.t.Fatalf("store %d of %d, %d bytes at %d, %s, everybody alive: %v: %v", i, len(c.log), len(c.log[i].data), c.log[i].off, what, alive, err)
		}
	}
	for i, s := range c.log {
		if len(s.data) > 8 {
			before := slices.Clone(at[s.off : s.off+len(s.data)])
			torn(s, at, func(k int, seen []byte) {
				copy(work[s.off:], seen)
				copy(at[s.off:], seen) // what crashed puts work back to
				check(i, fmt.Sprintf("torn after %d bytes", k), k%16 == 0)
			})
			copy(at[s.off:], before)
		}
		copy(at[s.off:], s.data)
		copy(work[s.off:], s.data)
		if id, w, ok := wordOf(s); ok {
			words[id] = w
			kinds[w.state]++
		}
		check(i, "whole", false)
		check(i, "whole", true)
	}
	if string(at) != string(c.file) {
		c.t.Fatal("the log does not lead to the file: a store was made without OnWrite")
	}
	for s := meta.Free; s <= meta.Removed; s++ {
		if kinds[s] == 0 && (s != meta.Evicting || len(c.clients) > 1) && !testing.Short() {
			c.t.Errorf("no record became %v: the calls try too little", s)
		}
	}
	c.t.Logf("%d stores, %d crashes, words %v, at most %d extents", len(c.log), crashes, kinds, c.longest)
}

const (
	fuzzEntries  = 8
	fuzzOverflow = 8
)

// part is a structure that a mutation may aim at.
type part struct {
	at, size int
	repair   func(b []byte) // makes its checksum fit again
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func parts() []part {
	le := binary.LittleEndian
	sum := func(at, from int) func([]byte) {
		return func(b []byte) { le.PutUint32(b[at:], crc32.Checksum(b[from:], castagnoli)) }
	}
	head := func(b []byte) { le.PutUint32(b[4092:], crc32.Checksum(b[:4092], castagnoli)) }
	out := []part{{0, meta.HeaderSize, head}, {meta.HeaderSize, meta.HeaderSize, head}}
	for i := range 3 {
		out = append(out, part{namespacesAt + i*meta.NamespaceSize, meta.NamespaceSize, sum(12, 16)},
			part{sessionsAt + i*meta.SessionSize, meta.SessionSize, sum(12, 16)})
	}
	for i := range fuzzEntries {
		out = append(out, part{entriesAt + i*meta.EntrySize, meta.EntrySize, func(b []byte) {
			le.PutUint32(b[16:], crc32.Update(le.Uint32(b[4:]), castagnoli, b[20:]))
		}})
	}
	for i := range fuzzOverflow {
		out = append(out, part{entriesAt + fuzzEntries*meta.EntrySize + i*meta.OverflowSize, meta.OverflowSize, func(b []byte) {
			le.PutUint32(b[12:], crc32.Update(crc32.Checksum(b[:12], castagnoli), castagnoli, b[16:]))
		}})
	}
	return out
}

// fuzzFile is a sound file in which every structure is used.
func fuzzFile(t testing.TB) []byte {
	h := meta.Header{ArenaPages: 512, Entries: fuzzEntries, Overflow: fuzzOverflow, Name: "fuzz"}
	b := make([]byte, meta.NewLayout(h.Entries, h.Overflow).Size)
	tb, err := meta.Create(b, h)
	if err != nil {
		t.Fatal(err)
	}
	n := meta.Namespace{ID: [32]byte{1}, Groups: []meta.Group{{ChunkTokens: 16, Parts: []uint32{16 * 4096}}, {Kind: meta.Window, Window: 2, Parts: []uint32{4096}}}}
	for i := range 2 {
		n.ID[0], n.Private = byte(i), i == 1
		if err := tb.PutNamespace(i, &n); err != nil {
			t.Fatal(err)
		}
	}
	tb.PutProcess(0, &meta.Process{Session: 1, Role: meta.Manager, WorldSize: 1, EngineID: "e"})
	tb.PutProcess(1, &meta.Process{Session: 1, Role: meta.Worker, WorldSize: 1, EngineID: "e"})
	page, over := uint32(0), []uint32{0, 1, 2, 3, 4, 5, 6, 7}
	for id, extents := range []int{16, 1, 5, 1, 11, 4, 10} {
		e := meta.Entry{Tick: uint64(id) << 22, Namespace: uint16(id % 2), Position: uint32(id), Parent: block.Ref{Entry: block.NoEntry}, Payload: 16 * 4096, Pages: 16}
		e.Key, _ = block.MakeKey([]byte{byte(id), 1, 2, 3})
		for i := range extents {
			n := uint32(16 / extents)
			if i == extents-1 {
				n = 16 - n*uint32(extents-1)
			}
			e.Extents = append(e.Extents, block.Extent{Page: page, Count: n})
			page += n + 1
		}
		need := meta.OverflowNeeded(extents)
		tb.Reserve(uint32(id), &e, slices.Clone(over[:need]))
		over = over[need:]
		tb.SetState(uint32(id), []meta.State{meta.Ready, meta.Ready, meta.Evicting, meta.Reserved, meta.Removed, meta.Ready, meta.Free}[id])
	}
	tb.SetHeader(false)
	return b
}

// FuzzAdopt changes a sound file in places, checks it and adopts it, with and without giving damaged records up. Nothing
// may panic or go on for ever; what was adopted must fit its own records; and what was adopted by giving records up must
// be sound for the next start.
//
// The input is a list of changes of 6 bytes: the structure; 1 when its checksum is to fit afterwards; where in it, two
// bytes; how many bits to turn there, a byte; how wide, 0 to 3 for one to eight bytes.
func FuzzAdopt(f *testing.F) {
	base := fuzzFile(f)
	ps := parts()
	f.Add([]byte{})
	for i := range ps {
		for _, at := range []byte{0, 2, 4, 16, 20, 25, 40, 84, 88, 96} {
			f.Add([]byte{byte(i), 1, at, 0, 0xff, 0})
			f.Add([]byte{byte(i), 1, at, 0, 1, 2, byte(i), 1, at + 4, 0, 0x80, 2})
		}
	}
	var mu sync.Mutex // guards file, which is too long to be made anew each time
	file := make([]byte, len(base))
	f.Fuzz(func(t *testing.T, in []byte) {
		mu.Lock()
		defer mu.Unlock()
		copy(file, base)
		headers := false
		for ; len(in) >= 6; in = in[6:] {
			p := ps[int(in[0])%len(ps)]
			b := file[p.at : p.at+p.size]
			width := 1 << (in[5] % 4)
			at := min(int(binary.LittleEndian.Uint16(in[2:]))%p.size, p.size-width)
			for i := range width {
				b[at+i] ^= in[4]
			}
			if in[1]&1 != 0 {
				p.repair(b)
				headers = headers || p.size == meta.HeaderSize
			}
		}
		tb, err := meta.Open(file)
		if err != nil {
			return
		}
		// A header that was made to fit may promise any arena; the arena's file is compared with it before the engine
		// reserves memory by it.
		if headers && tb.Header.ArenaPages > 1<<20 {
			return
		}
		found := engine.Check(tb)
		o := engine.Options{SessionID: func() uint64 { return 1 }}
		e, _, err := engine.Adopt(tb, o, func(int) bool { return true })
		if (err == nil) != (len(found.Problems) == 0) {
			t.Fatalf("adopted: %v, the check found %v", err, found.Problems)
		}
		if err == nil {
			if err := e.Audit(); err != nil {
				t.Fatalf("adopted, and does not fit: %v", err)
			}
			return
		}
		o.DropDamaged = true
		e, _, err = engine.Adopt(tb, o, func(int) bool { return false })
		if err != nil {
			t.Fatalf("giving damaged records up: %v", err)
		}
		if err := e.Audit(); err != nil {
			t.Fatalf("adopted by giving records up, and does not fit: %v", err)
		}
		if again := engine.Check(tb); len(again.Problems) > 0 {
			t.Fatalf("still damaged after records were given up: %v", again.Problems)
		}
		if again := engine.Check(tb); len(again.Problems) > 0 {
			t.Fatalf("still damaged after giving records up: %v", again.Problems)
		}
	})
}

// TestReasonsDocumented: the numbers of docs/formats.md are what clients decode.
func TestReasonsDocumented(t *testing.T) {
	b, err := os.ReadFile("../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range append([]engine.Reason{engine.Fits}, engine.Reasons()...) {
		if want := fmt.Sprintf("\n| %d | %v | ", i, r); int(r) != i || !strings.Contains(string(b), want) {
			t.Errorf("reason %d: docs/formats.md does not say %q", r, want)
		}
	}
}
