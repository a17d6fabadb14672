package server_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/engine"
	"kvlift/wire"
)

// unequal are the parts of four pipeline ranks that own different numbers of layers of two groups.
func unequal() [][]uint32 { return [][]uint32{{5000, 4096}, {1, 8193}, {12288, 4095}, {4097, 100}} }

// member is one process of an engine: a connection, and the descriptor that carries its lock. All members are in this
// process; one ends as a process does that lets go of the arena.
type member struct {
	*raw
	life *os.File
}

// joins says hello for a rank, or for the manager when rank is negative, and takes the descriptor. A worker has not mapped
// anything yet.
func (d *daemon) joins(t testing.TB, engineID string, rank int, parts [][]uint32, change func(*wire.Hello)) *member {
	t.Helper()
	m := &member{raw: d.raw(t)}
	m.json(wire.THello, partHello(engineID, rank, parts, change))
	m.life = m.rights()
	t.Cleanup(func() { _ = m.life.Close() }) // most are closed already
	return m
}

func partHello(engineID string, rank int, parts [][]uint32, change func(*wire.Hello)) *wire.Hello {
	role := "worker"
	if rank < 0 {
		role = "manager"
	}
	return helloOf(role, engineID, func(h *wire.Hello) {
		h.WorldSize = len(parts)
		h.Namespace.Groups = make([]wire.Group, len(parts[0]))
		for g := range h.Namespace.Groups {
			h.Namespace.Groups[g] = wire.Group{Kind: "full", ChunkTokens: 16}
		}
		if rank >= 0 {
			h.Rank, h.Parts = rank, parts[rank]
		}
		if change != nil {
			change(h)
		}
	})
}

// mapped says so, and returns when the daemon has handled it.
func (m *member) mapped() {
	m.t.Helper()
	m.send(wire.TMapped, nil)
	m.ended(1 << 60) // of a job that nobody knows: only the order of the answers counts
}

// ended reports the end of a job and waits for the acknowledgement.
func (m *member) ended(job uint64) {
	m.t.Helper()
	m.send(wire.TEnded, wire.AppendJob(nil, job))
	m.want(wire.TEndedAck)
}

func (m *member) end() {
	m.t.Helper()
	if err := errors.Join(m.c.Close(), m.life.Close()); err != nil {
		m.t.Fatal(err)
	}
}

// crew is an engine that is ready: its ranks and its manager.
func (d *daemon) crew(t testing.TB, engineID string, parts [][]uint32) (ranks []*member, manager *member) {
	t.Helper()
	for r := range parts {
		w := d.joins(t, engineID, r, parts, nil)
		w.mapped()
		ranks = append(ranks, w)
	}
	manager = d.joins(t, engineID, -1, parts, nil)
	manager.want(wire.TReady)
	return ranks, manager
}

// session is what the daemon knows of an engine; the zero value when it knows nothing.
func (d *daemon) session(engineID string) engine.SessionStatus {
	for _, s := range d.eng.Status().Sessions {
		if s.EngineID == engineID {
			return s
		}
	}
	return engine.SessionStatus{}
}

// openRanks attaches an engine whose ranks are all in this process.
func (d *daemon) openRanks(engineID string, parts [][]uint32) *client.Engine {
	d.t.Helper()
	c := d.config(engineID, parts[0]...)
	c.Parts = parts
	e, err := client.Open(d.t.Context(), c)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() {
		if err := e.Close(); err != nil {
			d.t.Error(err)
		}
	})
	return e
}

// part is where a rank's bytes of a key lie: parts follow each other in the key's pages, each from a page on.
func part(e *client.Engine, parts [][]uint32, group uint16, rank int, xs []block.Extent) []byte {
	var b []byte
	skip := uint64(0)
	for r := range rank {
		skip += block.Pages(uint64(parts[r][group]))
	}
	for _, x := range xs {
		for p := x.Page; p < x.Page+x.Count; p++ {
			if skip > 0 {
				skip--
				continue
			}
			b = append(b, e.Workers[rank].Bytes(block.Extent{Page: p, Count: 1})...)
		}
	}
	return b[:parts[rank][group]]
}

// putPart writes a rank's bytes page by page, since a key's pages need not be neighbours.
func putPart(e *client.Engine, parts [][]uint32, group uint16, rank int, xs []block.Extent, value func(int) byte) {
	at, skip := 0, uint64(0)
	for r := range rank {
		skip += block.Pages(uint64(parts[r][group]))
	}
	for _, x := range xs {
		for p := x.Page; p < x.Page+x.Count; p++ {
			if skip > 0 {
				skip--
				continue
			}
			b := e.Workers[rank].Bytes(block.Extent{Page: p, Count: 1})
			for i := 0; i < len(b) && at < int(parts[rank][group]); i++ {
				b[i] = value(at)
				at++
			}
		}
	}
}

// TestUnequalRanks: ranks of one engine have parts of different sizes, each in pages of its own. A key is there when its
// manager has committed it and not before, whatever ranks report; a replica with the same description finds and reads it.
func TestUnequalRanks(t *testing.T) {
	parts := unequal()
	d := start(t, t.TempDir(), setup{pages: 256})
	a, b := d.openRanks("replica 0", parts), d.openRanks("replica 1", parts)
	value := func(g uint16, rank int) func(int) byte {
		return func(i int) byte { return byte(i*7+rank*31) ^ byte(g*99) }
	}
	want := uint64(0)
	for _, p := range parts {
		want += block.Pages(uint64(p[0])) + block.Pages(uint64(p[1]))
	}
	offers := []block.Offer{{Key: key(1), Position: 16}, {Key: key(2), Group: 1, Position: 16}}
	var r client.Reservation
	if err := a.Reserve(1, offers, &r); err != nil || len(r.Keys) != 2 {
		t.Fatalf("%d of 2 accepted, %v", len(r.Keys), err)
	}
	if used := 256 - d.eng.Status().FreePages; used != want {
		t.Errorf("%d pages are taken, want %d", used, want)
	}
	for _, k := range r.Keys {
		g := offers[k.Index].Group
		for _, rank := range []int{2, 0, 3, 1} {
			putPart(a, parts, g, rank, k.Extents, value(g, rank))
			if err := a.Workers[rank].Ended(r.Job, 5*time.Second); err != nil { // its own part is done: that commits nothing
				t.Fatal(err)
			}
		}
	}
	if st := d.eng.Status(); st.ReadyKeys != 0 || st.ReservedKeys != 2 {
		t.Fatalf("%d ready, %d reserved before the commit", st.ReadyKeys, st.ReservedKeys)
	}
	for _, e := range []*client.Engine{a, b} {
		if _, ok := find(e, 1); ok {
			t.Error("a hit before the commit")
		}
		e.StepEnd()
	}
	a.Commit(r.Job)
	sync5(t, a)
	eventually(t, "the replica hears of both", func() bool { b.StepEnd(); _, ok := find(b, 2); return ok })
	for _, e := range []*client.Engine{a, b} {
		for _, o := range offers {
			c, ok := e.Lookup(&o.Key)
			if !ok {
				t.Fatalf("key %v is a miss", o.Key)
			}
			job := e.PrepareLoad(9, []client.Copy{c})
			for rank := range parts {
				for i, v := range part(e, parts, o.Group, rank, c.Extents(nil)) {
					if v != value(o.Group, rank)(i) {
						t.Fatalf("group %d, rank %d: byte %d is wrong", o.Group, rank, i)
					}
				}
			}
			e.CompleteLoad(job)
		}
		e.Finish(9, 0, 0, wire.NoHint)
		e.StepEnd()
	}
	if st := d.eng.Status(); len(st.Namespaces) != 1 || st.Namespaces[0].Sessions != 2 {
		t.Errorf("namespaces: %+v", st.Namespaces)
	}
}

// permutations calls f with every order of 0 to n-1.
func permutations(n int, f func([]int)) {
	var rec func(head, rest []int)
	rec = func(head, rest []int) {
		if len(rest) == 0 {
			f(head)
		}
		for i := range rest {
			rec(append(slices.Clone(head), rest[i]), slices.Delete(slices.Clone(rest), i, i+1))
		}
	}
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	rec(nil, all)
}

// TestRankOrders: three ranks and their manager come in every order, and ranks map the arena in every order. The manager is
// told that it is ready once, when the last of them has, and not before.
func TestRankOrders(t *testing.T) {
	parts := unequal()[:3]
	d := start(t, t.TempDir(), setup{pages: 64})
	forming := func(id string, n int) {
		t.Helper()
		if s := d.session(id); s.State != engine.Forming || s.Ranks != n {
			t.Fatalf("engine %s: %v with %d ranks, want forming with %d", id, s.State, s.Ranks, n)
		}
	}
	ready := func(id string, m *member) {
		t.Helper()
		for _, want := range []wire.Type{wire.TReady, wire.TSnapshot} {
			if h, _, err := m.frame(); err != nil || h.Type != want {
				t.Fatalf("engine %s: %v, %v; want %v", id, h.Type, err, want)
			}
		}
		// The next thing that it hears is the answer to what it asks.
		m.send(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: 1, Request: 1}))
		if h, _, err := m.frame(); err != nil || h.Type != wire.TReserved {
			t.Fatalf("engine %s: %v, %v; want an answer", id, h.Type, err)
		}
		if s := d.session(id); s.State != engine.Attached || s.Ranks != 3 || s.World != 3 {
			t.Fatalf("engine %s: %+v", id, s)
		}
	}
	permutations(4, func(order []int) {
		id := fmt.Sprint("comes ", order)
		var all []*member
		var manager *member
		for n, who := range order {
			ranks := n
			if manager != nil {
				ranks--
			}
			if n > 0 {
				forming(id, ranks)
			}
			m := d.joins(t, id, who-1, parts, nil) // 0 is the manager
			if all = append(all, m); who == 0 {
				manager = m
			} else {
				m.mapped()
			}
		}
		ready(id, manager)
		for _, m := range all {
			m.end()
		}
	})
	permutations(3, func(order []int) {
		id := fmt.Sprint("maps ", order)
		var ranks []*member
		for r := range parts {
			ranks = append(ranks, d.joins(t, id, r, parts, nil))
		}
		manager := d.joins(t, id, -1, parts, nil)
		for _, r := range order {
			forming(id, 3)
			ranks[r].mapped()
		}
		ready(id, manager)
		for _, m := range append(ranks, manager) {
			m.end()
		}
	})
	eventually(t, "all sessions end", func() bool { return len(d.sessions()) == 0 })
}

// TestRankNeverComes: an engine that lacks a rank, or of which one has not mapped the arena, is told nothing and can promise
// nothing, so nobody waits for it.
func TestRankNeverComes(t *testing.T) {
	parts := unequal()
	d := start(t, t.TempDir(), setup{pages: 64})
	var all []*member
	for _, id := range []string{"lacks one", "maps three"} {
		for r := range parts {
			if id == "lacks one" && r == 2 {
				continue
			}
			m := d.joins(t, id, r, parts, nil)
			if all = append(all, m); id == "lacks one" || r != 2 {
				m.mapped()
			}
		}
		all = append(all, d.joins(t, id, -1, parts, nil))
	}
	// The namespace is that of the others, if they had one.
	_, m := d.crew(t, "whole", parts)
	for job := uint64(1); job < 60; job++ {
		m.send(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: job, Request: job, Keys: offers(int(job), 1)}))
		var got wire.Reserved
		if err := got.Parse(m.want(wire.TReserved)); err != nil {
			t.Fatal(err)
		}
		if got.Slots[0].Outcome != 0 {
			t.Fatalf("store %d is refused, %v", job, engine.Reason(got.Reason))
		}
		m.send(wire.TCommit, wire.AppendJob(nil, job))
		m.send(wire.TFinish, wire.AppendFinish(nil, &wire.Finish{Request: job}))
	}
	if st := d.eng.Status(); st.Counters.Evicted[engine.ByStore] == 0 || st.Counters.Evicted[engine.Ahead] != 0 {
		t.Errorf("evicted: %v", st.Counters.Evicted)
	}
	for id, ranks := range map[string]int{"lacks one": 3, "maps three": 4} {
		if s := d.session(id); s.State != engine.Forming || s.Ranks != ranks || s.Namespace != -1 || s.Behind != 0 {
			t.Errorf("engine %s: %+v", id, s)
		}
	}
	for _, m := range all {
		m.end()
	}
	eventually(t, "those that never began end", func() bool { return slices.Equal(d.sessions(), []string{"whole"}) })
}

// TestRankGeometry: what does not fit is refused with a code that says so, to the process that can act on it: the manager
// while the engine forms, the rank itself when it comes back.
func TestRankGeometry(t *testing.T) {
	parts := unequal()
	swapped := slices.Clone(parts) // the same bytes altogether, laid out differently
	swapped[0], swapped[2] = swapped[2], swapped[0]
	other := slices.Clone(parts)
	other[3] = []uint32{4096, 100}
	for _, c := range []struct {
		name    string
		parts   [][]uint32
		message string
	}{
		{"parts of two ranks exchanged", swapped, "group 0, rank 0: this engine has 12288 bytes, the namespace 5000"},
		{"one part differs", other, "group 0, rank 3: this engine has 4096 bytes, the namespace 4097"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := start(t, t.TempDir(), setup{pages: 64})
			ranks, m := d.crew(t, "first", parts)
			for r := range c.parts {
				d.joins(t, "second", r, c.parts, nil).mapped()
			}
			d.refuses(t, d.raw(t), func(r *raw) { r.json(wire.THello, partHello("second", -1, c.parts, nil)) }, "geometry", c.message)
			// The other way about: the manager waits, and hears of it through the last rank.
			waits := d.joins(t, "third", -1, c.parts, nil)
			for r := range c.parts {
				d.joins(t, "third", r, c.parts, nil).mapped()
			}
			d.refuses(t, waits.raw, func(*raw) {}, "geometry", c.message)
			if s := d.session("first"); s.State != engine.Attached || s.Ranks != len(ranks) {
				t.Errorf("the first engine: %+v", s)
			}
			m.reserve(1, 1)
			_, again := d.crew(t, "fourth", parts)
			again.reserve(1, 2)
			if st := d.eng.Status(); len(st.Namespaces) != 1 || st.Namespaces[0].Sessions != 2 {
				t.Errorf("namespaces: %+v", st.Namespaces)
			}
		})
	}
	t.Run("comes back", func(t *testing.T) {
		d := start(t, t.TempDir(), setup{pages: 64})
		ranks, m := d.crew(t, "engine", parts)
		back := func(h *wire.Hello) {
			h.Session, h.ArenaID = fmt.Sprintf("%016x", d.session("engine").ID), fmt.Sprintf("%x", d.arena.Table.Header.ArenaID)
		}
		for _, c := range []struct {
			name          string
			rank          int
			parts         [][]uint32
			code, message string
		}{
			{"a rank with other parts", 3, other, "geometry", "group 0, rank 3"},
			{"a rank of a smaller world", 1, parts[:3], "geometry", "world of 3"},
			{"a rank of a larger world", 1, append(slices.Clone(parts), parts[0]), "geometry", "world of 5"},
			{"a rank that was not there", 4, append(slices.Clone(parts), parts[0]), "geometry", "world of 5"},
			{"the manager of a smaller world", -1, parts[:3], "geometry", "world of 3"},
			{"the manager of a larger world", -1, append(slices.Clone(parts), parts[0]), "geometry", "world of 5"},
		} {
			d.refuses(t, d.raw(t), func(r *raw) { r.json(wire.THello, partHello("engine", c.rank, c.parts, back)) }, c.code, c.message)
		}
		if s := d.session("engine"); s.State != engine.Attached || s.Ranks != 4 || s.World != 4 {
			t.Errorf("%+v", s)
		}
		// Nothing of it has stuck: a rank comes back as it was, and the engine goes on.
		if err := ranks[3].c.Close(); err != nil {
			t.Fatal(err)
		}
		again := &member{raw: d.raw(t)}
		again.json(wire.THello, partHello("engine", 3, parts, back))
		again.want(wire.TWelcome)
		again.mapped()
		m.reserve(1, 1)
		if s := d.session("engine"); s.State != engine.Attached || s.Ranks != 4 || s.World != 4 {
			t.Errorf("%+v", s)
		}
	})
}

// TestRankDies: a rank that ends alone takes nothing with it: the session goes on as long as its manager says so, and what it
// has stored, reserved and pinned stays. A process that starts under its name later is another session's.
func TestRankDies(t *testing.T) {
	parts := unequal()
	d := start(t, t.TempDir(), setup{pages: 64})
	ranks, m := d.crew(t, "engine", parts)
	stored := m.reserve(1, 1).Slots[0].Ref
	m.send(wire.TCommit, wire.AppendJob(nil, 1))
	m.want(wire.TDelta)
	m.reserve(2, 2)
	m.send(wire.TPin, wire.AppendRefs(nil, &wire.Refs{Job: 3, Request: 1, Refs: []block.Ref{stored}}))
	ranks[2].end()
	eventually(t, "its end is noticed", func() bool { return d.session("engine").Ranks == 3 })
	if s, st := d.session("engine"), d.eng.Status(); s.State != engine.Attached || s.Jobs != 2 || st.ReadyKeys != 1 || st.ReservedKeys != 1 {
		t.Errorf("%+v, %d ready, %d reserved", s, st.ReadyKeys, st.ReservedKeys)
	}
	d.joins(t, "engine", 2, parts, nil).mapped()
	if n := len(d.eng.Status().Sessions); n != 2 {
		t.Errorf("%d sessions: a new process is not the one that died", n)
	}
	m.send(wire.TCommit, wire.AppendJob(nil, 2)) // its rank had stored before it died
	m.send(wire.TUnpin, wire.AppendJob(nil, 3))
	m.send(wire.TFinish, wire.AppendFinish(nil, &wire.Finish{Request: 1}))
	eventually(t, "nothing is open", func() bool { return d.eng.OpenJobs() == 0 })
	if st := d.eng.Status(); st.ReadyKeys != 2 || st.ReservedKeys != 0 {
		t.Errorf("%d ready, %d reserved", st.ReadyKeys, st.ReservedKeys)
	}
}

// TestManagerDies: nobody will commit what the manager has left. Its pages come back when every rank has reported that its
// copies are over, or has ended, and not before; the load's pages come back with the session.
func TestManagerDies(t *testing.T) {
	parts := unequal()
	for _, c := range []struct {
		name string
		last func(d *daemon, ranks []*member)
	}{
		{"both report", func(_ *daemon, ranks []*member) { ranks[2].ended(1); ranks[3].ended(1) }},
		{"both end", func(_ *daemon, ranks []*member) { ranks[2].end(); ranks[3].end() }},
		{"one reports, one ends", func(_ *daemon, ranks []*member) { ranks[2].ended(1); ranks[3].end() }},
		{"one ends, one reports", func(d *daemon, ranks []*member) {
			ranks[3].end()
			eventually(d.t, "its end is noticed", func() bool { return d.session("engine").Ranks == 3 })
			if n := d.eng.Status().ReservedKeys; n != 1 {
				d.t.Errorf("%d keys reserved while a rank may still copy", n)
			}
			ranks[2].ended(1)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := start(t, t.TempDir(), setup{pages: 64})
			ranks, m := d.crew(t, "engine", parts)
			m.reserve(1, 1)
			ranks[0].ended(1)
			ranks[1].ended(1)
			if n := d.eng.Status().ReservedKeys; n != 1 {
				t.Fatalf("%d keys reserved", n)
			}
			m.end()
			eventually(t, "the manager's end is noticed", func() bool { s := d.session("engine"); return s.State == engine.Detached && s.PID == 0 })
			ranks[1].ended(1) // once more: it counts once
			if st := d.eng.Status(); st.ReservedKeys != 1 || st.FreePages == 64 {
				t.Fatalf("%d keys reserved, %d pages free: two ranks may still copy", st.ReservedKeys, st.FreePages)
			}
			c.last(d, ranks)
			eventually(t, "the pages come back", func() bool { st := d.eng.Status(); return st.ReservedKeys == 0 && st.FreePages == 64 })
			if len(d.sessions()) != 1 || d.eng.OpenJobs() != 0 {
				t.Errorf("sessions %v, %d jobs", d.sessions(), d.eng.OpenJobs())
			}
			if err := d.eng.Audit(); err != nil {
				t.Error(err)
			}
		})
	}
}

// helpMember is one process of an engine of several. It says so when it is attached, and waits to be killed.
func helpMember() error {
	rank, err := strconv.Atoi(os.Getenv("RANK"))
	if err != nil {
		return err
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: os.Getenv("SOCKET"), Net: "unix"})
	if err != nil {
		return err
	}
	b, err := wire.AppendJSON(wire.AppendHeader(nil, wire.THello, 0, 1), partHello("killed", rank, unequal(), nil))
	if err != nil {
		return err
	}
	wire.Seal(b, 0)
	if rank >= 0 {
		b = wire.Append(b, wire.TMapped, 0, 2, nil)
	}
	if _, err := c.Write(b); err != nil {
		return err
	}
	// The descriptors that come with the welcome stay in this process: they carry its lock.
	if n, _, _, _, err := c.ReadMsgUnix(make([]byte, 64<<10), make([]byte, 64)); err != nil || n == 0 {
		return fmt.Errorf("welcome: %d bytes, %w", n, err)
	}
	if rank < 0 {
		r := &raw{c: c}
		for job := uint64(0); job < 3; { // until ready, and then an answer for each
			h, body, err := r.frame()
			switch {
			case err != nil:
				return err
			case h.Type == wire.TError:
				return fmt.Errorf("the daemon says %s", body)
			case h.Type == wire.TSnapshot || h.Type == wire.TReserved:
				job++
				r.send(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: job, Request: job, Keys: offers(int(job), 1)}))
			}
		}
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin) // until the parent kills it, or is gone
	return err
}

// TestKilledTogether: an engine of a manager and four ranks, each a process, is killed as a whole. Everything it had comes
// back, in whatever order the kernel tells of the ends.
func TestKilledTogether(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	var all []*exec.Cmd
	for rank := -1; rank < len(unequal()); rank++ {
		c := helper("member", "SOCKET="+d.socket, fmt.Sprint("RANK=", rank))
		in, err := c.StdinPipe() // held open: it waits on it
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		c.Stderr = os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	eventually(t, "it works", func() bool { s := d.session("killed"); return s.Ranks == 4 && s.Jobs == 3 })
	if st := d.eng.Status(); st.ReservedKeys != 3 || st.FreePages == 64 {
		t.Fatalf("%d keys reserved, %d pages free", st.ReservedKeys, st.FreePages)
	}
	for _, c := range all {
		if err := c.Process.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range all {
		_ = c.Wait() // it was killed
	}
	eventually(t, "its session ends", func() bool { return len(d.sessions()) == 0 })
	if st := d.eng.Status(); st.ReservedKeys != 0 || st.FreePages != 64 || d.eng.OpenJobs() != 0 {
		t.Errorf("%d keys reserved, %d pages free, %d jobs", st.ReservedKeys, st.FreePages, d.eng.OpenJobs())
	}
	if err := d.eng.Audit(); err != nil {
		t.Error(err)
	}
}
