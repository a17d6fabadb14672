package server

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/engine"
)

// A session that does not acknowledge removals keeps pages from being reused. If it is only silent (stopped, or between
// steps for long), it can be fenced: it promises nothing until it has heard everything, and then its acknowledgements are not
// needed. The fence stands until it says something, so that it costs the others nothing, however long it is silent. What
// its jobs copy stays pinned all the same (F3).

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
		for seen := map[*engine.Session]silence{}; s.fenceOnce(seen, time.Now()) > 0; {
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

// silence is since when a session has not acknowledged anything, and up to where it had.
type silence struct {
	since time.Time
	acked uint64
}

// fenceOnce fences those that owe acknowledgements and have given none for long, and returns how many are behind still. A
// slow engine that acknowledges now and then is never up to date while others store, and is not silent. seen remembers the
// last look.
func (s *Server) fenceOnce(seen map[*engine.Session]silence, now time.Time) int {
	behind := s.c.Engine.Behind()
	for sess := range seen {
		if _, still := behind[sess]; !still {
			delete(seen, sess)
		}
	}
	left := 0
	for sess, acked := range behind {
		was, known := seen[sess]
		if !known || was.acked != acked {
			was = silence{now, acked}
			seen[sess] = was
		}
		if now.Sub(was.since) < fenceAfter || !s.fenceOne(sess) {
			left++
		}
	}
	return left
}

// fenceOne tries to fence a session. A window that is open, or bytes that are not read yet, forbid it for now.
func (s *Server) fenceOne(sess *engine.Session) bool {
	s.mu.Lock()
	defer s.mu.Unlock() // the connection cannot end meanwhile: it leaves the maps first
	c := s.managers[sess]
	if c == nil || c.page == nil || !c.mu.TryLock() { // a snapshot may be under way: then it is not silent
		return false
	}
	ready := c.ready
	c.mu.Unlock()
	if !ready || c.page.Windowed() {
		return false
	}
	was := c.page.Fence()
	if open, ok := c.page.Raise(); !ok || open || !c.fence() {
		c.page.Lower(was)
		return false
	}
	s.c.Log.Warn("engine fenced: it has not acknowledged removals", "session", fmt.Sprintf("%016x", sess.ID()), "pid", c.pid)
	return true
}

// fence fences the session of a connection if everything that the client has sent is handled. It does not wait: a reader at
// work is not quiet.
func (c *conn) fence() bool {
	if !c.ioMu.TryLock() {
		return false
	}
	defer c.ioMu.Unlock()
	n, err := unix.IoctlGetInt(c.fd, unix.SIOCINQ)
	c.fenced = err == nil && n == 0 && c.have == c.handled && c.s.c.Engine.Fence(c.session)
	return c.fenced
}

// unfence ends a fence with the first word of the client: it may promise again when it has heard what it was told until now.
// The caller holds ioMu, as whoever handles a frame does.
func (c *conn) unfence() {
	if c.fenced {
		c.fenced = false
		c.page.Lower(c.s.c.Engine.Unfence(c.session))
	}
}
