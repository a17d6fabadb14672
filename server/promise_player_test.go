package server

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/meta"
	"kvlift/wire"
)

// player is an engine as vLLM would drive it: a scheduler with its window, and ranks that copy in their own time.
type player struct {
	w    *world
	id   string
	e    *client.Engine
	ver  int // of its weights
	open bool
	hits []hit // of the open window: promised to the scheduler

	loads, stores []*copyJob
	request       uint64
	manager       bool // lives
	ranks         bool // live
	frozen        int  // actions to come that it sleeps through
	impatient     bool // the next answer comes too late for it

	attaching bool
	try       int // attempts to attach
	stage     int // hellos that the daemon has taken up of this attempt
	opened    chan opened
}

type opened struct {
	e   *client.Engine
	err error
}

type hit struct {
	key int
	at  client.Copy
}

// copyJob is a load or a store that the ranks work on.
type copyJob struct {
	job    uint64
	store  bool
	doomed bool // from before a reset
	ver    int
	keys   []int
	refs   []block.Ref // of a load
	pages  [][]uint32  // of each key, all ranks
	parts  []int       // per rank: 0 to do, 1 at work, 2 done
	told   []bool      // per rank: its end was reported and acknowledged
}

func (j *copyJob) kind() string {
	if j.store {
		return "store"
	}
	return "load"
}

func (j *copyJob) done() bool { return slices.Min(j.parts) == 2 }

// store is what owns the right to write a page.
type store = copyJob

func (w *world) key(n int) block.Key {
	k := block.Key{Len: 36}
	binary.LittleEndian.PutUint32(k.Bytes[:], uint32(n)+1)
	return k
}

func (w *world) offer(n int) block.Offer {
	g := len(w.draw.parts[0])
	return block.Offer{Key: w.key(n), Group: uint16(n % g), Position: uint32(n / g)}
}

// rankPages are the pages of a rank in a key's slot: the ranks' parts follow each other, each on pages of its own.
func (w *world) rankPages(key, rank int, all []uint32) []uint32 {
	g := key % len(w.draw.parts[0])
	at := 0
	for r := range rank {
		at += int(block.Pages(uint64(w.draw.parts[r][g])))
	}
	return all[at : at+int(block.Pages(uint64(w.draw.parts[rank][g])))]
}

func pagesOf(xs []block.Extent) []uint32 {
	var out []uint32
	for _, x := range xs {
		for i := range x.Count {
			out = append(out, x.Page+i)
		}
	}
	return out
}

// spawn starts an engine. It attaches while other things happen.
func (w *world) spawn() {
	w.born++
	p := &player{w: w, id: fmt.Sprintf("e%d", w.born), manager: true, ranks: true, attaching: true, opened: make(chan opened, 1)}
	w.players = append(w.players, p)
	c := client.Config{Socket: w.socket, EngineID: p.id, Parts: w.draw.parts, AttachTimeout: time.Hour, Timer: -1, Now: w.now, Waiting: func() { w.answer(p) }, Opening: func() { w.meanwhile(p) },
		Namespace: wire.Namespace{Identity: map[string]any{"model": "promise"}, Groups: w.draw.groups}}
	go func() {
		e, err := client.Open(context.Background(), c)
		p.opened <- opened{e, err}
	}()
	w.note("%s starts", p.id)
	p.await()
}

// mine tells whether a connection is one of the player's.
func (p *player) mine(t *turn) bool { return t.hello != nil && t.hello.EngineID == p.id }

// finished takes note of the end of an attempt to attach.
func (p *player) finished() bool {
	if p.e == nil {
		select {
		case o := <-p.opened:
			p.attaching = false
			if p.e = o.e; o.err != nil { // the daemon died meanwhile: nothing is left of it
				p.e, p.manager, p.ranks = nil, false, false
			}
		default:
		}
		return !p.attaching
	}
	p.attaching = p.e.Reconnecting()
	return !p.attaching
}

// await waits until an engine that attaches has come as far as it can without the daemon.
func (p *player) await() {
	until(p.id+" goes on attaching", func() bool {
		if p.finished() {
			return true
		}
		if p.w.stop == nil {
			return false
		}
		said, ready := 0, false
		for _, t := range p.w.pending() {
			if p.mine(t) && t.try == p.try && !t.passed {
				return true
			}
		}
		for _, t := range p.w.look() {
			if p.mine(t) && t.try == p.try && t.passed && t.here {
				said++
				t.c.mu.Lock()
				ready = ready || t.c.ready && !t.c.left
				t.c.mu.Unlock()
			}
		}
		return p.stage == len(p.w.draw.parts)+1 && !ready && said > 0
	})
}

// after is called when the daemon has taken up a frame of the player.
func (p *player) after(t *turn, hello, gone bool) {
	if !p.attaching {
		return
	}
	if hello {
		p.stage++
	}
	if gone && (hello || t.hello.Role == "manager") { // that is where it waits
		until(p.id+" gives up attaching", p.finished)
	} else {
		p.await()
	}
}

// giveUp is the end of the time that attaching may take: a rank's connection was lost before the daemon heard that it has
// mapped the arena, and only a new attempt helps.
func (p *player) giveUp() {
	for _, t := range p.w.look() {
		if p.mine(t) && t.try == p.try && t.passed && t.hello.Role == "manager" {
			p.w.note("%s gives up attaching", p.id)
			t.c.shutdown()
			until(p.id+" gives up attaching", p.finished)
		}
	}
}

// stir sees whether a call has made the client reconnect.
func (p *player) stir() {
	if p.e != nil && p.manager && !p.attaching && p.e.Reconnecting() {
		p.attaching, p.stage = true, 0
		p.try++
		p.w.note("%s reconnects", p.id)
		p.await()
	}
}

// Actions of the scheduler.

func (p *player) lookup(n int) {
	k := p.w.key(n)
	c, ok := p.e.Lookup(&k)
	p.open = true
	if !ok {
		p.w.note("%s: key %d is a miss", p.id, n)
		return
	}
	p.w.counts.Hits++
	p.w.note("%s: key %d is a hit at %v", p.id, n, c.Ref)
	p.hits = append(p.hits, hit{n, c})
}

func (p *player) load() {
	n := 1 + p.w.rng.IntN(len(p.hits))
	j := &copyJob{ver: p.ver, parts: make([]int, len(p.w.draw.parts)), told: make([]bool, len(p.w.draw.parts))}
	var copies []client.Copy
	for _, i := range p.w.rng.Perm(len(p.hits))[:n] {
		h := p.hits[i]
		copies = append(copies, h.at)
		j.keys = append(j.keys, h.key)
		j.refs = append(j.refs, h.at.Ref)
		j.pages = append(j.pages, pagesOf(h.at.Extents(nil)))
	}
	j.job = p.e.PrepareLoad(p.request, copies)
	p.loads = append(p.loads, j)
	p.w.counts.Loads++
	p.w.note("%s: load %d of keys %v", p.id, j.job, j.keys)
}

// shut closes the window: its hits lapse.
func (p *player) shut() { p.open, p.hits = false, nil }

func (p *player) reserve(late bool) {
	w := p.w
	var keys []block.Offer
	var ns []int
	for _, n := range w.rng.Perm(w.draw.keys)[:1+w.rng.IntN(min(3, w.draw.keys))] {
		keys = append(keys, w.offer(n))
		ns = append(ns, n)
	}
	var r client.Reservation
	began := time.Now()
	if p.impatient = late; late {
		p.e.SetDeadline(1)
		w.counts.Late++
	} else {
		p.e.SetDeadline(reserveDeadline)
	}
	err := p.e.Reserve(p.request, keys, &r)
	p.impatient = false
	p.shut()
	if errors.Is(err, client.ErrDeadline) && !late && time.Since(began) >= reserveDeadline {
		violated("L1 the reserve of %s is not answered though only the daemon is needed", p.id)
	}
	w.note("%s: reserve of keys %v: %d accepted, %d refused (%d), %v", p.id, ns, len(r.Keys), r.Refused, r.Reason, err)
	w.counts.Refused += r.Refused
	if err != nil || len(r.Keys) == 0 {
		return
	}
	j := &copyJob{store: true, job: r.Job, ver: p.ver, parts: make([]int, len(w.draw.parts)), told: make([]bool, len(w.draw.parts))}
	for _, s := range r.Keys {
		j.keys = append(j.keys, ns[s.Index])
		j.pages = append(j.pages, pagesOf(s.Extents))
	}
	w.claim(p, j)
	p.stores = append(p.stores, j)
	w.counts.Stores++
}

// reserveDeadline is longer than anything that a busy machine may take: an answer that does not come is noticed before.
const reserveDeadline = time.Minute

// claim notes whose pages they are until the copies are over (S3).
func (w *world) claim(p *player, j *copyJob) {
	for _, pages := range j.pages {
		for _, n := range pages {
			if o := w.writers[n]; o != nil {
				violated("S3 page %d is given to store %d of %s and belongs to store %d", n, j.job, p.id, o.job)
			}
			w.writers[n] = j
		}
	}
}

func (w *world) disclaim(j *copyJob) {
	for _, pages := range j.pages {
		for _, n := range pages {
			if w.writers[n] == j {
				delete(w.writers, n)
			}
		}
	}
}

// progress lets a rank take one step of a job.
func (p *player) progress(j *copyJob, rank int) {
	w := p.w
	begin := j.parts[rank] == 0
	j.parts[rank]++
	w.note("%s: rank %d, %s %d: %d of 2", p.id, rank, j.kind(), j.job, j.parts[rank])
	for i, key := range j.keys {
		pages := w.rankPages(key, rank, j.pages[i])
		if j.store {
			w.write(pages, begin, key, j.ver, rank)
		} else if err := w.right(pages, key, j.ver, rank); err != nil {
			violated("S2 a load of %s reads %v", p.id, err)
		}
	}
	if j.store && j.done() {
		w.disclaim(j)
	}
}

// complete tells the manager that all ranks have copied.
func (p *player) complete(j *copyJob) {
	switch {
	case !j.store:
		p.w.note("%s: load %d is complete", p.id, j.job)
		p.e.CompleteLoad(j.job)
		p.loads = remove(p.loads, j)
	case !j.doomed:
		p.w.note("%s: store %d is complete", p.id, j.job)
		p.e.Commit(j.job)
		p.stores = remove(p.stores, j)
	default:
		err := p.e.Ended(j.job, stuck)
		p.w.note("%s: ranks report the end of store %d: %v", p.id, j.job, err != nil)
		if err == nil {
			p.stores = remove(p.stores, j)
		}
	}
}

func remove(js []*copyJob, j *copyJob) []*copyJob {
	return slices.DeleteFunc(js, func(o *copyJob) bool { return o == j })
}

func (p *player) abort(j *copyJob) {
	p.w.note("%s: abort of store %d", p.id, j.job)
	p.e.Abort(j.job)
	p.w.disclaim(j)
	p.stores = remove(p.stores, j)
}

func (p *player) reset() {
	p.w.counts.Resets++
	p.w.vers++
	p.ver = p.w.vers
	p.w.note("%s: reset, weights %d", p.id, p.ver)
	p.e.Reset()
	p.shut()
	for _, j := range p.stores {
		j.doomed = true
	}
}

func (p *player) stepEnd() {
	p.w.note("%s: the step ends", p.id)
	p.e.StepEnd()
	p.shut()
}

func (p *player) tick() {
	p.w.note("%s: timer", p.id)
	p.e.Tick()
}

func (p *player) nextRequest() {
	if p.request > 0 {
		p.e.Finish(p.request, 0, 0, wire.Hint(p.w.rng.IntN(4)))
	}
	p.request++
	p.e.Begin(p.request, 0)
	p.w.note("%s: request %d", p.id, p.request)
}

// kill ends the manager, and the ranks with it or later.
func (p *player) kill(all bool) {
	p.w.note("%s: killed, ranks too: %v", p.id, all)
	p.w.counts.Kills++
	if p.e == nil { // it has not even attached: its ranks are not its own yet
		return
	}
	if err := p.e.Kill(); err != nil {
		violated("kill %s: %v", p.id, err)
	}
	p.manager, p.attaching = false, false
	p.shut()
	if all {
		p.killRanks()
	}
}

func (p *player) killRanks() {
	p.w.note("%s: ranks end", p.id)
	for _, r := range p.e.Workers {
		if err := r.Kill(); err != nil {
			violated("kill a rank of %s: %v", p.id, err)
		}
	}
	p.ranks = false
	for _, j := range p.stores {
		p.w.disclaim(j)
	}
	p.loads, p.stores = nil, nil
}

// report lets a rank whose manager is dead say that a job of its is over.
func (p *player) report(j *copyJob, rank int) {
	err := p.e.Workers[rank].Ended(j.job, stuck)
	p.w.note("%s: rank %d reports the end of %s %d: %v", p.id, rank, j.kind(), j.job, err != nil)
	if j.told[rank] = err == nil; slices.Contains(j.told, false) {
		return
	}
	p.loads, p.stores = remove(p.loads, j), remove(p.stores, j)
}

// holds looks whether a promised entry is still what it was: that comes before its bytes are another's.
func (w *world) holds(p *player, ref block.Ref) {
	if w.stop == nil {
		return
	}
	if st, gen, ok := w.arena.Table.Word(ref.Entry); !ok || gen != ref.Gen || st == meta.Free || st == meta.Reserved {
		violated("S1 entry %v is promised to %s, and is %v of generation %d", ref, p.id, st, gen)
	}
}

// check compares the bytes under every promise that the player holds.
func (p *player) check() {
	w := p.w
	if p.manager {
		for _, h := range p.hits {
			w.holds(p, h.at.Ref)
			all := pagesOf(h.at.Extents(nil))
			for r := range w.draw.parts {
				if err := w.right(w.rankPages(h.key, r, all), h.key, p.ver, r); err != nil {
					violated("S1 a hit of %s that holds: %v", p.id, err)
				}
			}
		}
	}
	if p.ranks {
		for _, j := range p.loads {
			for _, ref := range j.refs {
				w.holds(p, ref)
			}
			for r, part := range j.parts {
				for i, key := range j.keys {
					if part == 2 {
						break
					}
					if err := w.right(w.rankPages(key, r, j.pages[i]), key, j.ver, r); err != nil {
						violated("S1 load %d of %s is not over: %v", j.job, p.id, err)
					}
				}
			}
		}
	}
}
