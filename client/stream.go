package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/fence"
	"kvlift/wire"
)

// Errors of a connection.
var (
	ErrNotReachable = errors.New("no daemon answers")
	ErrDeadline     = errors.New("the daemon did not answer in time")
	ErrBacklog      = errors.New("the daemon does not read")
)

// RemoteError is what the daemon said before it closed the connection.
type RemoteError struct {
	Code, Message, Hint string
}

func (e *RemoteError) Error() string { return "daemon: " + e.Message }

// maxBacklog is how many bytes may wait for a daemon that does not read, before the connection counts as broken.
const maxBacklog = 8 << 20

// stream is a connection as frames. It is not safe for concurrent use, but for interrupt.
type stream struct {
	fd   int
	in   []byte
	lo   int // in[lo:hi] is read and not handled
	hi   int
	out  []byte // queued, not sent
	sent int
	seq  uint64
	fds  []int // descriptors that came and were not taken

	fdMu sync.Mutex // guards the closing of fd against interrupt
}

// spin is how long an answer is looked for before the thread sleeps: waking a processor that has gone idle costs more
// than most answers take.
const spin = 50 * time.Microsecond

// dial connects within the context's time.
func dial(ctx context.Context, socket string) (*stream, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("%w at %s: %w", ErrNotReachable, socket, err)
	}
	u := c.(*net.UnixConn)
	f, err := u.File() // a duplicate that the runtime's poller does not know: its reads are plain system calls
	if err = errors.Join(err, u.Close()); err != nil {
		return nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &stream{fd: fd, in: make([]byte, 64<<10)}, nil
}

func (s *stream) close() error {
	if s == nil {
		return nil
	}
	s.fdMu.Lock()
	defer s.fdMu.Unlock()
	if s.fd < 0 {
		return nil
	}
	for _, fd := range s.fds {
		_ = unix.Close(fd)
	}
	err := unix.Close(s.fd)
	s.fd, s.fds = -1, nil
	return err
}

// interrupt makes a wait in another goroutine end with the end of the stream.
func (s *stream) interrupt() {
	s.fdMu.Lock()
	defer s.fdMu.Unlock()
	if s.fd >= 0 {
		_ = unix.Shutdown(s.fd, unix.SHUT_RDWR) // it fails when the peer was first
	}
}

// queue appends a frame to what the next flush sends, and returns its sequence.
func (s *stream) queue(t wire.Type, encode func([]byte) []byte) uint64 {
	s.seq++
	start := len(s.out)
	s.out = wire.AppendHeader(s.out, t, 0, s.seq)
	if encode != nil {
		s.out = encode(s.out)
	}
	wire.Seal(s.out, start)
	return s.seq
}

// flush sends what the socket takes without waiting.
func (s *stream) flush() error {
	for s.sent < len(s.out) {
		n, err := unix.SendmsgN(s.fd, s.out[s.sent:], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch {
		case err == nil:
			s.sent += n
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			if len(s.out)-s.sent > maxBacklog {
				return ErrBacklog
			}
			return nil
		default:
			return fmt.Errorf("send: %w", err)
		}
	}
	s.out, s.sent = s.out[:0], 0
	return nil
}

// receive reads what is there. It returns false when nothing was, and waits up to wait for something (0: not at all).
func (s *stream) receive(wait time.Duration) (bool, error) {
	if s.lo > 0 {
		s.hi = copy(s.in, s.in[s.lo:s.hi])
		s.lo = 0
	}
	if s.hi == len(s.in) {
		s.in = append(s.in, make([]byte, len(s.in))...)
	}
	var oob []byte
	if s.seq <= 1 { // only the first answer carries a descriptor
		oob = make([]byte, unix.CmsgSpace(4*4))
	}
	start := time.Now()
	for {
		if wait > 0 && time.Since(start) > spin {
			start := time.Now()
			p := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
			if s.sent < len(s.out) {
				p[0].Events |= unix.POLLOUT
			}
			ts := unix.NsecToTimespec(int64(wait))
			if _, err := unix.Ppoll(p, &ts, nil); err != nil && !errors.Is(err, unix.EINTR) {
				return false, fmt.Errorf("wait: %w", err)
			}
			if p[0].Revents&unix.POLLOUT != 0 {
				if err := s.flush(); err != nil {
					return false, err
				}
			}
			wait -= time.Since(start)
		}
		n, oobn, _, _, err := unix.Recvmsg(s.fd, s.in[s.hi:], oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			if wait <= 0 {
				return false, nil
			}
			_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // the daemon may have been woken on this very processor
			continue
		case err != nil:
			return false, fmt.Errorf("receive: %w", err)
		}
		if oobn > 0 {
			s.takeFDs(oob[:oobn])
		}
		if n == 0 {
			return false, io.EOF
		}
		s.hi += n
		return true, nil
	}
}

func (s *stream) takeFDs(oob []byte) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return
	}
	for i := range msgs {
		if fds, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			s.fds = append(s.fds, fds...)
		}
	}
}

// frame returns the next whole frame that is buffered. The payload is valid until the next receive.
func (s *stream) frame() (wire.Header, []byte, bool, error) {
	if s.hi-s.lo < wire.HeaderSize {
		return wire.Header{}, nil, false, nil
	}
	h, err := wire.ParseHeader(s.in[s.lo:s.hi], wire.MaxFrame)
	if err != nil {
		return h, nil, false, err
	}
	n := wire.HeaderSize + int(h.Length)
	if s.hi-s.lo < n {
		return h, nil, false, nil
	}
	b := s.in[s.lo+wire.HeaderSize : s.lo+n]
	s.lo += n
	return h, b, true, nil
}

// await reads until a frame of the wanted type comes; anything else is an error. The daemon's last word is a
// *RemoteError.
func (s *stream) await(t wire.Type, wait time.Duration) (wire.Header, []byte, error) {
	deadline := time.Now().Add(wait)
	for {
		h, b, ok, err := s.frame()
		switch {
		case err != nil:
			return h, nil, err
		case ok && h.Type == t:
			return h, b, nil
		case ok:
			return h, nil, unexpected(h, b)
		}
		left := time.Until(deadline)
		if left <= 0 {
			return h, nil, ErrDeadline
		}
		if _, err := s.receive(left); err != nil {
			return h, nil, err
		}
	}
}

func unexpected(h wire.Header, b []byte) error {
	if h.Type == wire.TError {
		var e wire.Error
		if err := wire.ParseJSON(b, &e); err != nil {
			return err
		}
		return &RemoteError{e.Code, e.Message, e.Hint}
	}
	return fmt.Errorf("%w: unexpected %v", wire.ErrMalformed, h.Type)
}

// hello introduces this process and returns the welcome and the descriptor that came with it, nil when none did.
func (s *stream) hello(h *wire.Hello, wait time.Duration) (*wire.Welcome, *os.File, error) {
	var encErr error
	s.queue(wire.THello, func(b []byte) []byte {
		b, encErr = wire.AppendJSON(b, h)
		return b
	})
	if encErr != nil {
		return nil, nil, encErr
	}
	sent := s.flush()
	_, b, err := s.await(wire.TWelcome, wait)
	if _, told := errors.AsType[*RemoteError](err); sent != nil && !told {
		return nil, nil, sent // a daemon that closes at once says why before it does
	}
	if err != nil {
		return nil, nil, err
	}
	w := &wire.Welcome{}
	if err := wire.ParseJSON(b, w); err != nil {
		return nil, nil, err
	}
	if w.Protocol[0] != wire.Major {
		return nil, nil, fmt.Errorf("the daemon speaks protocol %d.%d, this client %d.%d", w.Protocol[0], w.Protocol[1], wire.Major, wire.Minor)
	}
	var f *os.File
	if w.ArenaFD && len(s.fds) > 0 {
		f = os.NewFile(uintptr(s.fds[0]), "arena")
		s.fds = s.fds[1:]
	}
	return w, f, nil
}

// takePage maps the session page that came with a welcome; nil when none did.
func (s *stream) takePage(sent bool) (*fence.Page, error) {
	if !sent || len(s.fds) == 0 {
		return nil, nil
	}
	f := os.NewFile(uintptr(s.fds[0]), "session page")
	s.fds = s.fds[1:]
	p, err := fence.Map(f)
	return p, errors.Join(err, f.Close())
}

// Status asks the daemon at a socket for its state, a JSON document. collect makes it collect garbage first.
func Status(ctx context.Context, socket string, collect bool) ([]byte, error) {
	s, err := dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer s.close()
	wait := 10 * time.Second
	if d, ok := ctx.Deadline(); ok {
		wait = time.Until(d)
	}
	if _, _, err := s.hello(&wire.Hello{Protocol: [2]int{wire.Major, wire.Minor}, Client: "kvlift", Role: "observer"}, wait); err != nil {
		return nil, err
	}
	s.queue(wire.TStatus, func(b []byte) []byte {
		b, _ = wire.AppendJSON(b, &wire.StatusRequest{Collect: collect}) // a bool alone
		return b
	})
	if err := s.flush(); err != nil {
		return nil, err
	}
	var doc []byte
	for {
		h, b, err := s.await(wire.TState, wait)
		if err != nil {
			return nil, err
		}
		doc = append(doc, b...)
		if h.Flags&wire.FlagLast != 0 {
			return doc, nil
		}
	}
}
