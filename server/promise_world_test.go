package server

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/arena"
	"kvlift/block"
	"kvlift/engine"
	"kvlift/host"
	"kvlift/meta"
	"kvlift/wire"
)

// The randomised tester of promises: a real daemon, real sockets, the Go client, and one goroutine that decides what
// happens next. Every connection's reader stops at a gate before it takes a frame up, so the tester chooses the order in
// which messages arrive, who is slow, who is killed, and when the daemon dies; the same seed makes the same run. After
// every action the bytes under every outstanding promise are compared.

// violation ends a round: a rule was broken.
type violation string

func violated(format string, args ...any) { panic(violation(fmt.Sprintf(format, args...))) }

// stuck is how long something may take that needs nothing but processor time.
const stuck = 20 * time.Second

// world is a round's daemon and its engines.
type world struct {
	rng    *rand.Rand
	draw   draw
	dir    string
	socket string
	clock  atomic.Int64 // milliseconds
	ids    uint64       // sessions so far
	vers   int          // versions of the weights so far

	arena *arena.Arena
	mem   []byte // the tester's own mapping of the arena
	eng   *engine.Engine
	srv   *Server
	stop  func() // kills the daemon; nil while it is down

	mu    sync.Mutex
	turns []*turn // of the daemon's connections, as they were accepted

	players    []*player
	nested     bool // somebody acts within an action of somebody else
	born       int
	writers    map[uint32]*store // pages that an unfinished store of a living engine may write
	complaints []string          // of the daemon's log
	log        []string
	sum        uint64 // of the whole log
	echo       func(string)
	counts     counts
}

// counts tell whether a run has come to what it is for.
type counts struct {
	Actions, Hits, Loads, Stores, Late, Lost, Resets, Kills, Crashes, Fenced, Removed, Refused int
}

func (c *counts) add(o counts) {
	c.Actions += o.Actions
	c.Hits += o.Hits
	c.Loads += o.Loads
	c.Stores += o.Stores
	c.Late += o.Late
	c.Lost += o.Lost
	c.Resets += o.Resets
	c.Kills += o.Kills
	c.Crashes += o.Crashes
	c.Fenced += o.Fenced
	c.Removed += o.Removed
	c.Refused += o.Refused
}

// turn is a connection's place at the gate.
type turn struct {
	c      *conn
	at     chan struct{} // its reader has come to the gate
	goOn   chan error
	here   bool        // as far as the tester has seen
	hello  *wire.Hello // what it will say first
	passed bool        // it has said it
	buf    [8192]byte  // what next looks into; no frame of the tester is longer
	try    int         // the attempt of its engine to attach that it belongs to
}

// gate is where a reader waits until the tester lets it take a frame up.
func (w *world) gate(c *conn) error {
	w.mu.Lock()
	i := slices.IndexFunc(w.turns, func(t *turn) bool { return t.c == c })
	if i < 0 {
		i = len(w.turns)
		w.turns = append(w.turns, &turn{c: c, at: make(chan struct{}, 1), goOn: make(chan error, 1)})
	}
	t := w.turns[i]
	w.mu.Unlock()
	t.at <- struct{}{}
	return <-t.goOn
}

// until waits for something that other goroutines are about to do.
func until(what string, cond func() bool) {
	for limit := time.Now().Add(stuck); !cond(); {
		if time.Now().After(limit) {
			buf := make([]byte, 1<<20)
			violated("no progress: %s\n%s", what, buf[:runtime.Stack(buf, true)])
		}
		runtime.Gosched()
	}
}

// look notes who has come to the gate and returns all turns.
func (w *world) look() []*turn {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.turns {
		if !t.here {
			select {
			case <-t.at:
				t.here = true
			default:
			}
		}
	}
	return slices.Clone(w.turns)
}

// over tells whether a connection has ended, and forgets it then.
func (w *world) over(t *turn) bool {
	w.srv.mu.Lock()
	_, open := w.srv.conns[t.c]
	w.srv.mu.Unlock()
	if !open {
		w.mu.Lock()
		w.turns = slices.DeleteFunc(w.turns, func(o *turn) bool { return o == t })
		w.mu.Unlock()
	}
	return !open
}

// next is the frame that a reader at the gate would take up, as far as it has arrived; eof tells that nothing more will.
func (t *turn) next() (frame []byte, whole, eof bool) {
	b := t.buf[:]
	n := copy(b, t.c.in[t.c.handled:t.c.have])
	m, _, err := unix.Recvfrom(t.c.fd, b[n:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if err == nil {
		eof = m == 0
		n += m
	} else if !errors.Is(err, unix.EAGAIN) {
		eof = true
	}
	if n < wire.HeaderSize {
		return nil, false, eof
	}
	h, err := wire.ParseHeader(b[:wire.HeaderSize], wire.MaxFrame)
	if err != nil {
		return nil, true, eof
	}
	size := wire.HeaderSize + int(h.Length)
	return b[:min(n, size)], n >= size, eof
}

// pending lists the readers that have something to take up. The one of a connection that has not said hello is asked
// what it will say.
func (w *world) pending() []*turn {
	var out []*turn
	for _, t := range w.look() {
		if !t.here {
			continue
		}
		frame, whole, eof := t.next()
		if whole && !t.passed && t.hello == nil {
			t.hello = &wire.Hello{}
			if err := wire.ParseJSON(frame[wire.HeaderSize:], t.hello); err != nil {
				violated("a hello that cannot be read: %v", err)
			}
			for _, p := range w.players {
				if p.mine(t) {
					t.try = p.try
				}
			}
		}
		if whole || eof {
			out = append(out, t)
		}
	}
	return out
}

// pass lets a reader take one frame up and waits until everything that it causes is said.
func (w *world) pass(t *turn) {
	frame, whole, _ := t.next()
	if whole {
		h, _ := wire.ParseHeader(frame, wire.MaxFrame) // a bad one is the daemon's to refuse
		w.note("daemon handles %v of %s", h.Type, t.name())
	} else {
		w.note("daemon sees the end of %s", t.name())
	}
	t.here, t.passed = false, true
	t.goOn <- nil
	until("the daemon handles a frame", func() bool {
		select {
		case <-t.at:
			t.here = true
			return true
		default:
			return w.over(t)
		}
	})
	w.calm()
}

func (t *turn) name() string {
	if t.hello == nil {
		return "somebody"
	}
	return fmt.Sprintf("%s.%s%d", t.hello.EngineID, t.hello.Role[:1], t.hello.Rank)
}

// calm waits until everything that the daemon has to say is in the sockets.
func (w *world) calm() {
	until("the daemon says what it has to say", func() bool {
		w.srv.mu.Lock()
		defer w.srv.mu.Unlock()
		for c := range w.srv.conns {
			c.box.mu.Lock()
			busy := c.box.busy || !c.box.over() && !c.box.attended && (c.box.size > 0 || c.box.sent < len(c.box.buf))
			c.box.mu.Unlock()
			if busy {
				return false
			}
		}
		return true
	})
}

// deliver lets a reader take one frame up, and its engine go on if it waits for that.
func (w *world) deliver(t *turn) {
	hello := !t.passed
	w.pass(t)
	w.complained(t)
	gone := !slices.Contains(w.look(), t)
	for _, p := range w.players {
		if p.mine(t) && t.try == p.try {
			p.after(t, hello, gone)
		}
	}
}

// complained looks whether the daemon has thrown somebody out. What the dead had still said may be refused: they have
// ended for the daemon.
func (w *world) complained(t *turn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, text := range w.complaints {
		if !slices.ContainsFunc(w.players, func(p *player) bool {
			return p.mine(t) && (t.hello.Role == "manager" && !p.manager || t.hello.Role == "worker" && !p.ranks)
		}) {
			violated("the daemon throws %s out: %s", t.name(), text)
		}
	}
	w.complaints = nil
}

// answer takes up what an engine has said, in order, while it waits for the answer.
func (w *world) answer(p *player) {
	for again := w.stop != nil && !p.attaching && !p.impatient; again; {
		again = false
		for _, t := range w.pending() {
			if p.mine(t) {
				w.deliver(t)
				again = true
				break
			}
		}
	}
}

// start opens the arena and serves.
func (w *world) start() {
	a, err := arena.Open(context.Background(), arena.Config{Name: "test", Dir: filepath.Join(w.dir, "arena"), Bytes: uint64(w.draw.pages) * block.PageSize,
		Keys: 64, AnyFS: true, Now: w.now})
	if err != nil {
		violated("the arena is not adopted: %v", err)
	}
	if w.mem == nil {
		w.mapArena()
	}
	w.arena = a
	stalled := make(chan struct{}, 1)
	w.eng, _, err = engine.Adopt(a.Table, engine.Options{Policy: w.draw.policy, Now: w.now, EvictAhead: w.draw.ahead, Quotas: w.draw.quotas, Stalled: stalled,
		SessionID: func() uint64 { w.ids++; return w.ids }}, a.Held)
	if err != nil {
		violated("the table is not adopted: %v", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: w.socket, Net: "unix"})
	if err != nil {
		violated("listen: %v", err)
	}
	w.srv = New(Config{UIDs: []uint32{uint32(os.Geteuid())}, Engine: w.eng, Arena: a, Log: slog.New(&witness{w: w}), Version: "test", Host: host.FS{},
		HelloTimeout: time.Hour, Stalled: stalled})
	w.srv.gate, w.srv.byLock = w.gate, true
	ctx, cancel := context.WithCancel(context.Background())
	w.srv.ctx = ctx
	for _, p := range w.eng.Survivors() {
		w.srv.watchLock(p)
	}
	srv, accepted := w.srv, make(chan struct{})
	go func() {
		defer close(accepted)
		for {
			u, err := l.AcceptUnix()
			if err != nil {
				return
			}
			srv.accept(u)
		}
	}()
	w.stop = func() {
		cancel()
		_ = l.Close()
		<-accepted
		for done := make(chan struct{}); ; {
			for _, t := range w.look() { // what they have not taken up dies with the daemon
				if t.here {
					t.here = false
					t.goOn <- io.EOF
				}
			}
			srv.mu.Lock()
			for c := range srv.conns {
				c.shutdown()
			}
			left := len(srv.conns)
			srv.mu.Unlock()
			if left == 0 {
				go func() { srv.wg.Wait(); close(done) }()
				<-done
				break
			}
			runtime.Gosched()
		}
		w.turns = nil
		if err := a.Close(); err != nil {
			violated("close the arena: %v", err)
		}
	}
}

// crash ends the daemon between two actions: what it had in memory is gone, the files stay as they are.
func (w *world) crash() {
	w.stop()
	w.stop = nil
}

func (w *world) now() time.Time { return time.UnixMilli(w.clock.Load()) }

func (w *world) mapArena() {
	f, err := os.OpenFile(filepath.Join(w.dir, "arena", "arena"), os.O_RDWR, 0)
	if err == nil {
		w.mem, err = unix.Mmap(int(f.Fd()), 0, w.draw.pages*block.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		violated("map the arena: %v", err)
	}
}

// witness is the daemon's log. Whoever is thrown out broke the protocol, or was wronged by the daemon: no engine here
// ever means to.
type witness struct {
	w *world
}

func (l *witness) Enabled(context.Context, slog.Level) bool { return true }
func (l *witness) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *witness) WithGroup(string) slog.Handler            { return l }

func (l *witness) Handle(_ context.Context, r slog.Record) error {
	if r.Message != "connection ended" && r.Message != "connection refused" {
		return nil
	}
	text, lost := r.Message, false
	r.Attrs(func(a slog.Attr) bool {
		text += " " + a.String()
		if err, ok := a.Value.Any().(error); ok {
			lost = errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
		}
		return true
	})
	if !lost { // the tester breaks connections, too
		l.w.mu.Lock()
		l.w.complaints = append(l.w.complaints, text)
		l.w.mu.Unlock()
	}
	return nil
}

// page is the memory of a page of the arena.
func (w *world) page(p uint32) []byte { return w.mem[int(p)*block.PageSize : int(p+1)*block.PageSize] }

// tag is what the bytes of a page of a key are made of.
func tag(key, ver, rank, i int) uint64 {
	return 0xA5<<56 | uint64(key)<<40 | uint64(ver)<<24 | uint64(rank)<<16 | uint64(i)
}

// torn is what a page holds while a store writes it.
const torn = 0xDEAD << 48

// write begins or ends the writing of a rank's pages.
func (w *world) write(pages []uint32, begin bool, key, ver, rank int) {
	for i, p := range pages {
		b, v := w.page(p), tag(key, ver, rank, i)
		if begin {
			binary.LittleEndian.PutUint64(b, torn)
			continue
		}
		binary.LittleEndian.PutUint64(b[block.PageSize-8:], v)
		binary.LittleEndian.PutUint64(b, v)
	}
}

// right compares a rank's pages with what its key's bytes are.
func (w *world) right(pages []uint32, key, ver, rank int) error {
	for i, p := range pages {
		b, v := w.page(p), tag(key, ver, rank, i)
		if a, z := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[block.PageSize-8:]); a != v || z != v {
			return fmt.Errorf("page %d of key %d, rank %d: %x…%x, want %x", p, key, rank, a, z, v)
		}
	}
	return nil
}

// note writes an action down.
func (w *world) note(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	h := fnv.New64a()
	_ = binary.Write(h, binary.LittleEndian, w.sum) // a hash does not fail
	_, _ = io.WriteString(h, s)
	w.sum = h.Sum64()
	if w.log = append(w.log, s); len(w.log) > 400 {
		w.log = slices.Delete(w.log, 0, 200)
	}
	if w.echo != nil {
		w.echo(s)
	}
}

// ready lists what the table holds, by ref.
func (w *world) table() map[block.Ref]meta.Entry {
	out := map[block.Ref]meta.Entry{}
	for id := range w.arena.Table.Entries {
		v, err := w.arena.Table.Entry(id, nil)
		if err != nil {
			violated("record %d: %v", id, err)
		}
		if v.State != meta.Free {
			out[block.Ref{Entry: id, Gen: v.Gen}] = v
		}
	}
	return out
}
