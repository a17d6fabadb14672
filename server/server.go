// Package server speaks the protocol on a Unix socket: it checks who connects, passes the arena on, turns frames into
// calls of the engine and watches the processes that hold the arena.
//
// Each connection is a goroutine that reads, and one that writes what the reader could not send at once. A client's
// error ends its own connection only.
package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"kvlift/arena"
	"kvlift/engine"
	"kvlift/host"
	"kvlift/meta"
	"kvlift/wire"
)

// Config of a server. Engine, Arena, Log and State must be given.
type Config struct {
	Engine  *engine.Engine
	Arena   *arena.Arena
	Log     *slog.Logger
	Version string
	// State answers a status request with a JSON document.
	State func(collect bool) ([]byte, error)
	// UIDs and GIDs may connect besides root; GIDs are compared with the peer's effective group.
	UIDs, GIDs     []uint32
	MaxConnections int           // default 1024
	HelloTimeout   time.Duration // default 5 s
	TraceClock     bool
	Host           host.FS
	// Stalled hears from the engine when pages are waited for that a session has not acknowledged (engine.Options.Stalled).
	Stalled <-chan struct{}
}

// Server answers connections until it is closed.
type Server struct {
	c   Config
	ctx context.Context // ends with Serve; goroutines of processes wait on it

	mu    sync.Mutex // guards the maps; never held across a call of the engine
	conns map[*conn]struct{}
	// managers that wait for their ranks, and who is connected for a session
	managers map[*engine.Session]*conn
	locks    map[*engine.Process]struct{} // processes known by their byte lock alone
	pidfds   map[*engine.Process]*os.File // processes whose end is waited for
	wg       sync.WaitGroup
	lockPoll chan struct{}

	// For tests of the protocol, which decide themselves what happens next; both are zero otherwise.
	gate   func(*conn) error // called before a frame is taken up
	byLock bool              // processes are known by their byte locks alone, as where the kernel has no pidfds
}

// lockPollEvery is how often byte locks are looked at while a process is known by nothing else.
const lockPollEvery = 250 * time.Millisecond

// New makes a server.
func New(c Config) *Server {
	if c.MaxConnections == 0 {
		c.MaxConnections = 1024
	}
	if c.HelloTimeout == 0 {
		c.HelloTimeout = 5 * time.Second
	}
	return &Server{c: c, conns: map[*conn]struct{}{}, managers: map[*engine.Session]*conn{}, locks: map[*engine.Process]struct{}{},
		pidfds: map[*engine.Process]*os.File{}, lockPoll: make(chan struct{}, 1)}
}

// Serve answers connections on l until ctx ends, then closes all of them and waits for their goroutines.
// survivors are the processes of an earlier daemon's sessions.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener, survivors []*engine.Process) error {
	ctx, cancel := context.WithCancel(ctx)
	s.ctx = ctx
	s.wg.Go(s.pollLocks)
	s.wg.Go(s.fenceLoop)
	for _, p := range survivors {
		s.watchLock(p)
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	var err error
	for {
		var c *net.UnixConn
		if c, err = l.AcceptUnix(); err != nil {
			if ctx.Err() != nil {
				err = nil
				break
			}
			if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() || errors.Is(err, errTooManyFiles) {
				s.c.Log.Warn("cannot accept", "error", err)
				select {
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond): // descriptors come back as connections end
				}
				continue
			}
			break
		}
		s.accept(c)
	}
	cancel()
	s.mu.Lock()
	for c := range s.conns {
		c.shutdown()
	}
	for _, f := range s.pidfds {
		_ = f.Close() // ends its watcher
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}

func (s *Server) accept(u *net.UnixConn) {
	c, err := newConn(s, u)
	if err != nil {
		s.c.Log.Warn("connection refused", "error", err)
		return
	}
	s.mu.Lock()
	full := len(s.conns) >= s.c.MaxConnections
	if !full {
		s.conns[c] = struct{}{}
	}
	s.mu.Unlock()
	if full {
		c.fail(&wire.Error{Code: "busy", Message: fmt.Sprintf("%d connections are open", s.c.MaxConnections), Hint: "kvlift serve --max-connections"})
		c.close()
		return
	}
	s.wg.Go(func() {
		c.serve()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		c.close()
	})
}

// allowed tells whether a peer may connect.
func (s *Server) allowed(uid, gid uint32) bool {
	return uid == 0 || slices.Contains(s.c.UIDs, uid) || slices.Contains(s.c.GIDs, gid)
}

// Connections counts open connections.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// watchLock waits for the end of a process that is known by its byte lock alone.
func (s *Server) watchLock(p *engine.Process) {
	s.mu.Lock()
	s.locks[p] = struct{}{}
	s.mu.Unlock()
	select {
	case s.lockPoll <- struct{}{}:
	default:
	}
}

// pollLocks looks at byte locks while there are some to look at; it costs nothing otherwise.
func (s *Server) pollLocks() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.lockPoll:
		}
		tick := time.NewTicker(lockPollEvery)
		for s.pollOnce() > 0 {
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

func (s *Server) pollOnce() int {
	s.mu.Lock()
	ps := slices.SortedFunc(maps.Keys(s.locks), func(a, b *engine.Process) int { return cmp.Compare(a.Slot(), b.Slot()) })
	s.mu.Unlock()
	left := 0
	for _, p := range ps {
		if s.c.Engine.Knows(p) && s.c.Arena.Held(p.Slot()) {
			left++
			continue
		}
		s.mu.Lock()
		_, still := s.locks[p] // it may have come back meanwhile
		delete(s.locks, p)
		s.mu.Unlock()
		if still {
			s.ended(p)
		}
	}
	return left
}

// ended tells the engine that a process is gone.
func (s *Server) ended(p *engine.Process) {
	s.c.Engine.ProcessEnded(p)
	s.c.Log.Debug("process ended", "slot", p.Slot())
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.Role() == meta.Manager {
		delete(s.managers, p.Session())
	}
	if w := s.pidfds[p]; w != nil { // it was its byte lock that told
		delete(s.pidfds, p)
		_ = w.Close() // ends its watcher
	}
}

// random32 reads 32 random bytes.
func random32() ([32]byte, error) {
	var b [32]byte
	_, err := rand.Read(b[:])
	return b, err
}

func hexID(b []byte) string { return hex.EncodeToString(b) }
