package engine_test

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
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
