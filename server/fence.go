package server

import (
	"time"

	"kvlift/engine"
)

// A session that does not acknowledge removals keeps pages from being reused. If it is only silent (stopped, or between
// steps for long), it can be fenced: what it has not heard of it will not promise, and then its acknowledgement is not
// needed. What its jobs copy stays pinned all the same (F3).

const (
	fenceAfter = 200 * time.Millisecond // how long a session may be silent before it is fenced
	fenceEvery = 100 * time.Millisecond // between looks while somebody is behind
)

// fenceLoop looks at sessions that are behind whenever the engine says that pages are waited for.
func (s *Server) fenceLoop() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.c.Stalled:
		}
		tick := time.NewTicker(fenceEvery)
		for since := map[*engine.Session]time.Time{}; s.fenceOnce(since, time.Now()) > 0; {
			select {
			case <-s.ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
		}
		tick.Stop()
	}
}

// fenceOnce fences those that have been behind for long and returns how many are behind still. since remembers from when.
func (s *Server) fenceOnce(since map[*engine.Session]time.Time, now time.Time) int {
	behind := s.c.Engine.Behind()
	for sess := range since {
		if _, still := behind[sess]; !still {
			delete(since, sess)
		}
	}
	left := 0
	for sess, epoch := range behind {
		from, known := since[sess]
		if !known {
			since[sess] = now
		}
		if !known || now.Sub(from) < fenceAfter || !s.fenceOne(sess, epoch) {
			left++
		}
	}
	return left
}

// fenceOne tries to fence a session for all removals up to epoch. A window that is open, or bytes that are not read yet,
// forbid it for now.
func (s *Server) fenceOne(sess *engine.Session, epoch uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock() // the connection cannot end meanwhile: it leaves the maps first
	c := s.managers[sess]
	if c == nil || c.page == nil || !c.mu.TryLock() { // a snapshot may be under way: then it is not silent
		return false
	}
	ready := c.ready
	c.mu.Unlock()
	if !ready {
		return false
	}
	open, ok := c.page.Raise(epoch)
	if !ok || open || !c.quiet() {
		return false
	}
	s.c.Engine.Fenced(sess, epoch)
	s.c.Log.Warn("engine fenced: it has not acknowledged removals", "session", sess.ID(), "pid", c.pid, "epoch", epoch)
	return true
}
