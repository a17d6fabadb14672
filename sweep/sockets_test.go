package sweep

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestSockets: a socket is dead when nobody accepts a connection.
func TestSockets(t *testing.T) {
	dir := t.TempDir()
	const dead, live, fresh = "lmcache_rpc_port_1", "engine_7d2c4a10-51aa-4f0e-8f53-6b1a90c2d4e8_service_lookup_x_lmcache_rpc_port_2", "7d2c4a10-51aa-4f0e-8f53-6b1a90c2d4e8"
	for _, name := range []string{dead, fresh} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name)})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	l, err := net.Listen("unix", live)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dgram, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: "cuda_fd_xchg_1"})
	if err != nil {
		t.Fatal(err)
	}
	defer dgram.Close()
	if err := os.WriteFile("lmcache_rpc_port_9", []byte("no socket"), 0o600); err != nil {
		t.Fatal(err)
	}
	sweepSockets := func(later time.Duration) map[string]File {
		r := run(t, dir, func(o *Options) {
			o.Families = []string{"sockets"}
			o.Now = func() time.Time { return time.Now().Add(later) }
		})
		out := map[string]File{}
		for _, f := range r.Files {
			out[filepath.Base(f.Path)] = f
		}
		return out
	}
	got := sweepSockets(0)
	for name, v := range map[string]Verdict{dead: Starting, fresh: Starting, live: Live, "cuda_fd_xchg_1": Live, "lmcache_rpc_port_9": Foreign} {
		if f := got[name]; f.Verdict != v || f.Action != Kept {
			t.Errorf("%s is %s, %s (%s), want %s", name, f.Verdict, f.Action, f.Reason, v)
		}
	}
	got = sweepSockets(2 * time.Minute)
	for name, a := range map[string]Action{dead: Removed, fresh: Removed, live: Kept, "cuda_fd_xchg_1": Kept, "lmcache_rpc_port_9": Kept} {
		if f := got[name]; f.Action != a {
			t.Errorf("%s was %s (%s), want %s", name, f.Action, f.Reason, a)
		}
	}
	if c, err := net.Dial("unix", live); err != nil {
		t.Errorf("the living one: %v", err)
	} else if err := c.Close(); err != nil {
		t.Error(err)
	}
	if n := namesIn(t, dir); len(n) != 3 {
		t.Errorf("left: %v", n)
	}
}
