package notify

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"
)

// manager listens as a service manager would.
func manager(t *testing.T, addr string) *net.UnixConn {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: addr, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // the test is over
	return conn
}

func receive(t *testing.T, conn *net.UnixConn) string {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 8192)
	n, err := conn.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

func TestMessages(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for name, addr := range map[string]string{"path": path, "abstract": "@" + path} {
		t.Run(name, func(t *testing.T) {
			conn := manager(t, addr)
			n, err := New(addr)
			if err != nil {
				t.Fatal(err)
			}
			for _, tc := range []struct {
				name string
				send func() error
				want string
			}{
				{"ready", func() error { return n.Ready("") }, "READY=1"},
				{"ready with status", func() error { return n.Ready("12 GiB in use") }, "READY=1\nSTATUS=12 GiB in use"},
				{"status", func() error { return n.Status("größer") }, "STATUS=größer"},
				{"no status", func() error { return n.Status("") }, "STATUS="},
				{"injection", func() error { return n.Status("x\nSTOPPING=1\r\n\x00y") }, "STATUS=x STOPPING=1   y"},
				{"injection when ready", func() error { return n.Ready("x\nMAINPID=1") }, "READY=1\nSTATUS=x MAINPID=1"},
				{"not UTF-8", func() error { return n.Status("a\xffb") }, "STATUS=a\ufffdb"},
				{"stopping", func() error { return n.Stopping() }, "STOPPING=1"},
				{"extend", func() error { return n.ExtendTimeout(90 * time.Second) }, "EXTEND_TIMEOUT_USEC=90000000"},
				{"extend, rounded up", func() error { return n.ExtendTimeout(1) }, "EXTEND_TIMEOUT_USEC=1"},
				{"extend for ever", func() error { return n.ExtendTimeout(1<<63 - 1) }, "EXTEND_TIMEOUT_USEC=9223372036854776"},
				{"watchdog", func() error { return n.Watchdog() }, "WATCHDOG=1"},
			} {
				if err := tc.send(); err != nil {
					t.Fatalf("%s: %v", tc.name, err)
				}
				if got := receive(t, conn); got != tc.want {
					t.Errorf("%s: sent %q, want %q", tc.name, got, tc.want)
				}
			}
		})
	}
}

func TestLongStatus(t *testing.T) {
	for _, s := range []string{
		strings.Repeat("x", 1<<20),
		strings.Repeat("ü", 1<<10),
		"x" + strings.Repeat("ü", 1<<10),
		strings.Repeat("\xff", 1<<20),
		strings.Repeat("\x80", 1<<20),
		"x" + strings.Repeat("\U0001f600", 1<<10),
	} {
		got := line(s)
		if len(got) > maxStatusBytes || !utf8.ValidString(got) {
			t.Errorf("line(%.8q...) has %d bytes, valid UTF-8: %v", s, len(got), utf8.ValidString(got))
		}
	}
}

func FuzzLine(f *testing.F) {
	f.Add("a\nb")
	f.Add("\xff\u2028")
	f.Fuzz(func(t *testing.T, s string) {
		got := line(s)
		if strings.ContainsAny(got, "\n\r\x00") || !utf8.ValidString(got) || len(got) > maxStatusBytes {
			t.Errorf("line(%q) = %q", s, got)
		}
		if again := line(got); again != got {
			t.Errorf("line(%q) = %q, and of that %q", s, got, again)
		}
	})
}

func TestNew(t *testing.T) {
	for addr, ok := range map[string]bool{
		"":                               true,
		"/run/systemd/notify":            true,
		"@abstract":                      true,
		"/" + strings.Repeat("x", 106):   true,
		"/" + strings.Repeat("x", 107):   false,
		"relative":                       false,
		"vsock:2:1234":                   false,
		"/":                              false,
		"@":                              false,
		"/run/a\x00b":                    false,
		"@" + strings.Repeat("x", 1<<16): false,
	} {
		if _, err := New(addr); (err == nil) != ok {
			t.Errorf("New(%.40q) = %v, want success: %v", addr, err, ok)
		}
	}
}

func TestNobody(t *testing.T) {
	var n Notifier
	for _, err := range []error{n.Ready("x"), n.Status("x"), n.Stopping(), n.ExtendTimeout(1), n.Watchdog()} {
		if err != nil {
			t.Errorf("the zero notifier: %v", err)
		}
	}
	if n.ExtendTimeout(0) == nil {
		t.Error("ExtendTimeout(0) succeeded")
	}
	n, err := New(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Stopping(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Stopping without a socket: %v, want not exist", err)
	}
}

// TestDeafManager fills the socket of a manager that does not read: the call must come back.
func TestDeafManager(t *testing.T) {
	addr := filepath.Join(t.TempDir(), "s")
	manager(t, addr)
	n, err := New(addr)
	if err != nil {
		t.Fatal(err)
	}
	for range 10000 {
		if err = n.Watchdog(); err != nil {
			break
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a full socket: %v, want a timeout", err)
	}
}

func TestConcurrent(t *testing.T) {
	addr := filepath.Join(t.TempDir(), "s")
	conn := manager(t, addr)
	n, err := New(addr)
	if err != nil {
		t.Fatal(err)
	}
	const senders = 8
	var wg sync.WaitGroup
	for i := range senders {
		wg.Go(func() {
			if err := n.Status(fmt.Sprint(i)); err != nil {
				t.Error(err)
			}
		})
	}
	seen := map[string]bool{}
	for range senders {
		seen[receive(t, conn)] = true
	}
	wg.Wait()
	if len(seen) != senders {
		t.Errorf("received %d different messages, want %d", len(seen), senders)
	}
}
