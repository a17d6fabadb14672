package bench_test

import (
	"encoding/json"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvlift/bench"
	"kvlift/block"
	"kvlift/client"
	"kvlift/trace"
	"kvlift/wire"
)

const draining = 6 // the reason of a refusal; engine.Draining

func daemon(t *testing.T, args ...string) *bench.Daemon {
	t.Helper()
	d, err := bench.StartDaemon(t.Context(), binary, append([]string{"--ram", "4MiB", "--min-idle", "0s"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func engine(t *testing.T, d *bench.Daemon, id string) *client.Engine {
	t.Helper()
	e, err := client.Open(t.Context(), bench.EngineConfig(d.Socket, id, block.PageSize))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() }) // its daemon may be gone
	return e
}

func offers(from, n int) (out []block.Offer) {
	for i := range n {
		out = append(out, block.Offer{Key: trace.KeyOf(uint64(from+i), 0), Position: uint32(i+1) * trace.BlockTokens})
	}
	return out
}

// verify runs kvlift verify on the daemon's files.
func verify(t *testing.T, d *bench.Daemon) (clean bool, ready, reserved int) {
	t.Helper()
	out, err := exec.Command(binary, "verify", "--json", "--name", "bench", "--arena", d.Dir).Output()
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Clean           bool
		Ready, Reserved int
	}
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatal(err)
	}
	return r.Clean, r.Ready, r.Reserved
}

// drains starts a stop and waits until the daemon refuses new stores.
func drains(t *testing.T, d *bench.Daemon, e *client.Engine) (stopped chan error) {
	t.Helper()
	stopped = make(chan error, 1)
	go func() { stopped <- d.Stop() }()
	var r client.Reservation
	for n := 1000; ; n++ {
		if err := e.Reserve(uint64(n), offers(n, 1), &r); err != nil {
			t.Fatal(err)
		}
		if r.Reason == draining {
			return stopped
		}
		if r.Job == 0 {
			t.Fatalf("refused for reason %d", r.Reason)
		}
		e.Abort(r.Job)
		e.Finish(uint64(n), 0, 0, wire.NoHint)
	}
}

// TestDrain: a daemon that is asked to end refuses new stores, waits for the one under way, and keeps what it brings.
func TestDrain(t *testing.T) {
	d := daemon(t, "--shutdown-timeout", "60s")
	e := engine(t, d, "e")
	var r client.Reservation
	if err := e.Reserve(1, offers(0, 3), &r); err != nil || len(r.Keys) != 3 {
		t.Fatalf("%+v, %v", r, err)
	}
	job := r.Job
	stopped := drains(t, d, e)
	e.Commit(job)
	if err := e.Sync(10 * time.Second); err != nil {
		t.Error(err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if clean, ready, reserved := verify(t, d); !clean || ready != 3 || reserved != 0 {
		t.Errorf("clean %v, %d ready, %d reserved", clean, ready, reserved)
	}
}

// TestDrainTimeout: it waits as long as it may, ends in order all the same, and leaves the store to its engine, which
// brings it to the next daemon.
func TestDrainTimeout(t *testing.T) {
	const timeout = 300 * time.Millisecond
	d := daemon(t, "--shutdown-timeout", timeout.String())
	e := engine(t, d, "e")
	var r client.Reservation
	if err := e.Reserve(1, offers(0, 3), &r); err != nil || len(r.Keys) != 3 {
		t.Fatalf("%+v, %v", r, err)
	}
	job, began := r.Job, time.Now()
	if err := <-drains(t, d, e); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took < timeout || took > 10*time.Second {
		t.Errorf("it ended after %v", took)
	}
	if !strings.Contains(d.Log(), "jobs were still open") {
		t.Errorf("the log says %q", d.Log())
	}
	if clean, ready, reserved := verify(t, d); !clean || ready != 0 || reserved != 3 {
		t.Errorf("clean %v, %d ready, %d reserved", clean, ready, reserved)
	}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	for limit := time.Now().Add(10 * time.Second); e.Counters().Reconnects == 0; e.StepEnd() {
		if time.Now().After(limit) {
			t.Fatal("the engine does not come back")
		}
	}
	e.Commit(job)
	if err := e.Sync(10 * time.Second); err != nil {
		t.Error(err)
	}
	if st, err := d.Status(t.Context(), false); err != nil || st.Tiers[0].Keys != 3 || st.Tiers[0].ReservedKeys != 0 {
		t.Errorf("%+v, %v", st.Tiers, err)
	}
}

// TestSecondSignal: who cannot wait says so again.
func TestSecondSignal(t *testing.T) {
	d := daemon(t, "--shutdown-timeout", "1h")
	e := engine(t, d, "e")
	var r client.Reservation
	if err := e.Reserve(1, offers(0, 3), &r); err != nil || len(r.Keys) != 3 {
		t.Fatalf("%+v, %v", r, err)
	}
	stopped := drains(t, d, e)
	if err := syscall.Kill(d.PID(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-stopped; err == nil {
		t.Error("it ended as if it had drained")
	}
	if clean, ready, reserved := verify(t, d); clean || ready != 0 || reserved != 3 {
		t.Errorf("clean %v, %d ready, %d reserved", clean, ready, reserved)
	}
}
