package engine

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"

	"kvlift/block"
	"kvlift/meta"
)

// SessionState says what the daemon knows of a session.
type SessionState uint8

const (
	Forming    SessionState = iota // ranks or manager have not all come yet; it can promise nothing
	Attached                       // its manager is connected
	Detached                       // its manager's connection is lost; everything it had stays (R14)
	Unresolved                     // from before our start, seen by its byte locks (R22)
	Ended
)

func (s SessionState) String() string {
	return [...]string{"forming", "attached", "detached", "unresolved", "ended"}[s]
}

// Session is a manager with its ranks. Its methods are the engine's: all may be called concurrently.
type Session struct {
	e        *Engine
	id       uint64
	engineID string
	state    SessionState
	ns       *namespace
	world    int
	sink     Sink
	acked    uint64 // removals up to this epoch are acknowledged
	told     uint64 // the last removal that its sink was told of
	fenced   bool   // it can promise nothing and owes no acknowledgement; see Fence
	manager  *Process
	ranks    map[uint16]*Process
	procs    int // living processes
	jobs     map[uint64]*job
	requests map[uint64]*request
	sinceMS  int64
	desc     *Description
	parts    map[uint16][]uint32
	stats    SessionStats
	open     int // refs that its jobs and requests hold, at most MaxOpen
}

// Process is one attached process of a session: its slot is the record in the session table and the byte that it locks.
type Process struct {
	session *Session
	slot    int
	role    meta.Role
	rank    uint16
	pid     uint32
	mapped  bool // a worker that has mapped the arena
}

// Slot is the number of the process's byte lock.
func (p *Process) Slot() int { return p.slot }

// Role is what the process is in its session.
func (p *Process) Role() meta.Role { return p.role }

// Session is what the process belongs to.
func (p *Process) Session() *Session { return p.session }

// Description tells what an engine's keys mean. Two engines with equal identity share a namespace.
type Description struct {
	ID     [32]byte // SHA-256 of Text
	Text   string   // canonical JSON
	Groups []meta.Group
}

// Describe makes a Description of canonical text and groups without parts.
func Describe(text string, groups []meta.Group) *Description {
	return &Description{ID: sha256.Sum256([]byte(text)), Text: text, Groups: groups}
}

// Joining says who wants to attach.
type Joining struct {
	Role      meta.Role
	EngineID  string
	Rank      uint16
	WorldSize uint16
	PID, UID  uint32
	Start     uint64
	Parts     []uint32 // of a worker: payload bytes of this rank for each group
	Session   uint64   // when it comes back: the session it had, else 0
	Desc      *Description
}

// Join attaches a process, writes its record (R21: before any descriptor is sent) and returns it. A process that comes
// back to a session of which it holds a slot gets that slot again.
func (e *Engine) Join(j Joining) (*Process, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if j.WorldSize == 0 || int(j.WorldSize)*len(j.Desc.Groups) > meta.MaxParts || j.Role == meta.Worker && j.Rank >= j.WorldSize {
		return nil, fmt.Errorf("%w: rank %d of %d with %d groups", ErrGeometry, j.Rank, j.WorldSize, len(j.Desc.Groups))
	}
	if j.Role == meta.Worker && len(j.Parts) != len(j.Desc.Groups) {
		return nil, fmt.Errorf("%w: %d parts for %d groups", ErrGeometry, len(j.Parts), len(j.Desc.Groups))
	}
	s := e.findSession(&j)
	if s != nil && s.ns != nil && j.Role == meta.Worker && s.world == int(j.WorldSize) { // before anything of it sticks
		if err := s.ns.fits(j.Rank, j.Parts); err != nil {
			return nil, err
		}
	}
	if s == nil {
		s = &Session{e: e, id: e.opts.SessionID(), engineID: j.EngineID, world: int(j.WorldSize), desc: j.Desc,
			ranks: map[uint16]*Process{}, jobs: map[uint64]*job{}, requests: map[uint64]*request{}, parts: map[uint16][]uint32{}}
		s.sinceMS = e.opts.Now().UnixMilli()
		e.sessions[s.id] = s
	} else if s.world != int(j.WorldSize) {
		return nil, fmt.Errorf("%w: engine %q comes back in a world of %d, it was one of %d", ErrGeometry, j.EngineID, j.WorldSize, s.world)
	} else if s.desc == nil {
		if s.ns != nil && !s.ns.Private && s.ns.ID != j.Desc.ID {
			return nil, fmt.Errorf("%w: engine %q came back with another cache", ErrGeometry, j.EngineID)
		}
		s.desc = j.Desc
	} else if s.desc.ID != j.Desc.ID {
		return nil, fmt.Errorf("%w: manager and ranks of engine %q describe different caches", ErrGeometry, j.EngineID)
	}
	p, err := e.addProcess(s, &j)
	if err != nil {
		if s.procs == 0 {
			e.endSession(s)
		}
		return nil, err
	}
	if j.Role == meta.Worker {
		s.parts[j.Rank] = slices.Clone(j.Parts)
	}
	return p, nil
}

// findSession picks the session that the process belongs to: the one it names, else the youngest of its engine id that
// still lacks this role.
func (e *Engine) findSession(j *Joining) *Session {
	if s := e.sessions[j.Session]; j.Session != 0 && s != nil && s.engineID == j.EngineID {
		return s
	}
	var best *Session
	for _, s := range e.sessions {
		if s.engineID != j.EngineID || s.world != int(j.WorldSize) {
			continue
		}
		// Ranks that a manager never heard of may have survived a daemon.
		if s.state != Forming && !(s.state == Unresolved && s.ns == nil && j.Role == meta.Manager) {
			continue
		}
		if j.Role == meta.Manager && s.manager != nil || j.Role == meta.Worker && s.ranks[j.Rank] != nil {
			continue
		}
		if best == nil || s.id > best.id {
			best = s
		}
	}
	return best
}

func (e *Engine) addProcess(s *Session, j *Joining) (*Process, error) {
	old := s.manager
	if j.Role == meta.Worker {
		old = s.ranks[j.Rank]
	}
	if old != nil {
		if old.pid == j.PID {
			return old, nil
		}
		return nil, fmt.Errorf("%w: engine %q already has its %s", ErrBadJob, j.EngineID, j.Role)
	}
	// A child may hold the descriptor, and so the lock, of a process that is gone: its byte is not given out again.
	at := 0
	for at < len(e.procs) && (e.procs[at] != nil || e.held(at)) {
		at++
	}
	if at == len(e.procs) {
		return nil, ErrSessions
	}
	ns := uint16(meta.NoNamespace)
	if s.ns != nil {
		ns = s.ns.index
	}
	e.table.PutProcess(at, &meta.Process{Session: s.id, Role: j.Role, Rank: j.Rank, WorldSize: j.WorldSize, Namespace: ns,
		PID: j.PID, UID: j.UID, Start: j.Start, EngineID: j.EngineID})
	p := &Process{session: s, slot: at, role: j.Role, rank: j.Rank, pid: j.PID}
	e.procs[at] = p
	s.procs++
	if j.Role == meta.Worker {
		s.ranks[j.Rank] = p
	} else {
		s.manager = p
	}
	return p, nil
}

// Mapped tells that a worker has mapped the arena. It returns true when all ranks have: the manager may then be told
// that it is ready (R11).
func (e *Engine) Mapped(p *Process) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	p.mapped = true
	return p.session.allMapped()
}

// AllMapped tells whether all ranks of a session have mapped the arena.
func (e *Engine) AllMapped(s *Session) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return s.allMapped()
}

// Survivors are the processes of unresolved sessions, to be watched by their byte locks.
func (e *Engine) Survivors() []*Process {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []*Process
	for _, p := range e.procs {
		if p != nil && p.session.state == Unresolved {
			out = append(out, p)
		}
	}
	return out
}

func (s *Session) allMapped() bool {
	if len(s.ranks) < s.world {
		return false
	}
	for _, r := range s.ranks {
		if !r.mapped {
			return false
		}
	}
	return true
}

// Resume lists what a manager had open when it comes back; see docs/protocol.md, hello.
type Resume struct {
	Loads  []OpenJob
	Stores []OpenJob
}

// OpenJob is an unfinished job of a manager that comes back.
type OpenJob struct {
	Job    uint64
	Doomed bool // from before a reset
	Done   bool // it was committed, but the added keys were never seen
	Refs   []block.Ref
}

// Registration is what an attached manager starts from.
type Registration struct {
	Epoch   uint64
	Refs    []block.Ref // READY keys of the namespace, to be read with Describe while they stay the same
	Payload []uint32    // bytes of a chunk, per group
	Parts   [][]uint32  // of these, the bytes of each rank, per group
}

// Ready registers a manager whose ranks have all mapped the arena: from this moment the sink hears every change, and
// the returned list is what was READY before (R20: one critical section). A manager that came back hands in its open
// jobs; what it does not list has ended.
func (e *Engine) Ready(s *Session, sink Sink, r *Resume) (*Registration, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.state == Ended || s.manager == nil {
		return nil, ErrClosed
	}
	if !s.allMapped() {
		return nil, fmt.Errorf("%w: not every rank has mapped the arena", ErrGeometry)
	}
	if s.ns == nil {
		ns, err := e.enterNamespace(s)
		if err != nil {
			return nil, err
		}
		s.ns = ns
		ns.sessions = append(ns.sessions, s)
		e.moveProcesses(s)
	} else if err := s.ns.matches(s); err != nil {
		return nil, err
	}
	if err := e.relist(s, r); err != nil {
		return nil, err
	}
	if s.state == Unresolved {
		e.unknown--
	}
	s.state, s.sink, s.acked, s.told, s.fenced = Attached, sink, e.epoch, e.epoch, false
	e.settle()
	if s.desc != nil {
		e.nameAccount(s.ns.account, s.desc.Text)
	}
	reg := &Registration{Epoch: e.epoch}
	for i, g := range s.ns.groups {
		reg.Payload = append(reg.Payload, g.payload)
		reg.Parts = append(reg.Parts, slices.Clone(s.ns.Groups[i].Parts))
	}
	for id := range e.slots {
		if e.slots[id].state == meta.Ready && e.slots[id].ns == s.ns.index {
			reg.Refs = append(reg.Refs, block.Ref{Entry: uint32(id), Gen: e.slots[id].gen})
		}
	}
	return reg, nil
}

// Details shows READY entries for a snapshot. One that is not READY any more in this generation is left out: its removal was
// announced since, and that is what the session will hear next.
func (e *Engine) Details(refs []block.Ref, visit func(ref block.Ref, key *block.Key, group uint16, position uint32, extents []block.Extent)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range refs {
		if s := &e.slots[r.Entry]; s.state == meta.Ready && s.gen == r.Gen {
			_, g, pos, _ := e.table.Place(r.Entry)
			e.key, e.extents = e.table.Key(r.Entry), e.table.Extents(r.Entry, e.extents[:0])
			visit(r, &e.key, g, pos, e.extents)
		}
	}
}

// enterNamespace finds or makes the namespace of a session whose parts are known.
func (e *Engine) enterNamespace(s *Session) (*namespace, error) {
	for _, ns := range e.spaces {
		if ns != nil && !ns.Private && ns.ID == s.desc.ID {
			return ns, ns.matches(s)
		}
	}
	n := meta.Namespace{ID: s.desc.ID, Description: s.desc.Text}
	for g, v := range s.desc.Groups {
		v.Parts = make([]uint32, s.world)
		for r := range s.world {
			v.Parts[r] = s.parts[uint16(r)][g]
		}
		n.Groups = append(n.Groups, v)
	}
	return e.makeNamespace(&n)
}

func (e *Engine) makeNamespace(n *meta.Namespace) (*namespace, error) {
	at := slices.Index(e.spaces[:], nil)
	if at < 0 {
		// A namespace without keys and without sessions is only a name.
		at = slices.IndexFunc(e.spaces[:], func(n *namespace) bool { return n.keys == 0 && len(n.sessions) == 0 })
		if at < 0 {
			return nil, ErrNamespaces
		}
		e.table.DropNamespace(at)
		e.closeAccount(e.spaces[at])
		e.spaces[at] = nil
	}
	if err := e.table.PutNamespace(at, n); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrGeometry, err)
	}
	ns := newNamespace(uint16(at), *n)
	e.spaces[at] = ns
	e.openAccount(ns)
	return ns, nil
}

func newNamespace(at uint16, n meta.Namespace) *namespace {
	ns := &namespace{index: at, Namespace: n}
	for i := range n.Groups {
		b, p := n.Groups[i].Payload()
		ns.groups = append(ns.groups, groupState{payload: uint32(b), pages: uint32(p)})
		ns.mixed = ns.mixed || n.Groups[i].Kind != meta.Full
	}
	return ns
}

// matches compares the vector of rank parts: equal between engines, not between ranks. A survivor whose rank has not come
// back yet wrote by the parts that the namespace has.
func (n *namespace) matches(s *Session) error {
	for _, r := range slices.Sorted(maps.Keys(s.parts)) {
		if err := n.fits(r, s.parts[r]); err != nil {
			return err
		}
	}
	return nil
}

// fits compares the parts of one rank with those that the namespace has for it.
func (n *namespace) fits(rank uint16, parts []uint32) error {
	if len(parts) != len(n.Groups) {
		return fmt.Errorf("%w: this engine has %d groups, the namespace %d", ErrGeometry, len(parts), len(n.Groups))
	}
	for g := range n.Groups {
		if want := n.Groups[g].Parts; int(rank) >= len(want) {
			return fmt.Errorf("%w: rank %d, the namespace has %d", ErrGeometry, rank, len(want))
		} else if parts[g] != want[rank] {
			return fmt.Errorf("%w: group %d, rank %d: this engine has %d bytes, the namespace %d", ErrGeometry, g, rank, parts[g], want[rank])
		}
	}
	return nil
}

// Detach tells that the connection behind a sink is lost. Nothing is released (R14). A manager that has come back
// meanwhile has another sink, and is not concerned.
func (e *Engine) Detach(s *Session, sink Sink) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.sink != sink {
		return
	}
	s.sink = nil
	if s.state == Attached {
		s.state = Detached
	}
}

// Knows tells whether a process still counts: it has not ended, and its slot was not given away.
func (e *Engine) Knows(p *Process) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.procs[p.slot] == p
}

// ProcessEnded tells that a process is gone: it died, or it said goodbye and its byte lock is free. With the last
// process the session ends, and everything it had.
func (e *Engine) ProcessEnded(p *Process) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.procs[p.slot] != p {
		return
	}
	e.procs[p.slot] = nil
	e.table.DropProcess(p.slot)
	s := p.session
	s.procs--
	if p.role == meta.Manager {
		s.manager = nil
		s.sink = nil
		if s.state == Attached {
			s.state = Detached
		}
	} else {
		delete(s.ranks, p.rank)
	}
	for _, j := range inOrder(s.jobs) { // without a manager nobody will commit any more: the ranks decide
		e.endIfReported(s, j)
	}
	if s.procs == 0 {
		e.endSession(s)
	}
}

func (e *Engine) endSession(s *Session) {
	if s.state == Ended {
		return
	}
	if s.state == Unresolved {
		e.unknown--
	}
	s.state, s.sink = Ended, nil
	for _, j := range inOrder(s.jobs) {
		e.endJob(s, j, false)
	}
	for _, r := range inOrder(s.requests) {
		r.finished = true
		e.closeRequest(s, r)
	}
	delete(e.sessions, s.id)
	if ns := s.ns; ns != nil {
		ns.sessions = slices.DeleteFunc(ns.sessions, func(o *Session) bool { return o == s })
	}
	e.settle()
}

// Step acknowledges the removals up to epoch (R5).
func (e *Engine) Step(s *Session, epoch uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if epoch > e.epoch {
		return fmt.Errorf("%w: epoch %d of %d", ErrBadRef, epoch, e.epoch)
	}
	if epoch > s.acked {
		s.acked = epoch
		e.settleNamespace(s.ns)
	}
	return nil
}

// Reset moves a session to a private generation: everything that its namespace holds is removed, its unfinished stores
// are doomed (R10, R23). When it returns the removal is in the table.
func (e *Engine) Reset(s *Session, random [32]byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.state != Attached {
		return ErrClosed
	}
	old := s.ns
	if !old.Private { // a private generation has no other session: it is emptied and goes on
		n := old.Namespace
		n.Private = true
		copy(n.ID[16:], random[:]) // the other half says where it comes from, and so whose quota it has
		ns, err := e.makeNamespace(&n)
		if err != nil {
			return err
		}
		old.sessions = slices.DeleteFunc(old.sessions, func(o *Session) bool { return o == s })
		ns.sessions = append(ns.sessions, s)
		s.ns = ns
	}
	e.clearNamespace(old, s)
	s.acked = e.epoch
	for _, r := range s.requests {
		r.tails = nil
	}
	e.moveProcesses(s)
	for _, j := range inOrder(s.jobs) {
		if j.store {
			j.doomed = true
			e.endIfReported(s, j)
		}
	}
	e.settleNamespace(old)
	return nil
}

// moveProcesses rewrites the session's records so that a later daemon knows which namespace its survivors can promise.
func (e *Engine) moveProcesses(s *Session) {
	for _, p := range append([]*Process{s.manager}, slices.Collect(maps.Values(s.ranks))...) {
		if p != nil {
			e.table.MoveProcess(p.slot, s.ns.index)
		}
	}
}

// ID names the session; a manager that comes back says it.
func (s *Session) ID() uint64 { return s.id }

// inOrder lists a map by its numbers, so that the same calls leave the same records.
func inOrder[V any](m map[uint64]V) []V {
	out := make([]V, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, m[k])
	}
	return out
}
