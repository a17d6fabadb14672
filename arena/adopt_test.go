package arena_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/arena"
	"kvlift/meta"
)

// TestKilled: a daemon that is killed while it makes its files leaves nothing that the next one takes for an arena.
func TestKilled(t *testing.T) {
	t.Run("while populating", func(t *testing.T) {
		dir := shm(t)
		spawn(t, "populate", dir)()
		for _, name := range []string{"arena.new", "meta.new"} {
			if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
				t.Error(err)
			}
		}
		if err := arena.Inspect(config(dir), func(*meta.Table) error { return nil }); !errors.Is(err, arena.ErrMissing) {
			t.Errorf("inspect: %v", err)
		}
		if !open(t, config(dir)).Created {
			t.Error("half an arena was adopted")
		}
		noneHalf(t, dir)
	})
	t.Run("between the names", func(t *testing.T) {
		dir := shm(t)
		a := open(t, config(dir))
		id := a.Table.Header.ArenaID
		if err := errors.Join(a.Close(), os.Rename(filepath.Join(dir, "meta"), filepath.Join(dir, "meta.new"))); err != nil {
			t.Fatal(err)
		}
		b := open(t, config(dir))
		if !b.Created || b.Table.Header.ArenaID == id {
			t.Errorf("created %v, arena %x was %x", b.Created, b.Table.Header.ArenaID, id)
		}
		noneHalf(t, dir)
	})
	t.Run("while serving", func(t *testing.T) {
		dir := shm(t)
		kill := spawn(t, "daemon", dir)
		refused(t, config(dir), arena.ErrInUse, "another daemon holds it")
		if err := arena.Inspect(config(dir), func(*meta.Table) error { return nil }); !errors.Is(err, arena.ErrInUse) {
			t.Errorf("inspect: %v", err)
		}
		kill() // the lock goes with the process
		if open(t, config(dir)).Created {
			t.Error("made anew")
		}
	})
}

func TestTruncated(t *testing.T) {
	for _, c := range []struct {
		name string
		by   func(size int64) int64
		want error
	}{
		{"meta", func(int64) int64 { return 0 }, meta.ErrTruncated},
		{"meta", func(int64) int64 { return 1 }, meta.ErrTruncated},
		{"meta", func(int64) int64 { return 2*meta.HeaderSize - 1 }, meta.ErrTruncated},
		{"meta", func(int64) int64 { return 2 * meta.HeaderSize }, meta.ErrTruncated},
		{"meta", func(n int64) int64 { return n - 1 }, meta.ErrTruncated},
		{"meta", func(n int64) int64 { return n + 1 }, meta.ErrTruncated},
		{"meta", func(int64) int64 { return 1 << 45 }, meta.ErrTruncated},
		{"arena", func(int64) int64 { return 0 }, meta.ErrTruncated},
		{"arena", func(n int64) int64 { return n - 1 }, meta.ErrTruncated},
		{"arena", func(n int64) int64 { return n + 4096 }, meta.ErrTruncated},
	} {
		dir := shm(t)
		made(t, config(dir))
		path := filepath.Join(dir, c.name)
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		size := c.by(st.Size())
		t.Run(fmt.Sprintf("%s of %d bytes", c.name, size), func(t *testing.T) {
			if err := os.Truncate(path, size); err != nil {
				t.Fatal(err)
			}
			refused(t, config(dir), c.want, "bytes")
			if err := arena.Inspect(config(dir), func(*meta.Table) error { return nil }); !errors.Is(err, c.want) {
				t.Errorf("inspect: %v", err)
			}
		})
	}
}

func TestReplaced(t *testing.T) {
	for _, how := range []string{"a copy", "nothing"} {
		t.Run(how, func(t *testing.T) {
			dir := shm(t)
			made(t, config(dir))
			path := filepath.Join(dir, "arena")
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			// The old file is kept under another name, lest the new one get its inode number.
			if err := os.Rename(path, path+".old"); err != nil {
				t.Fatal(err)
			}
			want, message := error(fs.ErrNotExist), "no such file"
			if how == "a copy" {
				want, message = arena.ErrReplaced, "inode"
				if err := os.WriteFile(path, b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			refused(t, config(dir), want, message)
			if err := arena.Inspect(config(dir), func(*meta.Table) error { return nil }); !errors.Is(err, want) {
				t.Errorf("inspect: %v", err)
			}
			c := config(dir)
			c.Reset = true
			if !open(t, c).Created {
				t.Error("reset adopted it")
			}
		})
	}
}

// TestOtherVersion: a file of another version is refused with both numbers, never guessed at.
func TestOtherVersion(t *testing.T) {
	dir := shm(t)
	made(t, config(dir))
	path := filepath.Join(dir, "meta")
	sound, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, copies := range [][]int{{0, 1}, {0}, {1}} {
		b := slices.Clone(sound)
		copy(b[:meta.HeaderSize], sound[meta.HeaderSize:]) // a young file has one copy alone
		for _, i := range copies {
			binary.LittleEndian.PutUint32(b[i*meta.HeaderSize+8:], meta.Version+6)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("the file has version %d, this kvlift writes %d", meta.Version+6, meta.Version)
		refused(t, config(dir), meta.ErrVersion, want)
		if err := arena.Inspect(config(dir), func(*meta.Table) error { return nil }); !errors.Is(err, meta.ErrVersion) || !strings.Contains(err.Error(), want) {
			t.Errorf("inspect: %v", err)
		}
	}
}

func TestInUse(t *testing.T) {
	dir := shm(t)
	a := open(t, config(dir))
	refused(t, config(dir), arena.ErrInUse, "another daemon holds it")
	c := config(dir)
	c.Reset = true
	refused(t, c, arena.ErrInUse, "another daemon holds it")
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	open(t, config(dir))
}

// TestByteLocks: a process holds its byte as long as it holds the descriptor, whatever becomes of the daemons.
func TestByteLocks(t *testing.T) {
	dir := shm(t)
	a := open(t, config(dir))
	pass := func(slot int, role meta.Role) (kill func()) {
		t.Helper()
		f, err := a.Descriptor(slot, role)
		if err != nil {
			t.Fatal(err)
		}
		kill = spawn(t, "descriptor", dir, f)
		if err := f.Close(); err != nil { // the copy of the process keeps the lock
			t.Fatal(err)
		}
		return kill
	}
	held := func(want ...int) {
		t.Helper()
		for slot := range meta.MaxSessions {
			if got := a.Held(slot); got != slices.Contains(want, slot) {
				t.Errorf("slot %d: held %v", slot, got)
			}
		}
	}
	held()
	killWorker, killManager := pass(3, meta.Worker), pass(1023, meta.Manager)
	held(3, 1023)
	if f, err := a.Descriptor(3, meta.Worker); err == nil {
		t.Errorf("slot 3 was given twice: %v", f.Close())
	}
	killManager()
	held(3)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	c := config(dir)
	c.Reset = true
	refused(t, c, arena.ErrMapped, "slot 3")
	a = open(t, config(dir))
	if a.Created {
		t.Error("made anew")
	}
	held(3)
	killWorker()
	held()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if a = open(t, c); !a.Created {
		t.Error("reset adopted it")
	}
}

// TestRoles: a manager copies nothing, so its descriptor cannot write.
func TestRoles(t *testing.T) {
	a := open(t, config(shm(t)))
	for slot, role := range map[int]meta.Role{1: meta.Manager, 2: meta.Worker} {
		f, err := a.Descriptor(slot, role)
		if err != nil {
			t.Fatal(err)
		}
		mem, err := unix.Mmap(int(f.Fd()), 0, int(a.Bytes()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if writes := role == meta.Worker; (err == nil) != writes {
			t.Errorf("%v: mapped for writing: %v", role, err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		if err == nil {
			if !a.Held(slot) {
				t.Errorf("%v: the lock is gone, the mapping is not", role)
			}
			if err := unix.Munmap(mem); err != nil {
				t.Error(err)
			}
		}
		if a.Held(slot) {
			t.Errorf("%v: held after its end", role)
		}
	}
}

// TestCancelled: a start that is given up while it populates leaves nothing.
func TestCancelled(t *testing.T) {
	cause := errors.New("asked to end")
	for _, when := range []int{0, 1, 2} { // before, when the header is made, while threads populate
		ctx, cancel := context.WithCancelCause(t.Context())
		calls := 0
		now := func() time.Time {
			if calls++; calls == when {
				cancel(cause)
			}
			return time.Now()
		}
		if when == 0 {
			cancel(cause)
		}
		c := arena.Config{Name: "t", Dir: shm(t), Bytes: 200 << 20, Threads: 1, Now: now}
		a, err := arena.Open(ctx, c)
		if !errors.Is(err, cause) {
			t.Errorf("cancelled at %d: %v", when, err)
		}
		if err == nil {
			t.Error(a.Close())
		}
		if left, err := os.ReadDir(c.Dir); err != nil || len(left) > 0 {
			t.Errorf("cancelled at %d: %v is left, %v", when, left, err)
		}
		cancel(nil)
	}
}

func TestInspect(t *testing.T) {
	dir := filepath.Join(shm(t), "a")
	nothing := func(*meta.Table) error { t.Error("called"); return nil }
	hinted := func(err, want error) {
		t.Helper()
		if e, ok := errors.AsType[*arena.Error](err); !ok || !errors.Is(err, want) || e.Hint == "" {
			t.Errorf("got %v, want %v with a hint", err, want)
		}
	}
	hinted(arena.Inspect(config(dir), nothing), arena.ErrMissing)
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("looking made the folder: %v", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	hinted(arena.Inspect(config(dir), nothing), arena.ErrMissing)
	a := open(t, config(dir))
	hinted(arena.Inspect(config(dir), nothing), arena.ErrInUse)
	a.Table.SetHeader(true)
	id := a.Table.Header.ArenaID
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	before, calls := digest(t, dir), 0
	says := errors.New("what was found")
	err := arena.Inspect(config(dir), func(tb *meta.Table) error {
		calls++
		if h := tb.Header; h.ArenaID != id || !h.Clean || h.ArenaPages != 256 {
			t.Errorf("header: %+v", h)
		}
		refused(t, config(dir), arena.ErrInUse, "another daemon holds it") // no daemon starts meanwhile
		return says
	})
	if !errors.Is(err, says) || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
	if digest(t, dir) != before {
		t.Error("looking changed the files")
	}
	open(t, config(dir))
}
