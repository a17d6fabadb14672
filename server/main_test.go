package server_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvlift/block"
	"kvlift/client"
	"kvlift/engine"
	"kvlift/wire"
)

// helperVar makes the test binary run one of helpers instead of the tests: an engine in a process of its own, which may
// be killed or belong to another user.
const helperVar = "KVLIFT_TEST_HELPER"

var helpers = map[string]func() error{"status": helpStatus, "engine": helpEngine, "member": helpMember}

func TestMain(m *testing.M) {
	if name := os.Getenv(helperVar); name != "" {
		if err := helpers[name](); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// helper prepares this binary as another process with further variables.
func helper(name string, env ...string) *exec.Cmd {
	c := exec.Command("/proc/self/exe") // another user may not see the path of the file, but may run it
	c.Env = append(os.Environ(), append(env, helperVar+"="+name)...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // tests that are killed take it with them
	return c
}

// eventually waits until a condition holds that other goroutines or processes bring about.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(10 * time.Second); !cond(); {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// heap is what is in use after a collection.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// witness is an engine that stores, looks up and loads in a loop, beside whatever else a test does. Its namespace is its
// own, and it forgets everything now and then: it holds 48 pages at most, the rest is for the test. The returned function ends it after one round more and fails the test when any of them went wrong.
func (d *daemon) witness() (finish func()) {
	d.t.Helper()
	c := d.config("witness", 8192)
	c.Namespace.Identity = map[string]any{"model": "witness"}
	e, err := client.Open(d.t.Context(), c)
	if err != nil {
		d.t.Fatal(err)
	}
	var stop atomic.Bool
	done := make(chan error, 1)
	rounds := 0
	go func() {
		for {
			last := stop.Load()
			if rounds++; rounds%6 == 0 {
				e.Reset()
			}
			if err := round(e, uint64(rounds)); err != nil || last {
				done <- err
				return
			}
		}
	}()
	return func() {
		d.t.Helper()
		stop.Store(true)
		if err := errors.Join(<-done, e.Close()); err != nil {
			d.t.Errorf("the engine beside, in round %d: %v", rounds, err)
		}
		if rounds < 2 {
			d.t.Errorf("the engine beside came to %d rounds", rounds)
		}
	}
}

// round stores 4 new keys, finds them and loads them, and compares every byte.
func round(e *client.Engine, req uint64) error {
	const n = 4
	keys := offers(int(req)*n, n)
	var r client.Reservation
	if err := e.Sync(10 * time.Second); err != nil { // a reset may be under way
		return err
	}
	if err := e.Reserve(req, keys, &r); err != nil {
		return fmt.Errorf("reserve: %w", err)
	}
	if len(r.Keys) != n {
		return fmt.Errorf("%d of %d keys were accepted, reason %d", len(r.Keys), n, r.Reason)
	}
	for _, k := range r.Keys {
		for _, x := range k.Extents {
			for i, b := 0, e.Workers[0].Bytes(x); i < len(b); i++ {
				b[i] = keys[k.Index].Key.Bytes[31] ^ byte(i)
			}
		}
	}
	e.Commit(r.Job)
	if err := e.Sync(10 * time.Second); err != nil {
		return err
	}
	var copies []client.Copy
	for i := range keys {
		c, ok := e.Lookup(&keys[i].Key)
		if !ok {
			return fmt.Errorf("key %d is a miss", i)
		}
		copies = append(copies, c)
	}
	job := e.PrepareLoad(req, copies)
	for i := range copies {
		if at := wrongAt(e, &keys[i].Key, &copies[i]); at >= 0 {
			return fmt.Errorf("key %d: byte %d is wrong", i, at)
		}
	}
	e.CompleteLoad(job)
	e.Finish(req, n*16, n*16, wire.NoHint)
	e.StepEnd()
	return nil
}

// wrongAt compares a copy with the pattern that store writes and returns where they differ, -1 if nowhere.
func wrongAt(e *client.Engine, k *block.Key, c *client.Copy) int {
	off := 0
	for _, x := range c.Extents(nil) {
		b := e.Workers[0].Bytes(x)
		for i := range b {
			if b[i] != k.Bytes[31]^byte(i) {
				return off + i
			}
		}
		off += len(b)
	}
	return -1
}

// raw is a connection that may say anything.
type raw struct {
	t testing.TB
	c *net.UnixConn
}

func (d *daemon) raw(t testing.TB) *raw {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: d.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // most have closed it already
	return &raw{t, c}
}

// write sends bytes. The daemon may have closed the connection meanwhile: what it said before is still there to be read.
func (r *raw) write(b []byte) {
	_ = r.c.SetWriteDeadline(time.Now().Add(20 * time.Second)) // it fails on a closed connection alone
	_, _ = r.c.Write(b)
}

func (r *raw) send(t wire.Type, payload []byte) { r.write(wire.Append(nil, t, 0, 1, payload)) }

func (r *raw) json(t wire.Type, v any) {
	r.t.Helper()
	b, err := wire.AppendJSON(nil, v)
	if err != nil {
		r.t.Fatal(err)
	}
	r.send(t, b)
}

// frame reads the next frame.
func (r *raw) frame() (wire.Header, []byte, error) {
	_ = r.c.SetReadDeadline(time.Now().Add(20 * time.Second)) // as above
	head := make([]byte, wire.HeaderSize)
	if _, err := io.ReadFull(r.c, head); err != nil {
		return wire.Header{}, nil, err
	}
	h, err := wire.ParseHeader(head, wire.MaxFrame)
	if err != nil {
		return h, nil, err
	}
	b := make([]byte, h.Length)
	_, err = io.ReadFull(r.c, b)
	return h, b, err
}

// rights reads the welcome and takes the descriptor that comes with it.
func (r *raw) rights() *os.File {
	r.t.Helper()
	b, oob := make([]byte, 64<<10), make([]byte, 64)
	n, oobn, _, _, err := r.c.ReadMsgUnix(b, oob)
	if err != nil {
		r.t.Fatal(err)
	}
	if h, err := wire.ParseHeader(b[:n], wire.MaxFrame); err != nil || h.Type != wire.TWelcome {
		r.t.Fatalf("%v for a welcome, %v", h.Type, err)
	}
	msgs, err := syscall.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		r.t.Fatalf("%d control messages, %v", len(msgs), err)
	}
	fds, err := syscall.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) < 1 || len(fds) > 2 {
		r.t.Fatalf("%d descriptors, %v", len(fds), err)
	}
	for _, fd := range fds[1:] { // the session page, which this client does without
		_ = syscall.Close(fd)
	}
	return os.NewFile(uintptr(fds[0]), "arena")
}

// want reads frames until one of the type comes.
func (r *raw) want(t wire.Type) []byte {
	r.t.Helper()
	for {
		h, b, err := r.frame()
		if err != nil {
			r.t.Fatalf("waiting for %v: %v", t, err)
		}
		if h.Type == t {
			return b
		}
		if h.Type == wire.TError {
			r.t.Fatalf("waiting for %v: %s", t, b)
		}
	}
}

// reserve asks for one key under a job number until it is accepted: with several engines there may be no free page at
// first, and the refusal is what makes room.
func (r *raw) reserve(job uint64, n int) wire.Reserved {
	r.t.Helper()
	for {
		r.send(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: job, Request: 1, Keys: offers(n, 1)}))
		var got wire.Reserved
		if err := got.Parse(r.want(wire.TReserved)); err != nil {
			r.t.Fatal(err)
		}
		if got.Slots[0].Outcome == 0 {
			return got
		}
		if engine.Reason(got.Reason) != engine.Waiting {
			r.t.Fatalf("refused with %v", engine.Reason(got.Reason))
		}
	}
}

// lastWord reads until the daemon has said why it gives the client up, and has closed the connection.
func (r *raw) lastWord() (wire.Error, error) {
	var e wire.Error
	for {
		h, b, err := r.frame()
		switch {
		case err != nil && e.Code != "" && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)):
			return e, nil
		case err != nil:
			return e, err
		case h.Type == wire.TError:
			if err := wire.ParseJSON(b, &e); err != nil {
				return e, err
			}
		}
	}
}

// helloOf is the hello of an engine with one group.
func helloOf(role, engineID string, change func(*wire.Hello)) *wire.Hello {
	h := &wire.Hello{Protocol: [2]int{wire.Major, wire.Minor}, Client: "raw", Role: role, EngineID: engineID, WorldSize: 1,
		Namespace: &wire.Namespace{Identity: map[string]any{"model": "raw"}, Groups: []wire.Group{{Kind: "full", ChunkTokens: 16}}}}
	if role == "worker" {
		h.Parts = []uint32{4096}
	}
	if change != nil {
		change(h)
	}
	return h
}

// attach makes a worker and a ready manager of one engine on raw connections.
func (d *daemon) attach(t testing.TB, engineID string, change func(*wire.Hello)) (manager, worker *raw) {
	t.Helper()
	worker = d.raw(t)
	worker.json(wire.THello, helloOf("worker", engineID, change))
	worker.want(wire.TWelcome)
	worker.send(wire.TMapped, nil)
	manager = d.raw(t)
	manager.json(wire.THello, helloOf("manager", engineID, change))
	manager.want(wire.TWelcome)
	manager.want(wire.TReady)
	for {
		h, _, err := manager.frame()
		if err != nil {
			t.Fatal(err)
		}
		if h.Type == wire.TSnapshot && h.Flags&wire.FlagLast != 0 {
			return manager, worker
		}
	}
}

// helpStatus asks for the daemon's state.
func helpStatus() error {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: os.Getenv("SOCKET"), Net: "unix"})
	if err != nil {
		return err
	}
	defer c.Close()
	r := &raw{c: c}
	b, err := wire.AppendJSON(nil, &wire.Hello{Protocol: [2]int{wire.Major, wire.Minor}, Role: "observer"})
	if err != nil {
		return err
	}
	r.send(wire.THello, b)
	h, b, err := r.frame()
	if err != nil {
		return err
	}
	fmt.Printf("%v %s\n", h.Type, b)
	return nil
}

// helpEngine is an engine that stores 8 keys, pins 2 of them, reserves 3 more, says so, and waits to be killed.
func helpEngine() error {
	d := &daemon{socket: os.Getenv("SOCKET")}
	c := d.config(os.Getenv("ENGINE"), 8192)
	e, err := client.Open(timeoutContext(), c)
	if err != nil {
		return err
	}
	var r client.Reservation
	if err := e.Reserve(1, offers(500, 8), &r); err != nil {
		return err
	}
	e.Commit(r.Job)
	if err := e.Sync(10 * time.Second); err != nil {
		return err
	}
	e.Finish(1, 0, 0, wire.NoHint)
	var copies []client.Copy
	for i := range 2 {
		k := key(500 + i)
		at, ok := e.Lookup(&k)
		if !ok {
			return fmt.Errorf("key %d is a miss", i)
		}
		copies = append(copies, at)
	}
	e.PrepareLoad(2, copies)
	if err := e.Reserve(3, offers(600, 3), &r); err != nil {
		return err
	}
	if len(r.Keys) != 3 {
		return fmt.Errorf("%d of 3 keys were accepted", len(r.Keys))
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin) // until the parent kills it, or is gone
	return err
}

// sessions are the engine ids that the daemon knows.
func (d *daemon) sessions() []string {
	ids := map[string]bool{}
	for _, s := range d.eng.Status().Sessions {
		ids[s.EngineID] = true
	}
	return slices.Sorted(maps.Keys(ids))
}

// behind is how many removals an engine has not acknowledged.
func (d *daemon) behind(engineID string) uint64 {
	for _, s := range d.eng.Status().Sessions {
		if s.EngineID == engineID {
			return s.Behind
		}
	}
	return 0
}

// needRoot skips a test that only root can do, but not in CI, where nobody would notice.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("CI must run this as root")
	}
	t.Skip("only root can do this")
}

// pidfds counts this process's descriptors of processes.
func pidfds(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && strings.Contains(to, "pidfd") {
			n++
		}
	}
	return n
}
