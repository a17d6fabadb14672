package sweep

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestVLLM has vLLM's own code make a region: KVLIFT_TEST_VLLM names a Python that has vLLM, without it there is nothing to
// test. A running engine's region is kept, a killed one's is named and removed.
func TestVLLM(t *testing.T) {
	if os.Getenv("KVLIFT_TEST_VLLM") == "" {
		t.Skip("KVLIFT_TEST_VLLM names no Python with vLLM")
	}
	needRoot(t)
	// vLLM knows /dev/shm alone, so that is another one for these processes.
	h := spawn(t, "vllm", func(c *exec.Cmd) { c.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS })
	out := h.finish()
	t.Log("\n" + out)
	for _, want := range []string{"running: live, kept by maps fd", "running, unseen: live, kept by lease", "killed: stale, removed", "freed 64 MiB"} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q", want)
		}
	}
}

// vllmMode is the test in a mount namespace of its own.
func vllmMode([]string) error {
	const id, mib = "7d2c4a10-51aa-4f0e-8f53-6b1a90c2d4e8", 64
	err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err = errors.Join(err, unix.Mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=256m")); err != nil {
		return err
	}
	c := exec.Command(os.Getenv("KVLIFT_TEST_VLLM"), "testdata/region.py", id, fmt.Sprint(mib))
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err1 := c.StdinPipe()
	out, err2 := c.StdoutPipe()
	var errs strings.Builder
	c.Stderr = &errs
	if err := errors.Join(err1, err2, c.Start()); err != nil {
		return err
	}
	defer in.Close()
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "mapped ") { // vLLM logs there, too
	}
	if lines.Err() != nil || lines.Text() == "" {
		return fmt.Errorf("no region: %s", errs.String())
	}
	fmt.Println(lines.Text())
	look := func(what string, change func(*Options)) error {
		o := options("/dev/shm")
		if change != nil {
			change(&o)
		}
		r, err := Run(context.Background(), o)
		if err != nil {
			return err
		}
		for _, f := range r.Files {
			fmt.Printf("%s: %s, %s by %s: %s: %s\n", what, f.Verdict, f.Action, strings.Join(f.Evidence, " "), f.Path, f.Reason)
		}
		if r.FreedBytes > 0 {
			fmt.Printf("freed %d MiB\n", r.FreedBytes>>20)
		}
		return nil
	}
	root, err := os.MkdirTemp("", "noproc")
	if err != nil {
		return err
	}
	defer os.RemoveAll(root)
	if err := os.Mkdir(root+"/proc", 0o755); err != nil {
		return err
	}
	err = errors.Join(look("running", nil), look("running, unseen", func(o *Options) { o.Root = root }), c.Process.Kill())
	_, _ = io.Copy(io.Discard, out) // until it is gone
	_ = c.Wait()                    // it was killed
	return errors.Join(err, look("killed", nil), look("after that", nil))
}
