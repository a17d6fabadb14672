package client

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"time"

	"kvlift/block"
	"kvlift/fence"
	"kvlift/wire"
)

// Attaching takes three steps, so that no step of the engine waits for it: list what is open (under the mutex), connect
// and read the snapshot (without it), take what came (under it, outside a window). While a connection is away the mirror
// is empty and every lookup a miss, so nothing can be promised that the hello does not list.

// listing is a hello and what it says of jobs.
type listing struct {
	hello  wire.Hello
	loads  []uint64
	stores map[uint64]storeJob // as listed
	aid    string
}

// attachment is a connection whose snapshot has been read.
type attachment struct {
	listing *listing
	s       *stream
	welcome *wire.Welcome
	ready   wire.Ready
	arena   *os.File // nil when this process has it already
	page    *fence.Page
	mirror  map[block.Key]Copy
	applied uint64
}

// list writes down what a hello has to say. The caller holds mu, or is alone.
func (e *Engine) list() *listing {
	l := &listing{stores: map[uint64]storeJob{}, aid: e.aid}
	l.hello = wire.Hello{Protocol: [2]int{wire.Major, wire.Minor}, Client: e.c.Name, Role: "manager", EngineID: e.c.EngineID, WorldSize: e.c.world(),
		Namespace: &e.c.Namespace, Session: e.id, ArenaID: e.aid}
	for _, id := range slices.Sorted(maps.Keys(e.loads)) {
		refs := e.loads[id]
		l.loads = append(l.loads, id)
		l.hello.Loads = append(l.hello.Loads, wire.OpenJob{Job: id, Refs: pairs(refs)})
	}
	for _, id := range slices.Sorted(maps.Keys(e.stores)) {
		j := e.stores[id]
		l.stores[id] = *j
		l.hello.Stores = append(l.hello.Stores, wire.OpenJob{Job: id, Refs: pairs(j.refs), Doomed: j.doomed, Done: j.done && !j.doomed})
	}
	return l
}

// connect attaches ranks and manager and reads the snapshot. It does not touch the engine but for its workers, which are
// the caller's meanwhile.
func (e *Engine) connect(ctx context.Context, l *listing) (*attachment, error) {
	for _, w := range e.Workers {
		if err := w.attach(ctx); err != nil {
			return nil, err
		}
	}
	s, err := dial(ctx, e.c.Socket)
	if err != nil {
		return nil, err
	}
	a := &attachment{listing: l, s: s}
	if err := a.read(ctx, e.c.AttachTimeout); err != nil {
		return nil, errors.Join(err, a.close())
	}
	return a, nil
}

func (a *attachment) close() error { return errors.Join(closeIf(a.arena), a.page.Close(), a.s.close()) }

// read does the talking of connect.
func (a *attachment) read(ctx context.Context, wait time.Duration) error {
	stop := context.AfterFunc(ctx, a.s.interrupt)
	defer stop()
	var err error
	if a.welcome, a.arena, err = a.s.hello(&a.listing.hello, wait); err != nil {
		return err
	}
	if a.page, err = a.s.takePage(a.welcome.SessionPage); err != nil {
		return err
	}
	if a.listing.aid != "" && a.listing.aid != a.welcome.ArenaID {
		return ErrOtherArena
	}
	_, b, err := a.s.await(wire.TReady, wait)
	if err != nil {
		return err
	}
	if err := wire.ParseJSON(b, &a.ready); err != nil {
		return err
	}
	a.mirror, a.applied = map[block.Key]Copy{}, a.ready.Epoch
	var d wire.Delta
	for {
		h, b, err := a.s.await(wire.TSnapshot, wait)
		if err != nil {
			return err
		}
		if err := d.Parse(b); err != nil {
			return err
		}
		addAll(a.mirror, &d, nil)
		if h.Flags&wire.FlagLast != 0 {
			return nil
		}
	}
}

// adopt makes an attachment the engine's connection, and tells the daemon what has happened to the listed jobs since.
// The caller holds mu and no window is open.
func (e *Engine) adopt(a *attachment) {
	if a.arena != nil {
		if e.arena != nil {
			_ = e.arena.Close()
		}
		e.arena = a.arena
	}
	_ = e.page.Close() // of a connection that is gone
	e.page = a.page
	e.id, e.aid = a.welcome.Session, a.welcome.ArenaID
	e.s, e.applied, e.acked = a.s, a.applied, a.applied
	e.mirror, e.unseen = a.mirror, e.unseen[:0]
	if e.c.Observe != nil {
		for k, c := range e.mirror {
			e.c.Observe(Event{Added: true, Key: k, Ref: c.Ref})
		}
	}
	for _, id := range a.listing.loads {
		if e.loads[id] == nil {
			e.post(wire.TUnpin, func(b []byte) []byte { return wire.AppendJob(b, id) })
		}
	}
	for _, id := range slices.Sorted(maps.Keys(a.listing.stores)) {
		was := a.listing.stores[id]
		j := e.stores[id]
		switch {
		case was.done: // its keys are in the snapshot, or gone again
			delete(e.stores, id)
		case j == nil:
			if !was.doomed {
				e.post(wire.TAbort, func(b []byte) []byte { return wire.AppendJob(b, id) })
			}
		case j.done && !j.doomed:
			e.unseen = append(e.unseen, id)
			e.post(wire.TCommit, func(b []byte) []byte { return wire.AppendJob(b, id) })
		}
	}
	if e.reset {
		e.post(wire.TReset, nil)
	}
	e.send()
}

// reconnect is a goroutine of its own.
func (e *Engine) reconnect(l *listing) {
	ctx, cancel := context.WithTimeout(e.life, e.c.AttachTimeout)
	defer cancel()
	a, err := e.connect(ctx, l)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.connecting = false
	if err != nil {
		e.backoff = min(2*e.backoff, time.Second)
		e.retryAt = e.c.Now().Add(e.backoff)
		return
	}
	e.count.Reconnects++
	e.arrived = a
	if !e.window {
		e.takeArrived()
	}
}

// takeArrived takes over what reconnect has brought. The caller holds mu and no window is open.
func (e *Engine) takeArrived() {
	if a := e.arrived; a != nil {
		e.arrived = nil
		e.adopt(a)
	}
}
