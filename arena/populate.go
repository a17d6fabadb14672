package arena

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
)

// Progress of reserving and populating.
type Progress struct {
	Done, Total uint64 // bytes
	Elapsed     time.Duration
	Remaining   time.Duration // by the rate of the last seconds; negative while that is unknown
}

const (
	pieceBytes = 64 << 20 // small enough that progress moves, large enough that system calls do not count
	rateWindow = 5 * time.Second
	every      = 200 * time.Millisecond
)

// preflight compares what the arena needs with what is there, before anything is touched: room on the mount, the
// cgroup's limit, and memory that is available without swapping.
func preflight(c *Config, arenaBytes, metaBytes uint64) error {
	room := func(path string, need uint64, huge bool) error {
		sp, err := c.Host.Space(path)
		if err != nil {
			return &Error{"stat", path, err, ""}
		}
		if huge && !sp.IsHugetlbfs() {
			return &Error{"use", path, fmt.Errorf("%w: it is not on hugetlbfs", ErrKind), "mount one: mount -t hugetlbfs -o pagesize=2M none " + path}
		}
		if !huge && !c.AnyFS && !sp.IsTmpfs() {
			return &Error{"use", path, fmt.Errorf("%w: an arena lies on tmpfs", ErrKind), "leave --arena out, or name a folder on tmpfs; huge pages are given with --hugetlbfs DIR"}
		}
		if !sp.Unlimited && need > sp.FreeBytes {
			return &Error{"reserve", path, fmt.Errorf("%w: %s needed, %s free on the file system of %s", ErrNoRoom, size(need), size(sp.FreeBytes), path),
				"mount it larger (docker run --shm-size), remove what dead engines left there, or give a smaller --ram"}
		}
		return nil
	}
	memory := arenaBytes + metaBytes
	if c.HugeDir != "" {
		if err := room(c.HugeDir, arenaBytes, true); err != nil {
			return err
		}
		memory = metaBytes // huge pages were set aside when the machine was configured
		arenaBytes = 0
	}
	if err := room(c.Dir, arenaBytes+metaBytes, false); err != nil {
		return err
	}
	limit, err := c.Host.CgroupMemory()
	if err != nil {
		return &Error{"read the memory limit of the control group", "", err, ""}
	}
	if !limit.Unlimited && memory > limit.RoomBytes() {
		return &Error{"reserve", c.Dir, fmt.Errorf("%w: %s needed, %s left below the limit of %s of control group %s", ErrNoRoom, size(memory), size(limit.RoomBytes()), size(limit.LimitBytes), limit.Path),
			"raise the container's memory limit, or give a smaller --ram"}
	}
	avail, err := c.Host.MemAvailable()
	if err != nil {
		return &Error{"read the available memory", "", err, ""}
	}
	if memory > avail {
		return &Error{"reserve", c.Dir, fmt.Errorf("%w: %s needed, %s available", ErrNoRoom, size(memory), size(avail)), "give a smaller --ram"}
	}
	return nil
}

// size writes bytes for people, exact where a round figure would hide the difference.
func size(b uint64) string {
	return fmt.Sprintf("%s (%s bytes)", humanize.IBytes(b), humanize.Comma(int64(b)))
}

// reserve gives a file its size and its blocks. A full file system is ENOSPC here.
func reserve(f *os.File, n int64) error {
	if err := f.Truncate(n); err != nil {
		return err
	}
	for {
		if err := unix.Fallocate(int(f.Fd()), 0, 0, n); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// populate reserves and touches the pages of the arena with several threads, a piece at a time, so that neither the
// first store of an engine nor its mapping pays for the kernel's zeroing.
func populate(ctx context.Context, f *os.File, n int64, huge uint64, c *Config) error {
	if err := f.Truncate(n); err != nil {
		return err
	}
	threads := c.Threads
	if threads <= 0 {
		threads = min(runtime.GOMAXPROCS(0), 16)
	}
	piece := int64(pieceBytes)
	if huge > pieceBytes {
		piece = int64(huge)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var mu sync.Mutex
	next, done := int64(0), int64(0)
	var wg sync.WaitGroup
	for range threads {
		wg.Go(func() {
			for ctx.Err() == nil {
				mu.Lock()
				off := next
				next += piece
				mu.Unlock()
				if off >= n {
					return
				}
				size := min(piece, n-off)
				if err := populatePiece(f, off, size); err != nil {
					stop(err)
					return
				}
				mu.Lock()
				done += size
				mu.Unlock()
			}
		})
	}
	finished := make(chan struct{})
	go func() { wg.Wait(); close(finished) }()
	report(finished, uint64(n), c, func() uint64 {
		mu.Lock()
		defer mu.Unlock()
		return uint64(done)
	})
	return context.Cause(ctx)
}

// report calls the progress function until finished is closed; it returns after it.
func report(finished <-chan struct{}, total uint64, c *Config, done func() uint64) {
	start := c.Now()
	tick := time.NewTicker(every)
	defer tick.Stop()
	type sample struct {
		at   time.Time
		done uint64
	}
	history := []sample{{start, 0}}
	for {
		over := false
		select {
		case <-finished:
			over = true
		case <-tick.C:
		}
		now, d := c.Now(), done()
		history = append(history, sample{now, d})
		for len(history) > 2 && now.Sub(history[0].at) > rateWindow {
			history = history[1:]
		}
		p := Progress{Done: d, Total: total, Elapsed: now.Sub(start), Remaining: -1}
		if first := history[0]; d > first.done && now.After(first.at) {
			rate := float64(d-first.done) / now.Sub(first.at).Seconds()
			p.Remaining = time.Duration(float64(total-d) / rate * float64(time.Second))
		}
		if c.Progress != nil {
			c.Progress(p)
		}
		if over {
			return
		}
	}
}

func populatePiece(f *os.File, off, n int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), 0, off, n)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		break
	}
	mem, err := unix.Mmap(int(f.Fd()), off, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	err = unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EINVAL) { // before Linux 5.14: fallocate has reserved the pages, the first touch zeroes them
		err = nil
	}
	return errors.Join(err, unix.Munmap(mem))
}
