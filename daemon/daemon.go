// Package daemon is kvlift serve: it opens the arena, adopts what is in it, answers on the socket and ends in order.
// The command fills in Options and calls Run.
package daemon

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"kvlift/arena"
	"kvlift/engine"
	"kvlift/host"
	"kvlift/metrics"
	"kvlift/notify"
	"kvlift/server"
	"kvlift/status"
)

// Options of a daemon; every field has the value that its flag has.
type Options struct {
	Name            string
	Version         string
	Socket          string
	Dir             string // of the arena
	HugeDir         string
	RAMBytes        uint64 // 0: adopt what is there
	MaxKeys         uint32
	Threads         int
	Policy          string
	MinIdle         time.Duration
	EvictAhead      float64
	Quotas          []engine.Quota
	UIDs, GIDs      []uint32
	MaxConnections  int
	HTTP            string
	HTTPPublic      bool
	Reset           bool
	DropDamaged     bool
	TraceClock      bool
	ShutdownTimeout time.Duration
	Log             *slog.Logger
	NotifyAddr      string // NOTIFY_SOCKET
	// Progress hears of populating, besides the log; may be nil.
	Progress func(arena.Progress)
}

type daemon struct {
	o        Options
	host     host.FS
	note     notify.Notifier
	arena    *arena.Arena
	engine   *engine.Engine
	server   *server.Server
	started  time.Time
	report   engine.Report
	adoption time.Duration
	created  bool
}

// Run serves until ctx ends, then drains and returns nil. Every error names what was being done; those of the arena
// carry a hint (*arena.Error).
func Run(ctx context.Context, o Options) error {
	d := &daemon{o: o, started: time.Now()}
	note, err := notify.New(o.NotifyAddr)
	if err != nil {
		o.Log.Warn("no service manager will be told", "error", err)
	}
	d.note = note
	a, err := arena.Open(ctx, arena.Config{Name: o.Name, Dir: o.Dir, HugeDir: o.HugeDir, Bytes: o.RAMBytes, Keys: o.MaxKeys, Threads: o.Threads,
		Reset: o.Reset, Host: d.host, Progress: d.progress()})
	if err != nil {
		if ctx.Err() != nil {
			return nil // asked to end while the arena was populated: nothing is left of it
		}
		return err
	}
	d.arena, d.created = a, a.Created
	return errors.Join(d.serve(ctx), a.Close())
}

// tell passes a word to the service manager, whose absence is nobody's concern.
func (d *daemon) tell(err error) {
	if err != nil {
		d.o.Log.Debug("service manager not told", "error", err)
	}
}

// progress logs populating every ten seconds and keeps the service manager patient.
func (d *daemon) progress() func(arena.Progress) {
	var logged time.Duration
	return func(p arena.Progress) {
		if d.o.Progress != nil {
			d.o.Progress(p)
		}
		if p.Elapsed-logged < 10*time.Second && p.Done < p.Total {
			return
		}
		logged = p.Elapsed
		text := fmt.Sprintf("populating %s of %s", humanize.IBytes(p.Done), humanize.IBytes(p.Total))
		if p.Remaining > 0 {
			text += fmt.Sprintf(", %v left", p.Remaining.Round(time.Second))
		}
		d.tell(d.note.Status(text))
		d.tell(d.note.ExtendTimeout(60 * time.Second))
		d.o.Log.Info("populating", "done_bytes", p.Done, "total_bytes", p.Total, "elapsed", p.Elapsed.Round(time.Millisecond), "remaining", p.Remaining.Round(time.Second))
	}
}

func sessionID() uint64 {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err) // crypto/rand never fails on Linux
	}
	return binary.LittleEndian.Uint64(b[:]) | 1 // never 0, which means none
}

func (d *daemon) serve(ctx context.Context) error {
	o := &d.o
	d.tell(d.note.Status("adopting"))
	start := time.Now()
	stalled := make(chan struct{}, 1)
	e, rep, err := engine.Adopt(d.arena.Table, engine.Options{Stalled: stalled, Policy: o.Policy, MinIdle: o.MinIdle, EvictAhead: o.EvictAhead, Quotas: o.Quotas, TraceClock: o.TraceClock,
		SessionID: sessionID, DropDamaged: o.DropDamaged}, d.arena.Held)
	if err != nil {
		return &arena.Error{Op: "adopt", Path: filepath.Join(o.Dir, "meta"), Err: err,
			Hint: "kvlift verify lists the damage; kvlift serve --drop-damaged keeps what is sound, --reset begins empty"}
	}
	d.engine, d.report, d.adoption = e, *rep, time.Since(start)
	how := "arena adopted"
	if d.created {
		how = "arena made"
	}
	o.Log.Info(how, "dir", o.Dir, "bytes", d.arena.Bytes(), "keys", rep.Ready, "reserved", rep.Reserved, "revived", rep.Revived,
		"dropped", rep.Dropped, "survivors", rep.Sessions, "adoption", d.adoption.Round(time.Microsecond))
	for _, p := range rep.Problems {
		o.Log.Warn("damaged record given up", "error", p)
	}
	l, err := listen(o)
	if err != nil {
		return err
	}
	d.server = server.New(server.Config{Engine: e, Arena: d.arena, Log: o.Log, Version: o.Version, State: d.state, UIDs: o.UIDs, GIDs: o.GIDs,
		MaxConnections: o.MaxConnections, TraceClock: o.TraceClock, Host: d.host, Stalled: stalled})
	// The HTTP listener and the server end after draining, not with ctx.
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	waitHTTP := func() error { return nil }
	if o.HTTP != "" {
		addr, wait, err := metrics.Serve(run, o.HTTP, o.HTTPPublic, metrics.Handler(d.document, o.Log), o.Log)
		if err != nil {
			_ = l.Close()        // nobody was answered yet
			_ = unlink(o.Socket) // the other error is the one to tell
			if errors.Is(err, metrics.ErrPublic) {
				return &arena.Error{Op: "listen on", Path: o.HTTP, Err: err, Hint: "anybody who reaches it can read it; --http-public allows that"}
			}
			return fmt.Errorf("listen on %s: %w", o.HTTP, err)
		}
		waitHTTP = wait
		o.Log.Info("http", "address", addr)
	}
	served := make(chan error, 1)
	go func() { served <- d.server.Serve(run, l, e.Survivors()) }()
	d.tell(d.note.Ready(fmt.Sprintf("%d keys in %s", rep.Ready, humanize.IBytes(d.arena.Bytes()))))
	o.Log.Info("serving", "socket", o.Socket, "pid", os.Getpid())
	select {
	case err := <-served:
		return errors.Join(fmt.Errorf("serve %s: %w", o.Socket, err), unlink(o.Socket))
	case <-ctx.Done():
	}
	d.drain()
	stop()
	err = errors.Join(<-served, waitHTTP(), unlink(o.Socket))
	e.MarkClean()
	o.Log.Info("ended")
	return err
}

// drain waits for what engines have under way, as long as it may.
func (d *daemon) drain() {
	d.tell(d.note.Stopping())
	d.engine.Drain()
	open := d.engine.OpenJobs()
	d.o.Log.Info("draining", "jobs", open, "timeout", d.o.ShutdownTimeout)
	deadline := time.NewTimer(d.o.ShutdownTimeout)
	defer deadline.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for open > 0 {
		select {
		case <-deadline.C:
			d.o.Log.Warn("jobs were still open", "jobs", open)
			return
		case <-tick.C:
			open = d.engine.OpenJobs()
		}
	}
}

// listen binds the socket. A file that a killed daemon left is removed, since this process holds the arena's lock and
// nobody answers on it.
func listen(o *Options) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(o.Socket), 0o755); err != nil {
		return nil, &arena.Error{Op: "create", Path: filepath.Dir(o.Socket), Err: err, Hint: "choose another path with --socket"}
	}
	addr := &net.UnixAddr{Name: o.Socket, Net: "unix"}
	if c, err := net.DialUnix("unix", nil, addr); err == nil {
		_ = c.Close() // it was only a question
		return nil, &arena.Error{Op: "listen on", Path: o.Socket, Err: errors.New("another process answers there"), Hint: "choose another path with --socket"}
	} else if errors.Is(err, unix.ECONNREFUSED) {
		if st, err := os.Lstat(o.Socket); err == nil && st.Mode()&os.ModeSocket != 0 {
			if err := os.Remove(o.Socket); err != nil {
				return nil, &arena.Error{Op: "remove", Path: o.Socket, Err: err}
			}
		}
	}
	l, err := net.ListenUnix("unix", addr)
	if err != nil {
		return nil, &arena.Error{Op: "listen on", Path: o.Socket, Err: err, Hint: "choose another path with --socket (at most 107 bytes)"}
	}
	l.SetUnlinkOnClose(false)
	// The peer's credentials decide, not the mode: a stranger is refused with a word on what would allow it.
	const mode = 0o666
	if err := os.Chmod(o.Socket, mode); err != nil {
		return nil, errors.Join(&arena.Error{Op: "set the mode of", Path: o.Socket, Err: err}, l.Close())
	}
	return l, nil
}

// unlink removes the socket; somebody may have been faster.
func unlink(socket string) error {
	if err := os.Remove(socket); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// document gathers the daemon's state.
func (d *daemon) document() (status.Document, error) {
	p := status.Process{Goroutines: runtime.NumGoroutine()}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	p.HeapBytes = m.HeapAlloc
	pid := os.Getpid()
	var err1, err2 error
	p.CPUUserSeconds, p.CPUSystemSeconds, err1 = d.host.CPUSeconds(pid)
	p.RSSBytes, err2 = d.host.RSSBytes(pid)
	if err := errors.Join(err1, err2); err != nil {
		return status.Document{}, err
	}
	return status.Build(d.engine.Status(), status.Daemon{Version: d.o.Version, Name: d.o.Name, PID: pid, Socket: d.o.Socket, Start: d.started, Now: time.Now(),
		ArenaDir: d.o.Dir, HugePageBytes: d.arena.HugePage(), Adopted: !d.created, Adoption: d.report, AdoptionTime: d.adoption,
		Connections: d.server.Connections(), Process: p}), nil
}

// state is document as JSON, after a collection when the heap figure is to count what is in use.
func (d *daemon) state(collect bool) ([]byte, error) {
	if collect {
		runtime.GC()
	}
	doc, err := d.document()
	if err != nil {
		return nil, err
	}
	return json.Marshal(&doc)
}
