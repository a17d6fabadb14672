package sweep

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestTwoSweeps: many at once remove each file once.
func TestTwoSweeps(t *testing.T) {
	const files, sweeps = 500, 4
	dir := shm(t)
	for i := range files {
		region(t, dir, fmt.Sprintf("vllm_offload_%d.mmap", i))
	}
	var helpers []*helper
	for range sweeps {
		helpers = append(helpers, spawn(t, "sweep", nil, dir))
	}
	removed, freed, by := 0, uint64(0), []int{}
	for _, h := range helpers {
		r := h.report()
		by = append(by, r.Count("", Removed))
		removed += r.Count("", Removed)
		freed += r.FreedBytes
		if n := r.Count("", Kept) + r.Count("", Failed); n > 0 {
			t.Errorf("%d files kept or failed: %+v", n, r.Files[0])
		}
	}
	t.Logf("%d files removed by %v, %d bytes", removed, by, freed)
	if removed != files || freed != files*regionSize {
		t.Errorf("%d removed and %d bytes freed, of %d and %d", removed, freed, files, files*regionSize)
	}
	if n := namesIn(t, dir); len(n) > 0 {
		t.Errorf("left: %v", n)
	}
}

// TestTwoSweepsUnlocked: the lock keeps them apart for speed alone.
func TestTwoSweepsUnlocked(t *testing.T) {
	const files = 300
	dir := shm(t)
	for i := range files {
		region(t, dir, fmt.Sprintf("vllm_offload_%d.mmap", i))
	}
	root := emptyProc(t)
	var mu sync.Mutex
	removed := map[string]int{}
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			o := options(dir)
			o.Root, o.PID = root, i+1
			now, ticks := time.Now(), 0
			o.Now = func() time.Time { ticks++; return now.Add(time.Duration(ticks) * time.Second) } // nobody waits for a lock
			for range 20 {
				r, err := Run(context.Background(), o)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, f := range r.Files {
					if f.Action == Removed {
						removed[filepath.Base(f.Path)]++
					}
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for name, n := range removed {
		if n != 1 {
			t.Errorf("%s was removed %d times", name, n)
		}
	}
	run(t, dir, func(o *Options) { o.Root = root })
	if n := namesIn(t, dir); len(n) > 0 {
		t.Errorf("left: %v", n)
	}
}

// TestManyFiles has no more time than a boot may lose.
func TestManyFiles(t *testing.T) {
	const files = 10_000
	dir := shm(t)
	for i := range files {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("vllm_offload_%d.mmap", i)), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, del := range []bool{false, true} {
		start, before := time.Now(), cpuTime(t)
		r := run(t, dir, func(o *Options) { o.Delete = del })
		took := cpuTime(t) - before // what it takes when nobody else wants the processor
		t.Logf("%d files, delete %v: %v of processor time, %v on the clock", len(r.Files), del, took.Round(time.Millisecond), time.Since(start).Round(time.Millisecond))
		if n := r.Count(Stale, ""); n != files || del && r.Count("", Removed) != files {
			t.Errorf("%d stale of %d", n, files)
		}
		if took > time.Second && !raceDetector {
			t.Errorf("%v for %d files", took, files)
		}
	}
	if r := run(t, dir, nil); len(r.Files) != 0 {
		t.Errorf("%d files left", len(r.Files))
	}
}

// cpuTime is what this process has used.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestWait: an engine that was told to end holds its region for a while.
func TestWait(t *testing.T) {
	dir := shm(t)
	h := spawn(t, "hold", nil, region(t, dir, regionName), "mapped")
	h.expect("ready")
	other := region(t, dir, "vllm_offload_1.mmap")
	rounds := 0
	r := run(t, dir, func(o *Options) {
		o.Wait = time.Hour
		o.Pause = func(context.Context, time.Duration) error {
			if rounds++; rounds == 3 {
				h.kill()
			}
			return nil
		}
	})
	if rounds != 3 || r.Count(Stale, Removed) != 2 || r.FreedBytes != 2*regionSize {
		t.Errorf("%d rounds: %+v", rounds, r)
	}
	if _, err := os.Lstat(other); err == nil {
		t.Error("the other one is there")
	}
}
