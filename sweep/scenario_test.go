package sweep

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
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
				if f := want(t, run(t, dir, nil), Foreign, Kept); !strings.Contains(f.Reason, "uid 12345") || !f.OtherUser() {
					t.Errorf("reason: %s, other user %v", f.Reason, f.OtherUser())
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
