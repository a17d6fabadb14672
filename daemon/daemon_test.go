package daemon_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvlift/arena"
	"kvlift/daemon"
	"kvlift/status"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// logged is a log in JSON that is written and read by several goroutines.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// find returns an attribute of the first record with a message.
func (l *logged) find(t *testing.T, msg, attr string) string {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range bytes.Lines(l.b.Bytes()) {
		var r map[string]any
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		if s, ok := r[attr].(string); ok && r["msg"] == msg {
			return s
		}
	}
	t.Fatalf("no %s with %s in the log:\n%s", msg, attr, l.b.Bytes())
	return ""
}

func options(t *testing.T) (daemon.Options, *logged) {
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
	l := &logged{}
	return daemon.Options{Name: "t", Version: "test", Socket: filepath.Join(dir, "s"), Dir: filepath.Join(dir, "a"), RAMBytes: 1 << 20, Policy: "lru",
		UIDs: []uint32{uint32(os.Geteuid())}, MaxConnections: 16, ShutdownTimeout: 10 * time.Second, Log: slog.New(slog.NewJSONHandler(l, nil))}, l
}

// TestServiceManager: the service manager hears that the daemon is ready once it answers, and not before, and that it is
// ending as soon as it is asked to.
func TestServiceManager(t *testing.T) {
	o, log := options(t)
	o.NotifyAddr = filepath.Join(filepath.Dir(o.Dir), "notify")
	o.HTTP = "127.0.0.1:0"
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: o.NotifyAddr, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	if err := manager.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	hear := func(want string) {
		t.Helper()
		b := make([]byte, 4096)
		for {
			n, err := manager.Read(b)
			if err != nil {
				t.Fatalf("waiting for %q: %v", want, err)
			}
			for line := range strings.Lines(string(b[:n])) {
				switch line = strings.TrimSpace(line); {
				case line == want:
					return
				case !strings.HasPrefix(line, "STATUS=") && !strings.HasPrefix(line, "EXTEND_TIMEOUT_USEC="):
					t.Errorf("%q before %q", line, want)
				}
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- daemon.Run(ctx, o) }()
	hear("READY=1")
	c, err := net.Dial("unix", o.Socket)
	if err != nil {
		t.Fatalf("ready and nobody answers: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	base := "http://" + log.find(t, "http", "address")
	get := func(path string) (int, string) {
		t.Helper()
		r, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get(base + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(b)
	}
	if code, body := get("/healthz"); code != http.StatusOK {
		t.Errorf("healthz: %d %s", code, body)
	}
	if code, body := get("/metrics"); code != http.StatusOK || !strings.Contains(body, "\nkvlift_") {
		t.Errorf("metrics: %d %.200s", code, body)
	}
	code, body := get("/status")
	if doc, err := status.Parse([]byte(body)); code != http.StatusOK || err != nil || doc.Name != "t" || doc.Tiers[0].TotalBytes != 1<<20 || doc.PID != os.Getpid() {
		t.Errorf("status: %d %s %v", code, body, err)
	}
	cancel()
	hear("STOPPING=1")
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(o.Socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

// TestEndedAtStart: a daemon that is asked to end while it makes its arena was not wrong, and leaves none.
func TestEndedAtStart(t *testing.T) {
	o, _ := options(t)
	ctx, cancel := context.WithCancel(t.Context())
	o.Progress = func(arena.Progress) { cancel() } // the pages are there, their names are not
	if err := daemon.Run(ctx, o); err != nil {
		t.Error(err)
	}
	cancel()
	if err := daemon.Run(ctx, o); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(o.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v is left, %v", left, err)
	}
}
