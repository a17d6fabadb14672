package sweep

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The processes of these tests are this binary run again with a mode in its environment. All of them end when their
// standard input does, so that none outlives its test.
const modeVar = "KVLIFT_TEST_SWEEP"

func TestMain(m *testing.M) {
	mode := os.Getenv(modeVar)
	if mode == "" {
		os.Exit(m.Run())
	}
	if os.Getenv("NEWPROC") != "" { // the first process of a PID namespace sees its own processes alone
		err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		if err = errors.Join(err, unix.Mount("proc", "/proc", "proc", 0, "")); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
	}
	run, ok := map[string]func(args []string) error{
		"hold": holdMode, "populate": populateMode, "sweep": sweepMode, "loop": loopMode, "rank": rankMode, "stop": stopMode, "vllm": vllmMode,
	}[mode]
	if !ok {
		fmt.Println("error: no mode", mode)
		os.Exit(1)
	}
	if err := run(os.Args[1:]); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

// helper is such a process.
type helper struct {
	t    *testing.T
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	errs *bytes.Buffer
}

// spawn starts a helper; change may set what its process is to be.
func spawn(t *testing.T, mode string, change func(*exec.Cmd), args ...string) *helper {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe, args...)
	c.Env = append(os.Environ(), modeVar+"="+mode)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	h := &helper{t: t, cmd: c, errs: &bytes.Buffer{}}
	c.Stderr = h.errs
	if change != nil {
		change(c)
	}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	h.in, h.out = in, bufio.NewReader(out)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.kill)
	return h
}

// elsewhere puts a helper into PID and mount namespaces of its own.
func elsewhere(c *exec.Cmd) {
	c.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID | syscall.CLONE_NEWNS
	c.Env = append(c.Env, "NEWPROC=1")
}

// as runs a helper as another user, without capabilities.
func as(uid uint32) func(*exec.Cmd) {
	return func(c *exec.Cmd) { c.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid} }
}

// line reads the next line of the helper.
func (h *helper) line() string {
	h.t.Helper()
	s, err := h.out.ReadString('\n')
	if err != nil {
		h.t.Fatalf("helper: %v: %s%s", err, s, h.errs)
	}
	return strings.TrimSuffix(s, "\n")
}

// expect reads the next line, which has to be want.
func (h *helper) expect(want string) {
	h.t.Helper()
	if got := h.line(); got != want {
		h.t.Fatalf("helper says %q, want %q", got, want)
	}
}

func (h *helper) tell(format string, args ...any) {
	h.t.Helper()
	if _, err := fmt.Fprintf(h.in, format+"\n", args...); err != nil {
		h.t.Fatal(err)
	}
}

// kill is SIGKILL; it returns when the process is gone.
func (h *helper) kill() {
	_ = h.cmd.Process.Kill() // it may have ended
	_ = h.cmd.Wait()         // twice is an error
}

// finish lets the helper end by itself and returns what it still had to say.
func (h *helper) finish() string {
	h.t.Helper()
	if err := h.in.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		h.t.Error(err)
	}
	rest, err := io.ReadAll(h.out)
	if err = errors.Join(err, h.cmd.Wait()); err != nil {
		h.t.Fatalf("helper: %v: %s%s", err, rest, h.errs)
	}
	return string(rest)
}

func waitForEnd() { _, _ = io.Copy(io.Discard, os.Stdin) }

// holdMode PATH HOW holds a file.
func holdMode(args []string) error {
	path, how := args[0], args[1]
	flags, prot := os.O_RDWR, unix.PROT_READ|unix.PROT_WRITE
	if strings.HasSuffix(how, "read-only") {
		flags, prot = os.O_RDONLY, unix.PROT_READ
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return err
	}
	switch {
	case strings.HasPrefix(how, "mapped"):
		st, err := f.Stat()
		if err != nil {
			return err
		}
		if _, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), prot, unix.MAP_SHARED); err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	case how == "flock":
		if err := unix.Flock(int(f.Fd()), unix.LOCK_SH); err != nil {
			return err
		}
	case how == "ofd":
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 7, Len: 1}); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	waitForEnd()
	return f.Close()
}

// populateMode PATH BYTES does what an engine does at its boot: make the region, size it, map it, touch every page.
func populateMode(args []string) error {
	var size int
	if _, err := fmt.Sscan(args[1], &size); err != nil {
		return err
	}
	f, err := os.OpenFile(args[0], os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := f.Truncate(int64(size)); err != nil {
		return err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	if err := unix.Madvise(mem, unix.MADV_POPULATE_WRITE); err != nil {
		fmt.Println("populate:", err)
	} else {
		fmt.Println("populated")
	}
	waitForEnd()
	return nil
}

// options are those of a sweep of dir that sees all processes.
func options(dir string) Options {
	return Options{Dirs: []string{dir}, Delete: true, DefaultAge: true, UID: uint32(os.Geteuid()), Now: time.Now, PID: os.Getpid(),
		Pause: func(_ context.Context, d time.Duration) error { time.Sleep(d); return nil }}
}

// sweepMode DIR [dry] sweeps once and prints the report.
func sweepMode(args []string) error {
	o := options(args[0])
	o.Delete = len(args) == 1
	r, err := Run(context.Background(), o)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// report reads what sweepMode prints.
func (h *helper) report() *Report {
	h.t.Helper()
	var r Report
	if s := h.finish(); json.Unmarshal([]byte(s), &r) != nil {
		h.t.Fatalf("no report: %s", s)
	}
	return &r
}

// shm makes an empty folder on the memory file system.
func shm(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "sweep-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // a leftover would be memory; nobody is left to be told
	return dir
}

// small mounts a tmpfs of a size of its own.
func small(t *testing.T, options string) string {
	t.Helper()
	needRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
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

const (
	regionName = "vllm_offload_7d2c4a10-51aa-4f0e-8f53-6b1a90c2d4e8.mmap"
	regionSize = 64 << 10
)

// region leaves a region that nobody holds.
func region(t testing.TB, dir, name string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, bytes.Repeat([]byte{0xa5}, regionSize), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// run sweeps dir once, with o changed.
func run(t testing.TB, dir string, change func(*Options)) *Report {
	t.Helper()
	o := options(dir)
	if change != nil {
		change(&o)
	}
	r, err := Run(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// only is the one file of a report.
func only(t testing.TB, r *Report) File {
	t.Helper()
	if len(r.Files) != 1 {
		t.Fatalf("%d files: %+v", len(r.Files), r.Files)
	}
	return r.Files[0]
}

// want compares the verdict and the action of the only file.
func want(t testing.TB, r *Report, v Verdict, a Action) File {
	t.Helper()
	f := only(t, r)
	if f.Verdict != v || f.Action != a {
		t.Fatalf("%s is %s and was %s (%v: %s), want %s, %s", f.Path, f.Verdict, f.Action, f.Evidence, f.Reason, v, a)
	}
	return f
}

// inode is the file's identity.
func inode(t testing.TB, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return st.Ino
}

// names lists a folder.
func namesIn(t testing.TB, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range list {
		out = append(out, e.Name())
	}
	return out
}
