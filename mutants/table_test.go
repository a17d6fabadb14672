package mutants

// mutants are those of the model that apply: all but promote-evicting, which needs the disk tier.
var mutants = []mutant{
	{"ack-in-window", "steady", "the timer drains and acknowledges while a window is open", []edit{
		{"client/client.go", "	if !e.window {\n		e.rest()\n	}\n}", "	if true {\n		e.rest()\n	}\n}"},
		{"client/client.go", "	if !e.window {\n		e.shut() // what", "	if false {\n		e.shut() // what"},
	}},
	{"ack-unread", "steady", "an acknowledgement counts removals received, not removals applied", []edit{
		{"client/client.go", "		got, err := e.s.receive(wait)\n", `		got, err := e.s.receive(wait)
		if got && wait == 0 {
			for lo := e.s.lo; e.s.hi-lo >= wire.HeaderSize; {
				h, _ := wire.ParseHeader(e.s.in[lo:e.s.hi], wire.MaxFrame)
				if end := lo + wire.HeaderSize + int(h.Length); end <= e.s.hi {
					var d wire.Delta
					if h.Type == wire.TDelta && d.Parse(e.s.in[lo+wire.HeaderSize:end]) == nil {
						e.applied = max(e.applied, d.Epoch)
					}
					lo = end
					continue
				}
				break
			}
			return nil
		}
`},
		{"client/step.go", "	if e.s != nil {\n		if err := e.pump(0); err != nil {\n			e.lose()\n		}\n	}\n	if e.c.Opening", "	if e.c.Opening"},
	}},
	{"unpin-early", "steady", "unpin when the first rank has loaded", []edit{
		{"server/promise_player_test.go", "func (j *copyJob) done() bool { return slices.Min(j.parts) == 2 }", "func (j *copyJob) done() bool { return slices.Min(j.parts) == 2 || !j.store && slices.Max(j.parts) == 2 }"},
		{"server/promise_player_test.go", "		p.loads = remove(p.loads, j)\n	case", "		if slices.Min(j.parts) == 2 {\n			p.loads = remove(p.loads, j)\n		}\n	case"},
	}},
	{"commit-early", "steady", "commit when the first rank has stored", []edit{
		{"server/promise_player_test.go", "func (j *copyJob) done() bool { return slices.Min(j.parts) == 2 }", "func (j *copyJob) done() bool { return slices.Min(j.parts) == 2 || j.store && slices.Max(j.parts) == 2 }"},
	}},
	{"pin-by-key", "steady", "pin names the key, not entry + generation", []edit{
		{"engine/request.go", "	j, err := s.newJob(id, r, len(refs))\n	if err != nil {\n		return err\n	}\n	for i, ref := range refs {", `	j, err := s.newJob(id, r, len(refs))
	if err != nil {
		return err
	}
	refs = slices.Clone(refs)
	for i, ref := range refs {
		if k := e.table.Key(ref.Entry); e.slots[ref.Entry].gen == ref.Gen {
			if id, ok := e.index.Find(e.index.Hash(s.ns.index, &k), s.ns.index, &k); ok && e.slots[id].state == meta.Ready {
				refs[i] = block.Ref{Entry: id, Gen: e.slots[id].gen}
			}
		}
	}
	for i, ref := range refs {`},
	}},
	{"inline-all", "steady", "a removal inside a reserve reply counts as acknowledged by every engine", []edit{
		{"engine/reserve.go", "		if o != s && !o.fenced {\n			return false\n		}\n", "		_ = o\n"},
	}},
	{"late-hit", "late", "after a reserve deadline lookups go on answering HIT while the reply is owed", []edit{
		{"client/step.go", "	if e.owed != 0 || e.reset || e.applied < e.fence {", "	if e.reset || e.applied < e.fence {"},
	}},
	{"late-noabort", "late", "a late reply is thrown away without abort", []edit{
		{"client/client.go", "			if hasAccepted(e.resv.Slots) {", "			if false && hasAccepted(e.resv.Slots) {"},
	}},
	{"drop-frees", "drop", "a lost connection releases pins, reservations and pending acknowledgements", []edit{
		{"engine/session.go", "	s.sink = nil\n	if s.state == Attached {\n		s.state = Detached\n	}\n}\n\n// Knows", "	s.sink = nil\n	e.endSession(s)\n	for _, p := range e.procs {\n		if p != nil && p.session == s {\n			e.procs[p.slot] = nil\n			e.table.DropProcess(p.slot)\n		}\n	}\n}\n\n// Knows"},
	}},
	{"death-frees", "death", "a dead manager's session ends while its workers still live", []edit{
		{"engine/session.go", "	if s.procs == 0 {\n		e.endSession(s)\n	}\n}\n\nfunc (e *Engine) endSession", "	if s.procs == 0 || p.role == meta.Manager {\n		e.endSession(s)\n	}\n}\n\nfunc (e *Engine) endSession"},
	}},
	{"adopt-reserved", "restart", "a start frees RESERVED records at once", []edit{
		{"engine/adopt.go", "	e.settle()\n	return e, rep, nil", "	for _, id := range e.orphans {\n		e.dropReserved(id)\n	}\n	e.orphans = nil\n	e.settle()\n	return e, rep, nil"},
	}},
	{"adopt-nosession", "restart", "a start does not know the sessions of its predecessor", []edit{
		{"engine/adopt.go", "		if !alive(i) {\n			e.table.DropProcess(i)", "		if true {\n			e.table.DropProcess(i)"},
	}},
	{"hello-nojobs", "restart", "a reconnect does not list the jobs in flight", []edit{
		{"client/attach.go", "	for _, id := range slices.Sorted(maps.Keys(e.loads)) {", "	for _, id := range slices.Sorted(maps.Keys(e.loads))[:0] {"},
		{"client/attach.go", "	for _, id := range slices.Sorted(maps.Keys(e.stores)) {", "	for _, id := range slices.Sorted(maps.Keys(e.stores))[:0] {"},
	}},
	{"hello-in-window", "drop", "a reconnect inside an open window", []edit{
		{"client/client.go", "	if !e.window {\n		e.rest()\n	}\n}", `	if !e.window {
		e.rest()
		return
	}
	e.takeArrived()
	if e.s != nil {
		if _, err := e.s.receive(0); err != nil {
			e.lose()
		}
	}
	if e.s == nil && !e.connecting && !e.closed && !e.c.Now().Before(e.retryAt) {
		e.connecting = true
		h := e.list()
		e.wg.Go(func() { e.reconnect(h) })
	}
}`},
		{"client/attach.go", "	if !e.window {\n		e.takeArrived()\n	}", "	e.takeArrived()"},
	}},
	{"mirror-kept", "drop", "the mirror survives a reconnect, the snapshot is merged in", []edit{
		{"client/client.go", "	e.s, e.mirror = nil, nil\n	e.owed = 0", "	e.s = nil\n	e.owed = 0"},
		{"client/attach.go", "	e.mirror, e.unseen = a.mirror, e.unseen[:0]", "	if e.mirror == nil {\n		e.mirror = map[block.Key]Copy{}\n	}\n	for k, c := range a.mirror {\n		e.mirror[k] = c\n	}\n	e.unseen = e.unseen[:0]"},
	}},
	{"snap-race", "drop", "the snapshot is taken before the session is registered for deltas", []edit{
		{"server/outbox.go", "	if o.over() {\n		return\n	}\n	o.remove(ref, key)\n	o.epoch = epoch", "	if o.over() || o.deaf {\n		return\n	}\n	o.remove(ref, key)\n	o.epoch = epoch"},
		{"server/outbox.go", "	closed   bool\n}", "	closed   bool\n	deaf     bool\n}"},
		{"server/handle.go", "	c.box.snapshot(reg.Epoch, reg.Refs, c.s.c.Engine.Details)\n", "	c.box.snapshot(reg.Epoch, reg.Refs, c.s.c.Engine.Details)\n	c.box.deaf = true\n"},
		{"server/handle.go", "	e := c.s.c.Engine\n	switch h.Type {\n	case wire.TReserve:", "	e := c.s.c.Engine\n	c.box.deaf = false\n	switch h.Type {\n	case wire.TReserve:"},
	}},
	{"reset-frees", "reset", "reset frees pages with stores in flight", []edit{
		{"engine/session.go", "			j.doomed = true\n			e.endIfReported(s, j)", "			e.endJob(s, j, false)"},
	}},
	{"reset-commit", "reset", "a store from before a reset is committed after it", []edit{
		{"engine/session.go", "			j.doomed = true\n			e.endIfReported(s, j)", "			_ = j"},
		{"client/step.go", "		if !j.done {\n			j.doomed = true\n		}", "		_ = j"},
		{"server/promise_player_test.go", "	for _, j := range p.stores {\n		j.doomed = true\n	}\n", ""},
	}},
	{"reset-hit", "reset", "lookups answer HIT again before the reset is confirmed", []edit{
		{"client/step.go", "	if e.owed != 0 || e.reset || e.applied < e.fence {", "	if e.owed != 0 || e.applied < e.fence {"},
	}},
	{"reset-forgotten", "reset", "a reset that was lost with the connection is not sent again", []edit{
		{"client/attach.go", "	if e.reset {\n		e.post(wire.TReset, nil)\n	}", "	e.reset = false"},
	}},
	{"reset-revived", "reset", "a start takes EVICTING records of a reset for READY", []edit{
		{"engine/adopt.go", "	if to == meta.Evicting {\n		to = meta.Ready\n	}", "	if to == meta.Evicting || to == meta.Removed {\n		to = meta.Ready\n	}"},
	}},
	{"fence-unread", "fence", "the engine does not read the fence word", []edit{
		{"client/step.go", "	if e.owed != 0 || e.reset || e.applied < e.fence {", "	if e.owed != 0 || e.reset {"},
	}},
	{"fence-order", "fence", "the engine reads the fence word before it writes the window word", []edit{
		{"client/step.go", "		e.fence = e.page.Open()", "		next := e.page.Open() // what stood there when the last window closed, at best\n		e.fence, e.early = e.early, next"},
		{"client/client.go", "	fence   uint64      // that", "	early   uint64\n	fence   uint64      // that"},
	}},
	{"fence-blind", "fence", "the daemon does not read the window word", []edit{
		{"server/fence.go", "	if !ready || c.page.Windowed() {", "	if !ready {"},
		{"server/fence.go", "!ok || open || !c.fence()", "!ok || open && false || !c.fence()"},
	}},
	{"fence-pins", "fence", "the daemon does not read the socket empty after it has read the window word", []edit{
		{"server/fence.go", "	n, err := unix.IoctlGetInt(c.fd, unix.SIOCINQ)\n	c.fenced = err == nil && n == 0 && c.have == c.handled && c.s", "	_ = unix.SIOCINQ\n	c.fenced = c.s"},
	}},
	{"fence-detached", "fence", "an engine whose connection is lost (with its pins) is fenced", []edit{
		{"server/fence.go", "	if c == nil || c.page == nil", "	if c == nil {\n		return s.c.Engine.Fence(sess)\n	}\n	if c == nil || c.page == nil"},
		{"engine/fence.go", "	if s.state != Attached || s.fenced", "	if s.state != Attached && s.state != Detached || s.fenced"},
	}},
	{"fence-untold", "fence", "a fenced session is not told of what another's reserve took", []edit{
		{"engine/evict.go", "	e.tell(e.spaces[n], s, ref)\n", "	_ = ref\n"},
	}},
	{"leak-orphan", "death", "the end of the last process does not free its reservations", []edit{
		{"engine/session.go", "	for _, j := range inOrder(s.jobs) {\n		e.endJob(s, j, false)\n	}", "	for _, j := range inOrder(s.jobs) {\n		if !j.store {\n			e.endJob(s, j, false)\n		}\n	}"},
		{"engine/request.go", "	if !j.doomed && s.manager != nil {", "	if !j.doomed && s.manager != nil || len(s.ranks) == 0 {"},
	}},
	{"ack-no-hits", "steady", "no acknowledgement from a step that answered HIT", []edit{
		{"client/step.go", "	c, ok := e.mirror[*k]\n	return c, ok", "	c, ok := e.mirror[*k]\n	e.busy = e.busy || ok\n	return c, ok"},
		{"client/client.go", "	fence   uint64      // that", "	busy    bool\n	fence   uint64      // that"},
		{"client/client.go", "	if e.applied > e.acked {\n		e.acked = e.applied", "	if was := e.busy; was {\n		e.busy = false\n	} else if e.applied > e.acked {\n		e.acked = e.applied"},
	}},
	{"reserve-waits", "steady", "reserve waits until a page is acknowledged", []edit{
		{"server/handle.go", "	a, r := &c.answer, &c.reply\n", "	for c.reply.Reason == engine.Waiting && c.s.ctx.Err() == nil {\n		if err := c.s.c.Engine.Reserve(c.session, c.reserve.Job, c.reserve.Request, c.reserve.Keys, &c.reply); err != nil {\n			return err\n		}\n	}\n	a, r := &c.answer, &c.reply\n"},
	}},
}
