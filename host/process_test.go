package host

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
)

func TestProcess(t *testing.T) {
	f := FS{Root: "testdata/k8s-v2"}
	if got, err := f.ProcessStart(4242); err != nil || got != 987654321 {
		t.Errorf("ProcessStart = %d, %v, want 987654321", got, err)
	}
	if got, err := f.ProcessComm(4242); err != nil || got != "kv (lift) 2" {
		t.Errorf("ProcessComm = %q, %v, want %q", got, err, "kv (lift) 2")
	}
	if user, sys, err := f.CPUSeconds(4242); err != nil || user != 314.15 || sys != 27.18 {
		t.Errorf("CPUSeconds = %v, %v, %v, want 314.15, 27.18", user, sys, err)
	}
	if got, err := f.RSSBytes(4242); err != nil || got != 262144*uint64(os.Getpagesize()) {
		t.Errorf("RSSBytes = %d, %v, want 262144 pages", got, err)
	}
	if _, err := f.ProcessStart(4243); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ProcessStart of no process: %v, want not exist", err)
	}
	for _, pid := range []int{0, -1} {
		if _, err := f.ProcessStart(pid); err == nil {
			t.Errorf("ProcessStart(%d) succeeded", pid)
		}
		if _, err := f.RSSBytes(pid); err == nil {
			t.Errorf("RSSBytes(%d) succeeded", pid)
		}
	}
}

func TestParseStat(t *testing.T) {
	const tail = " S 1 1 1 0 -1 0 0 0 0 0 7 8 0 0 20 0 1 0 99 0 0\n"
	for _, tc := range []struct {
		name, text, comm string
		ok               bool
	}{
		{"plain", "1 (init)" + tail, "init", true},
		{"spaces and parentheses", "1 (a) S (b c))" + tail, "a) S (b c)", true},
		{"empty name", "1 ()" + tail, "", true},
		{"newline in the name", "1 (a\nb)" + tail, "a\nb", true},
		{"no name", "1 init" + tail, "", false},
		{"closed before open", "1 )(" + tail, "", false},
		{"too few fields", "1 (init) S 1 1 1 0 -1 0 0 0 0 0 7 8 0 0 20 0 1 0\n", "", false},
		{"negative start", "1 (init)" + strings.Replace(tail, "99", "-9", 1), "", false},
		{"cut short", "1 (init)" + strings.TrimSuffix(tail, "\n"), "", false},
		{"empty", "", "", false},
	} {
		s, err := parseStat([]byte(tc.text))
		if (err == nil) != tc.ok || s.comm != tc.comm {
			t.Errorf("%s: parseStat(%q) = %+v, %v, want %q, success: %v", tc.name, tc.text, s, err, tc.comm, tc.ok)
		}
		if tc.ok && (s.user != 7 || s.sys != 8 || s.startedTick != 99) {
			t.Errorf("%s: parseStat(%q) = %+v, want 7, 8, 99", tc.name, tc.text, s)
		}
	}
}

func TestParseStatm(t *testing.T) {
	for text, ok := range map[string]bool{
		"765 425 396 5 0 123 0\n":  true,
		"765 425 396 5 0 123 0":    false,
		"765 425\n":                false,
		"765 -425 396 5 0 123 0\n": false,
		"\n":                       false,
		"":                         false,
	} {
		if n, err := parseStatm([]byte(text)); (err == nil) != ok || ok && n != 425 {
			t.Errorf("parseStatm(%q) = %d, %v, want success: %v", text, n, err, ok)
		}
	}
	f := tree(t, map[string]string{"proc/7/statm": "1 18446744073709551615 0 0 0 0 0\n"})
	if n, err := f.RSSBytes(7); err == nil {
		t.Errorf("RSSBytes = %d with 2^64-1 pages, want an error", n)
	}
}
