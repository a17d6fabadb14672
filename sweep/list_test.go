package sweep

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// paths are what is left below a folder.
func paths(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			rel, _ := filepath.Rel(dir, p) // it is below
			out = append(out, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

func write(t *testing.T, path string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("bytes"), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// TestTemporaries: what vLLM's fs tier was writing lies deep below the folder, and its writer closes it before it renames it.
func TestTemporaries(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	const name = "0123456789abcdef0123456789abcdef.bin_8812300123.tmp"
	for _, p := range []string{"m_0123456789ab_r0/012/34_g0/" + name, "m_0123456789ab_r0/012/34_g0/" + strings.TrimSuffix(name, "_8812300123.tmp"), ".o_direct_probe_12.tmp", "a/b/c/d/e/f/g/h/i/" + name} {
		write(t, filepath.Join(dir, p))
	}
	write(t, filepath.Join(outside, name))
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	before := paths(t, dir)
	if r := run(t, dir, nil); len(r.Files) != 0 {
		t.Errorf("not asked for: %+v", r.Files)
	}
	asked := func(o *Options) { o.Families = []string{"vllm-fs"} }
	if r := run(t, dir, asked); r.Count(Starting, Kept) != 2 || len(r.Files) != 2 {
		t.Errorf("young: %+v", r.Files)
	}
	if !slices.Equal(paths(t, dir), before) {
		t.Errorf("left: %v", paths(t, dir))
	}
	held := spawn(t, "hold", nil, filepath.Join(dir, ".o_direct_probe_12.tmp"), "open")
	held.expect("ready")
	later := func(o *Options) {
		asked(o)
		o.Now = func() time.Time { return time.Now().Add(time.Hour) }
	}
	if r := run(t, dir, later); r.Count(Stale, Removed) != 1 || r.Count(Live, Kept) != 1 {
		t.Errorf("old: %+v", r.Files)
	}
	if n := paths(t, dir); len(n) != len(before)-1 || slices.Contains(n, "m_0123456789ab_r0/012/34_g0/"+name) {
		t.Errorf("left: %v", n)
	}
	if n := paths(t, outside); len(n) != 1 {
		t.Error("a link was followed")
	}
}

// TestArena: without the one file the other is nothing, so they go in order or not at all.
func TestArena(t *testing.T) {
	asked := func(o *Options) { o.Families = []string{"kvlift-arena"} }
	for _, c := range []struct {
		held, left string
	}{{"", ""}, {"meta", "kvlift-x/arena kvlift-x/meta"}, {"arena", "kvlift-x/arena kvlift-x/meta"}} {
		t.Run("held "+c.held, func(t *testing.T) {
			dir := shm(t)
			write(t, filepath.Join(dir, "kvlift-x/arena"))
			write(t, filepath.Join(dir, "kvlift-x/meta"))
			write(t, filepath.Join(dir, "kvlift-x/arena.new")) // of a daemon that was killed
			if c.held != "" {
				spawn(t, "hold", nil, filepath.Join(dir, "kvlift-x", c.held), "mapped").expect("ready")
			}
			run(t, dir, asked)
			if got := strings.Join(paths(t, dir), " "); got != c.left {
				t.Errorf("left %q, want %q", got, c.left)
			}
		})
	}
}

// TestRefused: what is no regular file stays, whatever it is called, and so does what a link points to.
func TestRefused(t *testing.T) {
	dir := shm(t)
	name := func(i int) string { return fmt.Sprintf("vllm_offload_%d.mmap", i) }
	write(t, filepath.Join(dir, "precious"))
	err := errors.Join(os.Symlink("precious", filepath.Join(dir, name(1))), os.Symlink("nothing", filepath.Join(dir, name(2))), os.Mkdir(filepath.Join(dir, name(3)), 0o755))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, name(3), name(4)))
	before := paths(t, dir)
	r := run(t, dir, nil)
	if r.Count(Foreign, Kept) != 3 || len(r.Files) != 3 {
		t.Errorf("%+v", r.Files)
	}
	if after := paths(t, dir); !slices.Equal(after, before) {
		t.Errorf("left %v of %v", after, before)
	}
}

// TestLinked: memory that has another name is not freed, and is left as it is.
func TestLinked(t *testing.T) {
	dir := shm(t)
	path := region(t, dir, regionName)
	if err := os.Link(path, filepath.Join(dir, "other")); err != nil {
		t.Fatal(err)
	}
	r := run(t, dir, nil)
	want(t, r, Stale, Removed)
	if st, err := os.Stat(filepath.Join(dir, "other")); r.FreedBytes != 0 || err != nil || st.Size() != regionSize {
		t.Errorf("%d bytes freed, %v, %v", r.FreedBytes, st, err)
	}
}

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{}, ""},
		{Options{Families: []string{"nccl", "vllm"}}, ""},
		{Options{Families: []string{"nosuch"}}, `"nosuch"`},
		{Options{Families: []string{"vllm-fs"}}, "named"},
		{Options{Families: []string{"vllm-fs"}, Dirs: []string{"x"}}, ""},
	} {
		if err := c.o.Check(); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %q", c.o.Families, err, c.want)
		}
	}
}
