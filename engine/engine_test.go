package engine

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvlift/block"
	"kvlift/meta"
)

// mirror is what an engine believes, kept as the rules say.
type mirror struct {
	keys    map[block.Key]block.Ref
	unread  []event // told, not applied yet
	applied uint64
}

type event struct {
	added bool
	epoch uint64
	key   block.Key
	ref   block.Ref
}

func (m *mirror) Added(ref block.Ref, key *block.Key, _ uint16, _ uint32, _ []block.Extent) {
	m.unread = append(m.unread, event{added: true, key: *key, ref: ref})
}

func (m *mirror) Removed(epoch uint64, ref block.Ref, key *block.Key) {
	m.unread = append(m.unread, event{epoch: epoch, key: *key, ref: ref})
}

func (m *mirror) apply() { m.applyFirst(len(m.unread)) }

// applyFirst applies what stands first in the stream, as a manager does that has not read all of it.
func (m *mirror) applyFirst(n int) {
	for _, e := range m.unread[:n] {
		if e.added {
			m.keys[e.key] = e.ref
			continue
		}
		if m.keys[e.key] == e.ref {
			delete(m.keys, e.key)
		}
		m.applied = e.epoch
	}
	m.unread = m.unread[n:]
}

func testKey(n int) block.Key {
	h := sha256.Sum256(binary.LittleEndian.AppendUint64(nil, uint64(n)))
	k, _ := block.HashKey(h[:], 0)
	return k
}

type rig struct {
	t      *rapid.T
	file   []byte
	e      *Engine
	clock  time.Time
	ids    uint64
	opts   Options
	groups []meta.Group
}

func newRig(t *rapid.T, entries, arenaPages uint32, o Options) *rig {
	r := &rig{t: t, clock: time.UnixMilli(1_700_000_000_000), opts: o}
	l := meta.NewLayout(entries, 16)
	r.file = make([]byte, l.Size)
	tb, err := meta.Create(r.file, meta.Header{ArenaPages: arenaPages, Entries: entries, Overflow: 16, Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	r.adopt(tb, func(int) bool { return false })
	return r
}

func (r *rig) random() uint64 { r.ids++; return r.ids }

func (r *rig) adopt(tb *meta.Table, alive func(int) bool) *Report {
	o := r.opts
	o.Now = func() time.Time { return r.clock }
	o.SessionID = func() uint64 { r.ids++; return r.ids }
	e, rep, err := Adopt(tb, o, alive)
	if err != nil {
		r.t.Fatal(err)
	}
	r.e = e
	return rep
}

// describe is what engines of a model say of their cache.
func (r *rig) describe(model string) *Description {
	return Describe(fmt.Sprintf(`{"groups":[],"identity":{"model":%q}}`, model), slices.Clone(r.groups))
}

func (r *rig) join(name, model string, parts ...uint32) (*Session, *Process, *Process) {
	d := r.describe(model)
	m, err := r.e.Join(Joining{Role: meta.Manager, EngineID: name, WorldSize: 1, PID: 1, Desc: d})
	if err != nil {
		r.t.Fatal(err)
	}
	w, err := r.e.Join(Joining{Role: meta.Worker, EngineID: name, WorldSize: 1, PID: 1, Parts: parts, Desc: d})
	if err != nil {
		r.t.Fatal(err)
	}
	if !r.e.Mapped(w) {
		r.t.Fatal("the only rank has mapped, the engine waits for more")
	}
	return m.Session(), m, w
}

func (r *rig) attach(s *Session, resume *Resume) *mirror {
	m := &mirror{keys: map[block.Key]block.Ref{}}
	reg, err := r.e.Ready(s, m, resume)
	if err != nil {
		r.t.Fatal(err)
	}
	r.e.Details(reg.Refs, func(ref block.Ref, k *block.Key, _ uint16, _ uint32, _ []block.Extent) { m.keys[*k] = ref })
	m.applied = reg.Epoch
	return m
}

// crash adopts a copy of the file as a next daemon would find it and checks it against what the sinks were told.
func (r *rig) crash(alive func(int) bool) (*Engine, *Report) {
	copied := slices.Clone(r.file)
	tb, err := meta.Open(copied)
	if err != nil {
		r.t.Fatal(err)
	}
	ids := r.ids
	e, rep, err := Adopt(tb, Options{Policy: r.opts.Policy, Quotas: r.opts.Quotas, Now: func() time.Time { return r.clock }, SessionID: func() uint64 { ids++; return ids }}, alive)
	if err != nil {
		r.t.Fatalf("adoption: %v", err)
	}
	if err := e.Audit(); err != nil {
		r.t.Fatalf("after adoption: %v", err)
	}
	return e, rep
}

// TestModel drives several engines with random calls against their mirrors. After every call the engine's sums must fit
// its records, a crash must be adoptable, and every page that is written must be unknown to every mirror.
func TestModel(t *testing.T) {
	for _, policy := range []string{"lru", "arc"} {
		t.Run(policy, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { model(t, policy) })
		})
	}
}

type client struct {
	model  string
	s      *Session
	m, w   *Process
	mir    *mirror
	loads  map[uint64][]block.Ref
	stores map[uint64]storeJob
	reqs   map[uint64]bool
	fence  uint64 // what its page says: it promises nothing before it has applied up to here
}

type storeJob struct {
	keys []block.Key
	refs []block.Ref
	dead bool
}

// promises is what a lookup may hit.
func (c *client) promises() map[block.Key]block.Ref {
	if c.mir.applied < c.fence {
		return nil
	}
	return c.mir.keys
}

func model(t *rapid.T, policy string) {
	quotas := drawQuotas(t)
	r := newRig(t, 24, 40, Options{Policy: policy, Quotas: quotas, MinIdle: rapid.SampledFrom([]time.Duration{0, 0, 30 * time.Second}).Draw(t, "min-idle")})
	r.groups = []meta.Group{{ChunkTokens: 16}, {ChunkTokens: 16, Window: 2,
		Kind: rapid.SampledFrom([]meta.GroupKind{meta.Full, meta.StateG, meta.Window}).Draw(t, "kind")}}
	n := rapid.IntRange(1, 3).Draw(t, "engines")
	models := rapid.SliceOfN(rapid.SampledFrom([]string{"m0", "m0", "m1"}), n, n).Draw(t, "models")
	var cs []*client
	enter := func(i int) *client {
		c := &client{model: models[i], loads: map[uint64][]block.Ref{}, stores: map[uint64]storeJob{}, reqs: map[uint64]bool{}}
		c.s, c.m, c.w = r.join(fmt.Sprint("engine", i), c.model, 5000, 9000)
		c.mir = r.attach(c.s, nil)
		return c
	}
	for i := range n {
		cs = append(cs, enter(i))
	}
	next := uint64(0)
	// content maps a page to the key and generation whose bytes it holds, as the engines wrote them.
	owner := map[uint32]block.Ref{}
	caps, uses := &quotaWatch{r: r}, &useWatch{r: r, by: map[block.Ref]map[any]bool{}, unsure: map[*request]bool{}}
	check := func() {
		if err := r.e.Audit(); err != nil {
			t.Fatal(err)
		}
		caps.check()
		uses.sweep()
		for _, c := range cs {
			for k, ref := range c.promises() {
				if s := &r.e.slots[ref.Entry]; s.gen != ref.Gen || s.state == meta.Free || s.state == meta.Reserved {
					t.Fatalf("S1: a mirror promises key %v in entry %d generation %d, the table has %v generation %d", k, ref.Entry, ref.Gen, s.state, s.gen)
				}
			}
			for _, refs := range c.loads {
				for _, ref := range refs {
					if s := &r.e.slots[ref.Entry]; s.gen != ref.Gen || s.state == meta.Free {
						t.Fatalf("S1: a load copies entry %d generation %d, the table has %v generation %d", ref.Entry, ref.Gen, s.state, s.gen)
					}
				}
			}
		}
	}
	pick := func(t *rapid.T) *client { return cs[rapid.IntRange(0, len(cs)-1).Draw(t, "engine")] }
	speaks := func(t *rapid.T) *client { // a message comes from it: a fence ends
		c := pick(t)
		if epoch := r.e.Unfence(c.s); c.fence == math.MaxUint64 {
			c.fence = epoch
		}
		return c
	}
	t.Repeat(map[string]func(*rapid.T){
		"": func(t *rapid.T) { check() },
		"apply": func(t *rapid.T) {
			m := pick(t).mir
			m.applyFirst(rapid.IntRange(0, len(m.unread)).Draw(t, "messages"))
		},
		"fence": func(t *rapid.T) {
			if c := pick(t); r.e.Fence(c.s) {
				c.fence = math.MaxUint64
			}
		},
		"acknowledge": func(t *rapid.T) {
			c := speaks(t)
			if err := r.e.Step(c.s, c.mir.applied); err != nil {
				t.Fatal(err)
			}
		},
		"reserve": func(t *rapid.T) {
			c := speaks(t)
			req := uint64(rapid.IntRange(1, 4).Draw(t, "request"))
			from, count := rapid.IntRange(0, 8).Draw(t, "from"), rapid.IntRange(1, 5).Draw(t, "count")
			next++
			var offers []block.Offer
			for i := range count {
				g := uint16(rapid.IntRange(0, 1).Draw(t, "group"))
				offers = append(offers, block.Offer{Key: testKey(int(req%2)*100 + from + i + int(g)*50), Group: g, Position: uint32(from+i+1) * 16})
			}
			for i := range offers {
				for j := range i {
					if offers[i].Key == offers[j].Key {
						return
					}
				}
			}
			var out Reply
			verify := caps.reserving(c.s, offers)
			if err := r.e.Reserve(c.s, next, req, offers, &out); err != nil {
				t.Fatal(err)
			}
			verify(&out)
			for _, sl := range out.Slots {
				if sl.Outcome == Accepted || sl.Outcome == Present {
					uses.note(c.s.requests[req], sl.Ref)
				}
			}
			c.reqs[req] = true
			c.mir.apply() // what stands before the reply in the stream
			for _, g := range out.Removed {
				if c.mir.keys[g.Key] == g.Ref {
					delete(c.mir.keys, g.Key)
				}
			}
			j, refused := storeJob{}, false
			x := 0
			for i, sl := range out.Slots {
				switch {
				case sl.Outcome == Refused:
					refused = true
				case sl.Outcome == Accepted && refused:
					t.Fatal("a key behind a refused one was accepted: not the longest head")
				case sl.Outcome == Accepted:
					j.keys, j.refs = append(j.keys, offers[i].Key), append(j.refs, sl.Ref)
					total := uint32(0)
					for _, e := range out.Extents[x : x+sl.Extents] {
						for p := e.Page; p < e.Page+e.Count; p++ {
							owner[p] = sl.Ref
						}
						total += e.Count
					}
					x += sl.Extents
					if want := []uint32{2, 3}[offers[i].Group]; total != want {
						t.Fatalf("group %d got %d pages, want %d", offers[i].Group, total, want)
					}
				}
			}
			if len(j.refs) > 0 {
				c.stores[next] = j
			}
		},
		"commit": func(t *rapid.T) {
			c := speaks(t)
			for id, j := range c.stores {
				if !j.dead {
					if err := r.e.Commit(c.s, id); err != nil {
						t.Fatal(err)
					}
					delete(c.stores, id)
					return
				}
			}
		},
		"abort": func(t *rapid.T) {
			c := speaks(t)
			for id, j := range c.stores {
				if !j.dead {
					if err := r.e.Abort(c.s, id); err != nil {
						t.Fatal(err)
					}
					delete(c.stores, id)
					return
				}
			}
		},
		"pin": func(t *rapid.T) {
			c := speaks(t)
			var refs []block.Ref
			for _, k := range sortedKeys(c.promises()) {
				if rapid.Bool().Draw(t, "pin it") {
					refs = append(refs, c.mir.keys[k])
				}
			}
			if len(refs) == 0 {
				return
			}
			next++
			req := uint64(rapid.IntRange(1, 4).Draw(t, "request"))
			if err := r.e.Pin(c.s, next, req, refs); err != nil {
				t.Fatal(err)
			}
			for _, ref := range refs {
				r.e.extents = r.e.table.Extents(ref.Entry, r.e.extents[:0])
				for _, x := range r.e.extents {
					for p := x.Page; p < x.Page+x.Count; p++ {
						if owner[p] != ref {
							t.Fatalf("S2: page %d was written for entry %v, a load of %v reads it", p, owner[p], ref)
						}
					}
				}
			}
			uses.note(c.s.requests[req], refs...)
			c.reqs[req] = true
			c.loads[next] = refs
		},
		"unpin": func(t *rapid.T) {
			c := speaks(t)
			for id := range c.loads {
				if err := r.e.Unpin(c.s, id); err != nil {
					t.Fatal(err)
				}
				delete(c.loads, id)
				return
			}
		},
		"finish": func(t *rapid.T) {
			c := speaks(t)
			for req := range c.reqs {
				hint := Hint(rapid.IntRange(0, int(Closed)+1).Draw(t, "hint"))
				r.clock = r.clock.Add(time.Duration(rapid.SampledFrom([]int{0, 1, 31_000, 61_000}).Draw(t, "ms")) * time.Millisecond)
				verify := uses.finishing(c.s.requests[req], hint)
				r.e.Finish(c.s, Finished{Request: req, PromptTokens: 10, HitTokens: 5, Hint: hint})
				verify()
				delete(c.reqs, req)
				return
			}
		},
		"touch": func(t *rapid.T) {
			c := speaks(t)
			var refs []block.Ref
			for _, k := range sortedKeys(c.mir.keys) {
				if rapid.Bool().Draw(t, "touch it") {
					refs = append(refs, c.mir.keys[k])
				}
			}
			r.clock = r.clock.Add(time.Second)
			req := uint64(rapid.IntRange(1, 5).Draw(t, "request"))
			uses.touching(c.s.requests[req], refs)
			if err := r.e.Touch(c.s, req, refs); err != nil {
				t.Fatal(err)
			}
		},
		"reset": func(t *rapid.T) {
			c := speaks(t)
			if rapid.IntRange(0, 9).Draw(t, "rare") > 0 {
				return
			}
			if err := r.e.Reset(c.s, sha256.Sum256(binary.LittleEndian.AppendUint64(nil, r.random()))); err != nil {
				t.Fatal(err)
			}
			c.mir.keys, c.mir.unread, c.mir.applied = map[block.Key]block.Ref{}, nil, r.e.epoch
			for id, j := range c.stores {
				j.dead = true
				c.stores[id] = j
			}
		},
		"report": func(t *rapid.T) {
			c := pick(t)
			for id, j := range c.stores {
				if j.dead {
					r.e.EndReport(c.w, id)
					delete(c.stores, id)
					return
				}
			}
		},
		"die": func(t *rapid.T) {
			i := rapid.IntRange(0, len(cs)-1).Draw(t, "engine")
			if rapid.IntRange(0, 5).Draw(t, "rare") > 0 {
				return
			}
			r.e.ProcessEnded(cs[i].m)
			check()
			r.e.ProcessEnded(cs[i].w)
			cs[i] = enter(i)
		},
		"reconnect": func(t *rapid.T) {
			c := pick(t)
			r.e.Detach(c.s, c.mir)
			check()
			c.mir.apply() // what was read before the end of the stream
			uses.forget()
			reconnect(r, c)
		},
		"daemon dies": func(t *rapid.T) {
			if rapid.IntRange(0, 3).Draw(t, "rare") > 0 {
				return
			}
			tb, err := meta.Open(r.file)
			if err != nil {
				t.Fatal(err)
			}
			alive := map[int]bool{}
			for _, c := range cs {
				alive[c.m.slot], alive[c.w.slot] = true, true
			}
			r.opts.Quotas = drawQuotas(t)
			uses.forget()
			r.adopt(tb, func(slot int) bool { return alive[slot] })
			if err := r.e.Audit(); err != nil {
				t.Fatal(err)
			}
			if r.e.unknown != len(cs) {
				t.Fatalf("%d sessions unresolved, %d live", r.e.unknown, len(cs))
			}
			for _, c := range cs {
				c.m, c.w = r.e.procs[c.m.slot], r.e.procs[c.w.slot]
				c.s = c.m.session
				c.mir.keys = map[block.Key]block.Ref{}
			}
			for _, c := range cs {
				d := r.describe(c.model)
				if _, err := r.e.Join(Joining{Role: meta.Manager, EngineID: c.s.engineID, WorldSize: 1, PID: 1, Session: c.s.id, Desc: d}); err != nil {
					t.Fatal(err)
				}
				reconnect(r, c)
			}
			if r.e.unknown != 0 {
				t.Fatal("all came back, and some are still unresolved")
			}
		},
		"crash": func(t *rapid.T) {
			// Nobody survives: nothing may be left but READY keys in free pages' complement.
			e, rep := r.crash(func(int) bool { return false })
			if len(e.orphans) != 0 || e.pending != 0 || len(e.sessions) != 0 {
				t.Fatalf("leak after a crash without survivors: %d orphans, %d pages pending, %d sessions", len(e.orphans), e.pending, len(e.sessions))
			}
			for _, c := range cs {
				for k, ref := range c.promises() {
					if s := &r.e.slots[ref.Entry]; s.state != meta.Ready || r.e.spaces[s.ns].Private {
						continue
					}
					if s := &e.slots[ref.Entry]; s.state != meta.Ready || s.gen != ref.Gen {
						t.Fatalf("key %v was kept and is lost by a crash (%+v)", k, rep)
					}
				}
			}
			sameOrder(t, r.e, e)
		},
	})
}

// sameOrder checks that a next daemon evicts in the order of this one.
func sameOrder(t *rapid.T, a, b *Engine) {
	if a.order.Name() != "lru" {
		return
	}
	var wa, wb []uint32
	a.walk(func(id uint32) bool {
		if !a.spaces[a.slots[id].ns].Private {
			wa = append(wa, id)
		}
		return true
	})
	b.walk(func(id uint32) bool {
		if s := &a.slots[id]; s.state == meta.Ready && s.holds == 0 {
			wb = append(wb, id)
		}
		return true
	})
	if !slices.Equal(wa, wb) {
		t.Fatalf("eviction order %v became %v", wa, wb)
	}
}

func sortedKeys(m map[block.Key]block.Ref) []block.Key {
	var out []block.Key
	for k := range m {
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b block.Key) int { return slices.Compare(a.Bytes[:], b.Bytes[:]) })
	return out
}

func reconnect(r *rig, c *client) {
	res := &Resume{}
	for id, refs := range c.loads {
		res.Loads = append(res.Loads, OpenJob{Job: id, Refs: refs})
	}
	for id, j := range c.stores {
		res.Stores = append(res.Stores, OpenJob{Job: id, Refs: j.refs, Doomed: j.dead})
	}
	c.mir = r.attach(c.s, res)
	c.reqs, c.fence = map[uint64]bool{}, 0 // it has another page
}
