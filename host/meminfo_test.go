package host

import "testing"

func TestMeminfo(t *testing.T) {
	f := FS{Root: "testdata/k8s-v2"}
	got, err := f.Meminfo()
	want := Meminfo{
		TotalBytes:        1056431472 << 10,
		FreeBytes:         211392020 << 10,
		AvailableBytes:    958734908 << 10,
		ShmemBytes:        2 << 30,
		HugePagesTotal:    1024,
		HugePagesFree:     900,
		HugePagesReserved: 100,
		HugePageBytes:     2 << 20,
	}
	if err != nil || got != want {
		t.Errorf("Meminfo() = %+v, %v, want %+v", got, err, want)
	}
	if n, err := f.MemAvailable(); err != nil || n != want.AvailableBytes {
		t.Errorf("MemAvailable() = %d, %v, want %d", n, err, want.AvailableBytes)
	}
}

func TestParseMeminfo(t *testing.T) {
	const base = "MemTotal: 10 kB\nMemAvailable: 5 kB\n"
	for _, tc := range []struct {
		name, text string
		ok         bool
	}{
		{"least", base, true},
		{"unknown lines", base + "Whatever\nNew: x\n", true},
		{"empty", "", false},
		{"old kernel", "MemTotal: 10 kB\nMemFree: 5 kB\n", false},
		{"no newline", "MemTotal: 10 kB\nMemAvailable: 5 kB", false},
		{"no unit", "MemTotal: 10\nMemAvailable: 5 kB\n", false},
		{"negative", "MemTotal: -10 kB\nMemAvailable: 5 kB\n", false},
		{"empty value", "MemTotal: kB\nMemAvailable: 5 kB\n", false},
		{"no colon", "MemTotal\nMemAvailable: 5 kB\n", false},
		{"too large in bytes", "MemTotal: 18014398509481984 kB\nMemAvailable: 5 kB\n", false},
		{"largest", "MemTotal: 18014398509481983 kB\nMemAvailable: 5 kB\n", true},
		{"count with a unit", base + "HugePages_Free: 1 kB\n", false},
	} {
		if m, err := parseMeminfo([]byte(tc.text)); (err == nil) != tc.ok {
			t.Errorf("%s: parseMeminfo(%q) = %+v, %v, want success: %v", tc.name, tc.text, m, err, tc.ok)
		}
	}
}
