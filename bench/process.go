package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"kvlift/client"
	"kvlift/host"
	"kvlift/status"
)

// Daemon is a kvlift serve of one's own: a process on an arena in a temporary folder of the memory file system.
type Daemon struct {
	Socket string
	Dir    string // of the arena
	binary string
	tmp    string
	args   []string
	cmd    *exec.Cmd
	exited chan error
	log    *tail
}

// shm is where temporary arenas lie.
const shm = "/dev/shm"

// StartDaemon runs binary serve with the given flags behind those for socket and arena, and waits until it answers.
// Close it to remove everything.
func StartDaemon(ctx context.Context, binary string, args ...string) (*Daemon, error) {
	tmp, err := os.MkdirTemp(shm, "kvlift-bench-")
	if err != nil {
		return nil, err
	}
	d := &Daemon{Socket: filepath.Join(tmp, "sock"), Dir: filepath.Join(tmp, "arena"), binary: binary, tmp: tmp, args: args}
	if err := d.Start(ctx); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// tail keeps the end of what a process says on stderr.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if len(t.b) > 8192 {
		t.b = t.b[len(t.b)-8192:]
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.b))
}

// Start runs the daemon again after Kill or Stop, with more flags if there are some, and waits until it answers.
func (d *Daemon) Start(ctx context.Context, more ...string) error {
	args := append([]string{"serve", "--name", "bench", "--socket", d.Socket, "--arena", d.Dir, "--log-level", "warn"}, d.args...)
	d.cmd = exec.Command(d.binary, append(args, more...)...)
	// Its settings are those of the bench alone.
	d.cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "KVLIFT_") || strings.HasPrefix(v, "NOTIFY_SOCKET=") })
	d.log = &tail{}
	d.cmd.Stderr, d.cmd.Stdout = d.log, io.Discard
	// A bench that is killed takes its daemon with it.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := d.cmd.Start(); err != nil {
		return fmt.Errorf("start a daemon: %w", err)
	}
	d.exited = make(chan error, 1)
	go func(c *exec.Cmd, exited chan<- error) { exited <- c.Wait() }(d.cmd, d.exited)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := client.Status(ctx, d.Socket, false); err == nil {
			return nil
		}
		select {
		case err := <-d.exited:
			d.exited <- err
			return fmt.Errorf("the daemon ended: %v: %s", err, d.log)
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// PID of the running daemon.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Kill ends the daemon with SIGKILL and waits for its end.
func (d *Daemon) Kill() error { return d.signal(syscall.SIGKILL) }

// Stop ends the daemon with SIGTERM and waits for its end; an exit status other than 0 is an error.
func (d *Daemon) Stop() error {
	if err := d.signal(syscall.SIGTERM); err != nil {
		return err
	}
	if code := d.cmd.ProcessState.ExitCode(); code != 0 {
		return fmt.Errorf("the daemon ended with exit status %d: %s", code, d.log)
	}
	return nil
}

func (d *Daemon) signal(s syscall.Signal) error {
	if err := d.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	err := <-d.exited
	d.exited <- err
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil // how it ended is in ProcessState
	}
	return err
}

// Log is the end of what the daemon said.
func (d *Daemon) Log() string { return d.log.String() }

// Status asks the daemon.
func (d *Daemon) Status(ctx context.Context, collect bool) (status.Document, error) {
	return AskStatus(ctx, d.Socket, collect)
}

// AskStatus asks the daemon at a socket for its state.
func AskStatus(ctx context.Context, socket string, collect bool) (status.Document, error) {
	raw, err := client.Status(ctx, socket, collect)
	if err != nil {
		return status.Document{}, err
	}
	return status.Parse(raw)
}

// Close kills the daemon and removes its files. It is idempotent.
func (d *Daemon) Close() error {
	var err error
	if d.cmd != nil && d.cmd.Process != nil && d.exited != nil {
		err = d.Kill()
	}
	if strings.HasPrefix(d.tmp, shm+"/kvlift-bench-") {
		err = errors.Join(err, os.RemoveAll(d.tmp))
	}
	return err
}

// Machine says where figures were measured.
type Machine struct {
	Kernel string `json:"kernel"`
	CPU    string `json:"cpu"`
	CPUs   int    `json:"cpus"`
}

// usage is CPU time and resident memory of a process.
func usage(pid int) (cpu float64, rss uint64) {
	var h host.FS
	user, sys, err := h.CPUSeconds(pid)
	if err != nil {
		return 0, 0
	}
	rss, _ = h.RSSBytes(pid) // gone since: 0 says so
	return user + sys, rss
}
