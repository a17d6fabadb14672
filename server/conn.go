package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/engine"
	"kvlift/fence"
	"kvlift/meta"
	"kvlift/wire"
)

var errTooManyFiles error = syscall.EMFILE

var errLate = errors.New("nothing came in time")

// spin is how long a reader that has just answered looks for the next frame before it sleeps: waking a processor that has
// gone idle costs more than most answers take.
const spin = 50 * time.Microsecond

// conn is one connection. Its fields belong to its reader, except the outbox and what a mutex guards.
//
// The descriptor is the connection's own and in blocking mode: reader and writer are threads that sleep in the kernel. A
// round trip is then several times shorter than through the runtime's poller, which wakes a further thread for every
// message; the number of connections is bounded, and so is that of threads.
type conn struct {
	s       *Server
	fd      int
	uid     uint32
	pid     uint32
	pidfd   int // -1 when the kernel gives none
	in      []byte
	have    int // bytes of in that are read
	spin    bool
	handled int // of these, the frame that was handed out
	box     *outbox
	process *engine.Process
	session *engine.Session

	mu     sync.Mutex // guards what follows, and is held while a manager's message is handled: the last rank's connection may make it ready
	resume *engine.Resume
	ready  bool
	left   bool // the connection has ended, or its manager has another one

	// ioMu is held from the moment bytes leave the socket until the frames that they complete are handled. Whoever has it,
	// and finds socket and buffer empty, knows that everything the client sent was handled (F2).
	ioMu   sync.Mutex
	page   *fence.Page // of a manager; guarded by ioMu
	fenced bool        // its session was fenced on this connection, and nothing has come since; guarded by ioMu

	fdMu sync.Mutex // guards gone; innermost
	gone bool       // the descriptor is closed or shut down

	reply   engine.Reply
	reserve wire.Reserve
	refs    wire.Refs
	answer  wire.Reserved
}

// newConn takes a connection over from the runtime's poller and looks at who it is; it reads nothing. u is closed.
func newConn(s *Server, u *net.UnixConn) (*conn, error) {
	f, err := u.File()
	if err = errors.Join(err, u.Close()); err != nil {
		return nil, err
	}
	defer f.Close()
	c := &conn{s: s, pidfd: -1}
	if c.fd, err = unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, err
	}
	cred, err := unix.GetsockoptUcred(c.fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err = errors.Join(err, unix.SetNonblock(c.fd, false)); err != nil {
		return nil, errors.Join(err, unix.Close(c.fd))
	}
	c.uid, c.pid = cred.Uid, uint32(cred.Pid)
	c.box = newOutbox(c.fd, c.shutdown)
	if !s.allowed(cred.Uid, cred.Gid) {
		c.fail(&wire.Error{Code: "refused", Message: fmt.Sprintf("uid %d may not connect", cred.Uid), Hint: fmt.Sprintf("kvlift serve --allow-uid %d", cred.Uid)})
		return nil, errors.Join(fmt.Errorf("uid %d, pid %d may not connect", cred.Uid, cred.Pid), unix.Close(c.fd))
	}
	if p, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD); err == nil {
		c.pidfd = p
	} else if p, err := unix.PidfdOpen(int(cred.Pid), 0); err == nil {
		c.pidfd = p
	}
	return c, nil
}

// close gives the descriptors back. Nothing of value is lost: what was not sent is told again after the next hello.
func (c *conn) close() {
	c.box.countOn(nil) // before fdMu: whoever gives the client up holds the outbox and takes that
	c.fdMu.Lock()
	defer c.fdMu.Unlock()
	c.gone = true
	_ = unix.Close(c.fd)
	_ = c.page.Close() // nobody fences a connection that has ended: it is in no map any more
	c.dropPidfd()
}

func (c *conn) dropPidfd() {
	if c.pidfd >= 0 {
		_ = unix.Close(c.pidfd)
		c.pidfd = -1
	}
}

// shutdown ends the connection from any goroutine: a blocked read or send returns.
func (c *conn) shutdown() {
	c.fdMu.Lock()
	defer c.fdMu.Unlock()
	if !c.gone {
		c.gone = true
		_ = unix.Shutdown(c.fd, unix.SHUT_RDWR) // it fails when the peer was first
	}
}

// fail sends the last word as far as the socket takes it.
func (c *conn) fail(e *wire.Error) {
	c.box.post(wire.TError, 0, 0, func(b []byte) []byte {
		b, _ = wire.AppendJSON(b, e) // strings alone: it cannot fail
		return b
	})
	c.box.flush()
}

// code is what a client is told of an error.
func code(err error) string {
	switch {
	case errors.Is(err, wire.ErrMalformed), errors.Is(err, wire.ErrTooLong):
		return "malformed"
	case errors.Is(err, errVersion):
		return "version"
	case errors.Is(err, engine.ErrGeometry):
		return "geometry"
	case errors.Is(err, engine.ErrBusy), errors.Is(err, engine.ErrSessions), errors.Is(err, engine.ErrNamespaces):
		return "busy"
	case errors.Is(err, engine.ErrBadJob), errors.Is(err, engine.ErrBadRef), errors.Is(err, engine.ErrClosed):
		return "refused"
	}
	return "failed"
}

var errVersion = errors.New("another protocol version")

func (c *conn) serve() {
	var writer sync.WaitGroup
	writer.Go(c.box.write)
	err := c.run()
	if err != nil && !errors.Is(err, io.EOF) && c.s.ctx.Err() == nil {
		c.s.c.Log.Warn("connection ended", "pid", c.pid, "uid", c.uid, "error", err)
		c.fail(&wire.Error{Code: code(err), Message: err.Error()})
	}
	c.supersede()
	if c.session != nil && c.process != nil {
		c.s.leave(c)
	}
	c.box.close()
	writer.Wait()
}

func (c *conn) run() error {
	c.ioMu.Lock()
	defer c.ioMu.Unlock()
	h, payload, err := c.next(time.Now().Add(c.s.c.HelloTimeout))
	if err != nil {
		if errors.Is(err, errLate) {
			return fmt.Errorf("no hello within %v", c.s.c.HelloTimeout)
		}
		return err
	}
	if h.Type != wire.THello {
		return fmt.Errorf("%w: the first message is %v", wire.ErrMalformed, h.Type)
	}
	role, err := c.hello(h, payload)
	if err != nil {
		return err
	}
	for {
		h, payload, err := c.next(time.Time{})
		if err != nil {
			return err
		}
		c.spin = true
		c.box.attend()
		if err := c.handle(h, payload, role); err != nil {
			if errors.Is(err, errBye) {
				return io.EOF
			}
			return err
		}
		if !c.complete() {
			c.box.flush()
		}
	}
}

// complete tells whether another whole frame is buffered, so that its answer can share a send.
func (c *conn) complete() bool {
	rest := c.in[c.handled:c.have]
	if len(rest) < wire.HeaderSize {
		return false
	}
	h, err := wire.ParseHeader(rest, wire.MaxFrame)
	return err == nil && len(rest) >= wire.HeaderSize+int(h.Length)
}

// next reads one frame. The payload is valid until the next call. The buffer grows with what has arrived, never with
// what a header promises.
// With a deadline, a peer that sends byte by byte does not gain time.
func (c *conn) next(deadline time.Time) (wire.Header, []byte, error) {
	if c.in == nil {
		c.in = make([]byte, 4096)
	}
	c.consume()
	if c.s.gate != nil {
		c.ioMu.Unlock()
		err := c.s.gate(c)
		c.ioMu.Lock()
		if err != nil {
			return wire.Header{}, nil, err
		}
	}
	for {
		if c.have >= wire.HeaderSize {
			h, err := wire.ParseHeader(c.in, wire.MaxFrame)
			if err != nil {
				return h, nil, err
			}
			if n := wire.HeaderSize + int(h.Length); c.have >= n {
				c.handled = n
				return h, c.in[wire.HeaderSize:n], nil
			}
		}
		if c.have == len(c.in) {
			c.in = append(c.in, make([]byte, len(c.in))...)
		}
		n, err := c.read(c.in[c.have:], deadline)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return wire.Header{}, nil, err
		case n == 0 && c.have > 0:
			return wire.Header{}, nil, fmt.Errorf("%w: the connection ended inside a frame", wire.ErrMalformed)
		case n == 0:
			return wire.Header{}, nil, io.EOF
		case !deadline.IsZero() && time.Now().After(deadline):
			return wire.Header{}, nil, errLate
		}
		c.have += n
	}
}

// read waits for bytes. The caller holds ioMu, which is given up while nothing is there.
func (c *conn) read(b []byte, deadline time.Time) (int, error) {
	start := time.Now()
	for {
		n, _, err := unix.Recvfrom(c.fd, b, unix.MSG_DONTWAIT)
		if !errors.Is(err, unix.EAGAIN) {
			return n, err
		}
		c.ioMu.Unlock()
		if c.spin && time.Since(start) < spin {
			_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // the client may have been woken on this very processor
		} else {
			err = c.wait(deadline)
		}
		c.ioMu.Lock()
		if err != nil && !errors.Is(err, unix.EAGAIN) {
			return 0, err
		}
	}
}

// wait sleeps until something is there; with a deadline it fails with errLate when nothing came in time.
func (c *conn) wait(deadline time.Time) error {
	p := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}
	var ts *unix.Timespec
	if !deadline.IsZero() {
		t := unix.NsecToTimespec(max(int64(time.Until(deadline)), 0))
		ts = &t
	}
	n, err := unix.Ppoll(p, ts, nil)
	switch {
	case err != nil && !errors.Is(err, unix.EINTR):
		return err
	case err == nil && n == 0:
		return errLate
	}
	return nil
}

// consume drops the frame that was handed out.
func (c *conn) consume() {
	c.have = copy(c.in, c.in[c.handled:c.have])
	c.handled = 0
	if c.have == 0 && len(c.in) > 256<<10 {
		c.in = make([]byte, 4096) // a single long message does not keep its buffer
	}
}

type role uint8

const (
	roleObserver role = iota
	roleManager
	roleWorker
)

// hello reads who comes and attaches it.
func (c *conn) hello(h wire.Header, payload []byte) (role, error) {
	var m wire.Hello
	if err := wire.ParseJSON(payload, &m); err != nil {
		return 0, err
	}
	if m.Protocol[0] != wire.Major {
		return 0, fmt.Errorf("%w: the client speaks %d.%d, the daemon %d.%d", errVersion, m.Protocol[0], m.Protocol[1], wire.Major, wire.Minor)
	}
	w := &wire.Welcome{Protocol: [2]int{wire.Major, wire.Minor}, Daemon: c.s.c.Version, ArenaBytes: c.s.c.Arena.Bytes(), PageSize: 4096,
		ArenaID: hexID(c.s.c.Arena.Table.Header.ArenaID[:]), HugePage: c.s.c.Arena.HugePage(), TraceClock: c.s.c.TraceClock}
	switch m.Role {
	case "observer":
		return roleObserver, c.welcome(h.Seq, w)
	case "manager", "worker":
	default:
		return 0, fmt.Errorf("%w: role %q", wire.ErrMalformed, m.Role)
	}
	j, err := c.joining(&m)
	if err != nil {
		return 0, err
	}
	p, err := c.s.c.Engine.Join(*j)
	if err != nil {
		return 0, err
	}
	c.process, c.session = p, p.Session()
	c.s.watch(c, p)
	w.Session = fmt.Sprintf("%016x", c.session.ID())
	var files []*os.File
	if !c.s.c.Arena.Held(p.Slot()) { // a process that comes back has its descriptor and its lock already
		f, err := c.s.c.Arena.Descriptor(p.Slot(), j.Role)
		if err != nil {
			return 0, err
		}
		defer f.Close() // the peer's copy keeps the lock
		w.ArenaFD, files = true, append(files, f)
	}
	if j.Role == meta.Manager {
		page, f, err := fence.New()
		if err != nil {
			return 0, err
		}
		defer f.Close() // both ends have mapped it, or will not
		c.page, w.SessionPage, files = page, true, append(files, f)
		c.box.countOn(page)
	}
	if err := c.welcome(h.Seq, w, files...); err != nil {
		return 0, err
	}
	c.s.c.Log.Info("attached", "role", m.Role, "engine", m.EngineID, "rank", m.Rank, "pid", c.pid, "client", m.Client, "session", w.Session)
	if j.Role == meta.Worker {
		return roleWorker, nil
	}
	c.resume = &engine.Resume{Loads: jobs(m.Loads), Stores: jobs(m.Stores)}
	return roleManager, c.s.arrive(c)
}

func jobs(in []wire.OpenJob) []engine.OpenJob {
	var out []engine.OpenJob
	for i := range in {
		out = append(out, engine.OpenJob{Job: in[i].Job, Doomed: in[i].Doomed, Done: in[i].Done, Refs: in[i].RefList()})
	}
	return out
}

// joining checks a hello's fields and turns them into the engine's terms.
func (c *conn) joining(m *wire.Hello) (*engine.Joining, error) {
	bad := func(format string, args ...any) (*engine.Joining, error) {
		return nil, fmt.Errorf("%w: hello: %s", wire.ErrMalformed, fmt.Sprintf(format, args...))
	}
	switch {
	case m.EngineID == "" || len(m.EngineID) > meta.MaxEngineID:
		return bad("engine id of %d bytes: 1 to %d", len(m.EngineID), meta.MaxEngineID)
	case m.WorldSize < 1 || m.WorldSize > meta.MaxParts || m.Rank < 0 || m.Rank >= m.WorldSize:
		return bad("rank %d of %d", m.Rank, m.WorldSize)
	case m.Namespace == nil || len(m.Namespace.Groups) == 0 || len(m.Namespace.Groups) > meta.MaxGroups:
		return bad("a namespace of 1 to %d groups is needed", meta.MaxGroups)
	}
	text, err := m.Namespace.Canonical()
	if err != nil {
		return nil, err
	}
	var groups []meta.Group
	for _, g := range m.Namespace.Groups {
		groups = append(groups, meta.Group{Kind: meta.ParseGroupKind(g.Kind), ChunkTokens: g.ChunkTokens, Window: g.Window})
	}
	j := &engine.Joining{Role: meta.Manager, EngineID: m.EngineID, Rank: uint16(m.Rank), WorldSize: uint16(m.WorldSize), PID: c.pid, UID: c.uid, Desc: engine.Describe(text, groups)}
	if m.Role == "worker" {
		j.Role, j.Parts = meta.Worker, m.Parts
		total := uint64(0)
		for _, p := range m.Parts {
			if p == 0 {
				return bad("a group without payload")
			}
			total += uint64(p)
		}
		if total > 1<<32-1 {
			return bad("parts of %d bytes", total)
		}
	}
	if m.Session != "" {
		id, err := wire.ParseID(m.Session, 8)
		if err != nil {
			return nil, err
		}
		for _, b := range id {
			j.Session = j.Session<<8 | uint64(b)
		}
		if m.ArenaID != hexID(c.s.c.Arena.Table.Header.ArenaID[:]) {
			// What it maps is another arena: it stays off until its restart (R24).
			return bad("this is another arena than the one that the engine maps")
		}
	}
	if start, err := c.s.c.Host.ProcessStart(int(c.pid)); err == nil {
		j.Start = start
	}
	return j, nil
}

// welcome answers a hello; descriptors travel with it.
func (c *conn) welcome(seq uint64, w *wire.Welcome, files ...*os.File) error {
	b, err := wire.AppendJSON(wire.AppendHeader(nil, wire.TWelcome, 0, seq), w)
	if err != nil {
		return err
	}
	wire.Seal(b, 0)
	var rights []byte
	if len(files) > 0 {
		var fds []int
		for _, f := range files {
			fds = append(fds, int(f.Fd()))
		}
		rights = unix.UnixRights(fds...)
	}
	// The first thing on a fresh socket: it fits the socket's buffer.
	return unix.Sendmsg(c.fd, b, rights, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
}
