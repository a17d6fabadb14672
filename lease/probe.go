package lease

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Step is one thing that Probe has tried.
type Step struct {
	What string // "nobody holds it: granted"
	Err  error  // nil: it was so
}

// local are the file systems on which this kernel alone opens files, so that its leases see every holder.
var local = []int64{
	unix.TMPFS_MAGIC, unix.RAMFS_MAGIC, unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC,
	unix.OVERLAYFS_SUPER_MAGIC, 0x2fc12fc1 /* ZFS */, 0xca451a4e, /* bcachefs */
}

// Probe tries leases out on a scratch file without a name in the folder dir, or, when the folder takes none, in one like it.
// The error wraps ErrNoAnswer and says which step failed; nil says that leases prove here what Take promises. Steps are in
// the order in which they were tried.
func (k *Kernel) Probe(dir int) ([]Step, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(dir, &st); err != nil {
		return nil, fmt.Errorf("%w: statfs: %w", ErrNoAnswer, err)
	}
	if !slices.Contains(local, int64(uint32(st.Type))) {
		return nil, fmt.Errorf("%w: file system %#x is none that only this kernel is known to write", ErrNoAnswer, uint32(st.Type))
	}
	fd, err := unix.Openat(dir, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil && st.Type == unix.TMPFS_MAGIC { // full, or read-only
		fd, err = memfd()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: no scratch file to try a lease on: %w", ErrNoAnswer, err)
	}
	defer unix.Close(fd) // a scratch file: nothing is lost
	s := scratch{k: k, fd: fd, path: fmt.Sprintf("/proc/self/fd/%d", fd), size: unix.Getpagesize()}
	if err := unix.Ftruncate(fd, int64(s.size)); err != nil {
		return nil, fmt.Errorf("%w: scratch file: %w", ErrNoAnswer, err)
	}
	var steps []Step
	for _, t := range []struct {
		what string
		try  func() error
	}{
		{"nobody holds it: granted", s.free},
		{"open for writing: refused", func() error { return s.opened(unix.O_RDWR) }},
		{"open for reading: refused", func() error { return s.opened(unix.O_RDONLY) }},
		{"mapped for writing, closed: refused", func() error { return s.mapped(unix.O_RDWR, unix.PROT_READ|unix.PROT_WRITE) }},
		{"mapped for reading, closed: refused", func() error { return s.mapped(unix.O_RDONLY, unix.PROT_READ) }},
		{"opened while it is held: seen", s.broken},
	} {
		err := t.try()
		steps = append(steps, Step{t.what, err})
		if err != nil {
			return steps, fmt.Errorf("%w: leases do not work here (%s): %w", ErrNoAnswer, t.what, err)
		}
	}
	return steps, nil
}

// memfd makes a scratch file on a tmpfs of the kernel's own. The kernel does not count the descriptor that it makes it with
// as one that is open for writing, so another one takes its place.
func memfd() (int, error) {
	made, err := unix.MemfdCreate("kvlift-sweep", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, err
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", made), unix.O_RDWR|unix.O_CLOEXEC, 0)
	return fd, errors.Join(err, unix.Close(made))
}

// scratch is the file that Probe tries leases on.
type scratch struct {
	k    *Kernel
	fd   int
	path string
	size int
}

func (s *scratch) free() error {
	l, err := s.k.Take(s.fd)
	if err != nil {
		return err
	}
	if !l.Whole() {
		return errors.Join(errors.New("granted, and not there"), l.Release())
	}
	return l.Release()
}

func (s *scratch) refused() error {
	l, err := s.k.Take(s.fd)
	switch {
	case err == nil:
		return errors.Join(errors.New("granted"), l.Release())
	case errors.Is(err, ErrHeld):
		return nil
	}
	return err
}

func (s *scratch) opened(flags int) error {
	fd, err := unix.Open(s.path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(s.refused(), unix.Close(fd))
}

func (s *scratch) mapped(flags, prot int) error {
	fd, err := unix.Open(s.path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	mem, err := unix.Mmap(fd, 0, s.size, prot, unix.MAP_SHARED)
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return err
	}
	return errors.Join(s.refused(), unix.Munmap(mem))
}

func (s *scratch) broken() error {
	l, err := s.k.Take(s.fd)
	if err != nil {
		return err
	}
	fd, err := unix.Open(s.path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case err == nil:
		err = errors.Join(errors.New("the file was opened at once"), unix.Close(fd))
	case !errors.Is(err, unix.EWOULDBLOCK):
	case l.Whole():
		err = errors.New("nothing was seen")
	default:
		err = nil
	}
	return errors.Join(err, l.Release())
}
