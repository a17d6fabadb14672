package sweep

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

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

// TestForce: on a file system whose leases prove nothing, a file is removed on somebody's word for it alone.
func TestForce(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "hugetlbfs", 0, ""); err != nil {
		t.Skipf("no hugetlbfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, regionName)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(1<<30), f.Close()); err != nil { // a page of any size
		t.Fatal(err)
	}
	later := func(o *Options) { o.Now = func() time.Time { return time.Now().Add(2 * time.Minute) } }
	want(t, run(t, dir, nil), Starting, Kept)
	want(t, run(t, dir, later), Unknown, Kept)
	want(t, run(t, dir, func(o *Options) { later(o); o.Force = []string{path + "x"} }), Unknown, Kept)
	h := spawn(t, "hold", nil, path, "open")
	h.expect("ready")
	want(t, run(t, dir, func(o *Options) { later(o); o.Force = []string{path} }), Live, Kept)
	h.kill()
	want(t, run(t, dir, func(o *Options) { later(o); o.Force = []string{path} }), Unknown, Removed)
}
