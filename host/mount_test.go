package host

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMount(t *testing.T) {
	f := FS{Root: "testdata/k8s-v2"}
	for _, tc := range []struct {
		path, point, fsType, source string
	}{
		{"/", "/", "ext4", "/dev/nvme0n1p2"},
		{"/var/lib/kvlift", "/", "ext4", "/dev/nvme0n1p2"},
		{"/dev/shm", "/dev/shm", "tmpfs", "tmpfs"},
		{"/dev/shm/", "/dev/shm", "tmpfs", "tmpfs"},
		{"/dev/shm/kvlift.1", "/dev/shm", "tmpfs", "tmpfs"},
		{"/dev/shmoo", "/", "ext4", "/dev/nvme0n1p2"},
		{"/dev/hugepages/x", "/dev/hugepages", "hugetlbfs", "hugetlbfs"},
		{"/mnt/cache disk/data", "/mnt/cache disk", "xfs", "/dev/nvme1n1"},
		{"/mnt/cache disk/kv", "/mnt/cache disk/kv", "tmpfs", "over"},
		{"/mnt/cache disk/kv/../data", "/mnt/cache disk", "xfs", "/dev/nvme1n1"},
	} {
		m, err := f.Mount(tc.path)
		if err != nil || m.Point != tc.point || m.Type != tc.fsType || m.Source != tc.source {
			t.Errorf("Mount(%q) = %+v, %v, want %s of type %s from %s", tc.path, m, err, tc.point, tc.fsType, tc.source)
		}
		if m.IsTmpfs() != (tc.fsType == "tmpfs") || m.IsHugetlbfs() != (tc.fsType == "hugetlbfs") {
			t.Errorf("Mount(%q): tmpfs %v, hugetlbfs %v", tc.path, m.IsTmpfs(), m.IsHugetlbfs())
		}
	}
	for _, path := range []string{"", "relative", "./x"} {
		if m, err := f.Mount(path); err == nil {
			t.Errorf("Mount(%q) = %+v, want an error", path, m)
		}
	}
	m, err := f.Mount("/mnt/nas/x")
	if err != nil || m.Root != `/export/a\b` || !slices.Equal(m.Options, []string{"ro", "relatime", "rw", "vers=4.2"}) {
		t.Errorf("Mount(/mnt/nas/x) = %+v, %v", m, err)
	}
	if v, ok := m.Option("vers"); v != "4.2" || !ok {
		t.Errorf("Option(vers) = %q, %v, want 4.2", v, ok)
	}
	if v, ok := m.Option("ver"); ok {
		t.Errorf("Option(ver) = %q, want none", v)
	}
}

func TestMountFollowsLinks(t *testing.T) {
	f := tree(t, map[string]string{
		"proc/self/mountinfo": "1 1 0:1 / / rw - ext4 d rw\n2 1 0:2 / /data rw - xfs d rw\n",
		"data/kv/x":           "",
		"var/x":               "",
	})
	for name, target := range map[string]string{"var/kv": "../data/kv", "var/out": "../../..", "var/dangling": "nowhere"} {
		if err := os.Symlink(target, filepath.Join(f.Root, name)); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		"/var/kv":             "/data",
		"/var/kv/not/yet":     "/data",
		"/var/x":              "/",
		"/var/out":            "/",
		"/var/dangling/file":  "/",
		"/nothing/like/this":  "/",
		"/data/../var/kv/new": "/data",
	} {
		if m, err := f.Mount(path); err != nil || m.Point != want {
			t.Errorf("Mount(%q) = %+v, %v, want %s", path, m, err, want)
		}
	}
	if m, err := f.Mount("/data/kv/x/below-a-file"); err == nil {
		t.Errorf("Mount below a file = %+v, want an error", m)
	}
}

func TestParseMountinfo(t *testing.T) {
	for _, tc := range []struct {
		name, line string
		ok         bool
	}{
		{"no optional fields", "1 1 0:1 / / rw - ext4 d rw", true},
		{"three optional fields", "1 1 0:1 / / rw shared:1 master:2 unbindable - ext4 d rw", true},
		{"dash in the path", "1 1 0:1 / /- rw - ext4 - rw", true},
		{"empty source", "1 1 0:1 / / rw - tmpfs  rw", true},
		{"no dash", "1 1 0:1 / / rw ext4 d rw", false},
		{"nothing after the dash", "1 1 0:1 / / rw -", false},
		{"no options", "1 1 0:1 / / rw - ext4 d", false},
		{"relative point", "1 1 0:1 / mnt rw - ext4 d rw", false},
		{"blank", "", false},
	} {
		m, err := parseMountinfo([]byte(tc.line + "\n"))
		if (err == nil) != tc.ok {
			t.Errorf("%s: parseMountinfo(%q) = %+v, %v, want success: %v", tc.name, tc.line, m, err, tc.ok)
		}
	}
}

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{
		`plain`:          "plain",
		`a\040b\011c`:    "a b\tc",
		`\134\043\012`:   "\\#\n",
		`\134040`:        `\040`,
		`\`:              `\`,
		`\04`:            `\04`,
		`\048`:           `\048`,
		`\400`:           `\400`,
		`\377`:           "\xff",
		`end\040`:        "end ",
		`\x41 \\040 \n`:  `\x41 \` + " " + ` \n`,
		`deleted\040(x)`: "deleted (x)",
	} {
		if got := unescape(in); got != want {
			t.Errorf("unescape(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestSpaceOf(t *testing.T) {
	for _, tc := range []struct {
		name string
		st   unix.Statfs_t
		want Space
	}{
		{"ext4", unix.Statfs_t{Type: 0xef53, Bsize: 4096, Frsize: 4096, Blocks: 100, Bfree: 60, Bavail: 50},
			Space{TotalBytes: 409600, FreeBytes: 204800, BlockBytes: 4096, Magic: 0xef53}},
		{"nfs", unix.Statfs_t{Type: 0x6969, Bsize: 1 << 20, Frsize: 4096, Blocks: 100, Bavail: 50},
			Space{TotalBytes: 409600, FreeBytes: 204800, BlockBytes: 1 << 20, Magic: 0x6969}},
		{"no fragment size", unix.Statfs_t{Type: 0xef53, Bsize: 1024, Blocks: 100, Bavail: 50},
			Space{TotalBytes: 102400, FreeBytes: 51200, BlockBytes: 1024, Magic: 0xef53}},
		{"negative free", unix.Statfs_t{Type: 0xef53, Bsize: 4096, Blocks: 100, Bavail: ^uint64(0) - 5},
			Space{TotalBytes: 409600, BlockBytes: 4096, Magic: 0xef53}},
		{"tmpfs", unix.Statfs_t{Type: unix.TMPFS_MAGIC, Bsize: 4096, Blocks: 100, Bavail: 50},
			Space{TotalBytes: 409600, FreeBytes: 204800, BlockBytes: 4096, Magic: unix.TMPFS_MAGIC}},
		{"tmpfs size=0", unix.Statfs_t{Type: unix.TMPFS_MAGIC, Bsize: 4096},
			Space{Unlimited: true, BlockBytes: 4096, Magic: unix.TMPFS_MAGIC}},
		{"hugetlbfs min_size", unix.Statfs_t{Type: unix.HUGETLBFS_MAGIC, Bsize: 2 << 20, Blocks: ^uint64(0), Bavail: ^uint64(0)},
			Space{Unlimited: true, BlockBytes: 2 << 20, Magic: unix.HUGETLBFS_MAGIC}},
		{"full", unix.Statfs_t{Type: 0xef53, Bsize: 4096, Blocks: 100},
			Space{TotalBytes: 409600, BlockBytes: 4096, Magic: 0xef53}},
	} {
		if got := spaceOf(&tc.st); got != tc.want {
			t.Errorf("%s: %+v, want %+v", tc.name, got, tc.want)
		}
	}
}
