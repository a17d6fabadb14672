package engine_test

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvlift/block"
	"kvlift/engine"
	"kvlift/meta"
)

// Where the structures of a meta file lie, by the numbers of docs/formats.md alone.
const (
	namespacesAt = 2 * meta.HeaderSize
	sessionsAt   = namespacesAt + meta.MaxNamespaces*meta.NamespaceSize
	entriesAt    = sessionsAt + meta.MaxSessions*meta.SessionSize
)

// store is one write to the meta file.
type store struct {
	off  int
	data []byte
}

// payload is what an engine was told of a key that it stored.
type payload struct {
	offer   block.Offer
	extents []block.Extent
	private bool // in a namespace that only its session could use
}

// crashRig drives an engine and keeps the log of its stores.
type crashRig struct {
	t      *testing.T
	r      *rand.Rand
	policy string
	file   []byte
	base   []byte // file before the first store of the log
	log    []store
	table  *meta.Table
	e      *engine.Engine
	ids    uint64
	clock  time.Time

	clients []*crashClient
	job     uint64
	stored  map[block.Ref]*payload // by every reserve so far
	longest int                    // extents of one key
	resets  bool                   // may happen from now on
}

type crashClient struct {
	s        *engine.Session
	manager  *engine.Process
	worker   *engine.Process
	known    map[block.Ref]bool // added, not removed
	epoch    uint64
	stores   []uint64
	loads    []uint64
	requests map[uint64]bool
	private  bool
	dead     map[uint64]bool // stores from before a reset
}

func (c *crashClient) Added(ref block.Ref, _ *block.Key, _ uint16, _ uint32, _ []block.Extent) {
	c.known[ref] = true
}

func (c *crashClient) Removed(epoch uint64, ref block.Ref, _ *block.Key) {
	delete(c.known, ref)
	c.epoch = epoch
}

const (
	crashEntries  = 48
	crashOverflow = 16
	crashPages    = 44
)

// crashGroups are of 1, 3 and 13 pages: the small ones crumble the arena until the large ones need overflow records.
var (
	crashGroups = []meta.Group{{ChunkTokens: 16}, {ChunkTokens: 16, Kind: meta.Window, Window: 2}, {ChunkTokens: 16}}
	crashParts  = []uint32{4000, 3 * 4096, 13*4096 - 1}
)

func newCrashRig(t *testing.T, policy string, seed uint64) *crashRig {
	c := &crashRig{t: t, r: rand.New(rand.NewPCG(seed, 1)), policy: policy, clock: time.UnixMilli(1_700_000_000_000), stored: map[block.Ref]*payload{}}
	c.file = make([]byte, meta.NewLayout(crashEntries, crashOverflow).Size)
	var err error
	if c.table, err = meta.Create(c.file, meta.Header{ArenaPages: crashPages, Entries: crashEntries, Overflow: crashOverflow, Name: "crash"}); err != nil {
		t.Fatal(err)
	}
	c.base = slices.Clone(c.file)
	c.table.OnWrite = func(off, n int) { c.log = append(c.log, store{off, slices.Clone(c.file[off : off+n])}) }
	if c.e, _, err = engine.Adopt(c.table, c.options(&c.ids), func(int) bool { return false }); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *crashRig) options(ids *uint64) engine.Options {
	return engine.Options{Policy: c.policy, EvictAhead: 0.2, Now: func() time.Time { return c.clock }, SessionID: func() uint64 { *ids++; return *ids }}
}

// must ends the test when an engine did what the protocol allows and was refused.
func (c *crashRig) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *crashRig) enter(name string) *crashClient {
	d := engine.Describe("crash test", slices.Clone(crashGroups))
	m, err := c.e.Join(engine.Joining{Role: meta.Manager, EngineID: name, WorldSize: 1, PID: 1, Desc: d})
	c.must(err)
	w, err := c.e.Join(engine.Joining{Role: meta.Worker, EngineID: name, WorldSize: 1, PID: 1, Parts: crashParts, Desc: d})
	c.must(err)
	if !c.e.Mapped(w) {
		c.t.Fatal("the only rank has mapped, the engine waits for more")
	}
	v := &crashClient{s: m.Session(), manager: m, worker: w, known: map[block.Ref]bool{}, requests: map[uint64]bool{}, dead: map[uint64]bool{}}
	reg, err := c.e.Ready(v.s, v, nil)
	c.must(err)
	for _, ref := range reg.Refs {
		v.known[ref] = true
	}
	v.epoch = reg.Epoch
	return v
}

func crashKey(n int, group uint16) block.Key {
	h := sha256.Sum256(binary.LittleEndian.AppendUint64(nil, uint64(n)))
	k, _ := block.HashKey(h[:], uint32(group))
	return k
}

// run makes n random calls of one or two engines that share keys.
func (c *crashRig) run(engines, n int) {
	for i := range engines {
		c.clients = append(c.clients, c.enter(fmt.Sprint("engine ", i)))
	}
	c.crumble(c.clients[0])
	for i := range n {
		c.resets = i >= n/2 // behind it a session is alone, and nothing has to be announced
		c.clock = c.clock.Add(time.Duration(c.r.IntN(5)) * time.Millisecond)
		v := c.clients[c.r.IntN(len(c.clients))]
		if i == n/2 {
			c.reset(v)
		}
		switch c.r.IntN(12) {
		case 0, 1, 2, 3:
			c.reserve(v)
		case 4, 5:
			for i, id := range v.stores {
				if !v.dead[id] {
					c.must(c.e.Commit(v.s, id))
					v.stores = slices.Delete(v.stores, i, i+1)
					break
				}
			}
		case 6:
			for i, id := range v.stores {
				if v.dead[id] { // its rank says that the copies are over
					c.e.EndReport(v.worker, id)
				} else if c.r.IntN(3) == 0 {
					c.must(c.e.Abort(v.s, id))
				} else {
					continue
				}
				v.stores = slices.Delete(v.stores, i, i+1)
				break
			}
		case 7:
			c.load(v)
		case 8:
			if len(v.requests) > 0 {
				req := slices.Min(slices.Collect(maps.Keys(v.requests)))
				c.e.Finish(v.s, engine.Finished{Request: req})
				delete(v.requests, req)
			}
		case 9:
			c.must(c.e.Step(v.s, v.epoch))
		case 10:
			if refs := c.pick(v); len(refs) > 0 {
				c.must(c.e.Touch(v.s, uint64(1+c.r.IntN(5)), refs))
			}
		case 11:
			c.rare(v)
		}
		if err := c.e.Audit(); err != nil {
			c.t.Fatal(err)
		}
	}
}

// crumble fills the arena with keys of one page, gives every second one up and stores a key in the holes.
func (c *crashRig) crumble(v *crashClient) {
	for i := range crashPages {
		c.offer(v, 1, 0, i, 1)
	}
	kept := v.stores[:0]
	for i, id := range v.stores {
		if i%2 == 0 {
			c.must(c.e.Abort(v.s, id))
		} else {
			kept = append(kept, id)
		}
	}
	v.stores = kept
	c.offer(v, 1, 2, 0, 1)
	if want := 13; c.longest != want {
		c.t.Fatalf("the key in the holes has %d extents, want %d", c.longest, want)
	}
}

func (c *crashRig) reserve(v *crashClient) {
	g := []uint16{0, 0, 0, 0, 1, 2}[c.r.IntN(6)]
	c.offer(v, uint64(1+c.r.IntN(4)), g, c.r.IntN(50), 1+c.r.IntN([]int{8, 4, 2}[g]))
}

// offer reserves for the keys of a group from a number on, and notes what the engine is told.
func (c *crashRig) offer(v *crashClient, req uint64, g uint16, from, n int) {
	c.job++
	var offers []block.Offer
	for i := range n {
		offers = append(offers, block.Offer{Key: crashKey(from+i, g), Group: g, Position: uint32(from+i+1) * 16})
	}
	var out engine.Reply
	c.must(c.e.Reserve(v.s, c.job, req, offers, &out))
	v.requests[req] = true
	for _, gone := range out.Removed {
		delete(v.known, gone.Ref)
	}
	xs, accepted := out.Extents, false
	for i, sl := range out.Slots {
		if sl.Outcome != engine.Accepted {
			continue
		}
		c.stored[sl.Ref] = &payload{offers[i], slices.Clone(xs[:sl.Extents]), v.private}
		c.longest = max(c.longest, sl.Extents)
		xs, accepted = xs[sl.Extents:], true
	}
	if accepted {
		v.stores = append(v.stores, c.job)
	}
}

// pick draws some of the keys that an engine may promise.
func (c *crashRig) pick(v *crashClient) []block.Ref {
	var refs []block.Ref
	for _, ref := range slices.SortedFunc(maps.Keys(v.known), func(a, b block.Ref) int { return int(a.Entry) - int(b.Entry) }) {
		if c.r.IntN(2) == 0 {
			refs = append(refs, ref)
		}
	}
	return refs
}

func (c *crashRig) load(v *crashClient) {
	if len(v.loads) > 0 && c.r.IntN(2) == 0 {
		c.must(c.e.Unpin(v.s, v.loads[0]))
		v.loads = v.loads[1:]
		return
	}
	if refs := c.pick(v); len(refs) > 0 {
		c.job++
		req := uint64(1 + c.r.IntN(4))
		c.must(c.e.Pin(v.s, c.job, req, refs))
		v.requests[req] = true
		v.loads = append(v.loads, c.job)
	}
}

// rare is what happens now and then: a reset, an engine's death, the clean mark of a daemon that ends.
func (c *crashRig) rare(v *crashClient) {
	switch c.r.IntN(8) {
	case 0:
		if c.resets {
			c.reset(v)
		}
	case 1, 2:
		c.e.ProcessEnded(v.manager)
		c.e.ProcessEnded(v.worker)
		at := slices.Index(c.clients, v)
		c.clients[at] = c.enter(fmt.Sprint("engine ", at))
	case 3:
		c.e.MarkClean()
	}
}

func (c *crashRig) reset(v *crashClient) {
	var random [32]byte
	binary.LittleEndian.PutUint64(random[:], c.r.Uint64())
	c.must(c.e.Reset(v.s, random))
	v.private, v.known = true, map[block.Ref]bool{}
	for _, id := range v.stores {
		v.dead[id] = true
	}
}

// record is what the log says of an entry.
type record struct {
	state meta.State
	gen   uint32
}

// wordOf reads an entry's state word in a store, if it is one.
func wordOf(s store) (id uint32, r record, ok bool) {
	at := s.off - entriesAt
	if at < 0 || at >= crashEntries*meta.EntrySize || at%meta.EntrySize != 0 || len(s.data) != 8 {
		return 0, record{}, false
	}
	w := binary.LittleEndian.Uint64(s.data)
	return uint32(at / meta.EntrySize), record{meta.State(w), uint32(w >> 32)}, true
}

// crashed adopts the file in work as a next daemon would find it, compares it with what the log says, and puts work back
// to what it was, which is at.
func (c *crashRig) crashed(work, at []byte, words []record, alive bool) error {
	t2, err := meta.Open(work)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	var changed []store // by the adoption
	t2.OnWrite = func(off, n int) { changed = append(changed, store{off: off, data: work[off : off+n]}) }
	defer func() {
		for _, s := range changed {
			copy(s.data, at[s.off:])
		}
	}()
	ids := uint64(1 << 32)
	e, rep, err := engine.Adopt(t2, c.options(&ids), func(int) bool { return alive })
	if err != nil {
		return fmt.Errorf("adopt: %w", err)
	}
	if err := e.Audit(); err != nil {
		return fmt.Errorf("after adoption: %w", err)
	}
	if survivors := e.Survivors(); alive && len(survivors) > 0 {
		// While somebody may still copy, nothing that is being written is given away.
		reserved := 0
		for _, w := range words {
			if w.state == meta.Reserved {
				reserved++
			}
		}
		if got := e.Status().ReservedKeys; got != uint64(reserved) || rep.Reserved != reserved {
			return fmt.Errorf("with survivors: %d reserved keys, the log has %d", got, reserved)
		}
		for _, p := range survivors {
			e.ProcessEnded(p)
			if err := e.Audit(); err != nil {
				return fmt.Errorf("after the end of a survivor: %w", err)
			}
		}
	}
	return c.compare(e, t2, words)
}

// compare: nobody is left, so every record is READY as it was stored, or FREE.
func (c *crashRig) compare(e *engine.Engine, t2 *meta.Table, words []record) error {
	st := e.Status()
	if st.PendingPages != 0 || st.ReservedKeys != 0 || st.Unresolved != 0 || len(st.Sessions) != 0 {
		return fmt.Errorf("left over: %d pages pending, %d keys reserved, %d sessions", st.PendingPages, st.ReservedKeys, len(st.Sessions))
	}
	taken := map[block.Key]bool{} // keys of which a newer record was made
	for id, w := range words {
		if p := c.stored[block.Ref{Entry: uint32(id), Gen: w.gen}]; (w.state == meta.Ready || w.state == meta.Reserved) && !p.private {
			taken[p.offer.Key] = true
		}
	}
	ready := uint64(0)
	var lost []block.Key
	for id, w := range words {
		ref := block.Ref{Entry: uint32(id), Gen: w.gen}
		p := c.stored[ref]
		got, err := t2.Entry(uint32(id), nil)
		if err != nil {
			return err
		}
		// An announced removal is undone, unless the key is stored anew already; a private namespace ends with its session.
		want := w.state == meta.Ready && !p.private
		if w.state == meta.Evicting && !p.private && !taken[p.offer.Key] {
			if want = got.State == meta.Ready; want {
				taken[p.offer.Key] = true // of several on their way out one comes back
			} else {
				lost = append(lost, p.offer.Key)
			}
		}
		if got.Gen != w.gen {
			return fmt.Errorf("entry %d has generation %d, the log %d", id, got.Gen, w.gen)
		}
		if !want {
			if got.State != meta.Free {
				return fmt.Errorf("entry %d is %v, it was %v", id, got.State, w.state)
			}
			continue
		}
		ready++
		if got.State != meta.Ready || got.Key != p.offer.Key || got.Group != p.offer.Group || got.Position != p.offer.Position || !slices.Equal(got.Extents, p.extents) {
			return fmt.Errorf("entry %d was %v with %+v, it is %+v", id, w.state, *p, got)
		}
	}
	for _, k := range lost {
		if !taken[k] {
			return fmt.Errorf("key %v was on its way out, still whole, and is lost", k)
		}
	}
	if st.ReadyKeys != ready {
		return fmt.Errorf("%d keys are ready, want %d", st.ReadyKeys, ready)
	}
	return nil
}

// torn calls visit with what may be seen of a store that a kill cut short: its first k bytes, and the rest as it was or,
// since bodies are cleared before they are written, zero. Long bodies are cut at fewer places.
func torn(s store, before []byte, visit func(k int, seen []byte)) {
	seen := make([]byte, len(s.data))
	for k := 0; k < len(s.data); k += 8 {
		if k > 128 && k < len(s.data)-64 && k%1024 != 0 {
			continue
		}
		copy(seen, s.data)
		copy(seen[k:], before[s.off+k:s.off+len(s.data)])
		visit(k, seen)
		clear(seen[k:])
		visit(k, seen)
	}
}

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
