package sweep

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestRestartStorm is the outage that sweep was made for: an engine that dies at once and is started again, on a memory
// file system that holds one region. Every boot makes a region of a new name, touches its pages, and is killed.
func TestRestartStorm(t *testing.T) {
	const boots, size = 70, 48 << 20
	boot := func(dir string, i int) string {
		name := fmt.Sprintf("vllm_offload_%08x-0000-4000-8000-000000000000.mmap", i)
		h := spawn(t, "populate", nil, filepath.Join(dir, name), fmt.Sprint(size))
		got := h.line()
		h.kill()
		return got
	}
	t.Run("with sweep", func(t *testing.T) {
		dir := small(t, "size=64m")
		populated, removed, most := 0, 0, 0
		for i := range boots {
			r := run(t, dir, nil)
			if n := r.Count(Stale, Removed); n > 0 {
				if f := only(t, r); f.AllocatedBytes != size || r.FreedBytes != size {
					t.Fatalf("freed %d of %d bytes: %+v", r.FreedBytes, f.AllocatedBytes, f)
				}
				removed += n
			}
			if got := boot(dir, i); got != "populated" {
				t.Fatalf("boot %d: %s", i, got)
			}
			populated++
			most = max(most, len(namesIn(t, dir)))
		}
		removed += run(t, dir, nil).Count(Stale, Removed)
		t.Logf("%d of %d boots got their region, %d files removed, never more than %d there", populated, boots, removed, most)
		if populated != boots || removed != boots || most != 1 {
			t.Error("not every boot")
		}
	})
	t.Run("without", func(t *testing.T) {
		dir := small(t, "size=64m")
		if got := boot(dir, 0); got != "populated" {
			t.Fatalf("the first boot: %s", got)
		}
		got := boot(dir, 1)
		t.Logf("the second boot: %s", got)
		if got != "populate: bad address" {
			t.Errorf("the second boot: %q: without a sweep it has to fail", got)
		}
		// Both are full-sized, and the second holds what was left.
		r := run(t, dir, nil)
		if r.Count(Stale, Removed) != 2 || r.Files[0].SizeBytes != size || r.Files[1].SizeBytes != size || r.FreedBytes >= 2*size || r.FreedBytes < size {
			t.Errorf("freed %d: %+v", r.FreedBytes, r.Files)
		}
		if got := boot(dir, 2); got != "populated" {
			t.Errorf("a boot after the sweep: %s", got)
		}
	})
}

// TestHolders has a live process hold a region in each way, seen and not seen.
func TestHolders(t *testing.T) {
	for _, c := range []struct {
		how      string
		evidence []string
		hidden   []string // from where the process cannot be seen
	}{
		{"mapped", []string{"maps"}, []string{"lease"}},
		{"mapped read-only", []string{"maps"}, []string{"lease"}},
		{"open", []string{"fd"}, []string{"lease"}},
		{"open read-only", []string{"fd"}, []string{"lease"}},
		{"flock", []string{"fd"}, []string{"flock"}},
		{"ofd", []string{"fd"}, []string{"ofd"}},
	} {
		t.Run(c.how, func(t *testing.T) {
			dir := shm(t)
			path := region(t, dir, regionName)
			before := inode(t, path)
			h := spawn(t, "hold", nil, path, c.how)
			h.expect("ready")
			f := want(t, run(t, dir, nil), Live, Kept)
			if !slices.Equal(f.Evidence, c.evidence) || len(f.Owners) != 1 || f.Owners[0].PID != h.cmd.Process.Pid || f.Owners[0].Comm == "" {
				t.Errorf("evidence %v, owners %+v, want %v, %d", f.Evidence, f.Owners, c.evidence, h.cmd.Process.Pid)
			}
			f = want(t, run(t, dir, func(o *Options) { o.Root = emptyProc(t) }), Live, Kept)
			if !slices.Equal(f.Evidence, c.hidden) || len(f.Owners) != 0 {
				t.Errorf("unseen: evidence %v, owners %+v, want %v", f.Evidence, f.Owners, c.hidden)
			}
			if inode(t, path) != before {
				t.Error("it is another file")
			}
			h.kill()
			f = want(t, run(t, dir, nil), Stale, Removed)
			if !slices.Equal(f.Evidence, []string{"maps", "fd", "flock", "ofd", "lease"}) {
				t.Errorf("evidence %v", f.Evidence)
			}
			if n := namesIn(t, dir); len(n) != 0 {
				t.Errorf("left: %v", n)
			}
		})
	}
}

// emptyProc is the root of a machine without processes.
func emptyProc(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "proc"), 0o755); err != nil {
		t.Fatal(err)
	}
	return root
}

// TestOtherNamespace: containers that share the host's memory file system and not its processes.
func TestOtherNamespace(t *testing.T) {
	needRoot(t)
	for _, c := range []struct {
		name          string
		holder, sweep func(*exec.Cmd)
	}{
		{"from a third one", elsewhere, elsewhere},
		{"from inside of what is outside", nil, elsewhere},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := shm(t)
			path := region(t, dir, regionName)
			h := spawn(t, "hold", c.holder, path, "mapped")
			h.expect("ready")
			f := want(t, spawn(t, "sweep", c.sweep, dir).report(), Live, Kept)
			if !slices.Equal(f.Evidence, []string{"lease"}) || len(f.Owners) != 0 {
				t.Errorf("evidence %v, owners %v: the process should not be seen", f.Evidence, f.Owners)
			}
			t.Logf("%s: %s", c.name, f.Reason)
			h.kill()
			want(t, spawn(t, "sweep", c.sweep, dir).report(), Stale, Removed)
		})
	}
	t.Run("from outside of what is inside", func(t *testing.T) {
		// Outside the process is seen; without that, the lease tells.
		dir := shm(t)
		path := region(t, dir, regionName)
		h := spawn(t, "hold", elsewhere, path, "mapped")
		h.expect("ready")
		if f := want(t, run(t, dir, nil), Live, Kept); !slices.Equal(f.Evidence, []string{"maps"}) {
			t.Errorf("evidence %v", f.Evidence)
		}
		if f := want(t, run(t, dir, func(o *Options) { o.Root = emptyProc(t) }), Live, Kept); !slices.Equal(f.Evidence, []string{"lease"}) {
			t.Errorf("evidence %v", f.Evidence)
		}
		h.kill()
		want(t, run(t, dir, nil), Stale, Removed)
	})
}

// TestOtherUser: what may not be read is unknown, whether somebody holds it or not.
func TestOtherUser(t *testing.T) {
	needRoot(t)
	const owner, other = 12345, 12346
	for _, mode := range []os.FileMode{0o600, 0o644} {
		for _, held := range []bool{true, false} {
			t.Run(fmt.Sprintf("%o held %v", mode, held), func(t *testing.T) {
				dir := shm(t)
				path := region(t, dir, regionName)
				for _, err := range []error{os.Chmod(dir, 0o1777), os.Chmod(path, mode), os.Chown(path, owner, owner)} {
					if err != nil {
						t.Fatal(err)
					}
				}
				if held {
					h := spawn(t, "hold", readable(t, as(owner)), path, "mapped")
					h.expect("ready")
				}
				f := want(t, spawn(t, "sweep", readable(t, as(other)), dir, "dry").report(), Unknown, Kept)
				if !strings.Contains(f.Reason, "CAP_LEASE") {
					t.Errorf("the reason does not name CAP_LEASE: %s", f.Reason)
				}
				want(t, spawn(t, "sweep", readable(t, as(other)), dir).report(), Unknown, Kept)
				if held {
					return
				}
				// Root can tell, and still does not take what it was not told to.
				if f := want(t, run(t, dir, nil), Foreign, Kept); !strings.Contains(f.Reason, "uid 12345") {
					t.Errorf("reason: %s", f.Reason)
				}
				want(t, run(t, dir, func(o *Options) { o.Owners = []uint32{owner} }), Stale, Removed)
			})
		}
	}
}

// readable runs the helper from a copy of this binary that everybody may run.
func readable(t *testing.T, change func(*exec.Cmd)) func(*exec.Cmd) {
	return func(c *exec.Cmd) {
		t.Helper()
		b, err := os.ReadFile(c.Path)
		if err != nil {
			t.Fatal(err)
		}
		dir := shm(t)
		c.Path = filepath.Join(dir, "helper")
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(c.Path, b, 0o755); err != nil {
			t.Fatal(err)
		}
		c.Dir = "/"
		change(c)
	}
}

// TestReplaced: a delayed delete that carries the identity of a file that is gone leaves its successor alone.
func TestReplaced(t *testing.T) {
	dir := shm(t)
	path := region(t, dir, regionName)
	d := open(t, dir)
	id, err := d.Lookup(regionName)
	if err != nil {
		t.Fatal(err)
	}
	keep, err := os.Open(path) // lest its number be used again
	if err != nil {
		t.Fatal(err)
	}
	defer keep.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	region(t, dir, regionName)
	after := inode(t, path)
	if out := remove(d, regionName, "."+regionName+".swept.1", id); out.removed || out.err == nil {
		t.Errorf("outcome %+v", out)
	}
	if inode(t, path) != after {
		t.Error("the successor lost its name")
	}
	// The same for a name that is gone: that is success by another hand.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if out := remove(d, regionName, "."+regionName+".swept.1", id); out.removed || out.err != nil {
		t.Errorf("outcome %+v", out)
	}
}

// open opens a folder as a sweep does.
func open(t testing.TB, dir string) *folder {
	t.Helper()
	d, _, err := openFolder(dir, kernel(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	if d.noLease != nil {
		t.Fatal(d.noLease)
	}
	return d
}

// TestTwoSweeps: many at once remove each file once.
func TestTwoSweeps(t *testing.T) {
	const files, sweeps = 500, 4
	dir := shm(t)
	for i := range files {
		region(t, dir, fmt.Sprintf("vllm_offload_%d.mmap", i))
	}
	var helpers []*helper
	for range sweeps {
		helpers = append(helpers, spawn(t, "sweep", nil, dir))
	}
	removed, freed, by := 0, uint64(0), []int{}
	for _, h := range helpers {
		r := h.report()
		by = append(by, r.Count("", Removed))
		removed += r.Count("", Removed)
		freed += r.FreedBytes
		if n := r.Count("", Kept) + r.Count("", Failed); n > 0 {
			t.Errorf("%d files kept or failed: %+v", n, r.Files[0])
		}
	}
	t.Logf("%d files removed by %v, %d bytes", removed, by, freed)
	if removed != files || freed != files*regionSize {
		t.Errorf("%d removed and %d bytes freed, of %d and %d", removed, freed, files, files*regionSize)
	}
	if n := namesIn(t, dir); len(n) > 0 {
		t.Errorf("left: %v", n)
	}
}

// TestTwoSweepsUnlocked: the lock keeps them apart for speed alone.
func TestTwoSweepsUnlocked(t *testing.T) {
	const files = 300
	dir := shm(t)
	for i := range files {
		region(t, dir, fmt.Sprintf("vllm_offload_%d.mmap", i))
	}
	root := emptyProc(t)
	var mu sync.Mutex
	removed := map[string]int{}
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			o := options(dir)
			o.Root, o.PID = root, i+1
			now, ticks := time.Now(), 0
			o.Now = func() time.Time { ticks++; return now.Add(time.Duration(ticks) * time.Second) } // nobody waits for a lock
			for range 20 {
				r, err := Run(context.Background(), o)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, f := range r.Files {
					if f.Action == Removed {
						removed[filepath.Base(f.Path)]++
					}
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for name, n := range removed {
		if n != 1 {
			t.Errorf("%s was removed %d times", name, n)
		}
	}
	run(t, dir, func(o *Options) { o.Root = root })
	if n := namesIn(t, dir); len(n) > 0 {
		t.Errorf("left: %v", n)
	}
}

// TestManyFiles has no more time than a boot may lose.
func TestManyFiles(t *testing.T) {
	const files = 10_000
	dir := shm(t)
	for i := range files {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("vllm_offload_%d.mmap", i)), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, del := range []bool{false, true} {
		start, before := time.Now(), cpuTime(t)
		r := run(t, dir, func(o *Options) { o.Delete = del })
		took := cpuTime(t) - before // what it takes when nobody else wants the processor
		t.Logf("%d files, delete %v: %v of processor time, %v on the clock", len(r.Files), del, took.Round(time.Millisecond), time.Since(start).Round(time.Millisecond))
		if n := r.Count(Stale, ""); n != files || del && r.Count("", Removed) != files {
			t.Errorf("%d stale of %d", n, files)
		}
		if took > time.Second && !raceDetector {
			t.Errorf("%v for %d files", took, files)
		}
	}
	if r := run(t, dir, nil); len(r.Files) != 0 {
		t.Errorf("%d files left", len(r.Files))
	}
}

// cpuTime is what this process has used.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestSockets: a socket is dead when nobody accepts a connection.
func TestSockets(t *testing.T) {
	dir := t.TempDir()
	const dead, live, fresh = "lmcache_rpc_port_1", "engine_7d2c4a10-51aa-4f0e-8f53-6b1a90c2d4e8_service_lookup_x_lmcache_rpc_port_2", "7d2c4a10-51aa-4f0e-8f53-6b1a90c2d4e8"
	for _, name := range []string{dead, fresh} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name)})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	l, err := net.Listen("unix", live)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dgram, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: "cuda_fd_xchg_1"})
	if err != nil {
		t.Fatal(err)
	}
	defer dgram.Close()
	if err := os.WriteFile("lmcache_rpc_port_9", []byte("no socket"), 0o600); err != nil {
		t.Fatal(err)
	}
	sweepSockets := func(later time.Duration) map[string]File {
		r := run(t, dir, func(o *Options) {
			o.Families = []string{"sockets"}
			o.Now = func() time.Time { return time.Now().Add(later) }
		})
		out := map[string]File{}
		for _, f := range r.Files {
			out[filepath.Base(f.Path)] = f
		}
		return out
	}
	got := sweepSockets(0)
	for name, v := range map[string]Verdict{dead: Starting, fresh: Starting, live: Live, "cuda_fd_xchg_1": Live, "lmcache_rpc_port_9": Foreign} {
		if f := got[name]; f.Verdict != v || f.Action != Kept {
			t.Errorf("%s is %s, %s (%s), want %s", name, f.Verdict, f.Action, f.Reason, v)
		}
	}
	got = sweepSockets(2 * time.Minute)
	for name, a := range map[string]Action{dead: Removed, fresh: Removed, live: Kept, "cuda_fd_xchg_1": Kept, "lmcache_rpc_port_9": Kept} {
		if f := got[name]; f.Action != a {
			t.Errorf("%s was %s (%s), want %s", name, f.Action, f.Reason, a)
		}
	}
	if c, err := net.Dial("unix", live); err != nil {
		t.Errorf("the living one: %v", err)
	} else if err := c.Close(); err != nil {
		t.Error(err)
	}
	if n := namesIn(t, dir); len(n) != 3 {
		t.Errorf("left: %v", n)
	}
}

// TestNoLease: where the kernel cannot say, nothing is stale, and only a word for each file removes it.
func TestNoLease(t *testing.T) {
	dir := shm(t)
	path := region(t, dir, regionName)
	d := open(t, dir)
	d.noLease = fmt.Errorf("%w: for the test", errNoAnswer)
	st, err := d.stat(regionName)
	if err != nil {
		t.Fatal(err)
	}
	facts, err := d.facts(regionName, st, ByLease, true, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	mine := Rules{MinAge: -1, Owned: func(uint32) bool { return true }, Asked: true}
	if j := Judge(facts, mine); j.Verdict != Starting {
		t.Errorf("young: %+v", j)
	}
	facts.Age = 2 * time.Minute
	if j := Judge(facts, mine); j.Verdict != Unknown {
		t.Errorf("old: %+v", j)
	}
	if out := remove(d, regionName, "."+regionName+".swept.1", idOf(st)); out.removed || out.err == nil {
		t.Errorf("removed without proof: %+v", out)
	}
	h := spawn(t, "hold", nil, path, "flock")
	h.expect("ready")
	if out := remove(unproven{d}, regionName, "."+regionName+".swept.1", idOf(st)); out.removed || out.err == nil {
		t.Errorf("removed by force what is locked: %+v", out)
	}
	h.kill()
	if out := remove(unproven{d}, regionName, "."+regionName+".swept.1", idOf(st)); !out.removed || out.err != nil {
		t.Errorf("by force: %+v", out)
	}
	if _, err := unix.Open(path, unix.O_RDONLY, 0); err == nil {
		t.Error("it is still there")
	}
}

// TestNameless explains memory that no file accounts for.
func TestNameless(t *testing.T) {
	dir := small(t, "size=64m")
	path := region(t, dir, regionName)
	h := spawn(t, "hold", nil, path, "mapped")
	h.expect("ready")
	o := spawn(t, "hold", nil, path, "open")
	o.expect("ready")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	r := run(t, dir, nil)
	if r.NamelessBytes != regionSize || len(r.Nameless) != 2 || len(r.Files) != 0 {
		t.Fatalf("%+v", r)
	}
	for _, n := range r.Nameless {
		if n.Bytes != regionSize || n.PID != h.cmd.Process.Pid && n.PID != o.cmd.Process.Pid {
			t.Errorf("%+v", n)
		}
	}
	t.Logf("%d bytes in files without a name, held by %d and %d", r.NamelessBytes, r.Nameless[0].PID, r.Nameless[1].PID)
	h.kill()
	o.kill()
	if r := run(t, dir, nil); r.NamelessBytes != 0 || len(r.Nameless) != 0 {
		t.Errorf("after the end: %+v", r)
	}
}

// TestQuiet: a host with nothing of ours.
func TestQuiet(t *testing.T) {
	r := run(t, shm(t), nil)
	if len(r.Files) != 0 || r.FreedBytes != 0 {
		t.Errorf("%+v", r)
	}
}

// TestWait: an engine that was told to end holds its region for a while.
func TestWait(t *testing.T) {
	dir := shm(t)
	h := spawn(t, "hold", nil, region(t, dir, regionName), "mapped")
	h.expect("ready")
	other := region(t, dir, "vllm_offload_1.mmap")
	rounds := 0
	r := run(t, dir, func(o *Options) {
		o.Wait = time.Hour
		o.Pause = func(context.Context, time.Duration) error {
			if rounds++; rounds == 3 {
				h.kill()
			}
			return nil
		}
	})
	if rounds != 3 || r.Count(Stale, Removed) != 2 || r.FreedBytes != 2*regionSize {
		t.Errorf("%d rounds: %+v", rounds, r)
	}
	if _, err := os.Lstat(other); err == nil {
		t.Error("the other one is there")
	}
}
