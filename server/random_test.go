package server_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"kvlift/block"
	"kvlift/wire"
)

// babbler is an engine that says well-formed messages in little order: most of them are possible, some are not. It comes
// back when it is thrown out, and lists what it has open then, or what comes to its mind.
type babbler struct {
	d       *daemon
	t       *testing.T
	rng     *rand.Rand
	id      string
	session string
	arena   string
	held    []*os.File // its life locks
	m, w    *raw
	seq     uint64
	job     uint64
	stores  map[uint64][]block.Ref
	loads   map[uint64][]block.Ref
	refs    []block.Ref // that the daemon has spoken of lately
	thrown  int
}

var babbled = wire.Namespace{Identity: map[string]any{"model": "babble"}, Groups: []wire.Group{{Kind: "full", ChunkTokens: 16}, {Kind: "state", ChunkTokens: 64}}}

func (b *babbler) hello(role string) *wire.Hello {
	return helloOf(role, b.id, func(h *wire.Hello) {
		h.Namespace, h.Session, h.ArenaID = &babbled, b.session, b.arena
		if role == "worker" {
			h.Parts = []uint32{4096, 3 * 4096}
		}
	})
}

// start attaches rank and manager for the first time.
func (b *babbler) start() {
	b.stores, b.loads = map[uint64][]block.Ref{}, map[uint64][]block.Ref{}
	b.w = b.d.raw(b.t)
	b.w.json(wire.THello, b.hello("worker"))
	b.held = append(b.held, b.w.rights())
	b.w.send(wire.TMapped, nil)
	b.m = b.d.raw(b.t)
	b.m.json(wire.THello, b.hello("manager"))
	b.held = append(b.held, b.m.rights())
	b.m.want(wire.TReady) // its rank's word comes on another connection
	for _, s := range b.d.eng.Status().Sessions {
		if s.EngineID == b.id {
			b.session = fmt.Sprintf("%016x", s.ID)
		}
	}
	b.arena = fmt.Sprintf("%x", b.d.arena.Table.Header.ArenaID)
	if !b.listen() {
		b.t.Fatal("an engine is refused that has said nothing yet")
	}
}

// back attaches the manager again. A list of open jobs that cannot be is refused, the true one is not.
func (b *babbler) back() {
	for try := 0; ; try++ {
		h := b.hello("manager")
		lie := try == 0 && b.rng.IntN(3) == 0
		for job, refs := range b.loads {
			h.Loads = append(h.Loads, wire.OpenJob{Job: job, Refs: pairs(refs)})
		}
		for job, refs := range b.stores {
			h.Stores = append(h.Stores, wire.OpenJob{Job: job, Refs: pairs(refs)})
		}
		if lie {
			h.Loads = append(h.Loads, wire.OpenJob{Job: b.someJob(b.stores), Refs: pairs(b.some())})
			h.Stores = append(h.Stores, wire.OpenJob{Job: b.someJob(b.loads), Refs: pairs(b.some()), Done: b.rng.IntN(2) == 0})
		}
		b.m = b.d.raw(b.t)
		b.m.json(wire.THello, h)
		if b.listen() {
			if lie { // it was taken for the truth: then it is
				b.loads, b.stores = map[uint64][]block.Ref{}, map[uint64][]block.Ref{}
				_ = b.m.c.Close()
				continue
			}
			return
		}
		if !lie {
			b.t.Fatal("the truth is refused")
		}
	}
}

// listen says something that has an answer and reads up to that; false when the daemon has closed the connection.
func (b *babbler) listen() bool {
	b.seq++
	b.job++
	ping := b.seq
	b.m.write(wire.Append(nil, wire.TReserve, 0, ping, wire.AppendReserve(nil, &wire.Reserve{Job: b.job})))
	for {
		h, p, err := b.m.frame()
		if err != nil {
			_ = b.m.c.Close()
			return false
		}
		switch h.Type {
		case wire.TDelta, wire.TSnapshot:
			var d wire.Delta
			if err := d.Parse(p); err != nil {
				b.t.Fatal(err)
			}
			for i := range d.Added {
				b.refs = append(b.refs, d.Added[i].Ref)
			}
		case wire.TReserved:
			var r wire.Reserved
			if err := r.Parse(p); err != nil {
				b.t.Fatal(err)
			}
			if h.Seq == ping {
				b.refs = b.refs[max(0, len(b.refs)-32):]
				return true
			}
			for i := range r.Slots {
				if r.Slots[i].Outcome == 0 {
					b.stores[r.Job] = append(b.stores[r.Job], r.Slots[i].Ref)
				}
			}
		}
	}
}

func (b *babbler) some() []block.Ref {
	var out []block.Ref
	for range b.rng.IntN(4) {
		switch {
		case len(b.refs) == 0 || b.rng.IntN(60) == 0:
			out = append(out, block.Ref{Entry: b.rng.Uint32N(40), Gen: b.rng.Uint32N(4)})
		default: // it may be gone by now
			out = append(out, b.refs[len(b.refs)-1-b.rng.IntN(min(len(b.refs), 8))])
		}
	}
	return out
}

// someJob picks an open job, or now and then any number.
func (b *babbler) someJob(open map[uint64][]block.Ref) uint64 {
	jobs := slices.Sorted(maps.Keys(open))
	if len(jobs) == 0 || b.rng.IntN(60) == 0 {
		return b.job - min(b.job, b.rng.Uint64N(5))
	}
	return jobs[b.rng.IntN(len(jobs))]
}

// say sends one message, or hangs up and comes back.
func (b *babbler) say() {
	request := b.rng.Uint64N(4)
	jobOf := func(t wire.Type, open map[uint64][]block.Ref) {
		if len(open) == 0 && b.rng.IntN(30) > 0 {
			return
		}
		job := b.someJob(open)
		delete(open, job)
		b.m.send(t, wire.AppendJob(nil, job))
	}
	switch n := b.rng.IntN(100); {
	case n < 30:
		b.job++
		r := &wire.Reserve{Job: b.job, Request: request}
		for range b.rng.IntN(6) {
			r.Keys = append(r.Keys, block.Offer{Key: key(b.rng.IntN(48)), Group: uint16(b.rng.IntN(2)), Position: b.rng.Uint32N(1000)})
		}
		b.m.send(wire.TReserve, wire.AppendReserve(nil, r))
	case n < 47:
		jobOf(wire.TCommit, b.stores)
	case n < 50:
		jobOf(wire.TAbort, b.stores)
	case n < 58:
		b.job++
		refs := b.some()
		b.loads[b.job] = refs
		b.m.send(wire.TPin, wire.AppendRefs(nil, &wire.Refs{Job: b.job, Request: request, Refs: refs}))
	case n < 66:
		jobOf(wire.TUnpin, b.loads)
	case n < 70:
		b.m.send(wire.TTouch, wire.AppendRefs(nil, &wire.Refs{Request: request, Refs: b.some()}))
	case n < 80:
		b.m.send(wire.TStep, wire.AppendStep(nil, b.d.eng.Status().Epoch))
	case n < 94:
		b.m.send(wire.TFinish, wire.AppendFinish(nil, &wire.Finish{Request: request}))
	case n < 96:
		b.w.send(wire.TEnded, wire.AppendJob(nil, b.someJob(b.stores)))
		b.w.want(wire.TEndedAck)
	case n < 97: // what was being stored stays until its ranks have reported
		b.m.send(wire.TReset, nil)
		for _, job := range slices.Sorted(maps.Keys(b.stores)) {
			if b.listen() {
				b.w.send(wire.TEnded, wire.AppendJob(nil, job))
				b.w.want(wire.TEndedAck)
			}
		}
		clear(b.stores)
	case n < 98:
		_ = b.m.c.Close()
		b.back()
	}
	if !b.listen() {
		b.thrown++
		// The message that was wrong was the last one; a job that it named is not open, whatever was meant.
		for job, refs := range b.loads {
			if job == b.job-1 || len(refs) == 0 {
				delete(b.loads, job)
			}
		}
		b.back()
	}
}

// TestBabble: whatever engines say in whatever order, the daemon's sums fit its records, and with the end of the engines
// everything can be had again.
func TestBabble(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			d := start(t, t.TempDir(), setup{pages: 40, keys: 24, policy: []string{"lru", "arc"}[seed%2]})
			rng := rand.New(rand.NewPCG(seed, 1))
			var bs []*babbler
			for i := range 2 {
				b := &babbler{d: d, t: t, rng: rng, id: fmt.Sprint("babbler ", i)}
				b.start()
				bs = append(bs, b)
			}
			for i := range 800 {
				bs[rng.IntN(2)].say()
				if i%40 == 0 {
					if err := d.eng.Audit(); err != nil {
						t.Fatalf("after %d messages: %v", i, err)
					}
				}
			}
			for _, b := range bs {
				if err := errors.Join(b.m.c.Close(), b.w.c.Close()); err != nil {
					t.Error(err)
				}
				for _, f := range b.held {
					if err := f.Close(); err != nil {
						t.Error(err)
					}
				}
			}
			eventually(t, "all sessions end", func() bool { return len(d.sessions()) == 0 })
			st := d.eng.Status()
			if st.ReservedKeys != 0 || st.PendingPages != 0 || st.FreePages+st.ReadyPages != 40 || d.eng.OpenJobs() != 0 {
				t.Errorf("%d reserved, %d pages pending, %d free and %d used of 40", st.ReservedKeys, st.PendingPages, st.FreePages, st.ReadyPages)
			}
			if err := d.eng.Audit(); err != nil {
				t.Error(err)
			}
			t.Logf("thrown out %d and %d times; %+v", bs[0].thrown, bs[1].thrown, st.Counters)
			e := d.open("after", 4096)
			if n := store(t, e, 1, offers(1000, 24)); n != 24 && st.Policy == "lru" { // arc may prefer what it has
				t.Errorf("%d of 24 accepted afterwards", n)
			}
		})
	}
}
