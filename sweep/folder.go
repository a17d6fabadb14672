package sweep

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/holders"
	"kvlift/lease"
)

// folder is an open folder. What is in it is named relative to it, so that no rename above it leads elsewhere.
type folder struct {
	path   string
	dir    *os.File
	dev    uint64
	id     holders.ID // of a folder that openFolder has opened
	kernel *lease.Kernel
	// noLease is why leases prove nothing here; nil when they do.
	noLease error
}

// openFolder opens the folder and tries leases out in it.
func openFolder(path string, k *lease.Kernel) (d *folder, steps []lease.Step, err error) {
	dir, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return nil, nil, errors.Join(&fs.PathError{Op: "stat", Path: path, Err: err}, dir.Close())
	}
	d = &folder{path: path, dir: dir, dev: uint64(st.Dev), id: idOf(&st), kernel: k}
	steps, d.noLease = k.Probe(d.fd())
	return d, steps, nil
}

// at opens a folder below d without following a link; "" is d itself. Files there are judged as if they lay on the file
// system of d: those that do not are refused.
func (d *folder) at(sub string) (*folder, error) {
	at := d
	for name := range strings.SplitSeq(sub, "/") {
		if name == "" {
			name = "." // a descriptor of its own, which lists from the beginning
		}
		fd, err := unix.Openat(at.fd(), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if at != d {
			err = errors.Join(err, at.Close())
		}
		if err != nil {
			return nil, &fs.PathError{Op: "open", Path: path.Join(d.path, sub), Err: err}
		}
		at = &folder{path: path.Join(at.path, name), dir: os.NewFile(uintptr(fd), name), dev: d.dev, kernel: d.kernel, noLease: d.noLease}
	}
	return at, nil
}

func (d *folder) fd() int      { return int(d.dir.Fd()) }
func (d *folder) Close() error { return d.dir.Close() }

func idOf(st *unix.Stat_t) holders.ID { return holders.ID{Dev: uint64(st.Dev), Ino: st.Ino} }

// stat is of the name itself, never of what a link points to.
func (d *folder) stat(name string) (*unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(d.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	return &st, nil
}

// Lookup is part of Names.
func (d *folder) Lookup(name string) (holders.ID, error) {
	st, err := d.stat(name)
	if err != nil {
		return holders.ID{}, err
	}
	return idOf(st), nil
}

// Rename is part of Names.
func (d *folder) Rename(from, to string) error {
	err := unix.Renameat2(d.fd(), from, d.fd(), to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		// A file system that cannot: a second name and then no first one does not replace either.
		if err = unix.Linkat(d.fd(), from, d.fd(), to, 0); err == nil {
			err = unix.Unlinkat(d.fd(), from, 0)
		}
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

// Unlink is part of Names.
func (d *folder) Unlink(name string) error {
	if err := unix.Unlinkat(d.fd(), name, 0); err != nil {
		return &fs.PathError{Op: "unlink", Path: name, Err: err}
	}
	return nil
}

// open opens a regular file that is still id. It never waits: a file that another process has a lease on is held.
func (d *folder) open(name string, flags int, id holders.ID) (fd int, st *unix.Stat_t, err error) {
	fd, err = unix.Openat(d.fd(), name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return -1, nil, fmt.Errorf("%w: another process has a lease on it", lease.ErrHeld)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO):
		return -1, nil, errReplaced
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return -1, nil, fmt.Errorf("%w: it may not be opened (%w); its owner may, and CAP_DAC_OVERRIDE with CAP_LEASE", lease.ErrNoAnswer, err)
	case err != nil:
		return -1, nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	st = new(unix.Stat_t)
	if err = unix.Fstat(fd, st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || idOf(st) != id) {
		err = errReplaced
	}
	if err != nil {
		return -1, nil, errors.Join(err, unix.Close(fd))
	}
	return fd, st, nil
}

// Claim is part of Names.
func (d *folder) Claim(name string, id holders.ID) (Claim, error) {
	if d.noLease != nil {
		return nil, d.noLease
	}
	fd, st, err := d.open(name, unix.O_RDWR, id)
	if err != nil {
		return nil, err
	}
	if _, leftover := bare(name); st.Size == 0 && !leftover { // somebody makes it anew, with the same inode
		return nil, errors.Join(errReplaced, unix.Close(fd))
	}
	l, err := d.kernel.Take(fd)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &fileClaim{fd, l}, nil
}

// fileClaim is a write lease on a file that this process has open.
type fileClaim struct {
	fd    int
	lease *lease.Lease
}

func (c *fileClaim) Alone() bool { return c.lease.Whole() }

// Empty is for a file that nobody has, though somebody may wait for it. Whoever waits cannot have got it yet, unless this
// process has slept. A file with another name keeps what is in it: that name is nobody's to empty.
func (c *fileClaim) Empty() error {
	var st unix.Stat_t
	if err := unix.Fstat(c.fd, &st); err != nil || st.Nlink > 1 {
		return err
	}
	if !c.lease.InTime() {
		return fmt.Errorf("%w: the lease was held for too long", lease.ErrNoAnswer)
	}
	if err := unix.Ftruncate(c.fd, 0); err != nil {
		return fmt.Errorf("truncate: %w", err)
	}
	return nil
}

func (c *fileClaim) Release() error { return errors.Join(c.lease.Release(), unix.Close(c.fd)) }

// sockets is a folder whose files are Unix sockets.
type sockets struct{ *folder }

// Claim is part of Names. It keeps nobody waiting: whoever listens anew does so at a socket of its own, which is another
// file.
func (d sockets) Claim(name string, id holders.ID) (Claim, error) {
	fd, err := unix.Openat(d.fd(), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFSOCK || idOf(&st) != id) {
		err = errReplaced
	}
	if err == nil {
		err = connects(fd)
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return socketClaim(fd), nil
}

// socketClaim keeps a socket's inode; it is a descriptor of it.
type socketClaim int

func (c socketClaim) Alone() bool    { return connects(int(c)) == nil }
func (c socketClaim) Empty() error   { return nil }
func (c socketClaim) Release() error { return unix.Close(int(c)) }

// connects asks whether anybody listens at the socket that the descriptor is of. The error is as that of lease.Flocked:
// nil says that nobody does.
func connects(fd int) error {
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%w: socket: %w", lease.ErrNoAnswer, err)
	}
	defer unix.Close(s) // nothing was sent
	// Through the descriptor the address is short whatever the path, and it is this socket whatever its name.
	err = unix.Connect(s, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d", fd)})
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return nil
	case err == nil, errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINPROGRESS), errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("%w: somebody listens", lease.ErrHeld) // or has it, and it is of another type
	}
	return fmt.Errorf("%w: connect: %w", lease.ErrNoAnswer, err)
}

// unproven is a folder whose files are removed without the kernel's proof: on somebody's word, or because an earlier sweep
// had emptied them.
type unproven struct{ *folder }

// Claim is part of Names. It keeps nobody waiting, and sees only who has a lock.
func (d unproven) Claim(name string, id holders.ID) (Claim, error) {
	fd, _, err := d.open(name, unix.O_RDONLY, id)
	if err == nil {
		if err = errors.Join(lease.Flocked(fd), lease.RangeLocked(fd)); err == nil {
			return wordClaim(fd), nil
		}
		err = errors.Join(err, unix.Close(fd))
	}
	return nil, err
}

// wordClaim is a descriptor of a file of which nothing is proven.
type wordClaim int

func (c wordClaim) Alone() bool {
	return lease.Flocked(int(c)) == nil && lease.RangeLocked(int(c)) == nil
}
func (c wordClaim) Empty() error   { return nil } // somebody may hold it
func (c wordClaim) Release() error { return unix.Close(int(c)) }

// facts looks at one name, cheap and certain evidence first: whatever shows a holder ends it, and the file is not opened
// before. now is the present time.
func (d *folder) facts(name string, st *unix.Stat_t, proof Proof, seen bool, by []holders.Holder, now time.Time) (Facts, error) {
	_, leftover := bare(name)
	f := Facts{UID: st.Uid, SizeBytes: st.Size, Leftover: leftover, Holders: by, Seen: seen, Mounted: uint64(st.Dev) != d.dev}
	changed := time.Unix(st.Mtim.Unix())
	if c := time.Unix(st.Ctim.Unix()); c.After(changed) {
		changed = c
	}
	f.Age = max(0, now.Sub(changed))
	want := uint32(unix.S_IFREG)
	if proof == ByConnect {
		want = unix.S_IFSOCK
	}
	if kind := st.Mode & unix.S_IFMT; kind != want {
		f.What = kinds[kind]
		if f.What == "" {
			f.What = "of no known kind"
		}
	}
	if f.What != "" || f.Mounted || len(by) > 0 {
		return f, nil
	}
	if proof == ByConnect {
		c, err := sockets{d}.Claim(name, idOf(st))
		if err == nil {
			err = c.Release()
		}
		f.Connect = Answer{Asked: true, Err: err}
		return f, vanished(err)
	}
	if st.Size == 0 {
		return f, nil
	}
	fd, _, err := d.open(name, unix.O_RDONLY, idOf(st))
	if err != nil {
		f.Lease = Answer{Asked: true, Err: err}
		return f, vanished(err)
	}
	defer unix.Close(fd) // opened for reading
	for _, q := range []struct {
		answer *Answer
		ask    func() error
	}{
		{&f.Flock, func() error { return lease.Flocked(fd) }},
		{&f.Ranges, func() error { return lease.RangeLocked(fd) }},
		{&f.Lease, func() error { return d.asks(fd) }},
	} {
		if *q.answer = (Answer{Asked: true, Err: q.ask()}); q.answer.held() {
			break
		}
	}
	return f, nil
}

// asks takes the lease and gives it back.
func (d *folder) asks(fd int) error {
	if d.noLease != nil {
		return d.noLease
	}
	l, err := d.kernel.Take(fd)
	if err != nil {
		return err
	}
	alone := l.Whole()
	if err := l.Release(); err != nil {
		return fmt.Errorf("%w: %w", lease.ErrNoAnswer, err)
	}
	if !alone {
		return fmt.Errorf("%w: somebody opened it just now", lease.ErrHeld)
	}
	return nil
}

// vanished passes on what says that the name is not the file any more that was looked at.
func vanished(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errReplaced) {
		return err
	}
	return nil
}

// kinds are the files that are never anybody's region.
var kinds = map[uint32]string{
	unix.S_IFREG: "a regular file", unix.S_IFLNK: "a symbolic link", unix.S_IFDIR: "a folder", unix.S_IFSOCK: "a socket",
	unix.S_IFIFO: "a pipe", unix.S_IFCHR: "a device", unix.S_IFBLK: "a device",
}
