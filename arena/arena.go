// Package arena owns the files: the pages that engines map, the meta file that only the daemon maps, and the lock that
// makes one daemon their owner.
//
//	DIR (0700)        default /dev/shm/kvlift-<name>; locked (flock) by the daemon, on a descriptor that is never passed on
//	├── arena         pages only; engines get descriptors of their own, each with a locked byte (see Descriptor)
//	└── meta          package meta
//
// Both are made under the names arena.new and meta.new and renamed when they are whole, meta last, so a daemon that was
// killed while it populated leaves nothing that a next one could take for an arena. Space is reserved before anything
// is used: a full file system is ENOSPC at start and never SIGBUS later.
package arena

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/block"
	"kvlift/host"
	"kvlift/meta"
)

// Error is a failure that an operator can act on.
type Error struct {
	Op   string // what was being done
	Path string
	Err  error
	Hint string // the command or flag that helps; may be empty
}

func (e *Error) Error() string {
	if e.Path == "" {
		return fmt.Sprintf("%s: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("%s %s: %v", e.Op, e.Path, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Errors of opening an arena.
var (
	ErrInUse    = errors.New("another daemon holds it")
	ErrMapped   = errors.New("engines still hold it")
	ErrSize     = errors.New("the arena has another size")
	ErrReplaced = errors.New("the arena file is not the one that the meta file describes")
	ErrNoRoom   = errors.New("not enough memory")
	ErrKind     = errors.New("not a memory file system")
	ErrMissing  = errors.New("there is no arena")
)

// Config says where the arena lies and how large it is.
type Config struct {
	Name    string
	Dir     string
	HugeDir string // folder on hugetlbfs for the pages; empty: they lie in Dir
	Bytes   uint64 // of the arena, rounded up to whole pages
	Keys    uint32 // records of the entry table; 0 chooses
	Threads int    // that populate; 0 chooses
	Reset   bool   // begin empty whatever is there
	// AnyFS allows a folder on an ordinary file system (tests).
	AnyFS    bool
	Host     host.FS
	Progress func(Progress) // called from one goroutine at a time; may be nil
	Now      func() time.Time
}

// Entries returns how many records a table for the configured arena has.
func (c *Config) Entries() uint32 {
	pages := uint32(block.Pages(c.Bytes))
	if c.Keys > 0 {
		return c.Keys
	}
	return min(pages, max(pages/4, 1<<16))
}

func overflowFor(entries uint32) uint32 { return entries/4 + 64 }

// DirFor is the default folder of a name.
func DirFor(name string) string { return filepath.Join("/dev/shm", "kvlift-"+name) }

// Arena is an open arena. It is safe for concurrent use, except Close.
type Arena struct {
	Table   *meta.Table
	Created bool // by this Open; else adopted

	dir   *os.File
	arena *os.File
	meta  *os.File
	mem   []byte // of meta
	huge  uint64
}

func (c *Config) arenaPath() string {
	if c.HugeDir != "" {
		return filepath.Join(c.HugeDir, "kvlift-"+c.Name+".arena")
	}
	return filepath.Join(c.Dir, "arena")
}

// Open locks the folder and adopts the arena in it, or makes one. Errors are *Error with a hint, or the cause of ctx when
// it ended while a new arena was being populated; then nothing is left of it.
func Open(ctx context.Context, c Config) (*Arena, error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	_, err := os.Lstat(c.Dir)
	made := errors.Is(err, os.ErrNotExist)
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, &Error{"create", c.Dir, err, "choose another folder with --arena DIR"}
	}
	dir, err := lock(c.Dir)
	if err != nil {
		return nil, err
	}
	a := &Arena{dir: dir}
	if err := a.open(ctx, &c); err != nil {
		if made {
			_ = os.Remove(c.Dir) // only while it is empty: a start that failed leaves nothing
		}
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// lock takes the folder for this process. The lock is on the folder itself: there is nothing to unlink and nothing that
// could be passed on by mistake.
func lock(path string) (*os.File, error) {
	dir, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, &Error{"open", path, err, ""}
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return nil, errors.Join(&Error{"stat", path, err, ""}, dir.Close())
	}
	if int(st.Uid) != os.Geteuid() {
		return nil, errors.Join(&Error{"use", path, fmt.Errorf("the folder belongs to uid %d", st.Uid), "choose another folder with --arena DIR"}, dir.Close())
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = &Error{"lock", path, ErrInUse, "one daemon serves a name: give this one another with --name"}
		}
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

func (a *Arena) open(ctx context.Context, c *Config) error {
	for _, p := range []string{c.arenaPath() + ".new", filepath.Join(c.Dir, "meta.new")} {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			return &Error{"remove", p, err, ""}
		}
	}
	_, err := os.Lstat(filepath.Join(c.Dir, "meta"))
	exists := err == nil
	if exists && c.Reset {
		if err := a.discard(c); err != nil {
			return err
		}
		exists = false
	}
	if exists {
		return a.adopt(c)
	}
	// An arena without a meta file is what a kill between the two renames leaves; then nobody was ever given it. Or somebody
	// has removed the meta file by hand: the locks tell.
	if err := a.discard(c); err != nil {
		return err
	}
	return a.create(ctx, c)
}

const resetHint = "kvlift serve --reset begins empty; kvlift verify says what is wrong"

// adopt maps the files that are there.
func (a *Arena) adopt(c *Config) error {
	path := filepath.Join(c.Dir, "meta")
	var err error
	if a.meta, err = openFile(path, os.O_RDWR); err != nil {
		return &Error{"open", path, err, resetHint}
	}
	if a.Table, a.mem, err = mapMeta(a.meta, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return &Error{"adopt", path, err, resetHint}
	}
	h := &a.Table.Header
	if a.arena, err = openFile(c.arenaPath(), os.O_RDWR); err != nil {
		return &Error{"open", c.arenaPath(), err, resetHint}
	}
	if err := checkArena(a.arena, h); err != nil {
		return &Error{"adopt", c.arenaPath(), err, resetHint}
	}
	if h.Name != c.Name {
		return &Error{"adopt", path, fmt.Errorf("%w: it was made for the name %q, not %q", ErrReplaced, h.Name, c.Name), resetHint}
	}
	if want := block.Pages(c.Bytes); c.Bytes != 0 && want != uint64(h.ArenaPages) {
		return &Error{"adopt", c.arenaPath(), fmt.Errorf("%w: it has %d bytes, --ram asks for %d", ErrSize, uint64(h.ArenaPages)*block.PageSize, want*block.PageSize),
			fmt.Sprintf("an arena is never resized: start with --ram %s, or empty with --reset", exact(uint64(h.ArenaPages)*block.PageSize))}
	}
	if c.Keys != 0 && c.Keys != h.Entries {
		return &Error{"adopt", path, fmt.Errorf("%w: it has %d records, --max-keys asks for %d", ErrSize, h.Entries, c.Keys), "leave --max-keys out, or begin empty with --reset"}
	}
	a.huge = h.HugePage
	a.Table.SetHeader(false)
	return nil
}

// exact writes bytes in the largest unit that divides them, as a flag takes them.
func exact(n uint64) string {
	for _, u := range []struct {
		name string
		size uint64
	}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}} {
		if n%u.size == 0 {
			return fmt.Sprintf("%d%s", n/u.size, u.name)
		}
	}
	return fmt.Sprintf("%dKiB", n/1024)
}

func checkArena(f *os.File, h *meta.Header) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Ino != h.ArenaInode {
		return fmt.Errorf("%w: inode %d, expected %d", ErrReplaced, st.Ino, h.ArenaInode)
	}
	if want := int64(h.ArenaPages) * block.PageSize; st.Size < want || h.HugePage == 0 && st.Size != want {
		return fmt.Errorf("%w: the arena has %d bytes, expected %d", meta.ErrTruncated, st.Size, want)
	}
	return nil
}

// openFile opens a regular file of ours without following a link.
func openFile(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, errors.Join(fmt.Errorf("not a regular file"), err, f.Close())
	}
	return f, nil
}

func mapMeta(f *os.File, prot int) (*meta.Table, []byte, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if st.Size() < 2*meta.HeaderSize || st.Size() > 1<<44 {
		return nil, nil, fmt.Errorf("%w: %d bytes", meta.ErrTruncated, st.Size())
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("map %d bytes: %w", st.Size(), err)
	}
	t, err := meta.Open(mem)
	if err != nil {
		return nil, nil, errors.Join(err, unix.Munmap(mem))
	}
	return t, mem, nil
}

// create makes both files, reserves and populates them, and gives them their names.
func (a *Arena) create(ctx context.Context, c *Config) error {
	if c.Bytes == 0 {
		return &Error{"adopt", c.Dir, ErrMissing, "give the size of the arena: --ram 8GiB"}
	}
	pages, entries := block.Pages(c.Bytes), c.Entries()
	if pages > 1<<31 {
		return &Error{"create", c.Dir, fmt.Errorf("%d pages: at most %d", pages, uint64(1)<<31), "--ram at most 8TiB"}
	}
	l := meta.NewLayout(entries, overflowFor(entries))
	if err := preflight(c, pages*block.PageSize, uint64(l.Size)); err != nil {
		return err
	}
	h := meta.Header{ArenaPages: uint32(pages), Entries: entries, Overflow: l.Overflow, CreatedMS: uint64(c.Now().UnixMilli()), Name: c.Name}
	if c.HugeDir != "" {
		sp, err := c.Host.Space(c.HugeDir)
		if err != nil {
			return &Error{"stat", c.HugeDir, err, ""}
		}
		h.HugePage = uint64(sp.BlockBytes)
	}
	if _, err := rand.Read(h.ArenaID[:]); err != nil {
		return &Error{"create", c.Dir, err, ""}
	}
	size := int64(pages) * block.PageSize
	if h.HugePage > 0 {
		size = (size + int64(h.HugePage) - 1) / int64(h.HugePage) * int64(h.HugePage)
	}
	arenaNew, metaNew := c.arenaPath()+".new", filepath.Join(c.Dir, "meta.new")
	err := a.fill(ctx, c, arenaNew, metaNew, size, l.Size, &h)
	if err == nil {
		err = os.Rename(arenaNew, c.arenaPath())
	}
	if err == nil {
		err = os.Rename(metaNew, filepath.Join(c.Dir, "meta"))
	}
	if err != nil {
		_, _ = os.Remove(arenaNew), os.Remove(metaNew) // what is left is removed by the next start
		return err
	}
	a.huge, a.Created = h.HugePage, true
	return nil
}

func (a *Arena) fill(ctx context.Context, c *Config, arenaNew, metaNew string, size, metaSize int64, h *meta.Header) error {
	var err error
	flags := os.O_RDWR | os.O_CREATE | os.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	if a.arena, err = os.OpenFile(arenaNew, flags, 0o600); err != nil {
		return &Error{"create", arenaNew, err, ""}
	}
	if a.meta, err = os.OpenFile(metaNew, flags, 0o600); err != nil {
		return &Error{"create", metaNew, err, ""}
	}
	if err := reserve(a.meta, metaSize); err != nil {
		return &Error{"reserve", metaNew, err, "make the file system larger, or give a smaller --ram or --max-keys"}
	}
	if err := populate(ctx, a.arena, size, h.HugePage, c); err != nil {
		return &Error{"reserve", arenaNew, err, "make the file system larger, or give a smaller --ram"}
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(a.arena.Fd()), &st); err != nil {
		return &Error{"stat", arenaNew, err, ""}
	}
	h.ArenaInode = st.Ino
	mem, err := unix.Mmap(int(a.meta.Fd()), 0, int(metaSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return &Error{"map", metaNew, err, ""}
	}
	a.mem = mem
	a.Table, err = meta.Create(mem, *h)
	return err
}

// discard removes the files, unless an engine holds the arena: its copies would go on into memory that nobody owns.
func (a *Arena) discard(c *Config) error {
	if m, err := openFile(filepath.Join(c.Dir, "meta"), os.O_RDONLY); err == nil {
		h, err := readHeader(m)
		if err = errors.Join(err, m.Close()); err == nil && h.HugePage > 0 != (c.HugeDir != "") {
			return &Error{"reset", c.Dir, fmt.Errorf("%w: its pages lie elsewhere", ErrReplaced), "give --hugetlbfs as the arena was made: with the same folder, or not at all"}
		}
	}
	f, err := openFile(c.arenaPath(), os.O_RDWR)
	if err == nil {
		a.arena = f
		for slot := range meta.MaxSessions {
			if a.Held(slot) {
				return &Error{"reset", c.arenaPath(), fmt.Errorf("%w (slot %d)", ErrMapped, slot), "stop the engines first; kvlift status names them"}
			}
		}
		a.arena = nil
		if err := f.Close(); err != nil {
			return &Error{"close", c.arenaPath(), err, ""}
		}
	}
	for _, p := range []string{filepath.Join(c.Dir, "meta"), c.arenaPath()} {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			return &Error{"remove", p, err, ""}
		}
	}
	return nil
}

// readHeader reads the newest header of a meta file; the error tells nothing that a reset need know.
func readHeader(f *os.File) (meta.Header, error) {
	b := make([]byte, 2*meta.HeaderSize)
	if _, err := f.ReadAt(b, 0); err != nil {
		return meta.Header{}, err
	}
	h, err := meta.DecodeHeader(b)
	if other, err2 := meta.DecodeHeader(b[meta.HeaderSize:]); err2 == nil && (err != nil || other.Generation > h.Generation) {
		return other, nil
	}
	return h, err
}

// Bytes is the size of the arena in bytes; HugePage its page size on hugetlbfs, else 0.
func (a *Arena) Bytes() uint64 { return uint64(a.Table.Header.ArenaPages) * block.PageSize }

// HugePage is the page size in bytes when the arena lies on hugetlbfs, else 0.
func (a *Arena) HugePage() uint64 { return a.huge }

// Descriptor opens the arena anew for one process and locks the process's byte on that description. The caller passes
// the descriptor on and closes its own; the lock then lives as long as the process keeps the arena open (R21).
// A manager reads nothing and writes nothing: it gets a read-only descriptor.
func (a *Arena) Descriptor(slot int, role meta.Role) (*os.File, error) {
	flags, kind := os.O_RDWR, int16(unix.F_WRLCK)
	if role == meta.Manager {
		flags, kind = os.O_RDONLY, unix.F_RDLCK
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", a.arena.Fd()), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the arena for slot %d: %w", slot, err)
	}
	lk := unix.Flock_t{Type: kind, Whence: 0, Start: int64(slot), Len: 1}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lk); err != nil {
		return nil, errors.Join(fmt.Errorf("lock byte %d of the arena: %w", slot, err), f.Close())
	}
	return f, nil
}

// Held tells whether some process holds the byte lock of a slot.
func (a *Arena) Held(slot int) bool {
	lk := unix.Flock_t{Type: unix.F_WRLCK, Whence: 0, Start: int64(slot), Len: 1}
	if err := unix.FcntlFlock(a.arena.Fd(), unix.F_OFD_GETLK, &lk); err != nil {
		return true // unknown counts as held: pages that nobody can vouch for are not reused
	}
	return lk.Type != unix.F_UNLCK
}

// Close unmaps and closes everything and gives the folder up. The files stay. It is idempotent.
func (a *Arena) Close() error {
	var err error
	if a.mem != nil {
		err = unix.Munmap(a.mem)
		a.mem, a.Table = nil, nil
	}
	for _, f := range []**os.File{&a.meta, &a.arena, &a.dir} { // the lock last
		if *f != nil {
			err = errors.Join(err, (*f).Close())
			*f = nil
		}
	}
	return err
}

// Inspect maps a stopped daemon's meta file read-only and hands its table to f. It holds the folder's lock meanwhile, so
// that no daemon starts; a running daemon is ErrInUse.
func Inspect(c Config, f func(*meta.Table) error) error {
	dir, err := lock(c.Dir)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return &Error{"inspect", c.Dir, ErrMissing, "kvlift serve --name " + c.Name + " --ram 8GiB makes one"}
		}
		if errors.Is(err, ErrInUse) {
			return &Error{"inspect", c.Dir, ErrInUse, "stop the daemon first; kvlift status reads a running one"}
		}
		return err
	}
	defer dir.Close()
	path := filepath.Join(c.Dir, "meta")
	m, err := openFile(path, os.O_RDONLY)
	if errors.Is(err, os.ErrNotExist) { // a start that was refused leaves the folder
		return &Error{"inspect", c.Dir, ErrMissing, "kvlift serve --name " + c.Name + " --ram 8GiB makes one"}
	}
	if err != nil {
		return &Error{"inspect", path, err, ""}
	}
	defer m.Close()
	t, mem, err := mapMeta(m, unix.PROT_READ)
	if err != nil {
		return &Error{"inspect", path, err, "kvlift serve --reset begins empty"}
	}
	defer func() { _ = unix.Munmap(mem) }()
	pages, err := openFile(c.arenaPath(), os.O_RDONLY)
	if err != nil {
		return &Error{"inspect", c.arenaPath(), err, "kvlift serve --reset begins empty"}
	}
	defer pages.Close()
	if err := checkArena(pages, &t.Header); err != nil {
		return &Error{"inspect", c.arenaPath(), err, "kvlift serve --reset begins empty"}
	}
	return f(t)
}
