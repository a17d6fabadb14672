package bench_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"kvlift/bench"
	"kvlift/block"
	"kvlift/client"
	"kvlift/trace"
	"kvlift/wire"
)

// callOrder is what differs between releases of vLLM in the order of a scheduler's calls. In all of them a store that was
// prepared in one step is complete after the stores of the next.
type callOrder struct {
	release string
	touch   bool // the request's keys, there or not, after its lookups and after each store; later ones say it once, at its end
	endLast bool // on_schedule_end comes behind prepare_store and on_request_finished, else before them
}

var callOrders = []callOrder{{"0.30", true, false}, {"0.31", false, false}, {"0.33", false, true}}

// conversation is a prompt of some chunks of 16 tokens that is computed a chunk a step.
type conversation struct {
	name    string
	chunks  int
	request uint64
	done    int // chunks that are computed or loaded
	hit     int
	ends    bool // with this step
}

// scheduler makes the calls of one release to an engine.
type scheduler struct {
	t      *testing.T
	e      *client.Engine
	order  callOrder
	groups []string // kinds
	last   uint64
	before []uint64 // store jobs of the step before
	now    []uint64 // of this step
	resv   client.Reservation
}

func (s *scheduler) key(c *conversation, chunk, group int) block.Key {
	h := uint64(0)
	for _, b := range []byte(c.name) {
		h = h<<8 | uint64(b)
	}
	return trace.KeyOf(h<<16|uint64(chunk), uint32(group))
}

func (s *scheduler) keys(c *conversation) (all []block.Key) {
	for g := range s.groups {
		for i := range c.chunks {
			all = append(all, s.key(c, i+1, g))
		}
	}
	return all
}

// has tells whether a chunk is there, outside any step.
func (s *scheduler) has(c *conversation, chunk, group int) bool {
	found := false
	want := s.key(c, chunk, group)
	s.e.Keys(func(k block.Key, _ client.Copy) bool { found = k == want; return !found })
	return found
}

// head is how many chunks of a conversation are there from its start on, and whether there are others behind a gap.
func (s *scheduler) head(c *conversation) (n int, stranded bool) {
	for n < c.chunks && s.has(c, n+1, 0) {
		n++
	}
	for i := n + 1; i <= c.chunks; i++ {
		stranded = stranded || s.has(c, i, 0)
	}
	return n, stranded
}

// lookup finds the deepest chunk that a load can go to.
func (s *scheduler) lookup(c *conversation) {
	find := func(chunk, group int) (client.Copy, bool) {
		k := s.key(c, chunk, group)
		return s.e.Lookup(&k)
	}
	var copies []client.Copy
	for i := 1; i <= c.chunks; i++ {
		v, ok := find(i, 0)
		if !ok {
			break
		}
		copies = append(copies, v)
	}
	c.hit = len(copies)
	if len(s.groups) > 1 {
		for ; c.hit > 0; c.hit-- {
			if v, ok := find(c.hit, 1); ok {
				copies = append(copies[:c.hit], v)
				break
			}
		}
		if c.hit == 0 {
			copies = nil
		}
	}
	c.done = c.hit
	s.e.CompleteLoad(s.e.PrepareLoad(c.request, copies))
	if s.order.touch {
		s.e.Touch(c.request, s.keys(c))
	}
}

func (s *scheduler) prepareStore(c *conversation, group int) {
	offer := block.Offer{Key: s.key(c, c.done, group), Group: uint16(group), Position: uint32(c.done) * 16}
	if err := s.e.Reserve(c.request, []block.Offer{offer}, &s.resv); err != nil {
		s.t.Fatal(err)
	}
	if s.resv.Job == 0 {
		return
	}
	s.now = append(s.now, s.resv.Job)
	if s.order.touch {
		s.e.Touch(c.request, s.keys(c))
	}
}

// step is one step: those that wait are looked up, those that run compute a chunk, or decode when they have no more.
func (s *scheduler) step(waiting, running []*conversation) {
	for _, c := range waiting {
		s.last++
		c.request = s.last
		s.e.Begin(c.request, 0)
		s.lookup(c)
	}
	if !s.order.endLast {
		s.e.StepEnd()
	}
	for _, c := range append(running, waiting...) {
		if c.done < c.chunks {
			c.done++
			for g := len(s.groups) - 1; g >= 0; g-- { // a boundary's state in a call of its own, before its chunk
				s.prepareStore(c, g)
			}
		}
		if c.ends {
			if !s.order.touch {
				all := s.keys(c)
				slices.Reverse(all)
				s.e.Touch(c.request, all)
			}
			s.e.Finish(c.request, uint32(c.chunks)*16, uint32(c.hit)*16, wire.NoHint)
		}
	}
	if s.order.endLast {
		s.e.StepEnd()
	}
	for _, job := range s.before {
		s.e.Commit(job)
	}
	if err := s.e.Sync(10 * time.Second); err != nil {
		s.t.Fatal(err)
	}
	s.before, s.now = s.now, nil
}

// alone runs a conversation from its start to its end, while others decode.
func (s *scheduler) alone(c *conversation, decoding ...*conversation) {
	s.step([]*conversation{c}, decoding)
	for c.done < c.chunks {
		s.step(nil, append(decoding, c))
	}
	for range 3 {
		s.step(nil, append(decoding, c))
	}
}

func (s *scheduler) end(c *conversation, running ...*conversation) {
	c.ends = true
	s.step(nil, append(running, c))
	s.step(nil, running)
}

// TestInterleavedConversations is a tier that is full of two conversations. While the first still decodes the second comes;
// then the first returns, the second, and the first again. Whatever the order of a release's calls: what is kept of a
// conversation is its head, and a request hits all of it.
func TestInterleavedConversations(t *testing.T) {
	const chunks = 6
	for _, order := range callOrders {
		for _, kinds := range [][]string{{"full"}, {"full", "state"}} {
			for _, tier := range []int{8, 16} {
				for _, firstEnds := range []string{"P", "Q"} {
					t.Run(fmt.Sprintf("%s, %d groups, %d chunks, %s ends first", order.release, len(kinds), tier, firstEnds), func(t *testing.T) {
						t.Parallel()
						s := newScheduler(t, order, kinds, tier)
						p, q := &conversation{name: "P", chunks: chunks}, &conversation{name: "Q", chunks: chunks}
						s.alone(p)
						s.alone(q, p)
						if n, stranded := s.head(p); n != chunks || stranded {
							t.Fatalf("while P decodes %d of its chunks are there, stranded %v", n, stranded)
						}
						if firstEnds == "P" {
							s.end(p, q)
							s.end(q)
						} else {
							s.end(q, p)
							s.end(p)
						}
						returns := func(c *conversation) int {
							n, stranded := s.head(c)
							if stranded {
								t.Errorf("%s: behind a head of %d chunks there are others", c.name, n)
							}
							want := n
							if len(kinds) > 1 { // a head is worth what its deepest state is
								for want > 0 && !s.has(c, want, 1) {
									want--
								}
							}
							again := &conversation{name: c.name, chunks: chunks}
							s.alone(again)
							s.end(again)
							if again.hit != want {
								t.Errorf("%s returns: %d chunks hit, %d are there", c.name, again.hit, want)
							}
							return again.hit
						}
						if got := returns(p); got != chunks {
							t.Errorf("P returns: %d chunks hit, want all", got)
						}
						got := returns(q)
						if tier == 16 && got != chunks || len(kinds) == 1 && tier == 8 && got != 2 {
							t.Errorf("Q returns: %d chunks hit", got)
						}
						if got := returns(p); tier == 16 && got != chunks || len(kinds) == 1 && tier == 8 && got != 2 {
							t.Errorf("P returns again: %d chunks hit", got)
						}
					})
				}
			}
		}
	}
}

func newScheduler(t *testing.T, order callOrder, kinds []string, tier int) *scheduler {
	d, err := bench.StartDaemon(t.Context(), binary, "--ram", fmt.Sprint(tier*len(kinds)*block.PageSize), "--min-idle", "0s")
	if err != nil {
		t.Fatal(err)
	}
	c := client.Config{Socket: d.Socket, EngineID: "scheduler", Deadline: 10 * time.Second,
		Namespace: wire.Namespace{Identity: map[string]any{"model": "interleaved"}}, Parts: [][]uint32{nil}}
	for _, kind := range kinds {
		c.Namespace.Groups = append(c.Namespace.Groups, wire.Group{Name: kind, Kind: kind, ChunkTokens: 16})
		c.Parts[0] = append(c.Parts[0], block.PageSize)
	}
	e, err := client.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return &scheduler{t: t, e: e, order: order, groups: kinds}
}

// TestTouch: what is touched is not the next to go, and what is not stored is passed over.
func TestTouch(t *testing.T) {
	s := newScheduler(t, callOrders[1], []string{"full"}, 2)
	a, b, c := &conversation{name: "A", chunks: 1}, &conversation{name: "B", chunks: 1}, &conversation{name: "C", chunks: 1}
	for _, v := range []*conversation{a, b} {
		s.alone(v)
		s.end(v)
	}
	s.e.Touch(99, append(s.keys(a), s.keys(c)...))
	s.alone(c)
	s.end(c)
	if !s.has(a, 1, 0) || s.has(b, 1, 0) || !s.has(c, 1, 0) {
		t.Errorf("there are A %v, B %v, C %v, want A and C", s.has(a, 1, 0), s.has(b, 1, 0), s.has(c, 1, 0))
	}
}
