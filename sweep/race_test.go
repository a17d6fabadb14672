package sweep

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

const hide = "." + regionName + ".swept.1"

// TestOpenedMeanwhile has somebody open the file before each step of its removal. Whoever gets the file, with its size, has
// it under its name; whoever comes too late fails.
func TestOpenedMeanwhile(t *testing.T) {
	for _, step := range steps {
		for _, taken := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, name taken %v", step, taken), func(t *testing.T) {
				dir := shm(t)
				path := region(t, dir, regionName)
				d := open(t, dir)
				id, err := d.Lookup(regionName)
				if err != nil {
					t.Fatal(err)
				}
				type opened struct {
					f   *os.File
					err error
				}
				came := make(chan opened, 1)
				var got *opened
				h := hook(d, func(at string, c Claim) error {
					if at == step && got == nil {
						got = &opened{}
						for _, p := range []string{path, filepath.Join(dir, hide)} { // it may have been found before it was hidden
							if _, err := os.Lstat(p); err == nil {
								go func() {
									f, err := os.OpenFile(p, os.O_RDWR, 0)
									came <- opened{f, err}
								}()
								for c != nil && c.Alone() { // until it waits
								}
								if c == nil {
									*got = <-came
									came <- *got
								}
								break
							}
						}
						if taken && errors.Is(lookup(d, regionName), fs.ErrNotExist) {
							region(t, dir, regionName)
						}
					}
					return nil
				})
				out := remove(h, regionName, hide, id)
				var o opened
				select {
				case o = <-came:
				default:
					if step != "release" {
						o = <-came
					}
				}
				names := namesIn(t, dir)
				if o.f == nil {
					if step != "release" || !out.removed {
						t.Fatalf("nobody opened it: %+v, %v", out, o.err)
					}
					return
				}
				defer o.f.Close()
				st, err := o.f.Stat()
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("outcome %+v, %d bytes opened, names %v", out, st.Size(), names)
				other := taken && slices.Contains([]string{"lookup again", "alone", "empty", "unlink", "release"}, step)
				switch {
				case st.Size() > 0:
					if out.removed || inode(t, path) != id.Ino || len(names) != 1 {
						t.Errorf("removed %v, names %v: who opened it has a region that nobody finds", out.removed, names)
					}
				case !out.removed || out.err != nil:
					t.Errorf("emptied and not removed: %+v", out)
				case other && (len(names) != 1 || inode(t, path) == id.Ino):
					t.Errorf("the new file: %v", names)
				}
			})
		}
	}
}

func lookup(d *folder, name string) error {
	_, err := d.Lookup(name)
	return err
}

// TestRecreatedMeanwhile gives the name to another, living file before each step.
func TestRecreatedMeanwhile(t *testing.T) {
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			dir := shm(t)
			path := region(t, dir, regionName)
			d := open(t, dir)
			id, err := d.Lookup(regionName)
			if err != nil {
				t.Fatal(err)
			}
			var successor *os.File
			h := hook(d, func(at string, c Claim) error {
				if at == step && successor == nil {
					other := region(t, dir, "other")
					var err error
					if successor, err = os.Open(other); err == nil {
						err = os.Rename(other, path) // over what is there, if anything is
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				return nil
			})
			out := remove(h, regionName, hide, id)
			if successor == nil {
				t.Fatalf("the removal never came to %q: %+v", step, out)
			}
			defer successor.Close()
			if got := inodeOf(t, successor); inode(t, path) != got {
				t.Errorf("%+v: the successor lost its name", out)
			}
			if n := namesIn(t, dir); len(n) != 1 {
				t.Errorf("names %v", n)
			}
			if st, err := successor.Stat(); err != nil || st.Size() != regionSize {
				t.Errorf("the successor has %d bytes, %v", st.Size(), err)
			}
		})
	}
}

// TestGoneMeanwhile: another hand takes the name before each step. That is success, and nobody's count.
func TestGoneMeanwhile(t *testing.T) {
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			dir := shm(t)
			region(t, dir, regionName)
			d := open(t, dir)
			id, err := d.Lookup(regionName)
			if err != nil {
				t.Fatal(err)
			}
			took := false
			h := hook(d, func(at string, c Claim) error {
				if at == step && !took {
					for _, n := range namesIn(t, dir) {
						took = true
						if err := os.Remove(filepath.Join(dir, n)); err != nil {
							t.Fatal(err)
						}
					}
				}
				return nil
			})
			out := remove(h, regionName, hide, id)
			if out.err != nil || out.removed == took {
				t.Errorf("taken by another %v: %+v", took, out)
			}
			if n := namesIn(t, dir); len(n) != 0 {
				t.Errorf("names %v", n)
			}
		})
	}
}

// TestFaults lets each step fail. The file is then where it can be found, and the next sweep removes it.
func TestFaults(t *testing.T) {
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			dir := shm(t)
			region(t, dir, regionName)
			failed := false
			r := run(t, dir, func(o *Options) {
				o.wrap = func(n Names) Names {
					return hook(n, func(at string, c Claim) error {
						if at == step && !failed {
							failed = true
							return unix.EIO
						}
						return nil
					})
				}
			})
			f := only(t, r)
			if !failed {
				t.Fatalf("the removal never came to %q: %+v", step, f)
			}
			if step == "release" { // the name is gone
				if f.Action != Removed || r.FreedBytes != regionSize {
					t.Errorf("%+v", r)
				}
				return
			}
			if f.Action == Removed || r.FreedBytes != 0 {
				t.Errorf("counted: %+v", r)
			}
			if step != "alone" && f.Action != Failed { // there, an error is somebody who came
				t.Errorf("%s: %s", f.Action, f.Reason)
			}
			if _, err := os.Lstat(f.Path); err != nil {
				t.Errorf("the report says %s: %v", f.Path, err)
			}
			r = run(t, dir, nil)
			want(t, r, Stale, Removed)
			if n := namesIn(t, dir); len(n) != 0 {
				t.Errorf("names %v", n)
			}
		})
	}
}

// TestKilled kills a sweep with SIGKILL before each step, with and without an engine that opens the file at that moment.
// A living file ends under its name, and a dead one is removed by the next sweep.
func TestKilled(t *testing.T) {
	for _, step := range steps {
		for _, opened := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, opened %v", step, opened), func(t *testing.T) {
				dir := shm(t)
				path := region(t, dir, regionName)
				ino := inode(t, path)
				s := spawn(t, "stop", nil, dir, regionName, step)
				s.expect("at " + step)
				left := namesIn(t, dir)
				if len(left) > 1 {
					t.Fatalf("names %v", left)
				}
				var h *helper
				if opened && len(left) == 1 {
					// Held at whichever name: an engine that had found the file before it was hidden.
					h = spawn(t, "hold", nil, filepath.Join(dir, left[0]), "open")
				}
				s.kill()
				if h != nil {
					h.expect("ready")
					st, err := os.Stat(filepath.Join(dir, left[0]))
					if err != nil {
						t.Fatal(err)
					}
					r := run(t, dir, func(o *Options) { o.Delete = false })
					if f := only(t, r); st.Size() > 0 && (f.Action != Kept || f.Verdict != Live) {
						t.Errorf("a dry run: %+v", f)
					}
					r = run(t, dir, nil)
					if f := only(t, r); st.Size() == 0 && f.Action != Removed || st.Size() > 0 && f.Action != Kept {
						t.Errorf("%+v", f)
					}
					if st.Size() > 0 && inode(t, path) != ino {
						t.Error("it has not got its name back")
					}
					h.kill()
					if st.Size() == 0 { // there was nothing in it any more
						left = nil
					}
				}
				removed := run(t, dir, nil).Count(Stale, Removed)
				t.Logf("left %v, then removed %d", left, removed)
				if removed != len(left) {
					t.Errorf("removed %d of %v", removed, left)
				}
				if n := namesIn(t, dir); len(n) != 0 {
					t.Errorf("names %v", n)
				}
			})
		}
	}
}

// TestLeftoverBesideNew: a file that a killed sweep hid and that somebody holds cannot have its name back when that is
// taken. It stays, until nobody holds it.
func TestLeftoverBesideNew(t *testing.T) {
	dir := shm(t)
	path := region(t, dir, hide)
	region(t, dir, regionName)
	h := spawn(t, "hold", nil, path, "open")
	h.expect("ready")
	n := spawn(t, "hold", nil, filepath.Join(dir, regionName), "open")
	n.expect("ready")
	for range 2 {
		r := run(t, dir, nil)
		if r.Count(Live, Kept) != 2 {
			t.Fatalf("%+v", r.Files)
		}
	}
	h.kill()
	if r := run(t, dir, nil); r.Count(Stale, Removed) != 1 || r.Count(Live, Kept) != 1 {
		t.Errorf("%+v", r.Files)
	}
	if n := namesIn(t, dir); !slices.Equal(n, []string{regionName}) {
		t.Errorf("names %v", n)
	}
}
