package engine

import (
	"cmp"
	"fmt"
	"slices"

	"kvlift/block"
	"kvlift/meta"
	"kvlift/policy"
	"kvlift/restore"
)

// request is what a running request of an engine uses. Its entries are held until it has finished and its last job has
// ended; then they go to the hot end together, the deepest position first, so that no parent is colder than its child.
type request struct {
	id       uint64
	session  *Session
	tick     uint64
	entries  []block.Ref // held, in the order in which they came; one may stand twice, or be gone by a reset
	jobs     int         // open
	finished bool
	hint     Hint        // once it has finished
	news     bool        // entries were taken or became READY, or jobs ended, since trim last looked
	tails    []block.Ref // the last whole chunk of each group so far: the parent of the next
}

// job is a transfer between engine and arena.
type job struct {
	id     uint64
	req    *request
	refs   []block.Ref
	store  bool
	doomed bool            // from before a reset: never committed
	ended  map[uint16]bool // ranks that have reported its end
}

// Begin opens a request. clockMS is the request's own time in milliseconds and used only by an engine with TraceClock.
// Opening an open request again is allowed and changes nothing else.
func (e *Engine) Begin(s *Session, req uint64, clockMS int64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.opts.TraceClock && clockMS > e.traceMS {
		e.traceMS = clockMS
	}
	_, err := e.request(s, req)
	return err
}

func (e *Engine) request(s *Session, id uint64) (*request, error) {
	if r := s.requests[id]; r != nil {
		return r, nil
	}
	if s.ns == nil || s.state == Ended {
		return nil, ErrClosed
	}
	if len(s.requests) >= MaxRequests {
		return nil, ErrBusy
	}
	r := &request{id: id, session: s, tick: e.nextTick()}
	s.requests[id] = r
	return r, nil
}

// take holds an entry for a request, stamps it and remembers it as the parent of the next one.
func (e *Engine) take(r *request, ns *namespace, id uint32, group uint16) {
	ref := block.Ref{Entry: id, Gen: e.slots[id].gen}
	e.noteShared(id, r.tick)
	e.hold(id)
	e.table.SetTick(id, r.tick)
	r.entries = append(r.entries, ref)
	r.news = true
	r.session.open++
	_, _, position, _ := e.table.Place(id)
	r.follow(ns, group, position, ref)
}

// follow notes the last whole chunk of a group: the parent of the next one. Nothing goes on from the part of a chunk that
// a prompt has ended in: a longer prompt stores the whole chunk in its place.
func (r *request) follow(ns *namespace, group uint16, position uint32, ref block.Ref) {
	if int(group) < len(ns.Groups) && ns.Groups[group].Kind == meta.Full && ns.Groups[group].ChunkTokens > 0 && position%ns.Groups[group].ChunkTokens != 0 {
		return
	}
	if r.tails == nil {
		r.tails = make([]block.Ref, len(ns.groups))
		for g := range r.tails {
			r.tails[g].Entry = block.NoEntry
		}
	}
	if int(group) < len(r.tails) { // an entry of a generation that a reset has left may have more groups
		r.tails[group] = ref
	}
}

// Finished is what an engine says of a request at its end.
type Finished struct {
	Request      uint64
	PromptTokens uint32 // looked up; 0 when the engine does not say
	HitTokens    uint32 // of these, served by the tier
	Hint         Hint   // of what comes next
}

// Finish ends a request: its entries become evictable once its last job has ended.
func (e *Engine) Finish(s *Session, f Finished) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s.stats.add(&e.counters, f)
	r := s.requests[f.Request]
	if r == nil {
		return
	}
	r.finished, r.hint = true, f.Hint
	e.closeRequest(s, r)
}

// closeRequest lets a finished request without jobs go.
func (e *Engine) closeRequest(s *Session, r *request) {
	if !r.finished || r.jobs > 0 {
		return
	}
	if s.requests[r.id] == r { // a job from before a reconnect has a request of its own, without a number
		delete(s.requests, r.id)
	}
	s.open -= len(r.entries)
	e.letGoBy(r.hint, r.entries, e.worth(r, false))
	r.entries = nil
}

// letGo gives held entries back together, under one stamp; class may be nil when all are needed. refs is reordered.
func (e *Engine) letGo(refs []block.Ref, class map[block.Ref]restore.Class) {
	e.letGoTo(refs, class, policy.Recent)
}

// letGoTo is letGo as of the time that a lane stands for.
func (e *Engine) letGoTo(refs []block.Ref, class map[block.Ref]restore.Class, lane policy.Lane) {
	tick := e.tickIn(lane)
	e.sortColdFirst(refs)
	for _, ref := range refs {
		if s := &e.slots[ref.Entry]; s.gen == ref.Gen && s.state != meta.Free {
			if s.state == meta.Ready {
				e.table.SetTick(ref.Entry, tick)
			}
			e.unhold(ref.Entry, class[ref], lane)
		}
	}
}

// sortColdFirst orders entries of one stamp as a start would: deepest position first.
func (e *Engine) sortColdFirst(refs []block.Ref) {
	type place struct {
		ref      block.Ref
		position uint32
		group    uint16
	}
	at := make([]place, len(refs))
	sorted := true
	for i, ref := range refs {
		_, g, pos, _ := e.table.Place(ref.Entry)
		at[i] = place{ref, pos, g}
		sorted = sorted && (i == 0 || at[i-1].group == g && at[i-1].position < pos)
	}
	if sorted { // one group, head to tail: the usual case
		slices.Reverse(refs)
		return
	}
	slices.SortFunc(at, func(a, b place) int {
		return cmp.Or(cmp.Compare(b.position, a.position), cmp.Compare(b.group, a.group), cmp.Compare(a.ref.Entry, b.ref.Entry))
	})
	for i := range at {
		refs[i] = at[i].ref
	}
}

// Pin starts a load job: the named entries keep their bytes until Unpin. A pin is legal on READY and EVICTING records
// and on removed ones, as long as the generation is the one that was promised (R16).
func (e *Engine) Pin(s *Session, id, req uint64, refs []block.Ref) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	r, err := e.request(s, req)
	if err != nil {
		return err
	}
	return e.pin(s, r, id, refs, false)
}

// pin opens a load job. A load that is listed again may be of a generation that a reset has left since.
func (e *Engine) pin(s *Session, r *request, id uint64, refs []block.Ref, relisted bool) error {
	j, err := s.newJob(id, r, len(refs))
	if err != nil {
		return err
	}
	for i, ref := range refs {
		if !e.pinnable(ref) { // not for the first time, perhaps: it may stand in the list more than once
			for _, pinned := range refs[:i] {
				e.slots[pinned.Entry].pins--
			}
			delete(s.jobs, id)
			return fmt.Errorf("%w: pin of entry %d generation %d", ErrBadRef, ref.Entry, ref.Gen)
		}
		e.slots[ref.Entry].pins++
	}
	j.refs = slices.Clone(refs)
	s.open += len(refs)
	r.jobs++
	for _, ref := range refs {
		sl := &e.slots[ref.Entry]
		if sl.state == meta.Ready {
			_, g, _, _ := e.table.Place(ref.Entry)
			e.take(r, s.ns, ref.Entry, g)
			e.order.Use(ref.Entry)
			e.table.SetMarks(ref.Entry, true, uint8(restore.Needed))
		}
	}
	e.counters.Loads += uint64(len(refs))
	return nil
}

func (e *Engine) pinnable(ref block.Ref) bool {
	if ref.Entry >= uint32(len(e.slots)) {
		return false
	}
	s := &e.slots[ref.Entry]
	return s.gen == ref.Gen && (s.state == meta.Ready || s.state == meta.Evicting || s.state == meta.Removed) && s.pins < 1<<15 && s.holds < 1<<15
}

// newJob opens a job that will name up to n entries.
func (s *Session) newJob(id uint64, r *request, n int) (*job, error) {
	if len(s.jobs) >= MaxJobs || s.open+2*n > MaxOpen {
		return nil, ErrBusy
	}
	if s.jobs[id] != nil {
		return nil, fmt.Errorf("%w: job %d is open already", ErrBadJob, id)
	}
	j := &job{id: id, req: r}
	s.jobs[id] = j
	return j, nil
}

// Unpin ends a load job after all ranks have loaded (R6).
func (e *Engine) Unpin(s *Session, id uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	j := s.jobs[id]
	if j == nil || j.store {
		return fmt.Errorf("%w: unpin of job %d", ErrBadJob, id)
	}
	e.endJob(s, j, false)
	return nil
}

// Commit makes a store job's entries READY after all ranks have stored (R6, R18). A doomed job is not committed.
func (e *Engine) Commit(s *Session, id uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	j := s.jobs[id]
	if j == nil || !j.store {
		return fmt.Errorf("%w: commit of job %d", ErrBadJob, id)
	}
	if !j.doomed {
		e.endJob(s, j, true)
	}
	return nil
}

// Abort gives a reservation back that no worker was ever given (R8).
func (e *Engine) Abort(s *Session, id uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	j := s.jobs[id]
	if j == nil || !j.store {
		return fmt.Errorf("%w: abort of job %d", ErrBadJob, id)
	}
	e.endJob(s, j, false)
	return nil
}

// endJob closes a job: a load unpins, a store becomes READY (commit) or FREE.
func (e *Engine) endJob(s *Session, j *job, commit bool) {
	delete(s.jobs, j.id)
	s.open -= len(j.refs)
	for _, ref := range j.refs {
		switch {
		case !j.store:
			e.unpin(ref.Entry)
		case commit:
			e.makeReady(ref)
		}
	}
	if j.store && !commit {
		s.open -= len(j.req.entries)
		j.req.entries = slices.DeleteFunc(j.req.entries, func(ref block.Ref) bool { return slices.Contains(j.refs, ref) })
		s.open += len(j.req.entries)
		for i := range j.req.tails { // a parent that never was is none
			if slices.Contains(j.refs, j.req.tails[i]) {
				j.req.tails[i] = block.Ref{Entry: block.NoEntry}
			}
		}
		for _, ref := range j.refs {
			e.dropReserved(ref.Entry)
		}
		e.counters.Aborted += uint64(len(j.refs))
	}
	j.req.jobs--
	j.req.news = true
	e.closeRequest(s, j.req)
}

func (e *Engine) unpin(id uint32) {
	s := &e.slots[id]
	s.pins--
	if s.pins == 0 && s.flags&slotAcked != 0 {
		e.finishRemoval(id)
	}
}

func (e *Engine) makeReady(ref block.Ref) {
	id := ref.Entry
	e.table.SetState(id, meta.Ready)
	e.slots[id].state = meta.Ready
	n, g, pos, pg := e.table.Place(id)
	ns := e.spaces[n]
	ns.groups[g].keys++
	e.ready++
	e.used += pg
	e.counters.Stored++
	e.counters.StoredBytes += uint64(ns.groups[g].payload)
	e.key, e.extents = e.table.Key(id), e.table.Extents(id, e.extents[:0])
	for _, s := range ns.sessions {
		if s.sink != nil {
			s.sink.Added(ref, &e.key, g, pos, e.extents)
		}
	}
}

// EndReport is a worker's word that a job's copies are over, whatever became of the job (R12).
func (e *Engine) EndReport(p *Process, id uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := p.session
	j := s.jobs[id]
	if j == nil || p.role != meta.Worker {
		return
	}
	if j.ended == nil {
		j.ended = map[uint16]bool{}
	}
	j.ended[p.rank] = true
	e.endIfReported(s, j)
}

// endIfReported frees a store that nobody will commit once every rank has reported its end, or has ended itself: a doomed
// one, or any after its manager's death. While a manager lives, the end of an undoomed job is its word alone.
func (e *Engine) endIfReported(s *Session, j *job) {
	if !j.doomed && s.manager != nil {
		return
	}
	for r := range s.ranks {
		if !j.ended[r] {
			return
		}
	}
	e.endJob(s, j, false)
}

// Touch says that these entries were used by a request; those that are not READY in this generation are passed over.
func (e *Engine) Touch(s *Session, req uint64, refs []block.Ref) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.ns == nil || s.state == Ended {
		return ErrClosed
	}
	if s.open+2*len(refs) > MaxOpen {
		return ErrBusy
	}
	r := s.requests[req]
	mine := make([]block.Ref, 0, len(refs))
	for _, ref := range refs {
		if ref.Entry >= uint32(len(e.slots)) || e.slots[ref.Entry].gen != ref.Gen || e.slots[ref.Entry].state != meta.Ready ||
			e.slots[ref.Entry].ns != s.ns.index || e.slots[ref.Entry].holds >= 1<<15 {
			continue
		}
		mine = append(mine, ref)
	}
	if r != nil && !r.finished {
		old := r.tick
		r.tick = e.nextTick()
		for _, ref := range mine {
			e.noteShared(ref.Entry, old)
			if id := ref.Entry; e.slots[id].holds == 0 {
				_, g, _, _ := e.table.Place(id)
				e.take(r, s.ns, id, g)
				e.order.Use(id)
			} else {
				e.table.SetTick(id, r.tick)
			}
		}
		return nil
	}
	held := mine[:0]
	for _, ref := range mine {
		if e.slots[ref.Entry].holds < 1<<15 { // it may stand in the list more than once
			e.noteShared(ref.Entry, 0)
			e.hold(ref.Entry)
			e.order.Use(ref.Entry)
			held = append(held, ref)
		}
	}
	e.letGo(held, nil)
	return nil
}

// relist takes over the jobs that a returning manager names; what it does not name has ended (R9).
func (e *Engine) relist(s *Session, r *Resume) error {
	if r == nil {
		r = &Resume{}
	}
	listed, claimed, err := e.checkResume(s, r)
	if err != nil {
		return err
	}
	// First what it still has, so that nothing is let go in between; then the rest ends.
	old := s.jobs
	s.jobs = map[uint64]*job{}
	requests := s.requests
	s.requests = map[uint64]*request{}
	s.open = 0
	anon := func() *request { return &request{session: s, tick: e.nextTick(), finished: true} }
	for _, j := range r.Loads {
		if err := e.pin(s, anon(), j.Job, j.Refs, true); err != nil {
			return err
		}
	}
	for _, j := range r.Stores {
		nj, err := s.newJob(j.Job, anon(), len(j.Refs))
		if err != nil {
			return err
		}
		nj.store, nj.doomed = true, j.Doomed
		if o := old[j.Job]; o != nil && o.store { // a report that was acknowledged does not come again
			nj.ended = o.ended
		}
		nj.req.jobs++
		for _, ref := range j.Refs {
			if !e.reserved(ref) {
				continue // READY already (the commit arrived), or given up by a start after a reset
			}
			nj.refs = append(nj.refs, ref)
			e.slots[ref.Entry].holds++ // the anonymous request's; an old owner's hold ends below
			nj.req.entries = append(nj.req.entries, ref)
			s.open += 2
		}
	}
	e.orphans = slices.DeleteFunc(e.orphans, func(id uint32) bool { return claimed[id] })
	for _, j := range inOrder(old) {
		if j.store {
			j.refs = slices.DeleteFunc(j.refs, func(ref block.Ref) bool { return listed[ref] })
		}
		e.endOld(s, j)
	}
	ended := inOrder(requests)
	for _, j := range inOrder(old) { // those of jobs from before an earlier reconnect have no number
		if !slices.Contains(ended, j.req) {
			ended = append(ended, j.req)
		}
	}
	for _, q := range ended {
		e.letGo(q.entries, e.worth(q, false))
	}
	for _, j := range r.Stores {
		if nj := s.jobs[j.Job]; nj != nil && j.Done && !nj.doomed {
			e.endJob(s, nj, true)
		}
	}
	return nil
}

// endOld ends a job of before a reconnect, without touching a job of the same number that was listed again.
func (e *Engine) endOld(s *Session, j *job) {
	if j.store {
		for _, ref := range j.refs {
			j.req.entries = slices.DeleteFunc(j.req.entries, func(r block.Ref) bool { return r == ref })
			e.dropReserved(ref.Entry)
		}
		return
	}
	for _, ref := range j.refs {
		e.unpin(ref.Entry)
	}
}

// checkResume looks a returning manager's list through before anything is changed: every job once, every entry in one
// store, no store that is another session's, no load that cannot be pinned. It returns the entries listed as stores, and
// those of them that were nobody's since a restart.
func (e *Engine) checkResume(s *Session, r *Resume) (listed map[block.Ref]bool, claimed map[uint32]bool, err error) {
	mine, orphans := map[block.Ref]bool{}, map[uint32]bool{}
	for _, j := range s.jobs {
		if j.store {
			for _, ref := range j.refs {
				mine[ref] = true
			}
		}
	}
	for _, id := range e.orphans {
		orphans[id] = true
	}
	jobs, refs := map[uint64]bool{}, 0
	for _, j := range slices.Concat(r.Loads, r.Stores) {
		if jobs[j.Job] {
			return nil, nil, fmt.Errorf("%w: job %d is listed twice", ErrBadJob, j.Job)
		}
		jobs[j.Job] = true
		refs += len(j.Refs)
	}
	if len(jobs) > MaxJobs || 2*refs > MaxOpen {
		return nil, nil, ErrBusy
	}
	listed, claimed = map[block.Ref]bool{}, map[uint32]bool{}
	for _, j := range r.Stores {
		for _, ref := range j.Refs {
			switch {
			case ref.Entry >= uint32(len(e.slots)):
				return nil, nil, fmt.Errorf("%w: store of entry %d", ErrBadRef, ref.Entry)
			case listed[ref]:
				return nil, nil, fmt.Errorf("%w: store of entry %d is listed twice", ErrBadRef, ref.Entry)
			case !e.reserved(ref): // it will be passed over
			case orphans[ref.Entry]:
				claimed[ref.Entry] = true
			case !mine[ref]:
				return nil, nil, fmt.Errorf("%w: store of entry %d generation %d belongs to another session", ErrBadRef, ref.Entry, ref.Gen)
			}
			listed[ref] = true
		}
	}
	loads := map[block.Ref]int{}
	for _, j := range r.Loads {
		for _, ref := range j.Refs {
			loads[ref]++
			if !e.pinnable(ref) || int(max(e.slots[ref.Entry].pins, e.slots[ref.Entry].holds))+loads[ref] > 1<<15 {
				return nil, nil, fmt.Errorf("%w: load of entry %d generation %d", ErrBadRef, ref.Entry, ref.Gen)
			}
		}
	}
	return listed, claimed, nil
}

// reserved tells whether an entry is being stored in this generation.
func (e *Engine) reserved(ref block.Ref) bool {
	s := &e.slots[ref.Entry]
	return s.state == meta.Reserved && s.gen == ref.Gen
}
