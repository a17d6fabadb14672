package holders

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseMapping(t *testing.T) {
	shm := unix.Mkdev(0, 0x1b)
	for _, c := range []struct {
		line string
		want mapping
		ok   bool
		bad  bool
	}{
		{line: "7f1c00000000-7f1d00000000 rw-s 00000000 00:1b 17                         /dev/shm/region (deleted)",
			want: mapping{ID{shm, 17}, 0, 1 << 32, "/dev/shm/region", true}, ok: true},
		{line: "7f1c00000000-7f1c00001000 r--s 00002000 00:1b 17    /dev/shm/a b", want: mapping{ID{shm, 17}, 0x2000, 0x3000, "/dev/shm/a b", false}, ok: true},
		{line: `7f1c00000000-7f1c00001000 r--s 00000000 103:02 18446744073709551615 /a\012b`,
			want: mapping{ID{unix.Mkdev(0x103, 2), ^uint64(0)}, 0, 0x1000, `/a\012b`, false}, ok: true},
		{line: "7f1c00000000-7f1c00001000 rw-p 00000000 00:1b 17 ", want: mapping{ID{shm, 17}, 0, 0x1000, "", false}, ok: true},
		{line: "7f1e00000000-7f1e00021000 rw-p 00000000 00:00 0                          [heap]"},
		{line: "7f1e00000000-7f1e00021000 rw-p 00000000 00:00 0"},
		{line: "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]"},
		{line: "", bad: true},
		{line: "7f1c00000000-7f1d00000000 rw-s 00000000 00:1b", bad: true},
		{line: "7f1c00000000-7f1d00000000 rw-s 00000000 001b 17 /a", bad: true},
		{line: "7f1c00000000-7f1d00000000 rw-s 00000000 00:1b x /a", bad: true},
		{line: "7f1d00000000-7f1c00000000 rw-s 00000000 00:1b 17 /a", bad: true},
		{line: "7f1d00000000 rw-s 00000000 00:1b 17 /a", bad: true},
		{line: "0-ffffffffffffffff rw-s ffffffffffffffff 00:1b 17 /a", bad: true},
		{line: "7f1c00000000-7f1d00000000 rw 00000000 00:1b 17 /a", bad: true},
		{line: "-1-7f1d00000000 rw-s 00000000 00:1b 17 /a", bad: true},
	} {
		got, ok, err := parseMapping([]byte(c.line))
		if got != c.want || ok != c.ok || (err != nil) != c.bad {
			t.Errorf("parseMapping(%q) = %+v, %v, %v, want %+v, %v, an error: %v", c.line, got, ok, err, c.want, c.ok, c.bad)
		}
	}
}

// FuzzMapping: whatever is taken for a mapping is one that the kernel would print the same way.
func FuzzMapping(f *testing.F) {
	f.Add([]byte("7f1c00000000-7f1d00000000 rw-s 00000000 00:1b 17                         /dev/shm/region (deleted)"))
	f.Add([]byte("7f1e00000000-7f1e00021000 rw-p 00000000 00:00 0                          [heap]"))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, line []byte) {
		m, ok, err := parseMapping(line)
		if err != nil && ok {
			t.Fatalf("%q: ok with %v", line, err)
		}
		if !ok {
			if (m != mapping{}) {
				t.Fatalf("%q: %+v with ok false", line, m)
			}
			return
		}
		if m.id.Ino == 0 || m.to < m.from {
			t.Fatalf("%q: %+v", line, m)
		}
		path := m.path
		if m.deleted {
			path += deletedMark
		}
		again := fmt.Appendf(nil, "0-%x rw-s %x %x:%x %d %s", m.to-m.from, m.from, unix.Major(m.id.Dev), unix.Minor(m.id.Dev), m.id.Ino, path)
		if m2, ok2, err := parseMapping(again); err != nil || !ok2 || m2 != m {
			t.Fatalf("%q gives %+v; %q gives %+v, %v", line, m, again, m2, err)
		}
		if bytes.IndexByte(line, '\n') < 0 && strings.Contains(m.path, "\n") {
			t.Fatalf("%q: a path of two lines", line)
		}
	})
}

func TestRanges(t *testing.T) {
	a, b := ID{1, 1}, ID{1, 2}
	for _, c := range []struct {
		name string
		r    ranges
		want uint64
	}{
		{"nothing", ranges{}, 0},
		{"one", ranges{a: {{10, 20}}}, 10},
		{"twice the same", ranges{a: {{10, 20}, {10, 20}}}, 10},
		{"overlapping", ranges{a: {{15, 30}, {10, 20}}}, 20},
		{"inside", ranges{a: {{0, 100}, {10, 20}, {50, 120}}}, 120},
		{"apart", ranges{a: {{30, 40}, {10, 20}}}, 20},
		{"two files", ranges{a: {{0, 10}}, b: {{0, 10}}}, 20},
		{"more than there is", ranges{a: {{0, ^uint64(0)}}, b: {{0, ^uint64(0)}}}, ^uint64(0)},
	} {
		if got := c.r.bytes(); got != c.want {
			t.Errorf("%s: %d bytes, want %d", c.name, got, c.want)
		}
	}
}
