package host

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

func TestCgroupFixtures(t *testing.T) {
	for _, tc := range []struct {
		root string
		want Limit
		room uint64
	}{
		// The pod's 24 GB are less than the scope's 31 GB below memory.high and the slice's 720 GB.
		{"k8s-v2", Limit{
			LimitBytes: 64000000000, CurrentBytes: 50000000000, ReclaimableBytes: 10000000000,
			Path: "/sys/fs/cgroup/kubepods.slice/kubepods-pod7.slice/memory.max",
		}, 24000000000},
		{"docker-v1", Limit{
			LimitBytes: 8 << 30, CurrentBytes: 4 << 30, ReclaimableBytes: 1 << 30,
			Path: "/sys/fs/cgroup/memory/memory.limit_in_bytes",
		}, 5 << 30},
		{"hybrid", Limit{
			LimitBytes: 2 << 30, CurrentBytes: 1 << 30,
			Path: "/sys/fs/cgroup/memory/user.slice/memory.limit_in_bytes",
		}, 1 << 30},
	} {
		got, err := FS{Root: filepath.Join("testdata", tc.root)}.CgroupMemory()
		if err != nil || got != tc.want || got.RoomBytes() != tc.room {
			t.Errorf("%s: CgroupMemory() = %+v with room %d, %v, want %+v with room %d",
				tc.root, got, got.RoomBytes(), err, tc.want, tc.room)
		}
	}
	f := FS{Root: "testdata/k8s-v2"}
	if got, err := f.CgroupMemoryOf(4242); err != nil || got != (Limit{Unlimited: true}) {
		t.Errorf("CgroupMemoryOf(4242) = %+v, %v, want unlimited", got, err)
	}
	if _, err := f.CgroupMemoryOf(4243); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("CgroupMemoryOf a process that is not there: %v, want not exist", err)
	}
	if _, err := f.CgroupMemoryOf(-1); err == nil {
		t.Error("CgroupMemoryOf(-1) succeeded")
	}
}

func TestCgroupMemory(t *testing.T) {
	const (
		mountV2  = "28 23 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
		bindV2   = "29 23 0:25 /a/b /mnt/bind rw - cgroup2 cgroup2 rw\n"
		outsider = "28 23 0:25 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
	)
	group := func(dir, limit string) map[string]string {
		return map[string]string{
			dir + "/memory.max":     limit,
			dir + "/memory.current": "100\n",
		}
	}
	for _, tc := range []struct {
		name      string
		cgroup    string // proc/self/cgroup, "" for none
		mountinfo string // "" for none
		files     map[string]string
		want      string // path of the limit, "" for unlimited, "error"
	}{
		{"no control groups", "", "", nil, ""},
		{"empty file", "\n", "", nil, "error"},
		{"namespace", "0::/\n", mountV2, group("sys/fs/cgroup", "1000\n"), "/sys/fs/cgroup/memory.max"},
		{"no mountinfo", "0::/a\n", "", group("sys/fs/cgroup/a", "1000\n"), "/sys/fs/cgroup/a/memory.max"},
		{"no cgroup mount", "0::/a\n", "1 1 0:1 / / rw - ext4 d rw\n", group("sys/fs/cgroup/a", "1000\n"), "/sys/fs/cgroup/a/memory.max"},
		{"above is tighter", "0::/a/b\n", mountV2, group("sys/fs/cgroup/a", "1000\n"), "/sys/fs/cgroup/a/memory.max"},
		{"group has gone", "0::/a/b (deleted)\n", mountV2, group("sys/fs/cgroup/a", "1000\n"), "/sys/fs/cgroup/a/memory.max"},
		{"sibling does not bind", "0::/a\n", mountV2, group("sys/fs/cgroup/ab", "1000\n"), ""},
		{"root is better than bind", "0::/a/b\n", bindV2 + mountV2, group("sys/fs/cgroup/a", "1000\n"), "/sys/fs/cgroup/a/memory.max"},
		{"only a bind", "0::/a/b/c\n", bindV2, group("mnt/bind/c", "1000\n"), "/mnt/bind/c/memory.max"},
		{"name from outside", "0::/x/y\n", bindV2, group("mnt/bind", "1000\n"), "/mnt/bind/memory.max"},
		{"outside the namespace", "0::/../x\n", mountV2, group("sys/fs/cgroup", "1000\n"), "/sys/fs/cgroup/memory.max"},
		{"no way out through ..", "0::/../x\n", mountV2, group("sys/fs/x", "1000\n"), ""},
		{"mount from outside", "0::/\n", outsider, group("sys/fs/cgroup", "1000\n"), "/sys/fs/cgroup/memory.max"},
		{"colon in the name", "0::/a:b\n", mountV2, group("sys/fs/cgroup/a:b", "1000\n"), "/sys/fs/cgroup/a:b/memory.max"},
		{"zero is a limit", "0::/a\n", mountV2, group("sys/fs/cgroup/a", "0\n"), "/sys/fs/cgroup/a/memory.max"},
		{"max", "0::/a\n", mountV2, group("sys/fs/cgroup/a", "max\n"), ""},
		{"garbage limit", "0::/a\n", mountV2, group("sys/fs/cgroup/a", "lots\n"), "error"},
		{"empty limit", "0::/a\n", mountV2, group("sys/fs/cgroup/a", ""), "error"},
		{"limit cut short", "0::/a\n", mountV2, group("sys/fs/cgroup/a", "1000"), "error"},
		{"garbage groups", "zero::/a\n", mountV2, nil, "error"},
		{"relative group", "0::a\n", mountV2, nil, "error"},
		{"garbage mounts", "0::/a\n", "what\n", nil, "error"},
		{"limit without count", "0::/a\n", mountV2, map[string]string{"sys/fs/cgroup/a/memory.max": "1000\n"}, "error"},
		{"garbage count", "0::/a\n", mountV2, map[string]string{
			"sys/fs/cgroup/a/memory.max": "1000\n", "sys/fs/cgroup/a/memory.current": "max\n"}, "error"},
		{"garbage stat", "0::/a\n", mountV2, map[string]string{
			"sys/fs/cgroup/a/memory.max": "1000\n", "sys/fs/cgroup/a/memory.current": "1\n",
			"sys/fs/cgroup/a/memory.stat": "inactive_file\n"}, "error"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			files := map[string]string{"proc/self/comm": "x\n"}
			maps.Copy(files, tc.files)
			if tc.cgroup != "" {
				files["proc/self/cgroup"] = tc.cgroup
			}
			if tc.mountinfo != "" {
				files["proc/self/mountinfo"] = tc.mountinfo
			}
			got, err := tree(t, files).CgroupMemory()
			switch {
			case tc.want == "error":
				if err == nil {
					t.Errorf("CgroupMemory() = %+v, want an error", got)
				}
			case err != nil || got.Path != tc.want || got.Unlimited != (tc.want == ""):
				t.Errorf("CgroupMemory() = %+v, %v, want the limit in %q", got, err, tc.want)
			}
		})
	}
	if l, err := (FS{Root: t.TempDir()}).CgroupMemory(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("CgroupMemory() without /proc = %+v, %v, want not exist", l, err)
	}
}

func TestCgroupUnreadable(t *testing.T) {
	f := tree(t, map[string]string{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/x": ""})
	// A directory can be opened but not read, even by root.
	if err := os.Mkdir(filepath.Join(f.Root, "sys/fs/cgroup/a/memory.max"), 0o755); err != nil {
		t.Fatal(err)
	}
	if l, err := f.CgroupMemory(); err == nil {
		t.Errorf("CgroupMemory() = %+v with an unreadable limit, want an error", l)
	}
}

func TestRoomBytes(t *testing.T) {
	for _, tc := range []struct {
		name string
		l    Limit
		want uint64
	}{
		{"unlimited", Limit{Unlimited: true}, ^uint64(0)},
		{"cache is room", Limit{LimitBytes: 100, CurrentBytes: 100, ReclaimableBytes: 40}, 40},
		{"over the limit", Limit{LimitBytes: 100, CurrentBytes: 150, ReclaimableBytes: 40}, 0},
		{"stale stat", Limit{LimitBytes: 100, CurrentBytes: 30, ReclaimableBytes: 40}, 100},
		{"no room", Limit{}, 0},
	} {
		if got := tc.l.RoomBytes(); got != tc.want {
			t.Errorf("%s: RoomBytes of %+v = %d, want %d", tc.name, tc.l, got, tc.want)
		}
	}
}

func TestParseLimit(t *testing.T) {
	for _, tc := range []struct {
		text      string
		bytes     uint64
		unlimited bool
		ok        bool
	}{
		{"max\n", 0, true, true},
		{"4096\n", 4096, false, true},
		{"9223372036854771712\n", 0, true, true}, // 4 KiB pages
		{"9223372036854710272\n", 0, true, true}, // 64 KiB pages
		{"-1\n", 0, false, false},
		{"max", 0, false, false},
		{"1 2\n", 0, false, false},
		{"1\n2\n", 0, false, false},
		{"99999999999999999999\n", 0, false, false},
	} {
		n, unlimited, err := parseLimit([]byte(tc.text))
		if n != tc.bytes || unlimited != tc.unlimited || (err == nil) != tc.ok {
			t.Errorf("parseLimit(%q) = %d, %v, %v, want %d, %v, success: %v",
				tc.text, n, unlimited, err, tc.bytes, tc.unlimited, tc.ok)
		}
	}
}
