package host

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// ticksPerSecond is USER_HZ, the unit of times in /proc/<pid>/stat. It is part of the kernel's interface and 100 on all
// architectures that Go runs on, whatever the kernel's own tick is.
const ticksPerSecond = 100

// stat is what is wanted of /proc/<pid>/stat.
type stat struct {
	comm        string
	user, sys   uint64 // ticks of CPU time
	startedTick uint64 // ticks after boot
}

// ProcessStart is when the process was started, in ticks after boot (100 a second). With the pid it names a process for
// as long as the machine is up, though pids are used again. The error is fs.ErrNotExist when there is no such process.
func (f FS) ProcessStart(pid int) (ticks uint64, err error) {
	s, err := f.stat(pid)
	return s.startedTick, err
}

// ProcessComm is the name of the process: the first 15 bytes of its executable's name, or what it chose to call itself;
// any bytes, but for newlines and backslashes, which are escaped with a backslash. The error is fs.ErrNotExist when
// there is no such process.
func (f FS) ProcessComm(pid int) (string, error) {
	s, err := f.stat(pid)
	return s.comm, err
}

// CPUSeconds is the CPU time that all threads of the process have used so far, to 10 ms. The error is fs.ErrNotExist
// when there is no such process.
func (f FS) CPUSeconds(pid int) (user, sys float64, err error) {
	s, err := f.stat(pid)
	return float64(s.user) / ticksPerSecond, float64(s.sys) / ticksPerSecond, err
}

// RSSBytes is the memory that the process has in its page tables: its own pages, and those of files and shared memory
// too, so a daemon's includes the pages of its arena that it has touched, and the sum over processes counts shared
// pages once for each. The error is fs.ErrNotExist when there is no such process.
func (f FS) RSSBytes(pid int) (uint64, error) {
	name, err := procFile(pid, "statm")
	if err != nil {
		return 0, err
	}
	b, err := f.read(name, 4<<10)
	if err != nil {
		return 0, err
	}
	pages, err := parseStatm(b)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	bytes, ok := scale(pages, uint64(os.Getpagesize()))
	if !ok {
		return 0, fmt.Errorf("%s: %d pages are out of range", name, pages)
	}
	return bytes, nil
}

func (f FS) stat(pid int) (stat, error) {
	name, err := procFile(pid, "stat")
	if err != nil {
		return stat{}, err
	}
	b, err := f.read(name, 4<<10)
	if err != nil {
		return stat{}, err
	}
	s, err := parseStat(b)
	if err != nil {
		return stat{}, fmt.Errorf("%s: %w", name, err)
	}
	return s, nil
}

func procFile(pid int, name string) (string, error) {
	if pid <= 0 {
		return "", fmt.Errorf("pid %d: not a process", pid)
	}
	return fmt.Sprintf("proc/%d/%s", pid, name), nil
}

// parseStat reads "pid (comm) state ppid ...". comm may hold spaces and parentheses, but nothing after it does: it ends
// at the last ")".
func parseStat(b []byte) (stat, error) {
	line, ok := strings.CutSuffix(string(b), "\n")
	if !ok {
		return stat{}, errTruncated
	}
	open, end := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if open < 0 || end < open {
		return stat{}, errors.New("no name in parentheses")
	}
	s := stat{comm: line[open+1 : end]}
	fields := strings.Fields(line[end+1:])
	for _, f := range []struct {
		number int // as proc(5) counts: 3 is the first after the name
		dst    *uint64
	}{{14, &s.user}, {15, &s.sys}, {22, &s.startedTick}} {
		if f.number-3 >= len(fields) {
			return stat{}, fmt.Errorf("no field %d", f.number)
		}
		var err error
		if *f.dst, err = parseUint(fields[f.number-3]); err != nil {
			return stat{}, fmt.Errorf("field %d: %w", f.number, err)
		}
	}
	return s, nil
}

// parseStatm returns the second number of "size resident shared text lib data dt".
func parseStatm(b []byte) (residentPages uint64, err error) {
	line, ok := strings.CutSuffix(string(b), "\n")
	if !ok {
		return 0, errTruncated
	}
	fields := strings.Fields(line)
	if len(fields) < 7 {
		return 0, fmt.Errorf("%d fields, want 7", len(fields))
	}
	if residentPages, err = parseUint(fields[1]); err != nil {
		return 0, fmt.Errorf("field 2: %w", err)
	}
	return residentPages, nil
}
