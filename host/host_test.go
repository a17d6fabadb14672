package host

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// tree writes files under a fresh root.
func tree(t *testing.T, files map[string]string) FS {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return FS{Root: root}
}

func fixture(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// parsers is every parser of the package with a valid file of its kind.
func parsers(t testing.TB) map[string]struct {
	valid []byte
	parse func([]byte) error
} {
	type parser = struct {
		valid []byte
		parse func([]byte) error
	}
	return map[string]parser{
		"meminfo":   {fixture(t, "k8s-v2/proc/meminfo"), func(b []byte) error { _, err := parseMeminfo(b); return err }},
		"mountinfo": {fixture(t, "k8s-v2/proc/self/mountinfo"), func(b []byte) error { _, err := parseMountinfo(b); return err }},
		"cgroup":    {fixture(t, "docker-v1/proc/self/cgroup"), func(b []byte) error { _, err := parseCgroup(b); return err }},
		"limit":     {[]byte("900000000000\n"), func(b []byte) error { _, _, err := parseLimit(b); return err }},
		"current":   {[]byte("900000000000\n"), func(b []byte) error { _, err := parseCurrent(b); return err }},
		"memory.stat": {fixture(t, "docker-v1/sys/fs/cgroup/memory/memory.stat"),
			func(b []byte) error { _, err := parseMemoryStat(b, "total_inactive_file"); return err }},
		"stat":  {fixture(t, "k8s-v2/proc/4242/stat"), func(b []byte) error { _, err := parseStat(b); return err }},
		"statm": {fixture(t, "k8s-v2/proc/4242/statm"), func(b []byte) error { _, err := parseStatm(b); return err }},
	}
}

// TestPrefixes cuts each file short everywhere: what does not end with a line must be refused, since its last number may
// be a part of one.
func TestPrefixes(t *testing.T) {
	for name, p := range parsers(t) {
		t.Run(name, func(t *testing.T) {
			if err := p.parse(p.valid); err != nil {
				t.Fatalf("the whole file: %v", err)
			}
			for n := range p.valid {
				cut := p.valid[:n]
				if err := p.parse(cut); err == nil && n > 0 && cut[n-1] != '\n' {
					t.Errorf("accepted the first %d bytes, which end in %q", n, cut[max(0, n-20):])
				}
			}
		})
	}
}

// TestFlips damages each byte in turn; the parsers may accept or refuse, but not panic.
func TestFlips(t *testing.T) {
	for _, p := range parsers(t) {
		for i := range p.valid {
			for _, c := range []byte{0, ' ', '\n', '(', ')', ':', '-', '9', '\\', 0xff} {
				b := []byte(string(p.valid))
				b[i] = c
				_ = p.parse(b) // either answer will do
			}
		}
	}
}

func fuzz(f *testing.F, name string) {
	p := parsers(f)[name]
	f.Add(p.valid)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := p.parse(b); err == nil && len(b) > 0 && b[len(b)-1] != '\n' {
			t.Errorf("accepted %q, which is cut short", b)
		}
	})
}

func FuzzMeminfo(f *testing.F)    { fuzz(f, "meminfo") }
func FuzzMountinfo(f *testing.F)  { fuzz(f, "mountinfo") }
func FuzzCgroup(f *testing.F)     { fuzz(f, "cgroup") }
func FuzzLimit(f *testing.F)      { fuzz(f, "limit") }
func FuzzCurrent(f *testing.F)    { fuzz(f, "current") }
func FuzzMemoryStat(f *testing.F) { fuzz(f, "memory.stat") }
func FuzzStat(f *testing.F)       { fuzz(f, "stat") }
func FuzzStatm(f *testing.F)      { fuzz(f, "statm") }

func TestReadBounded(t *testing.T) {
	f := tree(t, map[string]string{"proc/meminfo": strings.Repeat("MemTotal: 1 kB\n", 10000)})
	if _, err := f.Meminfo(); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("Meminfo of 150 kB: %v, want a complaint about the size", err)
	}
}

// TestThisMachine checks only what is true of every Linux machine.
func TestThisMachine(t *testing.T) {
	var f FS
	if _, err := os.Stat("/proc/self/mountinfo"); errors.Is(err, fs.ErrNotExist) {
		t.Skip("no /proc")
	}
	m, err := f.Meminfo()
	if err != nil || m.TotalBytes == 0 || m.AvailableBytes == 0 {
		t.Errorf("Meminfo() = %+v, %v", m, err)
	}
	if l, err := f.CgroupMemory(); err != nil || !l.Unlimited && l.LimitBytes == 0 {
		t.Errorf("CgroupMemory() = %+v, %v", l, err)
	}
	dir := t.TempDir()
	mount, err := f.Mount(filepath.Join(dir, "not-yet-there"))
	if err != nil || !strings.HasPrefix(dir, mount.Point) {
		t.Errorf("Mount(%q) = %+v, %v", dir, mount, err)
	}
	s, err := f.Space(dir)
	if err != nil || s.BlockBytes == 0 || s.IsTmpfs() != mount.IsTmpfs() || s.FreeBytes > s.TotalBytes {
		t.Errorf("Space(%q) = %+v, %v", dir, s, err)
	}
	if _, err := f.Space(filepath.Join(dir, "nothing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Space of nothing: %v, want not exist", err)
	}
	pid := os.Getpid()
	a, err := f.ProcessStart(pid)
	if err != nil || a == 0 {
		t.Errorf("ProcessStart = %d, %v", a, err)
	}
	if rss, err := f.RSSBytes(pid); err != nil || rss < 1<<20 {
		t.Errorf("RSSBytes = %d, %v", rss, err)
	}
	if _, _, err := f.CPUSeconds(pid); err != nil {
		t.Errorf("CPUSeconds: %v", err)
	}
	if l, err := f.CgroupMemoryOf(pid); err != nil {
		t.Errorf("CgroupMemoryOf(self) = %+v, %v", l, err)
	}
}
