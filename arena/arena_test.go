package arena_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"kvlift/arena"
	"kvlift/host"
	"kvlift/meta"
)

// helperVar makes the test binary run one of helpers: another process that holds something and may be killed.
const helperVar = "KVLIFT_TEST_HELPER"

var helpers = map[string]func() error{"descriptor": helpDescriptor, "daemon": helpDaemon, "populate": helpPopulate}

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

// helpDescriptor keeps the descriptor that it was given.
func helpDescriptor() error {
	f := os.NewFile(3, "arena")
	if _, err := f.Stat(); err != nil {
		return err
	}
	return waitKilled()
}

// helpDaemon keeps an arena open.
func helpDaemon() error {
	a, err := arena.Open(context.Background(), arena.Config{Name: "t", Dir: os.Getenv("DIR"), Bytes: 1 << 20})
	if err != nil {
		return err
	}
	defer a.Close()
	return waitKilled()
}

// helpPopulate stops when the pages are reserved and nothing has its name yet.
func helpPopulate() error {
	_, err := arena.Open(context.Background(), arena.Config{Name: "t", Dir: os.Getenv("DIR"), Bytes: 1 << 20,
		Progress: func(arena.Progress) { _ = waitKilled() }}) // the process ends in it
	return err
}

func waitKilled() error {
	fmt.Println("ready")
	_, err := io.Copy(io.Discard, os.Stdin) // until the parent kills this process, or is gone
	return err
}

// spawn starts a helper and waits until it says that it is ready. The returned function kills it and waits for its end.
func spawn(t *testing.T, name, dir string, files ...*os.File) (kill func()) {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), helperVar+"="+name, "DIR="+dir)
	c.ExtraFiles = files
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	done := false
	kill = func() {
		if done {
			return
		}
		done = true
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()         // by the signal
		_ = in.Close()
	}
	t.Cleanup(kill)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("the helper says %q, %v", line, err)
	}
	return kill
}

// shm makes a folder on the memory file system.
func shm(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvlift-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func config(dir string) arena.Config { return arena.Config{Name: "t", Dir: dir, Bytes: 1 << 20} }

// open opens an arena that must open.
func open(t *testing.T, c arena.Config) *arena.Arena {
	t.Helper()
	a, err := arena.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// made makes an arena and closes it.
func made(t *testing.T, c arena.Config) {
	t.Helper()
	if err := open(t, c).Close(); err != nil {
		t.Fatal(err)
	}
}

// refused wants Open to fail as is told, with a hint, without leaving anything half made.
func refused(t *testing.T, c arena.Config, want error, message string) {
	t.Helper()
	a, err := arena.Open(t.Context(), c)
	if err == nil {
		t.Errorf("opened; want %v", want)
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		return
	}
	e, ok := errors.AsType[*arena.Error](err)
	if !ok || want != nil && !errors.Is(err, want) || !strings.Contains(err.Error(), message) {
		t.Errorf("got %v (%T); want %v with %q", err, err, want, message)
	} else if e.Hint == "" && want != nil {
		t.Errorf("%v: no hint", err)
	}
	noneHalf(t, c.Dir)
}

func noneHalf(t *testing.T, dir string) {
	t.Helper()
	for _, name := range []string{"arena.new", "meta.new"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left, %v", name, err)
		}
	}
}

// needRoot skips a test that only root can do, but not in CI, where nobody would notice.
func needRoot(t *testing.T, err error) {
	t.Helper()
	if err == nil && os.Geteuid() != 0 {
		err = errors.New("not root")
	}
	if err == nil {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("CI must be able to: %v", err)
	}
	t.Skip(err)
}

func TestSizes(t *testing.T) {
	for _, c := range []struct {
		bytes   uint64
		keys    uint32
		pages   uint32
		entries uint32
	}{
		{1, 0, 1, 1},
		{4095, 0, 1, 1},
		{4096, 0, 1, 1},
		{4097, 0, 2, 2},
		{1 << 20, 0, 256, 256},
		{1 << 20, 1, 256, 1},
		{1 << 20, 1000, 256, 1000},
		{70 << 20, 0, 17920, 17920}, // more than a piece of populating
		{512 << 20, 0, 131072, 65536},
	} {
		t.Run(fmt.Sprintf("%d bytes, %d keys", c.bytes, c.keys), func(t *testing.T) {
			dir := filepath.Join(shm(t), "a", "b")
			var last arena.Progress
			cfg := arena.Config{Name: "t", Dir: dir, Bytes: c.bytes, Keys: c.keys, Progress: func(p arena.Progress) { last = p }}
			a := open(t, cfg)
			h := a.Table.Header
			if !a.Created || h.ArenaPages != c.pages || h.Entries != c.entries || a.Bytes() != uint64(c.pages)*4096 || a.HugePage() != 0 || h.Name != "t" || h.CreatedMS == 0 {
				t.Errorf("created %v, header %+v", a.Created, h)
			}
			if size := uint64(c.pages) * 4096; last.Done != size || last.Total != size || last.Remaining != 0 {
				t.Errorf("the last progress is %+v", last)
			}
			noneHalf(t, dir)
			for name, mode := range map[string]os.FileMode{"": 0o700 | os.ModeDir, "arena": 0o600, "meta": 0o600} {
				st, err := os.Stat(filepath.Join(dir, name))
				if err != nil {
					t.Fatal(err)
				}
				if st.Mode() != mode {
					t.Errorf("%q has mode %v", name, st.Mode())
				}
				// Every page is there already: nothing can fail later for want of memory.
				if s := st.Sys().(*syscall.Stat_t); name != "" && s.Blocks*512 < s.Size {
					t.Errorf("%s has %d bytes of which %d are reserved", name, s.Size, s.Blocks*512)
				} else if name == "arena" && s.Size != int64(c.pages)*4096 {
					t.Errorf("arena has %d bytes", s.Size)
				}
			}
			if err := errors.Join(a.Close(), a.Close()); err != nil {
				t.Error(err)
			}
			b := open(t, cfg)
			if b.Created || b.Table.Header.ArenaID != h.ArenaID || b.Table.Header.Clean {
				t.Errorf("adopted: created %v, header %+v", b.Created, b.Table.Header)
			}
		})
	}
}

func TestOtherSize(t *testing.T) {
	dir := shm(t)
	refused(t, arena.Config{Name: "t", Dir: dir}, arena.ErrMissing, "there is no arena")
	refused(t, arena.Config{Name: "t", Dir: dir, Bytes: 9 << 40}, nil, "at most 2147483648")
	made(t, config(dir))
	for _, bytes := range []uint64{1, 1<<20 - 4096, 1<<20 + 1, 2 << 20, 16<<40 + 1<<20, 1 << 50} {
		c := config(dir)
		c.Bytes = bytes
		refused(t, c, arena.ErrSize, "it has 1048576 bytes")
	}
	c := config(dir)
	c.Keys = 255
	refused(t, c, arena.ErrSize, "it has 256 records, --max-keys asks for 255")
	c = config(dir)
	c.Name = "other"
	refused(t, c, arena.ErrReplaced, `for the name "t", not "other"`)
	for _, bytes := range []uint64{0, 1<<20 - 4095, 1 << 20} { // none, and what is rounded to the same
		c := config(dir)
		c.Bytes = bytes
		a := open(t, c)
		if a.Created {
			t.Errorf("%d bytes: made anew", bytes)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestNoSpace fills a small file system: as soon as it can be known, and, when others are faster, at the latest before
// anything is used.
func TestNoSpace(t *testing.T) {
	needRoot(t, nil)
	dir := shm(t)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		needRoot(t, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	c := config(filepath.Join(dir, "a"))
	c.Bytes = 16 << 20
	refused(t, c, arena.ErrNoRoom, "8.0 MiB (8,388,608 bytes) free on the file system")
	// What is asked about the file system is answered by a larger one, as if it had been filled in between.
	root := machine(t, "1000000000 kB", "")
	if err := os.MkdirAll(filepath.Join(root, c.Dir), 0o700); err != nil {
		t.Fatal(err)
	}
	c.Host = host.FS{Root: root}
	refused(t, c, unix.ENOSPC, "arena.new: no space left on device")
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	if st.Bfree < st.Blocks-1 {
		t.Errorf("%d of %d blocks are free afterwards", st.Bfree, st.Blocks)
	}
	c.Bytes, c.Keys = 4096, 1<<20 // now it is the table that does not fit
	refused(t, c, unix.ENOSPC, "meta.new: no space left on device")
	c = config(c.Dir)
	open(t, c)
}

// machine makes the files of a machine with so much memory, and a control group with a limit unless it is empty.
func machine(t *testing.T, available, limit string) (root string) {
	t.Helper()
	root = shm(t)
	files := map[string]string{
		"proc/meminfo":     "MemTotal:       1000000000 kB\nMemAvailable:   " + available + "\n",
		"proc/self/cgroup": "0::/box\n",
	}
	if limit != "" {
		files["sys/fs/cgroup/box/memory.max"] = limit + "\n"
		files["sys/fs/cgroup/box/memory.current"] = "4096\n"
	}
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// TestNoMemory: a limit of the container and the machine's own memory are looked at before anything is touched, since
// neither gives an error later: the one kills, the other swaps.
func TestNoMemory(t *testing.T) {
	for _, c := range []struct {
		name, available, limit, message string
	}{
		{"plenty", "1000000000 kB", "", ""},
		{"limit is enough", "1000000000 kB", "10000000", ""},
		{"limit", "1000000000 kB", "1000000", "left below the limit of 977 KiB (1,000,000 bytes) of control group /sys/fs/cgroup/box/memory.max"},
		{"little is left below the limit", "1000000000 kB", "1052672", "1.0 MiB (1,048,576 bytes) left below the limit"},
		{"available", "1024 kB", "", "1.0 MiB (1,048,576 bytes) available"},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := machine(t, c.available, c.limit)
			cfg := config(shm(t))
			cfg.Host = host.FS{Root: root}
			if err := os.MkdirAll(filepath.Join(root, cfg.Dir), 0o700); err != nil {
				t.Fatal(err)
			}
			if c.message == "" {
				open(t, cfg)
				return
			}
			refused(t, cfg, arena.ErrNoRoom, c.message)
		})
	}
}

func TestOtherFileSystem(t *testing.T) {
	disk := t.TempDir()
	if sp, err := (host.FS{}).Space(disk); err != nil {
		t.Fatal(err)
	} else if sp.IsTmpfs() {
		t.Skip("temporary folders are on tmpfs here")
	}
	refused(t, config(disk), arena.ErrKind, "an arena lies on tmpfs")
	c := config(disk)
	c.AnyFS = true
	open(t, c)
}

func TestNoHugetlbfs(t *testing.T) {
	dir := shm(t)
	c := config(filepath.Join(dir, "a"))
	c.HugeDir = dir
	refused(t, c, arena.ErrKind, "it is not on hugetlbfs")
	c.HugeDir = filepath.Join(dir, "missing")
	refused(t, c, nil, "no such file or directory")
	if got, err := os.ReadDir(dir); err != nil || len(got) != 0 {
		t.Errorf("%v is left, %v", got, err)
	}
}

// TestSymlinks: names below /dev/shm can be made by anybody, so none is followed.
func TestSymlinks(t *testing.T) {
	other := shm(t)
	made(t, config(other))
	before := digest(t, other)
	link := func(t *testing.T, from, to string) {
		t.Helper()
		if err := os.Symlink(from, to); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("folder", func(t *testing.T) {
		dir := filepath.Join(shm(t), "a")
		link(t, other, dir)
		refused(t, config(dir), nil, "a")
	})
	for _, name := range []string{"arena", "meta"} {
		t.Run(name, func(t *testing.T) {
			dir := shm(t)
			made(t, config(dir))
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
			link(t, filepath.Join(other, name), filepath.Join(dir, name))
			refused(t, config(dir), unix.ELOOP, name)
			if err := arena.Inspect(config(dir), func(*meta.Table) error { return nil }); !errors.Is(err, unix.ELOOP) {
				t.Errorf("inspect: %v", err)
			}
		})
	}
	t.Run("half made", func(t *testing.T) {
		dir := shm(t)
		for _, name := range []string{"arena", "meta"} {
			link(t, filepath.Join(other, name), filepath.Join(dir, name+".new"))
		}
		open(t, config(dir))
	})
	t.Run("reset", func(t *testing.T) {
		dir := shm(t)
		for _, name := range []string{"arena", "meta"} {
			link(t, filepath.Join(other, name), filepath.Join(dir, name))
		}
		c := config(dir)
		c.Reset = true
		open(t, c)
	})
	if after := digest(t, other); after != before {
		t.Error("the files behind the links were changed")
	}
}

// digest is the content of an arena's files.
func digest(t *testing.T, dir string) string {
	t.Helper()
	var s strings.Builder
	for _, name := range []string{"arena", "meta"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		s.Write(b)
	}
	return s.String()
}

func TestNotRegular(t *testing.T) {
	for _, name := range []string{"arena", "meta"} {
		dir := shm(t)
		made(t, config(dir))
		path := filepath.Join(dir, name)
		if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o700)); err != nil {
			t.Fatal(err)
		}
		refused(t, config(dir), nil, name)
	}
}

func TestForeignFolder(t *testing.T) {
	needRoot(t, nil)
	dir := filepath.Join(shm(t), "a")
	if err := errors.Join(os.Mkdir(dir, 0o777), os.Chown(dir, 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	refused(t, config(dir), nil, "the folder belongs to uid 65534")
	if err := arena.Inspect(config(dir), func(*meta.Table) error { return nil }); err == nil || !strings.Contains(err.Error(), "belongs to uid 65534") {
		t.Errorf("inspect: %v", err)
	}
}
