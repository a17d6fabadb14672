// Package host reads facts about the machine from /proc, /sys and statfs: memory and the limits on it, mounts, processes.
//
// All of it is input: sizes are bounded, text that does not look as documented is an error that names the file, and no
// content makes a function panic. Each file has a pure parser over its bytes; FS only finds and reads the files. Nothing
// is kept between calls, so every answer is as of the call.
package host

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// FS reads the machine whose root directory is Root; the zero value reads this machine. Tests point Root at a tree of
// frozen files. It holds nothing else: copy it freely and use it from any goroutine.
type FS struct {
	// Root is the directory that holds proc and sys: "/" when empty.
	Root string
}

// path is name, a path from the root of the machine, as this process opens it.
func (f FS) path(name string) string {
	if f.Root == "" {
		return filepath.Join("/", name)
	}
	return filepath.Join(f.Root, name)
}

// errTruncated is what the parsers say of a file without its last newline. Every file read here is lines that the kernel
// ends with one, so a number at the end of a file cut short is never taken for a whole one.
var errTruncated = errors.New("does not end in a newline")

// read returns the content of a kernel file of at most limit bytes. These files say that their size is 0, so the size
// is known only once they are read. A process or control group that goes away between open and read counts as absent:
// the error is fs.ErrNotExist.
func (f FS) read(name string, limit int64) ([]byte, error) {
	file, err := os.Open(f.path(name))
	if err != nil {
		return nil, err
	}
	defer file.Close() // opened for reading: Close has nothing to report
	b, err := io.ReadAll(io.LimitReader(file, limit+1))
	switch {
	case errors.Is(err, syscall.ESRCH), errors.Is(err, syscall.ENODEV):
		return nil, fmt.Errorf("read %s: %w", name, fs.ErrNotExist)
	case err != nil:
		return nil, err
	case int64(len(b)) > limit:
		return nil, fmt.Errorf("read %s: more than %d bytes", name, limit)
	}
	return b, nil
}

// lines splits the text of a kernel file, and fails when its last line is cut short.
func lines(b []byte) ([]string, error) {
	if len(b) == 0 {
		return nil, nil
	}
	s, ok := strings.CutSuffix(string(b), "\n")
	if !ok {
		return nil, errTruncated
	}
	return strings.Split(s, "\n"), nil
}

// parseUint takes decimal digits only; strconv says the rest (no sign, no underscore in base 10).
func parseUint(s string) (uint64, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%.40q is not a number of 64 bits", s)
	}
	return n, nil
}

// scale is n units of size bytes each, and false when that is more than 64 bits hold.
func scale(n, size uint64) (bytes uint64, ok bool) {
	if size != 0 && n > ^uint64(0)/size {
		return 0, false
	}
	return n * size, true
}
