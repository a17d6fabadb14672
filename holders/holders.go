// Package holders finds out which processes hold which files: what they map and what they have open, by device and inode
// and never by path, and how much memory processes hold in files that have no name any more.
//
// It sees what /proc shows: the processes of this PID namespace, and of those only what this user may read. So a match is
// proof that a file is held, and no match is no proof that it is not. Everything read is input: lines are bounded, and what
// does not look as documented makes its process unreadable, never a process that holds nothing.
package holders

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"

	"golang.org/x/sys/unix"
)

// ID names a file for as long as it exists: its device and inode as stat tells them.
type ID struct{ Dev, Ino uint64 }

// Holder is a process that holds a file.
type Holder struct {
	PID    int    // in the PID namespace of /proc
	Comm   string // the name it gives itself, without control characters
	Mapped bool   // it maps the file
	Open   bool   // it has a descriptor of it
}

// Nameless is what one process holds of files that have no name any more.
type Nameless struct {
	PID   int
	Comm  string
	Bytes uint64 // each byte of a file once, however often the process maps it
}

// Folder is a place whose nameless files are looked for. A file belongs to it if it lies on its device, or if its path was
// below it: the one fails for a tree of frozen files, the other for processes that have the folder elsewhere.
type Folder struct {
	Path string // absolute
	Dev  uint64
}

// FS reads the processes below Root; the zero value reads this machine's. It holds nothing else: copy it freely and use it
// from any goroutine.
type FS struct {
	Root string // the directory that holds proc: "/" when empty
}

// Scan is what one look at all processes has shown. Nothing in it is newer than the look.
type Scan struct {
	Holders       map[ID][]Holder // of the files asked for, by pid
	Nameless      []Nameless      // most bytes first
	NamelessBytes uint64          // over all processes, each byte of a file once
	Processes     int             // that were looked at
	Unreadable    int             // of which maps or descriptors could not be read
}

// Scan looks at every process once. It asks for the files of want, which have names, and for nameless files of folders. A
// process that ends meanwhile holds nothing. The error says that processes cannot be listed at all, or is the cause of ctx.
func (f FS) Scan(ctx context.Context, want map[ID]bool, folders []Folder) (*Scan, error) {
	proc := filepath.Join(cmp.Or(f.Root, "/"), "proc")
	dir, err := os.Open(proc)
	if err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(-1)
	if err = errors.Join(err, dir.Close()); err != nil {
		return nil, fmt.Errorf("list %s: %w", proc, err)
	}
	var pids []int
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil && pid > 0 && strconv.Itoa(pid) == n {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	s := &Scan{Holders: map[ID][]Holder{}}
	all := ranges{}
	for _, pid := range pids {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		p := process{dir: filepath.Join(proc, strconv.Itoa(pid)), want: want, folders: folders, held: map[ID]*Holder{}, nameless: ranges{}}
		if !p.look() {
			s.Unreadable++
		}
		s.Processes++
		comm := ""
		if len(p.held) > 0 || len(p.nameless) > 0 {
			comm = p.comm()
		}
		for id, h := range p.held {
			h.PID, h.Comm = pid, comm
			s.Holders[id] = append(s.Holders[id], *h)
		}
		if bytes := p.nameless.bytes(); bytes > 0 {
			s.Nameless = append(s.Nameless, Nameless{PID: pid, Comm: comm, Bytes: bytes})
		}
		all.add(p.nameless)
	}
	s.NamelessBytes = all.bytes()
	slices.SortStableFunc(s.Nameless, func(a, b Nameless) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return s, nil
}

// process is the look at one process.
type process struct {
	dir      string
	want     map[ID]bool
	folders  []Folder
	held     map[ID]*Holder
	nameless ranges
}

// look reads maps and descriptors. It reports false when something could not be read that may have been there.
func (p *process) look() bool {
	n, err := p.maps(filepath.Join(p.dir, "maps"))
	whole := readable(err)
	if n == 0 && whole {
		// A process whose first thread has ended shows its memory and descriptors at the others alone.
		if tasks, err := os.ReadDir(filepath.Join(p.dir, "task")); err == nil && len(tasks) > 1 {
			for _, t := range tasks {
				_, err := p.maps(filepath.Join(p.dir, "task", t.Name(), "maps"))
				whole = readable(err) && readable(p.descriptors(filepath.Join(p.dir, "task", t.Name(), "fd"))) && whole
			}
		}
	}
	return readable(p.descriptors(filepath.Join(p.dir, "fd"))) && whole
}

// readable takes a process that has ended for one that was read.
func readable(err error) bool {
	return err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}

func (p *process) holder(id ID) *Holder {
	h := p.held[id]
	if h == nil {
		h = &Holder{}
		p.held[id] = h
	}
	return h
}

// Bounds of one process's maps: a path has at most 4 KiB, which escapes make four times as long, and the kernel's default
// is 65,530 mappings.
const (
	maxLine = 32 << 10
	maxMaps = 4 << 20
)

// maps returns the number of lines.
func (p *process) maps(name string) (n int, err error) {
	f, err := os.Open(name)
	if err != nil {
		return 0, err
	}
	defer f.Close() // opened for reading: Close has nothing to report
	sc := bufio.NewScanner(f)
	sc.Buffer(make([]byte, 0, 4<<10), maxLine)
	for sc.Scan() {
		if n++; n > maxMaps {
			return n, fmt.Errorf("%s: more than %d lines", name, maxMaps)
		}
		m, ok, err := parseMapping(sc.Bytes())
		if err != nil {
			return n, fmt.Errorf("%s: %w", name, err)
		}
		switch {
		case !ok:
		case p.want[m.id]:
			p.holder(m.id).Mapped = true
		case m.deleted && p.below(m.id.Dev, m.path):
			p.nameless[m.id] = append(p.nameless[m.id], span{m.from, m.to})
		}
	}
	return n, sc.Err()
}

func (p *process) below(dev uint64, path string) bool {
	return slices.ContainsFunc(p.folders, func(f Folder) bool {
		return f.Dev == dev || strings.HasPrefix(path, strings.TrimSuffix(f.Path, "/")+"/")
	})
}

func (p *process) descriptors(name string) error {
	dir, err := os.Open(name)
	if err != nil {
		return err
	}
	defer dir.Close() // opened for reading: Close has nothing to report
	fds, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, fd := range fds {
		var st unix.Stat_t
		if err := unix.Fstatat(int(dir.Fd()), fd, &st, 0); err != nil {
			if readable(err) { // closed meanwhile
				continue
			}
			return err
		}
		id := ID{Dev: uint64(st.Dev), Ino: st.Ino}
		switch {
		case p.want[id]:
			p.holder(id).Open = true
		case st.Nlink == 0 && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Blocks > 0 && p.nameless[id] == nil && slices.ContainsFunc(p.folders, func(f Folder) bool { return f.Dev == id.Dev }):
			p.nameless[id] = []span{{0, uint64(st.Blocks) * 512}}
		}
	}
	return nil
}

// comm is the process's name, or "" when it has ended.
func (p *process) comm() string {
	f, err := os.Open(filepath.Join(p.dir, "comm"))
	if err != nil {
		return ""
	}
	defer f.Close() // opened for reading: Close has nothing to report
	b := make([]byte, 64)
	n, _ := f.Read(b) // a name of 15 bytes, or nothing
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) { // it is shown on terminals
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(strings.TrimSuffix(string(b[:n]), "\n"), string(unicode.ReplacementChar)))
}
