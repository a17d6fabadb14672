package host

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// mountinfoLimit bounds /proc/self/mountinfo: hosts of many containers have tens of thousands of mounts.
const mountinfoLimit = 32 << 20

// Mount is one line of /proc/self/mountinfo.
type Mount struct {
	Point   string   // where it is mounted, as this process sees it
	Root    string   // the directory of the file system that is mounted there; "/" but for bind mounts and cgroups
	Type    string   // file system type: "ext4", "tmpfs", "fuse.sshfs"
	Source  string   // device or whatever the file system calls its source; may be empty
	Options []string // options of the mount, then those of the file system: "rw", "noatime", "size=1g"
}

// IsTmpfs reports a file system whose files are memory.
func (m Mount) IsTmpfs() bool { return m.Type == "tmpfs" }

// IsHugetlbfs reports a file system whose files are huge pages.
func (m Mount) IsHugetlbfs() bool { return m.Type == "hugetlbfs" }

// Option finds an option by name and returns what stands behind its "=", "" when there is none.
func (m Mount) Option(name string) (value string, ok bool) {
	for _, o := range m.Options {
		if k, v, _ := strings.Cut(o, "="); k == name {
			return v, true
		}
	}
	return "", false
}

// Mount finds the mount that holds path, which must be absolute. Symbolic links are followed; what does not exist yet is
// taken to be made where path says. Of mounts on the same point the last is on top and wins. Mounts that a later mount
// on a parent directory hides are not told apart: no file system that kvlift uses is mounted so.
func (f FS) Mount(path string) (Mount, error) {
	if !filepath.IsAbs(path) {
		return Mount{}, fmt.Errorf("mount of %q: not an absolute path", path)
	}
	resolved, err := f.resolve(path)
	if err != nil {
		return Mount{}, fmt.Errorf("mount of %q: %w", path, err)
	}
	mounts, err := f.mounts()
	if err != nil {
		return Mount{}, err
	}
	m, ok := findMount(mounts, resolved)
	if !ok {
		return Mount{}, fmt.Errorf("mount of %q: not in proc/self/mountinfo", path)
	}
	return m, nil
}

// resolve follows the symbolic links in path as far as it exists. Under a Root of its own, links that leave the Root are
// not followed.
func (f FS) resolve(path string) (string, error) {
	root, err := filepath.EvalSymlinks(f.path("/"))
	if err != nil {
		return "", err
	}
	path = filepath.Clean(path)
	for at, rest := path, ""; ; at, rest = filepath.Dir(at), filepath.Join(filepath.Base(at), rest) {
		real, err := filepath.EvalSymlinks(f.path(at))
		if errors.Is(err, fs.ErrNotExist) && at != "/" {
			continue
		}
		if err != nil {
			return "", err
		}
		rel, err := filepath.Rel(root, real)
		if err != nil || !filepath.IsLocal(rel) {
			return path, nil
		}
		return filepath.Join("/", rel, rest), nil
	}
}

func (f FS) mounts() ([]Mount, error) {
	b, err := f.read("proc/self/mountinfo", mountinfoLimit)
	if err != nil {
		return nil, err
	}
	mounts, err := parseMountinfo(b)
	if err != nil {
		return nil, fmt.Errorf("proc/self/mountinfo: %w", err)
	}
	return mounts, nil
}

// findMount picks the mount with the longest point that is path or a directory above it.
func findMount(mounts []Mount, path string) (best Mount, ok bool) {
	for _, m := range mounts {
		if _, in := below(m.Point, path); in && (!ok || len(m.Point) >= len(best.Point)) {
			best, ok = m, true
		}
	}
	return best, ok
}

// below reports whether path is dir or lies below it, and how it goes on from there ("" or "/...").
func below(dir, path string) (rest string, ok bool) {
	rest, ok = strings.CutPrefix(path, strings.TrimSuffix(dir, "/"))
	if rest == "/" {
		rest = ""
	}
	return rest, ok && (rest == "" || rest[0] == '/')
}

// parseMountinfo reads lines such as
//
//	36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
//	   0  1    2     3     4           5...    -  t    source    options
//
// with any number of fields before the dash. Fields are split at single spaces, since the source may be empty.
func parseMountinfo(b []byte) ([]Mount, error) {
	ls, err := lines(b)
	if err != nil {
		return nil, err
	}
	mounts := make([]Mount, 0, len(ls))
	for i, line := range ls {
		fields := strings.Split(line, " ")
		dash := -1
		if len(fields) > 6 {
			dash = slices.Index(fields[6:], "-") + 6
		}
		if dash < 6 || len(fields) < dash+4 {
			return nil, fmt.Errorf("line %d: %.80q: too few fields", i+1, line)
		}
		m := Mount{
			Root:    unescape(fields[3]),
			Point:   unescape(fields[4]),
			Type:    unescape(fields[dash+1]),
			Source:  unescape(fields[dash+2]),
			Options: slices.Concat(strings.Split(fields[5], ","), strings.Split(fields[dash+3], ",")),
		}
		if !filepath.IsAbs(m.Point) {
			return nil, fmt.Errorf("line %d: mount point %.80q is not absolute", i+1, m.Point)
		}
		for j, o := range m.Options {
			m.Options[j] = unescape(o)
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}

// unescape undoes the kernel's escapes: a backslash and three octal digits for white space, the backslash and "#".
// Anything else stays as it is.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && len(s)-i >= 4 {
			d := s[i+1 : i+4]
			if d[0] >= '0' && d[0] <= '3' && d[1] >= '0' && d[1] <= '7' && d[2] >= '0' && d[2] <= '7' {
				b.WriteByte((d[0]-'0')<<6 | (d[1]-'0')<<3 | (d[2] - '0'))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// Space is what statfs says about a file system.
type Space struct {
	// Unlimited says that the file system has no size of its own (tmpfs with size=0, hugetlbfs without a size): it
	// takes what memory there is, and TotalBytes and FreeBytes are 0.
	Unlimited  bool
	TotalBytes uint64
	FreeBytes  uint64 // free for any user: without what is kept for root
	BlockBytes uint64 // the block size it prefers; on hugetlbfs the huge page size
	Magic      uint32 // the type, as in statfs(2)
}

// IsTmpfs reports a file system whose files are memory.
func (s Space) IsTmpfs() bool { return s.Magic == unix.TMPFS_MAGIC }

// IsHugetlbfs reports a file system whose files are huge pages.
func (s Space) IsHugetlbfs() bool { return s.Magic == unix.HUGETLBFS_MAGIC }

// Space asks the file system that holds path, which must exist. It blocks as long as the file system does: a network
// file system whose server is gone may never answer.
func (f FS) Space(path string) (Space, error) {
	var st unix.Statfs_t
	for {
		err := unix.Statfs(f.path(path), &st)
		if err == nil {
			return spaceOf(&st), nil
		}
		if err != unix.EINTR {
			return Space{}, &fs.PathError{Op: "statfs", Path: path, Err: err}
		}
	}
}

func spaceOf(st *unix.Statfs_t) Space {
	s := Space{BlockBytes: uint64(st.Bsize), Magic: uint32(st.Type)}
	// Counts are in fragments where those differ from the block size (NFS, FUSE); old file systems leave Frsize zero.
	unit := uint64(st.Bsize)
	if st.Frsize > 0 {
		unit = uint64(st.Frsize)
	}
	// hugetlbfs with only a minimum size says that it has -1 blocks.
	total, fits := scale(st.Blocks, unit)
	if memory := s.IsTmpfs() || s.IsHugetlbfs(); memory && (total == 0 || !fits) {
		s.Unlimited = true
		return s
	}
	if !fits {
		total = ^uint64(0)
	}
	s.TotalBytes = total
	// ext4 and others have let the free count fall below zero when reserved blocks were in use.
	if free, fits := scale(st.Bavail, unit); fits {
		s.FreeBytes = min(free, total)
	}
	return s
}
