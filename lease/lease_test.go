package lease_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/lease"
)

// TestMain is also the process that holds a lease while somebody opens the file: its environment names the file.
func TestMain(m *testing.M) {
	path := os.Getenv("KVLIFT_TEST_LEASE")
	if path == "" {
		os.Exit(m.Run())
	}
	k := lease.Open(time.Now)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		var l *lease.Lease
		if l, err = k.Take(int(f.Fd())); err == nil {
			fmt.Println("taken")
			for l.Whole() { // until somebody comes
			}
			fmt.Println("seen")
			_, _ = os.Stdin.Read(make([]byte, 1))
			err = errors.Join(l.Release(), f.Close())
		}
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) // some tests have
	return f
}

func kernel(t *testing.T, now func() time.Time) *lease.Kernel {
	k := lease.Open(now)
	t.Cleanup(k.Close)
	return k
}

// TestProbe: leases work on this machine's memory and disk, and are not believed where other kernels may write.
func TestProbe(t *testing.T) {
	k := kernel(t, time.Now)
	for _, dir := range []string{"/dev/shm", t.TempDir()} {
		d, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		steps, err := k.Probe(int(d.Fd()))
		if err != nil || len(steps) != 6 {
			t.Errorf("%s: %d steps, %v", dir, len(steps), err)
		}
		for _, s := range steps {
			t.Logf("%s: %s: %v", dir, s.What, s.Err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	d, err := os.Open("/proc")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if steps, err := k.Probe(int(d.Fd())); !errors.Is(err, lease.ErrNoAnswer) || len(steps) != 0 {
		t.Errorf("/proc: %v, %v", steps, err)
	}
}

// TestProbeFull: a memory file system that is full, or that may not be written, is where the answer is wanted most.
func TestProbeFull(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("CI must run this as root")
		}
		t.Skip("only root can do this")
	}
	k := kernel(t, time.Now)
	for _, options := range []string{"size=4k,nr_inodes=2", "ro"} {
		dir := t.TempDir()
		flags := uintptr(0)
		if options == "ro" {
			options, flags = "", unix.MS_RDONLY
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", flags, options); err != nil {
			t.Fatal(err)
		}
		if flags == 0 {
			if err := os.WriteFile(filepath.Join(dir, "all"), make([]byte, 4096), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "more"), nil, 0o600); err == nil {
				t.Error("it is not full")
			}
		}
		d, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := k.Probe(int(d.Fd())); err != nil {
			t.Errorf("%s: %v", options, err)
		}
		if err := errors.Join(d.Close(), unix.Unmount(dir, 0)); err != nil {
			t.Error(err)
		}
	}
}

func TestTake(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	f := open(t, path)
	now := time.Now()
	k := kernel(t, func() time.Time { return now })
	l, err := k.Take(int(f.Fd()))
	if err != nil || !l.Whole() || !l.InTime() {
		t.Fatalf("Take: %v", err)
	}
	// A lease that is older than the kernel lets one be while somebody waits proves nothing.
	now = now.Add(time.Minute)
	if l.Whole() || l.InTime() {
		t.Error("whole after a minute")
	}
	now = now.Add(-time.Minute)
	// Somebody comes.
	if fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("opened: %d, %v", fd, err)
	}
	if l.Whole() || !l.InTime() {
		t.Error("nobody was seen")
	}
	if err := errors.Join(l.Release(), l.Release()); err != nil {
		t.Error(err)
	}
	other := open(t, path)
	if _, err := k.Take(int(f.Fd())); !errors.Is(err, lease.ErrHeld) {
		t.Errorf("with another descriptor: %v", err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if l, err := k.Take(int(f.Fd())); err != nil || l.Release() != nil {
		t.Errorf("alone again: %v", err)
	}
	if _, err := k.Take(-1); !errors.Is(err, lease.ErrNoAnswer) {
		t.Errorf("of no file: %v", err)
	}
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if _, err := k.Take(int(dir.Fd())); !errors.Is(err, lease.ErrNoAnswer) {
		t.Errorf("of a folder: %v", err)
	}
}

func TestLocks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	f, other := open(t, path), open(t, path)
	fd := int(f.Fd())
	if err := errors.Join(lease.Flocked(fd), lease.RangeLocked(fd)); err != nil {
		t.Fatal(err)
	}
	for _, how := range []int{unix.LOCK_SH, unix.LOCK_EX} {
		if err := unix.Flock(int(other.Fd()), how); err != nil {
			t.Fatal(err)
		}
		if err := lease.Flocked(fd); !errors.Is(err, lease.ErrHeld) {
			t.Errorf("flock %d: %v", how, err)
		}
	}
	for _, kind := range []int16{unix.F_RDLCK, unix.F_WRLCK} {
		if err := unix.FcntlFlock(other.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Start: 1 << 40, Len: 1}); err != nil {
			t.Fatal(err)
		}
		if err := lease.RangeLocked(fd); !errors.Is(err, lease.ErrHeld) {
			t.Errorf("range %d: %v", kind, err)
		}
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(lease.Flocked(fd), lease.RangeLocked(fd)); err != nil {
		t.Error(err)
	}
	if err := lease.Flocked(-1); !errors.Is(err, lease.ErrNoAnswer) {
		t.Errorf("of no file: %v", err)
	}
	if err := lease.RangeLocked(-1); !errors.Is(err, lease.ErrNoAnswer) {
		t.Errorf("of no file: %v", err)
	}
}

// TestSignal: the kernel announces who comes with SIGIO. The process lives, and who comes waits until it is let in.
func TestSignal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe)
	c.Env = append(os.Environ(), "KVLIFT_TEST_LEASE="+path)
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
	var taken, seen string
	if _, err := fmt.Fscan(out, &taken); err != nil || taken != "taken" {
		t.Fatalf("%q, %v", taken, err)
	}
	came := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err == nil {
			err = f.Close()
		}
		came <- err
	}()
	if _, err := fmt.Fscan(out, &seen); err != nil || seen != "seen" {
		t.Fatalf("%q, %v", seen, err)
	}
	select {
	case err := <-came:
		t.Errorf("it did not wait: %v", err)
	default:
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-came; err != nil {
		t.Error(err)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("the holder of the lease: %v", err)
	}
}
