package holders

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// machine writes a tree of processes.
func machine(t *testing.T, files map[string]string) FS {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		name = filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return FS{Root: root}
}

func scan(t *testing.T, f FS, want map[ID]bool, folders ...Folder) *Scan {
	t.Helper()
	s, err := f.Scan(context.Background(), want, folders)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const region = "7f1c00000000-7f1c00004000 rw-s 00000000 00:1b 17   /dev/shm/r"

func TestScan(t *testing.T) {
	id := ID{unix.Mkdev(0, 0x1b), 17}
	f := machine(t, map[string]string{
		"proc/7/comm": "en\x1bg\ni\xffne\n", "proc/7/maps": region + "\n" + region + "\n", "proc/7/fd/.keep": "",
		"proc/9/comm": "other\n", "proc/9/maps": "7f1c00000000-7f1c00004000 rw-s 00000000 00:1c 17   /dev/shm/r\n", "proc/9/fd/.keep": "",
		"proc/11/comm": "cut", "proc/11/maps": region[:20], "proc/11/fd/.keep": "",
		"proc/12/maps": strings.Repeat("x", maxLine+1), "proc/12/fd/.keep": "",
		// The first thread has ended.
		"proc/20/comm": "threads\n", "proc/20/maps": "", "proc/20/fd/.keep": "", "proc/20/task/20/maps": "", "proc/20/task/20/fd/.keep": "",
		"proc/20/task/21/maps": region + "\n", "proc/20/task/21/fd/.keep": "",
		"proc/self/maps": region + "\n", "proc/077/maps": region + "\n",
	})
	s := scan(t, f, map[ID]bool{id: true})
	if got := s.Holders[id]; len(got) != 2 || got[0] != (Holder{7, "en\ufffdg\ufffdi\ufffdne", true, false}) || got[1] != (Holder{20, "threads", true, false}) {
		t.Errorf("holders %+v", got)
	}
	if s.Processes != 5 || s.Unreadable != 2 || len(s.Nameless) != 0 {
		t.Errorf("%+v", s)
	}
}

func TestNameless(t *testing.T) {
	deleted := strings.Replace(region, "/r", "/r (deleted)", 1) + "\n"
	shifted := strings.Replace(deleted, "00000000 00:1b", "00002000 00:1b", 1)
	f := machine(t, map[string]string{
		"proc/7/comm": "a\n", "proc/7/maps": deleted + deleted, "proc/7/fd/.keep": "",
		"proc/8/comm": "b\n", "proc/8/maps": deleted + shifted, "proc/8/fd/.keep": "",
		"proc/9/comm": "c\n", "proc/9/maps": strings.ReplaceAll(deleted, "/dev/shm/", "/memfd:"), "proc/9/fd/.keep": "",
	})
	s := scan(t, f, nil, Folder{Path: "/dev/shm"})
	if s.NamelessBytes != 0x6000 || len(s.Nameless) != 2 || s.Nameless[0] != (Nameless{8, "b", 0x6000}) || s.Nameless[1] != (Nameless{7, "a", 0x4000}) {
		t.Errorf("by path: %+v", s)
	}
	if s = scan(t, f, nil, Folder{Path: "/elsewhere", Dev: unix.Mkdev(0, 0x1b)}); len(s.Nameless) != 3 {
		t.Errorf("by device: %+v", s)
	}
	// A file that has a name may be called so.
	if s = scan(t, f, map[ID]bool{{unix.Mkdev(0, 0x1b), 17}: true}, Folder{Path: "/dev/shm"}); len(s.Nameless) != 0 {
		t.Errorf("with a name: %+v", s)
	}
}

// TestThisProcess finds what this process holds, by each way.
func TestThisProcess(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "holders-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	f, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(3 * 4096); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	id := ID{uint64(st.Dev), st.Ino}
	look := func() *Scan { return scan(t, FS{}, map[ID]bool{id: true}) }
	if h := look().Holders[id]; len(h) != 1 || h[0].PID != os.Getpid() || !h[0].Open || h[0].Mapped || h[0].Comm == "" {
		t.Errorf("open: %+v", h)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, 3*4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if h := look().Holders[id]; len(h) != 1 || !h[0].Open || !h[0].Mapped {
		t.Errorf("open and mapped: %+v", h)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if h := look().Holders[id]; len(h) != 1 || h[0].Open || !h[0].Mapped {
		t.Errorf("mapped: %+v", h)
	}
	if err := unix.Munmap(mem); err != nil {
		t.Fatal(err)
	}
	if s := look(); len(s.Holders[id]) != 0 || s.Processes == 0 {
		t.Errorf("nobody: %+v", s.Holders[id])
	}
}

func TestScanEnds(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	cause := errors.New("enough")
	cancel(cause)
	if _, err := (FS{}).Scan(ctx, nil, nil); !errors.Is(err, cause) {
		t.Errorf("error %v", err)
	}
	if _, err := (FS{Root: t.TempDir()}).Scan(context.Background(), nil, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without proc: %v", err)
	}
}
