package engine

import "kvlift/block"

// A session that is stopped acknowledges nothing. Once the server has seen that no window of it is open, that everything
// it sent was handled, and that it will look nothing up before it has heard more, it is fenced (F2): it counts as having
// acknowledged every removal, also those to come, until it says something again. What its jobs copy stays pinned (F3).

// Behind lists attached sessions that have not acknowledged every removal and are not fenced, and up to which one they
// have: while that grows they are slow, and not silent.
func (e *Engine) Behind() map[*Session]uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[*Session]uint64{}
	for _, s := range e.sessions {
		if s.behind() {
			out[s] = s.acked
		}
	}
	return out
}

// behind tells whether an attached session owes an acknowledgement. It was told of the removal, so it will give one as soon
// as it goes on.
func (s *Session) behind() bool {
	if s.state != Attached || s.fenced || len(s.ns.evicting) == 0 {
		return false
	}
	return s.ns.evicting[len(s.ns.evicting)-1].epoch > s.acked
}

// Fence counts all removals as acknowledged by a session, from now on until Unfence, or until its manager comes back on
// another connection. The caller has made sure that the session can promise nothing meanwhile. It returns false, and does nothing, for a
// session that is not attached or owes no acknowledgement: that one might never say anything that ends the fence.
func (e *Engine) Fence(s *Session) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !s.behind() {
		return false
	}
	s.fenced = true
	s.stats.Fenced++
	e.counters.Fenced++
	e.settleNamespace(s.ns)
	return true
}

// Unfence ends a fence, and returns the removal that the session has to apply before it may promise anything: the last one
// that it was told of. Of a session that is not fenced it changes nothing.
func (e *Engine) Unfence(s *Session) uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.fenced {
		s.fenced = false
		s.acked = max(s.acked, s.told)
	}
	return s.told
}

// heard is up to which removal a session's acknowledgements count.
func (e *Engine) heard(s *Session) uint64 {
	if s.fenced {
		return e.epoch
	}
	return s.acked
}

// tell names a key to fenced sessions whose pages a reply to another one gave away. They acknowledge nothing, but the number
// is one that they have to reach before they promise anything again.
func (e *Engine) tell(ns *namespace, asker *Session, ref block.Ref) {
	told := false
	for _, s := range ns.sessions {
		if s == asker || s.sink == nil {
			continue
		}
		if !told {
			e.epoch++
			told = true
		}
		s.sink.Removed(e.epoch, ref, &e.key)
		s.told = e.epoch
	}
}
