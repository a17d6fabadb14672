// Package lease asks the kernel whether anybody holds a file, without help from whoever does.
//
// A write lease (fcntl F_SETLEASE) is granted on a regular file only while nobody else on this kernel has it open or
// mapped: in whichever PID or mount namespace, as whichever user. While it is held, whoever opens the file waits for it to be
// given back, and its holder can see that somebody waits. So it answers "is it in use?" and keeps the answer true for the
// moment that it takes to remove a name.
//
// The kernel lets a file's owner and CAP_LEASE ask. A lease on a file system that other kernels write too proves nothing, and
// some systems have none: Probe tries it out and says what works.
package lease

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Answers of the kernel that are not "nobody holds it".
var (
	// ErrHeld: somebody has the file open, maps it, or has a lock on it.
	ErrHeld = errors.New("somebody holds it")
	// ErrNoAnswer: the kernel does not say. It wraps nothing; the error that wraps it tells why.
	ErrNoAnswer = errors.New("the kernel does not say who holds it")
)

// Kernel asks for leases. It is safe for concurrent use.
type Kernel struct {
	trust time.Duration
	now   func() time.Time
}

// Open prepares this process for leases: the kernel announces a lease that is to be given back with SIGIO, whose default
// action ends a process. The signal is ignored from here to Close; whether somebody waits is asked instead. now must be
// monotonic.
func Open(now func() time.Time) *Kernel {
	signal.Ignore(unix.SIGIO)
	k := &Kernel{trust: 20 * time.Second, now: now}
	// The kernel takes a lease away when it is not given back in this time; 0 is never. Half of it leaves room for what a
	// process may lose between two calls.
	if b, err := os.ReadFile("/proc/sys/fs/lease-break-time"); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && n > 0 {
			k.trust = min(k.trust, time.Duration(n)*time.Second/2)
		}
	}
	return k
}

// Close gives SIGIO back to the runtime, which drops it.
func (k *Kernel) Close() { signal.Reset(unix.SIGIO) }

// Lease is held on a descriptor that stays its owner's. It is for one goroutine.
type Lease struct {
	k     *Kernel
	fd    int
	until time.Time
}

// Take takes the write lease on a regular file. The error wraps ErrHeld or ErrNoAnswer. The lease ends with Release or when
// the descriptor is closed; hold it for microseconds, since whoever opens the file waits for it.
func (k *Kernel) Take(fd int) (*Lease, error) {
	until := k.now().Add(k.trust)
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK)
	switch {
	case err == nil:
		return &Lease{k, fd, until}, nil
	case errors.Is(err, unix.EAGAIN):
		return nil, fmt.Errorf("%w: the write lease is refused", ErrHeld)
	case errors.Is(err, unix.EACCES):
		return nil, fmt.Errorf("%w: only the file's owner and CAP_LEASE may ask for a lease (%w)", ErrNoAnswer, err)
	}
	return nil, fmt.Errorf("%w: write lease: %w", ErrNoAnswer, err)
}

// Whole tells whether the file is still nobody else's: nobody waits for the lease, and the kernel cannot have taken it away.
func (l *Lease) Whole() bool {
	kind, err := unix.FcntlInt(uintptr(l.fd), unix.F_GETLEASE, 0)
	return err == nil && kind == unix.F_WRLCK && l.k.now().Before(l.until)
}

// InTime tells whether whoever waits for the lease waits still: the kernel cannot have taken it away.
func (l *Lease) InTime() bool { return l.k.now().Before(l.until) }

// Release gives the lease back. Whoever waits goes on.
func (l *Lease) Release() error {
	if _, err := unix.FcntlInt(uintptr(l.fd), unix.F_SETLEASE, unix.F_UNLCK); err != nil && !errors.Is(err, unix.EAGAIN) { // it is gone already
		return fmt.Errorf("give the lease back: %w", err)
	}
	return nil
}

// Flocked asks for the file's flock and lets it go at once. The error wraps ErrHeld or ErrNoAnswer; nil says that nobody
// has one. A free lock does not tell that nobody holds the file.
func Flocked(fd int) error {
	err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	switch {
	case err == nil:
		return unix.Flock(fd, unix.LOCK_UN)
	case errors.Is(err, unix.EWOULDBLOCK):
		return fmt.Errorf("%w: it is locked", ErrHeld)
	}
	return fmt.Errorf("%w: flock: %w", ErrNoAnswer, err)
}

// RangeLocked asks for record locks (OFD and POSIX) on any byte of the file, without taking one. The error is as that of
// Flocked. kvlift's engines hold such locks on its arena.
func RangeLocked(fd int) error {
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &lk); err != nil {
		return fmt.Errorf("%w: F_OFD_GETLK: %w", ErrNoAnswer, err)
	}
	if lk.Type != unix.F_UNLCK {
		return fmt.Errorf("%w: byte %d is locked", ErrHeld, lk.Start)
	}
	return nil
}
