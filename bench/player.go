package bench

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/recording"
	"kvlift/wire"
)

// player makes the calls of a recorded scheduler to an engine of the client. What a worker copies is written when a store is
// complete, and compared when a load is: in between the pages are the job's.
type player struct {
	Played
	s        *recording.Session
	e        *client.Engine
	capacity uint64   // pages
	pages    []uint64 // per group, of a chunk over all ranks
	requests map[int]*played
	resv     client.Reservation
	refused  []refusedState
	chunks   map[place]int // chunks of full groups that are there: the line of their last offer

	loads, corruptAt int
}

// played is a request that runs.
type played struct {
	id     uint64
	load   uint64 // job, 0 none
	keys   []block.Key
	copies []client.Copy
	hit    uint32
	stores []playedStore
	held   map[block.Key]bool // offered and there, or loaded
}

type playedStore struct {
	job     uint64
	offered []block.Key
	stored  []block.Key
	extents [][]block.Extent
	awaited bool // the recording has its completion
}

// place is a key that a request has offered.
type place struct {
	request int
	key     block.Key
}

type refusedState struct {
	call *recording.Call
	key  block.Key
}

func newPlayer(e *client.Engine, s *recording.Session, tier uint64) *player {
	p := &player{s: s, e: e, capacity: tier / block.PageSize, requests: map[int]*played{}, chunks: map[place]int{}}
	p.Name, p.Version, p.Groups, p.Ranks, p.TierBytes, p.Requests = s.Name, s.Version, len(s.Groups), len(s.Parts), tier, s.Requests
	for g := range s.Groups {
		n := uint64(0)
		for _, part := range s.Parts {
			n += block.Pages(uint64(part[g]))
		}
		p.pages = append(p.pages, n)
	}
	return p
}

func (p *player) request(n int) *played {
	q := p.requests[n]
	if q == nil {
		q = &played{id: uint64(n + 1), held: map[block.Key]bool{}}
		p.requests[n] = q
	}
	return q
}

func (p *player) play(c *recording.Call) error {
	switch c.Method {
	case recording.NewRequest:
		p.e.Begin(p.request(c.Request).id, 0)
	case recording.Lookup:
		p.lookup(c)
	case recording.Touch:
		p.e.Touch(p.request(c.Request).id, c.Keys)
	case recording.PrepareLoad:
		p.prepareLoad(c)
	case recording.CompleteLoad:
		return p.completeLoad(p.request(c.Request))
	case recording.PrepareStore:
		return p.prepareStore(c)
	case recording.CompleteStore:
		return p.completeStore(c)
	case recording.RequestFinished:
		return p.finish(c)
	case recording.ScheduleEnd:
		p.Steps++
		p.e.StepEnd()
		return p.completeUnawaited()
	case recording.Reset:
		return p.reset()
	}
	return nil
}

func (p *player) lookup(c *recording.Call) {
	k := &c.Keys[0]
	_, ok := p.e.Lookup(k)
	p.Lookups++
	if c.Hit {
		p.RecordedHits++
	}
	switch {
	case ok && c.Hit:
		p.Hits++
	case ok:
		p.Hits++
		p.MoreHits++
		p.differ(c, k, map[bool]string{true: "hit, the recorded manager asked to be asked again", false: "hit, the recorded manager missed"}[c.Retry])
	case c.Hit:
		p.LostHits++
		p.differ(c, k, "miss, the recorded manager hit")
	}
}

func (p *player) prepareLoad(c *recording.Call) {
	q := p.request(c.Request)
	q.keys, q.copies = q.keys[:0], q.copies[:0]
	for i := range c.Keys {
		k := &c.Keys[i]
		v, ok := p.e.Lookup(k)
		if !ok {
			p.LostLoads++
			p.differ(c, k, "not there, the recorded manager loaded it")
			continue
		}
		q.keys, q.copies = append(q.keys, *k), append(q.copies, v)
		q.held[*k] = true
		q.hit = max(q.hit, p.s.Position(k))
	}
	q.load = p.e.PrepareLoad(q.id, q.copies)
}

func (p *player) completeLoad(q *played) error {
	if q.load == 0 {
		return nil
	}
	if p.loads++; p.loads == p.corruptAt {
		last := q.copies[len(q.copies)-1].Extents(nil)
		p.e.Workers[0].Bytes(last[len(last)-1])[0] ^= 1
	}
	for i := range q.keys {
		n, err := p.eachPart(&q.keys[i], q.copies[i].Extents(nil), func(rank int, b []byte, off int) error {
			if at := Check(b, &q.keys[i], rankOffset(rank)+off); at >= 0 {
				return fmt.Errorf("%w: key %v, rank %d, byte %d", ErrWrongBytes, q.keys[i], rank, at-rankOffset(rank))
			}
			return nil
		})
		if err != nil {
			return err
		}
		p.LoadedKeys++
		p.LoadedBytes += n
	}
	p.e.CompleteLoad(q.load)
	q.load = 0
	return nil
}

// rankOffset makes the content of a key another one on each rank.
func rankOffset(rank int) int { return rank << 40 }

// eachPart calls f for the pieces of a key's payload, of each rank at its own worker, and returns how many bytes they were.
func (p *player) eachPart(k *block.Key, xs []block.Extent, f func(rank int, b []byte, off int) error) (n uint64, err error) {
	g := p.s.Group(k)
	for rank, part := range p.s.Parts {
		left := block.Pages(uint64(part[g]))
		for off := 0; left > 0; {
			if len(xs) == 0 {
				return n, errors.New("a copy of another length than its group's payload")
			}
			x := block.Extent{Page: xs[0].Page, Count: uint32(min(left, uint64(xs[0].Count)))}
			if x.Count == xs[0].Count {
				xs = xs[1:]
			} else {
				xs = append([]block.Extent{{Page: xs[0].Page + x.Count, Count: xs[0].Count - x.Count}}, xs[1:]...)
			}
			left -= uint64(x.Count)
			b := p.e.Workers[rank].Bytes(x)
			b = b[:min(len(b), int(part[g])-off)]
			if err := f(rank, b, off); err != nil {
				return n, err
			}
			off += len(b)
			n += uint64(len(b))
		}
	}
	return n, nil
}

func (p *player) prepareStore(c *recording.Call) error {
	q := p.request(c.Request)
	offers := make([]block.Offer, len(c.Keys))
	for i := range c.Keys {
		offers[i] = block.Offer{Key: c.Keys[i], Group: uint16(p.s.Group(&c.Keys[i])), Position: p.s.Position(&c.Keys[i])}
	}
	if len(offers) == 0 {
		return nil
	}
	if err := p.e.Reserve(q.id, offers, &p.resv); err != nil {
		return err
	}
	st := playedStore{job: p.resv.Job, offered: c.Keys, awaited: len(c.Stored) > 0}
	recorded, accepted := map[block.Key]bool{}, map[int]bool{}
	for _, k := range c.Stored {
		recorded[k] = true
	}
	for _, k := range p.resv.Keys {
		accepted[k.Index] = true
		st.stored = append(st.stored, c.Keys[k.Index])
		st.extents = append(st.extents, slices.Clone(k.Extents))
	}
	firstRefused := len(offers) - p.resv.Refused
	for i := range c.Keys {
		k := &c.Keys[i]
		p.Offered++
		if recorded[*k] {
			p.RecordedStores++
		}
		switch {
		case accepted[i]:
			p.Stored++
			if !recorded[*k] && !c.None {
				p.StoredAgain++
				p.differ(c, k, "stored, the recorded manager had it")
			}
		case i < firstRefused:
			if recorded[*k] {
				p.Kept++
				p.differ(c, k, "there, the recorded manager stored it again")
			}
		default:
			p.refuse(c, k, recorded[*k])
			continue
		}
		q.held[*k] = true
		p.note(c, k, accepted[i])
	}
	if st.job != 0 {
		q.stores = append(q.stores, st)
	}
	return nil
}

// refuse notes a key that the daemon had no room for. That is the tier's size when what running requests use leaves none.
func (p *player) refuse(c *recording.Call, k *block.Key, recorded bool) {
	held, used := map[block.Key]bool{}, uint64(0)
	for _, q := range p.requests {
		for k := range q.held {
			if !held[k] {
				held[k] = true
				used += p.pages[p.s.Group(&k)]
			}
		}
	}
	switch {
	case used+p.pages[p.s.Group(k)] > p.capacity:
		p.RefusedFull++
		p.differ(c, k, "refused, running requests use all of the tier")
	case recorded:
		p.RefusedOtherwise++
		p.differ(c, k, fmt.Sprintf("refused for reason %d", p.resv.Reason))
	}
	if p.s.Groups[p.s.Group(k)].Kind != "full" {
		p.refused = append(p.refused, refusedState{c, *k})
	}
}

// note keeps in mind which states were offered before their chunk.
func (p *player) note(c *recording.Call, k *block.Key, stored bool) {
	if p.s.Groups[p.s.Group(k)].Kind == "full" {
		p.chunks[place{c.Request, *k}] = c.Line
		return
	}
	if stored && p.chunkAt(c.Request, k) == 0 {
		p.EarlyStates++
	}
}

// chunkAt is the line in which a request last offered the chunk of a full group at the place of a state, 0 none that is there.
func (p *player) chunkAt(request int, k *block.Key) (line int) {
	for g := range p.s.Groups {
		if p.s.Groups[g].Kind == "full" {
			line = max(line, p.chunks[place{request, p.s.In(k, g)}])
		}
	}
	return line
}

// judgeStates looks for states that were refused though their chunk came later.
func (p *player) judgeStates() {
	for i := range p.refused {
		if r := &p.refused[i]; p.chunkAt(r.call.Request, &r.key) > r.call.Line {
			p.RefusedStates++
			p.differ(r.call, &r.key, "refused, and its chain came later")
		}
	}
}

func (p *player) completeStore(c *recording.Call) error {
	if len(c.Keys) == 0 {
		return nil
	}
	q := p.request(c.Request)
	for i := range q.stores {
		if slices.Contains(q.stores[i].offered, c.Keys[0]) {
			st := q.stores[i]
			q.stores = slices.Delete(q.stores, i, i+1)
			return p.commit(&st)
		}
	}
	return nil // nothing of it was accepted
}

// completeUnawaited ends stores that the recorded manager had refused or not needed: nothing in the recording ends them.
func (p *player) completeUnawaited() error {
	for _, q := range p.requests {
		for i := 0; i < len(q.stores); i++ {
			if st := q.stores[i]; !st.awaited {
				q.stores = slices.Delete(q.stores, i, i+1)
				i--
				if err := p.commit(&st); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// commit writes what the workers of a job copy, and ends it. Between two steps of a scheduler runs a model: its next lookup
// finds what was committed before.
func (p *player) commit(st *playedStore) error {
	for i := range st.stored {
		if _, err := p.eachPart(&st.stored[i], st.extents[i], func(rank int, b []byte, off int) error {
			Fill(b, &st.stored[i], rankOffset(rank)+off)
			return nil
		}); err != nil {
			return err
		}
	}
	p.e.Commit(st.job)
	return p.e.Sync(10 * time.Second)
}

func (p *player) finish(c *recording.Call) error {
	q := p.request(c.Request)
	prompt := uint32(0)
	if c.Request < len(p.s.Prompts) {
		prompt = p.s.Prompts[c.Request]
	}
	p.e.Finish(q.id, prompt, min(q.hit, prompt), wire.NoHint)
	if len(q.stores) == 0 && q.load == 0 {
		delete(p.requests, c.Request)
		return nil
	}
	clear(q.held) // completions may still come
	return nil
}

// reset is what a manager does when the weights have changed: what is under way never completes.
func (p *player) reset() error {
	for _, q := range p.requests {
		if err := p.completeLoad(q); err != nil {
			return err
		}
	}
	p.e.Reset()
	for _, q := range p.requests {
		for _, st := range q.stores {
			if err := p.e.Ended(st.job, 10*time.Second); err != nil {
				return err
			}
		}
		q.stores = nil
		clear(q.held)
	}
	clear(p.chunks)
	return p.e.Sync(10 * time.Second)
}
