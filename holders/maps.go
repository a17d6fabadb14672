package holders

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mapping is one line of /proc/<pid>/maps that a file stands behind.
type mapping struct {
	id       ID
	from, to uint64 // bytes of the file, to exclusive
	path     string // as the kernel prints it, without the mark of a deleted one
	deleted  bool
}

// errNoMapping is what parseMapping says of a line that is no mapping.
var errNoMapping = errors.New("not a line of maps")

// deletedMark stands behind the path of a file without a name. A file may be called so itself; who needs to know asks
// whether the inode has a name.
const deletedMark = " (deleted)"

// parseMapping reads one line without its newline, such as
//
//	7f1c00000000-7f1d00000000 rw-s 00000000 00:1b 17                         /dev/shm/region (deleted)
//	from         to           mode offset   device inode                     path
//
// The path may hold spaces and, escaped as \012, newlines. Anonymous memory has inode 0 and gives ok false.
func parseMapping(line []byte) (m mapping, ok bool, err error) {
	var f [5][]byte
	rest := line
	for i := range f {
		var found bool
		f[i], rest, found = bytes.Cut(rest, []byte{' '})
		if !found && i < 4 {
			return mapping{}, false, fmt.Errorf("%w: %.80q", errNoMapping, line)
		}
	}
	bad := func() (mapping, bool, error) { return mapping{}, false, fmt.Errorf("%w: %.80q", errNoMapping, line) }
	low, high, found := strings.Cut(string(f[0]), "-")
	from, err1 := strconv.ParseUint(low, 16, 64)
	to, err2 := strconv.ParseUint(high, 16, 64)
	offset, err3 := strconv.ParseUint(string(f[2]), 16, 64)
	major, minor, pair := strings.Cut(string(f[3]), ":")
	maj, err4 := strconv.ParseUint(major, 16, 32)
	mnr, err5 := strconv.ParseUint(minor, 16, 32)
	ino, err6 := strconv.ParseUint(string(f[4]), 10, 64)
	if errors.Join(err1, err2, err3, err4, err5, err6) != nil || !found || !pair || to < from || len(f[1]) != 4 {
		return bad()
	}
	if to-from > ^uint64(0)-offset {
		return bad()
	}
	if ino == 0 {
		return mapping{}, false, nil
	}
	m = mapping{id: ID{Dev: unix.Mkdev(uint32(maj), uint32(mnr)), Ino: ino}, from: offset, to: offset + (to - from)}
	m.path = strings.TrimLeft(string(rest), " ")
	m.path, m.deleted = strings.CutSuffix(m.path, deletedMark)
	return m, true, nil
}
