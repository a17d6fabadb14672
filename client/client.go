// Package client is an engine's side of the protocol in Go: the rules R1 to R13 as the Python adapter keeps them. The
// bench, the crash tests and the demo are engines made of it.
//
// An Engine is a manager with its ranks in one process. The manager keeps a mirror of the namespace: lookups are answered
// from it without a call, and everything but a reserve is posted. A window opens at a step's first lookup and closes at
// the first reserve or StepEnd after it; in it the mirror does not change, so a hit holds until the window closes.
package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"kvlift/block"
	"kvlift/fence"
	"kvlift/wire"
)

// Errors of an engine.
var (
	ErrOtherArena = errors.New("the daemon serves another arena than the one that is mapped")
	ErrAway       = errors.New("the daemon is away")
)

// Config of an engine. Socket, EngineID, Namespace and Parts must be given.
type Config struct {
	Socket        string
	Name          string // for people; default "kvlift client"
	EngineID      string
	Namespace     wire.Namespace
	Parts         [][]uint32       // per rank, payload bytes per group
	Deadline      time.Duration    // of a reserve; default 5 ms
	AttachTimeout time.Duration    // default 10 s
	Timer         time.Duration    // acknowledgements and reconnects outside a step; default 50 ms, negative: none
	Observe       func(Event)      // hears every change of the mirror, under the engine's lock; may be nil
	Now           func() time.Time // paces reconnects; default time.Now
	// For tests of what may happen in between; both are called under the engine's lock and may be nil.
	Waiting func() // before an answer is waited for
	Opening func() // between what has come is applied and a window opens
}

func (c *Config) world() int { return len(c.Parts) }

func (c *Config) waits() {
	if c.Waiting != nil {
		c.Waiting()
	}
}

// Event is a change of the mirror.
type Event struct {
	Added bool
	Key   block.Key
	Ref   block.Ref
}

// Copy is where a stored key lies.
type Copy struct {
	Ref   block.Ref
	First block.Extent
	More  *[]block.Extent // behind First; nil for the usual key of one extent
}

// Extents appends all extents of the copy.
func (c *Copy) Extents(dst []block.Extent) []block.Extent {
	dst = append(dst, c.First)
	if c.More != nil {
		dst = append(dst, *c.More...)
	}
	return dst
}

// Counters count what the engine saw. They only grow.
type Counters struct {
	Reserves, Late, Refused, Lost, Reconnects uint64
}

type storeJob struct {
	refs   []block.Ref
	doomed bool
	done   bool // commit was posted; the keys' deltas were not all seen yet
	seen   int  // how many were: they come in the order of refs
}

// Engine is a manager with its ranks. Its methods may be called concurrently; one at a time does something.
type Engine struct {
	c       Config
	Workers []*Worker

	mu      sync.Mutex // R2: nobody applies a message while a window is open
	s       *stream
	arena   *os.File // the manager's own descriptor: it carries its life lock
	id, aid string
	window  bool
	page    *fence.Page // of this connection; nil when the daemon gave none
	fence   uint64      // that the open window has seen
	mirror  map[block.Key]Copy
	applied uint64 // removals up to here are applied
	acked   uint64
	job     uint64
	owed    uint64 // sequence of a reserve whose answer is late, 0 none
	owedJob uint64
	reset   bool // asked for, not confirmed
	loads   map[uint64][]block.Ref
	stores  map[uint64]*storeJob
	unseen  []uint64 // committed jobs whose deltas have not all come, in order: so will they
	delta   wire.Delta
	resv    wire.Reserved
	count   Counters
	stop    chan struct{}
	wg      sync.WaitGroup
	closed  bool

	life       context.Context // of the engine: it ends what reconnects
	cancel     context.CancelFunc
	connecting bool        // a goroutine reconnects; the workers are its own meanwhile
	arrived    *attachment // what it brought, to be taken outside a window
	backoff    time.Duration
	retryAt    time.Time
}

// Open attaches an engine and waits until its snapshot is applied.
func Open(ctx context.Context, c Config) (*Engine, error) {
	if c.Deadline == 0 {
		c.Deadline = 5 * time.Millisecond
	}
	if c.AttachTimeout == 0 {
		c.AttachTimeout = 10 * time.Second
	}
	if c.Timer == 0 {
		c.Timer = 50 * time.Millisecond
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Name == "" {
		c.Name = "kvlift client"
	}
	e := &Engine{c: c, loads: map[uint64][]block.Ref{}, stores: map[uint64]*storeJob{}, stop: make(chan struct{})}
	for r := range c.Parts {
		e.Workers = append(e.Workers, &Worker{c: &e.c, rank: r})
	}
	e.life, e.cancel = context.WithCancel(context.WithoutCancel(ctx))
	a, err := e.connect(ctx, e.list())
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	e.mu.Lock()
	e.adopt(a)
	e.mu.Unlock()
	if c.Timer > 0 {
		e.wg.Go(e.tick)
	}
	return e, nil
}

func pairs(refs []block.Ref) [][2]uint32 {
	out := make([][2]uint32, len(refs))
	for i, r := range refs {
		out[i] = [2]uint32{r.Entry, r.Gen}
	}
	return out
}

// lose acts on the end of the stream (R9): the mirror goes, jobs stay.
func (e *Engine) lose() {
	if e.s == nil {
		return
	}
	_ = e.s.close()
	e.s, e.mirror = nil, nil
	e.owed = 0
	e.count.Lost++
	e.retryAt = e.c.Now()
	e.backoff = 10 * time.Millisecond
}

// pump applies what is there, all of it when it may not wait, else what comes first within wait. The caller holds mu,
// outside a window.
func (e *Engine) pump(wait time.Duration) error {
	if e.s == nil {
		return ErrAway
	}
	for n := 0; ; {
		for {
			h, b, ok, err := e.s.frame()
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			n++
			if err := e.apply(h, b); err != nil {
				return err
			}
		}
		if n > 0 && wait > 0 {
			return nil
		}
		got, err := e.s.receive(wait)
		if err != nil {
			return err
		}
		if !got {
			if wait > 0 {
				return ErrDeadline
			}
			return nil
		}
	}
}

// apply changes the mirror (R3): only here.
func (e *Engine) apply(h wire.Header, b []byte) error {
	switch h.Type {
	case wire.TDelta:
		if err := e.delta.Parse(b); err != nil {
			return err
		}
		e.applyDelta()
	case wire.TReserved:
		if err := e.resv.Parse(b); err != nil {
			return err
		}
		for i := range e.resv.Removed {
			e.gone(&e.resv.Removed[i])
		}
		if h.Seq == e.owed { // late: nobody waits for it any more (R7)
			e.owed = 0
			if hasAccepted(e.resv.Slots) {
				job := e.owedJob
				e.s.queue(wire.TAbort, func(b []byte) []byte { return wire.AppendJob(b, job) })
			}
		}
	case wire.TDone: // what came before it belongs to the former generation
		e.reset = false
		if e.mirror != nil {
			e.mirror = map[block.Key]Copy{}
		}
	default:
		return unexpected(h, b)
	}
	return nil
}

func hasAccepted(slots []wire.Slot) bool {
	for i := range slots {
		if slots[i].Outcome == 0 {
			return true
		}
	}
	return false
}

func (e *Engine) gone(g *wire.GoneKey) {
	if c, ok := e.mirror[g.Key]; ok && c.Ref == g.Ref {
		delete(e.mirror, g.Key)
		if e.c.Observe != nil {
			e.c.Observe(Event{Key: g.Key, Ref: g.Ref})
		}
	}
}

func (e *Engine) applyDelta() {
	for i := range e.delta.Removed {
		e.gone(&e.delta.Removed[i])
	}
	addAll(e.mirror, &e.delta, func(a *wire.AddedKey) {
		if e.c.Observe != nil {
			e.c.Observe(Event{Added: true, Key: a.Key, Ref: a.Ref})
		}
		if len(e.unseen) > 0 {
			e.see(a.Ref)
		}
	})
	e.applied = max(e.applied, e.delta.Epoch)
}

// addAll puts the added keys of a message into a mirror.
func addAll(m map[block.Key]Copy, d *wire.Delta, each func(*wire.AddedKey)) {
	xs := d.Extents
	for i := range d.Added {
		a := &d.Added[i]
		c := Copy{Ref: a.Ref, First: xs[0]}
		if a.Extents > 1 {
			more := slices.Clone(xs[1:a.Extents])
			c.More = &more
		}
		xs = xs[a.Extents:]
		m[a.Key] = c
		if each != nil {
			each(a)
		}
	}
}

// see counts an added key that this engine has committed itself.
func (e *Engine) see(ref block.Ref) {
	j := e.stores[e.unseen[0]]
	if ref != j.refs[j.seen] {
		return
	}
	if j.seen++; j.seen == len(j.refs) {
		delete(e.stores, e.unseen[0])
		e.unseen = e.unseen[1:]
	}
}

// tick is the timer outside of steps: it drains, acknowledges and reconnects, never inside a window (R2, R5).
func (e *Engine) tick() {
	t := time.NewTicker(e.c.Timer)
	defer t.Stop()
	for {
		select {
		case <-e.stop:
			return
		case <-t.C:
		}
		e.Tick()
	}
}

// Tick is one turn of the timer, for engines that run without it: nothing happens while a window is open.
func (e *Engine) Tick() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.window {
		e.rest()
	}
}

// rest does what may be done outside a window. It never waits: reconnecting is another goroutine's (R9).
func (e *Engine) rest() {
	e.takeArrived()
	if e.s == nil {
		if !e.connecting && !e.closed && !e.c.Now().Before(e.retryAt) {
			e.connecting = true
			h := e.list()
			e.wg.Go(func() { e.reconnect(h) })
		}
		return
	}
	if err := e.pump(0); err != nil {
		e.lose()
		return
	}
	e.acknowledge()
}

// acknowledge sends step when the applied epoch advanced, and everything else that is queued.
func (e *Engine) acknowledge() {
	if e.applied > e.acked {
		e.acked = e.applied
		e.s.queue(wire.TStep, func(b []byte) []byte { return wire.AppendStep(b, e.applied) })
	}
	if err := e.s.flush(); err != nil {
		e.lose()
		return
	}
	if !e.window {
		e.shut() // what could not be sent when the window closed may be out now
	}
}

// shut closes the window. The page says so only once everything that was promised in it has been sent (F1).
func (e *Engine) shut() {
	e.window = false
	if e.page != nil && (e.s == nil || len(e.s.out) == 0) {
		e.page.Shut()
	}
}

// Counters returns a copy.
func (e *Engine) Counters() Counters {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.count
}

// Close says goodbye: this process holds no promise, no copy and no mapping any more. It is idempotent.
func (e *Engine) Close() error {
	if !e.retire() {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.arrived != nil {
		e.adopt(e.arrived) // it is closed below like any other
		e.arrived = nil
	}
	err := e.page.Close()
	if e.arena != nil {
		err = errors.Join(err, e.arena.Close())
	}
	if e.s != nil {
		e.s.queue(wire.TBye, nil)
		_ = e.s.flush() // a daemon that is away learns it from the byte locks
		err = errors.Join(err, e.s.close())
		e.s = nil
	}
	for _, w := range e.Workers {
		err = errors.Join(err, w.close())
	}
	return err
}

// retire ends the engine's goroutines. It returns false when that was done before.
func (e *Engine) retire() bool {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return false
	}
	e.closed = true
	close(e.stop)
	e.cancel()
	e.mu.Unlock()
	e.wg.Wait()
	return true
}

// Kill ends the manager as the end of its process would: nothing is said, and what was not sent is lost. The workers live
// on, each until its own Kill. The engine must not be used afterwards.
func (e *Engine) Kill() error {
	if !e.retire() {
		return nil
	}
	err := errors.Join(e.page.Close(), closeIf(e.arena), e.s.close())
	if e.arrived != nil {
		err = errors.Join(err, e.arrived.close())
	}
	e.s, e.mirror, e.arena, e.page, e.arrived = nil, nil, nil, nil, nil
	return err
}

// SetDeadline changes how long the reserves to come wait; see Config.Deadline.
func (e *Engine) SetDeadline(d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.c.Deadline = d
}

// Reconnecting tells whether a connection is being made in the background.
func (e *Engine) Reconnecting() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.connecting
}

// Sync waits until every commit that was posted has been seen as an added key: what is kept (design section 5).
func (e *Engine) Sync(wait time.Duration) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.s == nil {
		return ErrAway
	}
	e.shut()
	e.acknowledge()
	deadline := time.Now().Add(wait)
	for len(e.unseen) > 0 || e.reset {
		if e.s == nil {
			return ErrAway
		}
		if err := e.pump(max(time.Until(deadline), 0)); err != nil {
			if !errors.Is(err, ErrDeadline) {
				e.lose()
			}
			return fmt.Errorf("%d committed jobs were not seen: %w", len(e.unseen), err)
		}
		if time.Now().After(deadline) {
			return ErrDeadline
		}
	}
	return nil
}

// Keys calls f for every key of the mirror until it returns false.
func (e *Engine) Keys(f func(block.Key, Copy) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for k, c := range e.mirror {
		if !f(k, c) {
			return
		}
	}
}

// Attached tells whether the daemon is there and its snapshot is applied.
func (e *Engine) Attached() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.s != nil && e.mirror != nil
}
