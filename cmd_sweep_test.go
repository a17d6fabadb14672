package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvlift/sweep"
)

// TestSweepVerdict: the exit status is 0 only when nothing stale is left, and nothing of which that is not known.
func TestSweepVerdict(t *testing.T) {
	file := func(v sweep.Verdict, a sweep.Action) sweep.File {
		return sweep.File{Path: "/dev/shm/x", Verdict: v, Action: a, AllocatedBytes: 4096, Reason: "why"}
	}
	for _, c := range []struct {
		name  string
		files []sweep.File
		want  string
	}{
		{"nothing", nil, ""},
		{"kept", []sweep.File{file(sweep.Live, sweep.Kept), file(sweep.Starting, sweep.Kept), file(sweep.Foreign, sweep.Kept)}, ""},
		{"removed", []sweep.File{file(sweep.Stale, sweep.Removed)}, ""},
		{"removed by force", []sweep.File{file(sweep.Unknown, sweep.Removed)}, ""},
		{"a dry run", []sweep.File{file(sweep.Stale, sweep.WouldRemove), file(sweep.Stale, sweep.WouldRemove)}, "2 files left that nobody uses, 8.0 KiB"},
		{"unknown", []sweep.File{file(sweep.Unknown, sweep.Kept)}, "it is not known whether anybody holds them"},
		{"failed", []sweep.File{file(sweep.Stale, sweep.Failed), file(sweep.Live, sweep.Kept)}, "1 file could not be removed"},
	} {
		err := sweepVerdict(&sweep.Report{Files: c.files})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
		if err != nil {
			if code, _ := classify(err); code != exitFailed {
				t.Errorf("%s: exit status %d", c.name, code)
			}
		}
	}
}

// TestPrintSweep: a line for each file that says why; with --quiet only what was done or is wrong.
func TestPrintSweep(t *testing.T) {
	r := &sweep.Report{FreedBytes: 1 << 20, Files: []sweep.File{
		{Path: "/dev/shm/a", Verdict: sweep.Stale, Action: sweep.Removed, AllocatedBytes: 1 << 20, Reason: "nobody"},
		{Path: "/dev/shm/b", Verdict: sweep.Live, Action: sweep.Kept, AllocatedBytes: 1 << 30, Reason: "mapped"},
		{Path: "/dev/shm/c", Verdict: sweep.Unknown, Action: sweep.Kept, Reason: "who knows"},
		{Path: "/dev/shm/d", Verdict: sweep.Foreign, Action: sweep.Kept, Reason: "a link"},
	}, Nameless: []sweep.Nameless{{PID: 412, Comm: "engine", Bytes: 4 << 30}}}
	for _, c := range []struct {
		all, quiet bool
		want       string
	}{
		{false, false, "a b c 412 1"},
		{true, false, "a b c d 412 1"},
		{false, true, "a c 1"},
	} {
		var b bytes.Buffer
		if err := printSweep(&b, r, c.all, c.quiet); err != nil {
			t.Fatal(err)
		}
		var got []string
		for line := range strings.Lines(b.String()) {
			switch f := strings.Fields(line); {
			case strings.Contains(line, "/dev/shm/"):
				got = append(got, f[4][len("/dev/shm/"):])
			case strings.Contains(line, "held by"):
				got = append(got, f[6])
			default:
				got = append(got, f[0])
			}
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("all %v, quiet %v: %q, want %q:\n%s", c.all, c.quiet, s, c.want, &b)
		}
	}
	var b bytes.Buffer
	if err := printSweep(&b, &sweep.Report{}, false, false); err != nil || b.Len() > 0 {
		t.Errorf("of nothing: %q, %v", b.String(), err)
	}
}

// TestPrintSweepOfStrangeNames: no name of another user reaches the terminal as it is.
func TestPrintSweepOfStrangeNames(t *testing.T) {
	for _, c := range []struct{ path, want string }{
		{"/d/a b/é", "/d/a b/é"},
		{"/d/\x1b[2J\nremoved", `"/d/\x1b[2J\nremoved"`},
		{"/d/\xff\u202e", `"/d/\xff\u202e"`},
		{"/d/\u009b", `"/d/\u009b"`},
	} {
		r := &sweep.Report{Files: []sweep.File{{Path: c.path, Verdict: sweep.Unknown, Action: sweep.Failed, Reason: "open " + c.path}}}
		var b bytes.Buffer
		if err := printSweep(&b, r, true, false); err != nil {
			t.Fatal(err)
		}
		line := b.String()
		if !strings.Contains(line, "  "+c.want+"  open "+strings.Trim(c.want, `"`)) || strings.Count(line, "\n") != 1 {
			t.Errorf("%q is printed as %q, want %s", c.path, line, c.want)
		}
		if err := (&printableError{errors.New(c.path)}).Error(); err != strings.Trim(c.want, `"`) {
			t.Errorf("the error of %q says %q", c.path, err)
		}
	}
}

// TestPrintSweepOfOtherUser: root is told of a region that nobody holds and that it did not ask for.
func TestPrintSweepOfOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a file is given to another user")
	}
	dir, err := os.MkdirTemp("/dev/shm", "sweep")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	region := filepath.Join(dir, "vllm_offload_7.mmap")
	if err := errors.Join(os.WriteFile(region, []byte("x"), 0o600), os.Chown(region, 1000, 1000)); err != nil {
		t.Fatal(err)
	}
	r, err := sweep.Run(t.Context(), sweep.Options{Dirs: []string{dir}, DefaultAge: true, Now: time.Now, Pause: pause, PID: os.Getpid()})
	if err != nil {
		t.Fatal(err)
	}
	for _, quiet := range []bool{false, true} {
		var b bytes.Buffer
		if err := errors.Join(printSweep(&b, r, false, quiet), sweepVerdict(r)); err != nil {
			t.Fatal(err)
		}
		if told := strings.Contains(b.String(), "nobody holds it, but it belongs to uid 1000: --owner 1000\n"); told == quiet {
			t.Errorf("quiet %v: %q", quiet, &b)
		}
	}
}
