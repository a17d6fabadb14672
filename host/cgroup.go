package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Limit is a control group's limit on memory.
type Limit struct {
	Unlimited    bool   // no group sets a limit; the other fields are zero
	LimitBytes   uint64 // what the group may use
	CurrentBytes uint64 // what it uses now as the kernel counts: memory, shared memory and page cache of the whole group
	// ReclaimableBytes is the part of CurrentBytes that the kernel gives up without harm: page cache not used lately.
	ReclaimableBytes uint64
	Path             string // the file that sets the limit, "/sys/fs/cgroup/kvlift.slice/memory.max"
}

// RoomBytes is how much more the group can use: the limit less what is in use, where page cache that was not used lately
// (inactive_file) does not count as use. That is what Kubernetes calls the working set. The rest of the cache
// (active_file) counts although the kernel would drop it before it kills: to plan with it would be to evict the files
// that the machine is working on, such as weights being loaded. Tmpfs and shared memory count in full; the kernel keeps
// them on the anonymous lists, so they are never part of inactive_file. Without a limit it is the largest uint64.
func (l Limit) RoomBytes() uint64 {
	if l.Unlimited {
		return ^uint64(0)
	}
	// The kernel brings the two counters up to date at different times.
	used := l.CurrentBytes - min(l.ReclaimableBytes, l.CurrentBytes)
	return l.LimitBytes - min(used, l.LimitBytes)
}

// hierarchy is one of the two kinds of control groups: where they are mounted and what their files are called.
type hierarchy struct {
	fsType   string
	option   string   // an option that the mount has, if any
	point    string   // where it is by convention, for when the mounts do not say
	limits   []string // files that limit memory
	current  string
	inactive string // the line of memory.stat that says how much page cache of the whole group was not used lately
}

// In a hybrid set-up both exist, and the memory files are in only one of them.
//
// memory.high kills nobody, but a group above it sleeps at every allocation until it is below, and pages of an arena
// cannot be reclaimed: for an arena it is as hard as memory.max.
func hierarchies() (v1, v2 hierarchy) {
	v1 = hierarchy{"cgroup", "memory", "/sys/fs/cgroup/memory",
		[]string{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file"}
	v2 = hierarchy{"cgroup2", "", "/sys/fs/cgroup",
		[]string{"memory.max", "memory.high"}, "memory.current", "inactive_file"}
	return v1, v2
}

// CgroupMemory is the limit on memory that leaves this process the least room: that of its control group or of a group
// above it, version 1 or 2. Files that do not exist set no limit. In a container the groups outside are not visible, and
// a limit there goes unseen. Limits on huge pages (the hugetlb controller) are not looked at.
func (f FS) CgroupMemory() (Limit, error) { return f.cgroupMemory("self") }

// CgroupMemoryOf is CgroupMemory for another process. The error is fs.ErrNotExist when there is no such process.
func (f FS) CgroupMemoryOf(pid int) (Limit, error) {
	if pid <= 0 {
		return Limit{}, fmt.Errorf("pid %d: not a process", pid)
	}
	return f.cgroupMemory(fmt.Sprint(pid))
}

func (f FS) cgroupMemory(proc string) (Limit, error) {
	name := "proc/" + proc + "/cgroup"
	b, err := f.read(name, 64<<10) // at most a dozen hierarchies with paths of at most 4 KiB
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(f.path("proc/" + proc)); err != nil {
			return Limit{}, err // no such process, or no /proc at all: that says nothing about limits
		}
		return Limit{Unlimited: true}, nil // a kernel without control groups
	}
	if err != nil {
		return Limit{}, err
	}
	in, err := parseCgroup(b)
	if err != nil {
		return Limit{}, fmt.Errorf("%s: %w", name, err)
	}
	mounts, err := f.mounts()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Limit{}, err
	}
	v1, v2 := hierarchies()
	a, err := f.tightest(v1, mounts, in.memory)
	if err != nil {
		return Limit{}, err
	}
	c, err := f.tightest(v2, mounts, in.unified)
	if err != nil {
		return Limit{}, err
	}
	return tighter(a, c), nil
}

// tighter is the limit that leaves less room, a when they are equal.
func tighter(a, b Limit) Limit {
	if a.Unlimited || !b.Unlimited && b.RoomBytes() < a.RoomBytes() {
		return b
	}
	return a
}

// tightest walks from the group named path up to the top of what is mounted. path is "" when the process is in no group
// of this hierarchy.
func (f FS) tightest(h hierarchy, mounts []Mount, path string) (Limit, error) {
	least := Limit{Unlimited: true}
	if path == "" {
		return least, nil
	}
	top, group := h.find(mounts, path)
	for {
		l, err := f.groupLimit(h, filepath.Join(top, group))
		if err != nil {
			return Limit{}, err
		}
		least = tighter(least, l)
		if group == "/" {
			return least, nil
		}
		group = filepath.Dir(group)
	}
}

// find says where the group named path is: the mount that shows it and the most groups above it, and its place there
// ("/" or "/..."). A container may see only its own group, mounted as the top, while path is the name outside, or a
// name through ".."; then the top is all there is to read.
func (h hierarchy) find(mounts []Mount, path string) (top, group string) {
	top, group = h.point, path
	shortest := -1
	for _, m := range mounts {
		_, has := m.Option(h.option)
		if m.Type != h.fsType || h.option != "" && !has {
			continue
		}
		rest, in := below(m.Root, path)
		switch {
		case in && (shortest < 0 || len(m.Root) < shortest):
			top, group, shortest = m.Point, rest, len(m.Root)
		case shortest < 0:
			top, group = m.Point, ""
		}
	}
	if slices.Contains(strings.Split(group, "/"), "..") {
		group = ""
	}
	return top, filepath.Join("/", group)
}

// groupLimit reads the limit of one group.
func (f FS) groupLimit(h hierarchy, dir string) (Limit, error) {
	least := Limit{Unlimited: true}
	for _, name := range h.limits {
		name = filepath.Join(dir, name)
		b, err := f.read(name, 4<<10)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the root group, or no memory controller here
		}
		if err != nil {
			return Limit{}, err
		}
		n, unlimited, err := parseLimit(b)
		if err != nil {
			return Limit{}, fmt.Errorf("%s: %w", name, err)
		}
		if !unlimited && (least.Unlimited || n < least.LimitBytes) {
			least = Limit{LimitBytes: n, Path: name}
		}
	}
	if least.Unlimited {
		return least, nil
	}
	name := filepath.Join(dir, h.current)
	b, err := f.read(name, 4<<10)
	if err != nil {
		return Limit{}, err // also when absent: with a limit there is a count
	}
	if least.CurrentBytes, err = parseCurrent(b); err != nil {
		return Limit{}, fmt.Errorf("%s: %w", name, err)
	}
	name = filepath.Join(dir, "memory.stat")
	b, err = f.read(name, 64<<10)
	if errors.Is(err, fs.ErrNotExist) {
		return least, nil // nothing is known to be reclaimable
	}
	if err != nil {
		return Limit{}, err
	}
	if least.ReclaimableBytes, err = parseMemoryStat(b, h.inactive); err != nil {
		return Limit{}, fmt.Errorf("%s: %w", name, err)
	}
	return least, nil
}

// membership is the groups that a process is in; "" for a hierarchy that it is not in.
type membership struct {
	unified string // version 2
	memory  string // version 1, the hierarchy of the memory controller
}

// parseCgroup reads lines "number:controllers:path". The path may hold colons.
func parseCgroup(b []byte) (membership, error) {
	ls, err := lines(b)
	if err != nil {
		return membership{}, err
	}
	var in membership
	for i, line := range ls {
		number, rest, _ := strings.Cut(line, ":")
		controllers, path, ok := strings.Cut(rest, ":")
		if _, err := parseUint(number); err != nil || !ok || !filepath.IsAbs(path) {
			return membership{}, fmt.Errorf("line %d: %.80q is not number:controllers:/path", i+1, line)
		}
		switch {
		case number == "0" && controllers == "":
			in.unified = path
		case slices.Contains(strings.Split(controllers, ","), "memory"):
			in.memory = path
		}
	}
	return in, nil
}

// unlimitedBytes is where a limit stops being one. Version 1 writes "no limit" as the largest int64, rounded down to
// pages of whatever size.
const unlimitedBytes = 1 << 62

// parseLimit reads one number, or "max".
func parseLimit(b []byte) (bytes uint64, unlimited bool, err error) {
	s, ok := strings.CutSuffix(string(b), "\n")
	if !ok {
		return 0, false, errTruncated
	}
	if s == "max" {
		return 0, true, nil
	}
	n, err := parseUint(s)
	if err != nil {
		return 0, false, err
	}
	if n >= unlimitedBytes {
		return 0, true, nil
	}
	return n, false, nil
}

// parseCurrent reads one number.
func parseCurrent(b []byte) (bytes uint64, err error) {
	s, ok := strings.CutSuffix(string(b), "\n")
	if !ok {
		return 0, errTruncated
	}
	return parseUint(s)
}

// parseMemoryStat returns one of the "name number" lines, 0 when there is none of that name.
func parseMemoryStat(b []byte, name string) (uint64, error) {
	ls, err := lines(b)
	if err != nil {
		return 0, err
	}
	for _, line := range ls {
		if k, v, _ := strings.Cut(line, " "); k == name {
			n, err := parseUint(v)
			if err != nil {
				return 0, fmt.Errorf("%s: %w", name, err)
			}
			return n, nil
		}
	}
	return 0, nil
}
