package client

import (
	"errors"
	"slices"
	"time"

	"kvlift/block"
	"kvlift/wire"
)

// Lookup answers from the mirror. The first one of a step drains what the daemon has said and opens the window; a hit
// holds until the window closes. It never waits.
func (e *Engine) Lookup(k *block.Key) (Copy, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.open()
	return e.find(k)
}

// Prefix looks keys up until the first miss and appends what it found, as a scheduler does key by key.
func (e *Engine) Prefix(keys []block.Key, dst []Copy) []Copy {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.open()
	for i := range keys {
		c, ok := e.find(&keys[i])
		if !ok {
			break
		}
		dst = append(dst, c)
	}
	return dst
}

// open begins a window unless one is open. The caller holds mu.
func (e *Engine) open() {
	if e.window {
		return
	}
	e.takeArrived()
	if e.s != nil {
		if err := e.pump(0); err != nil {
			e.lose()
		}
	}
	if e.c.Opening != nil {
		e.c.Opening()
	}
	e.window = true
	if e.fence = 0; e.page != nil {
		e.fence = e.page.Open()
	}
}

// find answers one lookup. While an answer is owed, a reset is not confirmed, or a fence stands behind which removals were
// not applied yet, everything is a miss (R7, R10, F1).
func (e *Engine) find(k *block.Key) (Copy, bool) {
	if e.owed != 0 || e.reset || e.applied < e.fence {
		return Copy{}, false
	}
	c, ok := e.mirror[*k]
	return c, ok
}

// PrepareLoad pins what lookups of this window found and returns the number of the load job. It must be called before
// the window closes (R4). Of nothing it makes no job and returns 0; at most wire.MaxRefs copies fit into one.
func (e *Engine) PrepareLoad(request uint64, copies []Copy) uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(copies) == 0 {
		return 0
	}
	e.job++
	refs := make([]block.Ref, len(copies))
	for i := range copies {
		refs[i] = copies[i].Ref
	}
	e.loads[e.job] = refs
	e.post(wire.TPin, func(b []byte) []byte {
		return wire.AppendRefs(b, &wire.Refs{Job: e.job, Request: request, Refs: refs})
	})
	e.send()
	return e.job
}

// send flushes without waiting.
func (e *Engine) send() {
	if e.s == nil {
		return
	}
	if err := e.s.flush(); err != nil && !e.window { // in a window the end of the stream waits (R9)
		e.lose()
	}
}

// CompleteLoad ends a load job after every rank has copied (R6). A job that is not open is passed over.
func (e *Engine) CompleteLoad(job uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.loads[job] == nil {
		return
	}
	delete(e.loads, job)
	e.post(wire.TUnpin, func(b []byte) []byte { return wire.AppendJob(b, job) })
}

// post queues a message that has no answer; it goes out with the next send.
func (e *Engine) post(t wire.Type, encode func([]byte) []byte) {
	if e.s != nil {
		e.s.queue(t, encode)
	}
}

// Touch says that a request uses these keys, so that they are not the next to go. What is not stored is passed over. It
// opens no window and gives no promise.
func (e *Engine) Touch(request uint64, keys []block.Key) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var refs []block.Ref
	for i := range keys {
		if c, ok := e.mirror[keys[i]]; ok {
			refs = append(refs, c.Ref)
		}
	}
	for part := range slices.Chunk(refs, wire.MaxRefs) {
		e.post(wire.TTouch, func(b []byte) []byte {
			return wire.AppendRefs(b, &wire.Refs{Request: request, Refs: part})
		})
	}
}

// Begin opens a request. clockMS is its time for daemons that run on a trace's clock.
func (e *Engine) Begin(request uint64, clockMS int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.post(wire.TBegin, func(b []byte) []byte {
		return wire.AppendBegin(b, &wire.Begin{Request: request, ClockMS: clockMS})
	})
}

// Finish ends a request and says how much of its prompt was served, and what is known of the conversation's next one.
func (e *Engine) Finish(request uint64, prompt, hit uint32, hint wire.Hint) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.post(wire.TFinish, func(b []byte) []byte {
		return wire.AppendFinish(b, &wire.Finish{Request: request, PromptTokens: prompt, HitTokens: hit, Hint: hint})
	})
}

// Stored is one accepted key of a Reserve.
type Stored struct {
	Index   int // in the offered keys
	Ref     block.Ref
	Extents []block.Extent
}

// Reservation is the answer of a Reserve.
type Reservation struct {
	Job     uint64
	Keys    []Stored
	Present int   // stored already
	Refused int   // from here on nothing was accepted
	Reason  uint8 // why

	extents []block.Extent // what Keys point into; valid until the next Reserve with this value
}

// Reserve asks for room and closes the window. It waits for the answer up to the deadline; a late one is owed, and
// meanwhile every lookup is a miss (R7). An error means: store nothing. The memory of out is reused.
func (e *Engine) Reserve(request uint64, keys []block.Offer, out *Reservation) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.send() // pins of the window that ends here
	e.shut()
	out.Keys, out.Present, out.Refused, out.Reason, out.Job = out.Keys[:0], 0, 0, 0, 0
	e.takeArrived()
	if e.s == nil {
		return ErrAway
	}
	if e.owed != 0 || e.reset {
		if err := e.pump(0); err != nil {
			e.lose()
			return ErrAway
		}
		if e.owed != 0 || e.reset {
			return ErrDeadline
		}
	}
	if e.applied > e.acked {
		e.acked = e.applied
		e.s.queue(wire.TStep, func(b []byte) []byte { return wire.AppendStep(b, e.applied) })
	}
	e.job++
	job := e.job
	seq := e.s.queue(wire.TReserve, func(b []byte) []byte {
		return wire.AppendReserve(b, &wire.Reserve{Job: job, Request: request, Keys: keys})
	})
	e.count.Reserves++
	if err := e.s.flush(); err != nil {
		e.lose()
		return ErrAway
	}
	deadline := time.Now().Add(e.c.Deadline)
	e.c.waits()
	for {
		h, b, ok, err := e.s.frame()
		if err == nil && ok {
			if err = e.apply(h, b); err == nil && h.Type == wire.TReserved && h.Seq == seq {
				e.accept(job, keys, out)
				return nil
			}
		}
		if err != nil {
			e.lose()
			return ErrAway
		}
		if ok {
			continue
		}
		left := time.Until(deadline)
		if left <= 0 {
			e.owed, e.owedJob = seq, job
			e.count.Late++
			return ErrDeadline
		}
		if _, err := e.s.receive(left); err != nil {
			e.lose()
			return errors.Join(ErrAway, err)
		}
	}
}

// accept turns the answer that apply has parsed into the caller's.
func (e *Engine) accept(job uint64, keys []block.Offer, out *Reservation) {
	out.extents = append(out.extents[:0], e.resv.Extents...)
	xs := out.extents
	j := &storeJob{refs: make([]block.Ref, 0, len(keys))}
	for i, sl := range e.resv.Slots {
		switch sl.Outcome {
		case 0:
			out.Keys = append(out.Keys, Stored{i, sl.Ref, xs[:sl.Extents:sl.Extents]})
			xs = xs[sl.Extents:]
			j.refs = append(j.refs, sl.Ref)
		case 1, 2:
			out.Present++
		default:
			out.Refused++
		}
	}
	out.Reason = e.resv.Reason
	e.count.Refused += uint64(out.Refused)
	if len(j.refs) > 0 {
		out.Job = job
		e.stores[job] = j
	}
}

// Commit ends a store job after every rank has copied (R6). The keys are kept once their delta has been read.
func (e *Engine) Commit(job uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	j := e.stores[job]
	if j == nil || j.done {
		return
	}
	if j.doomed { // from before a reset: the ranks' reports end it
		return
	}
	j.done = true
	e.unseen = append(e.unseen, job)
	e.post(wire.TCommit, func(b []byte) []byte { return wire.AppendJob(b, job) })
}

// Abort gives back a job that no rank was given (R8).
func (e *Engine) Abort(job uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if j := e.stores[job]; j == nil || j.done || j.doomed {
		return
	}
	delete(e.stores, job)
	e.post(wire.TAbort, func(b []byte) []byte { return wire.AppendJob(b, job) })
}

// Ended is called for a doomed job once all its copies are over: each rank reports it and the job is forgotten.
func (e *Engine) Ended(job uint64, wait time.Duration) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.connecting {
		return ErrAway // it is reported again; the ranks are busy with coming back
	}
	for _, w := range e.Workers {
		if err := w.Ended(job, wait); err != nil {
			if !errors.Is(err, ErrDeadline) && !e.window {
				e.lose() // ranks come back together with the manager
			}
			return err
		}
	}
	if j := e.stores[job]; j != nil && j.doomed {
		delete(e.stores, job)
	}
	return nil
}

// StepEnd closes the window, applies what has come and acknowledges it (R1, R5).
func (e *Engine) StepEnd() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.send()
	e.shut()
	e.rest()
}

// Reset forgets everything: the weights changed. Lookups miss until the daemon has confirmed it, across reconnects (R10).
func (e *Engine) Reset() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.send()
	e.shut()
	for _, j := range e.stores {
		if !j.done {
			j.doomed = true
		}
	}
	for id, j := range e.stores {
		if j.done { // its delta may never come: the key may be removed before it is told
			delete(e.stores, id)
		}
	}
	e.unseen = e.unseen[:0]
	if e.mirror != nil {
		e.mirror = map[block.Key]Copy{}
	}
	e.reset = true
	if e.s != nil {
		e.s.queue(wire.TReset, nil)
		e.send()
	}
}
