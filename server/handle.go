package server

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"kvlift/block"
	"kvlift/engine"
	"kvlift/wire"
)

var errBye = errors.New("said goodbye")

// arrive notes a manager and registers it when its ranks are all there.
func (s *Server) arrive(c *conn) error {
	s.mu.Lock()
	old := s.managers[c.session]
	s.managers[c.session] = c
	s.mu.Unlock()
	if old != nil && old != c {
		old.supersede() // the same process came again: the former connection is dead to it
	}
	return c.tryReady()
}

// tryReady registers a manager once all ranks have mapped the arena (R11). It may be called by the connection of its
// last rank.
func (c *conn) tryReady() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ready || c.left || !c.s.c.Engine.AllMapped(c.session) {
		return nil
	}
	c.box.holdBack()
	reg, err := c.s.c.Engine.Ready(c.session, c.box, c.resume)
	if err != nil {
		return err
	}
	c.ready, c.resume = true, nil
	c.box.post(wire.TReady, 0, 0, func(b []byte) []byte {
		b, _ = wire.AppendJSON(b, &wire.Ready{Epoch: reg.Epoch, Keys: uint64(len(reg.Refs)), Payload: reg.Payload, Parts: reg.Parts}) // numbers alone
		return b
	})
	c.box.snapshot(reg.Epoch, reg.Refs, c.s.c.Engine.Details)
	c.box.flush()
	return nil
}

// supersede ends a manager's connection and returns when nothing that came on it will be handled any more. The kernel
// still hands out what was received before a shutdown, and the manager has listed its jobs anew since it said that.
func (c *conn) supersede() {
	c.shutdown() // a rank that is sending the snapshot stops waiting for this client
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left = true
}

// mapped handles a rank's word that it has mapped the arena: the manager that waits for it may be ready now.
func (s *Server) mapped(c *conn) error {
	if !s.c.Engine.Mapped(c.process) {
		return nil
	}
	s.mu.Lock()
	m := s.managers[c.session]
	s.mu.Unlock()
	if m != nil {
		if err := m.tryReady(); err != nil {
			m.fail(&wire.Error{Code: code(err), Message: err.Error()})
			m.shutdown()
		}
	}
	return nil
}

// leave detaches a manager whose connection has ended. Nothing is released: its processes decide (R14).
func (s *Server) leave(c *conn) {
	s.mu.Lock()
	current := s.managers[c.session] == c
	if current {
		delete(s.managers, c.session)
	}
	s.mu.Unlock()
	if c.process != nil && s.c.Engine.Knows(c.process) {
		// A process may live on without its mapping: then its byte lock is free, and that ends it as well (R13).
		s.watchLock(c.process)
	}
	if current {
		s.c.Engine.Detach(c.session, c.box)
		s.c.Log.Info("connection lost", "session", fmt.Sprintf("%016x", c.session.ID()), "pid", c.pid)
	}
}

// watch waits for the end of a process: by pidfd, else by its byte lock.
func (s *Server) watch(c *conn, p *engine.Process) {
	if c.pidfd < 0 || s.byLock {
		s.watchLock(p)
		return
	}
	s.mu.Lock()
	w := s.pidfds[p]
	if w == nil {
		if err := unix.SetNonblock(c.pidfd, true); err == nil {
			w = os.NewFile(uintptr(c.pidfd), "pidfd")
			s.pidfds[p] = w
			c.pidfd = -1 // it belongs to the watcher now
		}
	} else {
		w = nil // watched since an earlier connection
	}
	delete(s.locks, p)
	s.mu.Unlock()
	if w == nil {
		return
	}
	s.wg.Go(func() {
		ended := awaitExit(w)
		s.mu.Lock()
		delete(s.pidfds, p)
		s.mu.Unlock()
		_ = w.Close()
		if ended {
			s.ended(p)
		}
	})
}

// awaitExit sleeps until the process of a pidfd has ended; false when the descriptor was closed instead.
func awaitExit(f *os.File) bool {
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	ended := false
	err = raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		ended = err == nil && n > 0
		return ended
	})
	return err == nil && ended
}

// bye ends a process that gives everything back. Its byte lock must be free; while it is not, the lock or the end of the
// process decides, whichever comes first.
func (s *Server) bye(c *conn) {
	p := c.process
	c.process = nil // the end of the connection says nothing more
	s.mu.Lock()
	manager := s.managers[c.session] == c
	if manager {
		delete(s.managers, c.session)
	}
	s.mu.Unlock()
	if manager {
		s.c.Engine.Detach(c.session, c.box)
	}
	if s.c.Arena.Held(p.Slot()) {
		s.watchLock(p)
		return
	}
	s.ended(p)
}

// handle does what a frame says.
func (c *conn) handle(h wire.Header, b []byte, who role) error {
	e := c.s.c.Engine
	switch who {
	case roleObserver:
		if h.Type == wire.TStatus {
			return c.status(h, b)
		}
	case roleWorker:
		switch h.Type {
		case wire.TMapped:
			return c.s.mapped(c)
		case wire.TEnded:
			job, err := wire.ParseJob(b)
			if err != nil {
				return err
			}
			e.EndReport(c.process, job)
			c.box.post(wire.TEndedAck, 0, h.Seq, func(b []byte) []byte { return wire.AppendJob(b, job) })
			return nil
		case wire.TBye:
			c.s.bye(c)
			return errBye
		}
	case roleManager:
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.left {
			return errBye
		}
		if h.Type == wire.TBye {
			c.s.bye(c)
			return errBye
		}
		if !c.ready {
			return fmt.Errorf("%w: %v before ready", wire.ErrMalformed, h.Type)
		}
		c.unfence()
		return c.manage(h, b)
	}
	return fmt.Errorf("%w: %v from this role", wire.ErrMalformed, h.Type)
}

func (c *conn) manage(h wire.Header, b []byte) error {
	e := c.s.c.Engine
	switch h.Type {
	case wire.TReserve:
		return c.doReserve(h, b)
	case wire.TCommit, wire.TAbort, wire.TUnpin:
		job, err := wire.ParseJob(b)
		if err != nil {
			return err
		}
		switch h.Type {
		case wire.TCommit:
			return e.Commit(c.session, job)
		case wire.TAbort:
			return e.Abort(c.session, job)
		}
		return e.Unpin(c.session, job)
	case wire.TPin, wire.TTouch:
		if err := c.refs.Parse(b); err != nil {
			return err
		}
		if h.Type == wire.TPin {
			return e.Pin(c.session, c.refs.Job, c.refs.Request, c.refs.Refs)
		}
		return e.Touch(c.session, c.refs.Request, c.refs.Refs)
	case wire.TStep:
		epoch, err := wire.ParseStep(b)
		if err != nil {
			return err
		}
		return e.Step(c.session, epoch)
	case wire.TBegin:
		m, err := wire.ParseBegin(b)
		if err != nil {
			return err
		}
		return e.Begin(c.session, m.Request, m.ClockMS)
	case wire.TFinish:
		m, err := wire.ParseFinish(b)
		if err != nil {
			return err
		}
		e.Finish(c.session, engine.Finished{Request: m.Request, PromptTokens: m.PromptTokens, HitTokens: m.HitTokens, Hint: engine.Hint(m.Hint)})
		return nil
	case wire.TReset:
		r, err := random32()
		if err != nil {
			return err
		}
		if err := e.Reset(c.session, r); err != nil {
			return err
		}
		c.box.post(wire.TDone, 0, h.Seq, func(b []byte) []byte { return b })
		return nil
	}
	return fmt.Errorf("%w: %v from a manager", wire.ErrMalformed, h.Type)
}

func (c *conn) doReserve(h wire.Header, b []byte) error {
	if err := c.reserve.Parse(b); err != nil {
		return err
	}
	if err := c.s.c.Engine.Reserve(c.session, c.reserve.Job, c.reserve.Request, c.reserve.Keys, &c.reply); err != nil {
		return err
	}
	a, r := &c.answer, &c.reply
	a.Job, a.Reason, a.Slots, a.Removed, a.Extents = c.reserve.Job, uint8(r.Reason), a.Slots[:0], a.Removed[:0], r.Extents
	for i := range r.Slots {
		s := &r.Slots[i]
		a.Slots = append(a.Slots, wire.Slot{Outcome: uint8(s.Outcome), Ref: s.Ref, Extents: s.Extents})
	}
	// A few large keys may take the place of more small ones than an answer can name. Those are told before it in the
	// stream, which is the same to the client: until it has read the answer, it can promise nothing.
	room := (frameRoom - len(r.Slots)*wire.SlotSize - len(r.Extents)*wire.ExtentSize) / wire.GoneSize
	for ; len(r.Removed) > room; r.Removed = r.Removed[1:] {
		c.box.taken(r.Removed[0].Ref, &r.Removed[0].Key)
	}
	for i := range r.Removed {
		a.Removed = append(a.Removed, wire.GoneKey{Offer: block.Offer{Key: r.Removed[i].Key}, Ref: r.Removed[i].Ref})
	}
	c.box.post(wire.TReserved, 0, h.Seq, func(b []byte) []byte { return wire.AppendReserved(b, a) })
	return nil
}

// status answers an observer.
func (c *conn) status(h wire.Header, b []byte) error {
	var req wire.StatusRequest
	if err := wire.ParseJSON(b, &req); err != nil {
		return err
	}
	doc, err := c.s.c.State(req.Collect)
	if err != nil {
		return err
	}
	for {
		part := doc[:min(len(doc), wire.MaxFrame)]
		doc = doc[len(part):]
		flags := uint16(0)
		if len(doc) == 0 {
			flags = wire.FlagLast
		}
		c.box.post(wire.TState, flags, h.Seq, func(b []byte) []byte { return append(b, part...) })
		if len(doc) == 0 {
			return nil
		}
	}
}
