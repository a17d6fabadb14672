package server_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"kvlift/arena"
	"kvlift/block"
	"kvlift/client"
	"kvlift/engine"
	"kvlift/host"
	"kvlift/server"
	"kvlift/wire"
)

// daemon is a server on an arena in a temporary folder.
type daemon struct {
	t      *testing.T
	dir    string
	socket string
	arena  *arena.Arena
	eng    *engine.Engine
	server *server.Server
	stop   func()
	report *engine.Report
}

type setup struct {
	pages  int
	policy string
	keys   uint32
	conns  int
	hello  time.Duration
	uids   []uint32
	gids   []uint32
	state  []byte
	fence  bool // silent engines are fenced
	quotas []engine.Quota
	idle   time.Duration // what was used within this time is not evicted
}

func start(t *testing.T, dir string, s setup) *daemon {
	t.Helper()
	d := &daemon{t: t, dir: dir, socket: filepath.Join(dir, "s")}
	a, err := arena.Open(t.Context(), arena.Config{Name: "test", Dir: filepath.Join(dir, "arena"), Bytes: uint64(s.pages) * block.PageSize, Keys: s.keys, AnyFS: true})
	if err != nil {
		t.Fatal(err)
	}
	d.arena = a
	var stalled chan struct{}
	if s.fence {
		stalled = make(chan struct{}, 1)
	}
	d.eng, d.report, err = engine.Adopt(a.Table, engine.Options{Policy: s.policy, Stalled: stalled, EvictAhead: 0.02, Quotas: s.quotas, MinIdle: s.idle, SessionID: func() uint64 {
		var b [8]byte
		_, _ = rand.Read(b[:])
		return binary.LittleEndian.Uint64(b[:])
	}}, a.Held)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	d.server = server.New(server.Config{UIDs: append(s.uids, uint32(os.Geteuid())), GIDs: s.gids, Engine: d.eng, Arena: a, Log: slog.New(slog.DiscardHandler), Version: "test", Host: host.FS{}, MaxConnections: s.conns, HelloTimeout: s.hello, Stalled: stalled,
		State: func(bool) ([]byte, error) { return s.state, nil }})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.server.Serve(ctx, l, d.eng.Survivors()) }()
	d.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := d.eng.Audit(); err != nil {
			t.Error(err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(d.stop)
	return d
}

func (d *daemon) config(engineID string, parts ...uint32) client.Config {
	c := client.Config{Socket: d.socket, EngineID: engineID, Deadline: 5 * time.Second, Timer: -1,
		Namespace: wire.Namespace{Identity: map[string]any{"model": "test"}}, Parts: [][]uint32{parts}}
	for range parts {
		c.Namespace.Groups = append(c.Namespace.Groups, wire.Group{Kind: "full", ChunkTokens: 16})
	}
	return c
}

func (d *daemon) open(engineID string, parts ...uint32) *client.Engine {
	d.t.Helper()
	e, err := client.Open(d.t.Context(), d.config(engineID, parts...))
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

func key(n int) block.Key {
	var h [32]byte
	binary.BigEndian.PutUint64(h[24:], uint64(n))
	k, _ := block.HashKey(h[:], 0)
	return k
}

func offers(from, n int) []block.Offer {
	out := make([]block.Offer, n)
	for i := range out {
		out[i] = block.Offer{Key: key(from + i), Position: uint32(i+1) * 16}
	}
	return out
}

// store reserves, writes a byte pattern and commits; it returns how many were accepted.
func store(t *testing.T, e *client.Engine, req uint64, keys []block.Offer) int {
	t.Helper()
	var r client.Reservation
	if err := e.Reserve(req, keys, &r); err != nil {
		t.Fatal(err)
	}
	for _, k := range r.Keys {
		for _, x := range k.Extents {
			b := e.Workers[0].Bytes(x)
			for i := range b {
				b[i] = keys[k.Index].Key.Bytes[31] ^ byte(i)
			}
		}
	}
	e.Commit(r.Job)
	return len(r.Keys)
}

func check(t *testing.T, e *client.Engine, k block.Key, c client.Copy) {
	t.Helper()
	for _, x := range c.Extents(nil) {
		b := e.Workers[0].Bytes(x)
		want := make([]byte, len(b))
		for i := range want {
			want[i] = k.Bytes[31] ^ byte(i)
		}
		if !bytes.Equal(b, want) {
			t.Fatalf("key %v: wrong bytes", k)
		}
	}
}

func TestStoreLoad(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	e := d.open("a", 8192)
	if n := store(t, e, 1, offers(0, 20)); n != 20 {
		t.Fatalf("%d of 20 accepted", n)
	}
	if err := e.Sync(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	e.Finish(1, 320, 0, wire.NoHint)
	e.StepEnd()
	for i := range 20 {
		k := key(i)
		c, ok := e.Lookup(&k)
		if !ok {
			t.Fatalf("key %d is a miss", i)
		}
		check(t, e, k, c)
	}
	e.StepEnd()
	// Another 20 keys evict: the coldest, which are the deepest of the first request.
	if n := store(t, e, 2, offers(100, 20)); n != 20 {
		t.Fatalf("%d of 20 accepted", n)
	}
	if err := e.Sync(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	hits := 0
	for i := range 20 {
		k := key(i)
		if _, ok := e.Lookup(&k); ok {
			hits++
			if i != hits-1 {
				t.Fatalf("key %d is left of a chain whose key %d is gone", i, hits-1)
			}
		}
	}
	if hits != 12 {
		t.Fatalf("%d keys of the first request are left, want 12", hits)
	}
}

func TestRestart(t *testing.T) {
	dir := t.TempDir()
	d := start(t, dir, setup{pages: 64})
	e := d.open("a", 8192)
	store(t, e, 1, offers(0, 20))
	if err := e.Sync(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	k := key(3)
	c, ok := e.Lookup(&k)
	if !ok {
		t.Fatal("miss")
	}
	job := e.PrepareLoad(2, []client.Copy{c})
	e.StepEnd()
	d.stop()
	// The engine keeps its mapping and its load.
	check(t, e, k, c)
	e.StepEnd()
	if _, ok := e.Lookup(&k); ok {
		t.Fatal("a hit without a daemon")
	}
	e.StepEnd()
	d = start(t, dir, setup{pages: 64})
	if d.report.Ready != 20 || d.report.Sessions != 1 {
		t.Fatalf("adopted %+v", d.report)
	}
	for deadline := time.Now().Add(5 * time.Second); !e.Attached(); {
		e.StepEnd()
		if time.Now().After(deadline) {
			t.Fatal("the engine does not come back")
		}
		time.Sleep(time.Millisecond)
	}
	for i := range 20 {
		k := key(i)
		c, ok := e.Lookup(&k)
		if !ok {
			t.Fatalf("key %d is lost", i)
		}
		check(t, e, k, c)
	}
	e.CompleteLoad(job)
	e.StepEnd()
	if st := d.eng.Status(); st.Unresolved != 0 {
		t.Fatalf("%d sessions are unresolved", st.Unresolved)
	}
}
