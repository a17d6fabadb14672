// Package mutants plants the mistakes of the protocol's model in the code, one at a time, and looks whether the
// randomised tester of package server finds them. Nothing of it is in the code itself: a mutant is a replacement in one
// file, compiled with an overlay.
package mutants

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var (
	within = flag.Duration("within", 0, "how long a mutant may stay unfound; 0 checks only that every mutant can be planted")
	only   = flag.String("only", "", "the mutant to plant; empty: all")
	seed   = flag.Uint64("seed", 1, "of the tester: the same one finds the same rounds")
	show   = flag.Bool("show", false, "print how a mutant was found")
)

// edit replaces text that stands exactly once in a file.
type edit struct {
	file, from, to string
}

// mutant is a mistake. An edit that does not apply any more is a failure: the code has changed, and the mistake must be
// planted anew.
type mutant struct {
	name, scenario, what string // scenario is where it shows, as in the model
	edits                []edit
}

// plant writes the changed files and the overlay that puts them in the place of the true ones.
func plant(t *testing.T, m *mutant) (overlay string) {
	t.Helper()
	dir := t.TempDir()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	text := map[string]string{}
	for _, e := range m.edits {
		s, ok := text[e.file]
		if !ok {
			b, err := os.ReadFile(filepath.Join(root, e.file))
			if err != nil {
				t.Fatal(err)
			}
			s = string(b)
		}
		if n := strings.Count(s, e.from); n != 1 {
			t.Fatalf("%s: the text to replace stands %d times in %s:\n%s", m.name, n, e.file, e.from)
		}
		text[e.file] = strings.Replace(s, e.from, e.to, 1)
	}
	replace := map[string]string{}
	for file, s := range text {
		to := filepath.Join(dir, strings.ReplaceAll(file, "/", "_"))
		if err := os.WriteFile(to, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
		replace[filepath.Join(root, file)] = to
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	overlay = filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlay, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return overlay
}

var violationLine = regexp.MustCompile(`violation in round (\d+): (.*)`)

// TestMutants plants every mutant. Each has to be found by TestPromises within its time, as a violation: a build that
// fails, or any other error, does not count.
func TestMutants(t *testing.T) {
	if *within == 0 {
		for i := range mutants {
			m := &mutants[i]
			t.Run(m.name, func(t *testing.T) {
				plant(t, m)
			})
		}
		return
	}
	for i := range mutants {
		m := &mutants[i]
		if *only != "" && *only != m.name {
			continue
		}
		t.Run(m.name, func(t *testing.T) {
			began := time.Now()
			binary := filepath.Join(t.TempDir(), "server.test")
			if out, err := exec.Command("go", "test", "-c", "-overlay", plant(t, m), "-o", binary, "../server").CombinedOutput(); err != nil {
				t.Fatalf("build: %v\n%s", err, out)
			}
			built := time.Since(began)
			c := exec.Command(binary, "-test.run", "^TestPromises$", "-test.v", "-test.timeout", (*within + 2*time.Minute).String(), "-promises-for", within.String(), "-promises-scenario", m.scenario, "-promises-seed", fmt.Sprint(*seed))
			c.Dir = "../server"
			out, err := c.CombinedOutput()
			found := violationLine.FindSubmatch(out)
			switch _, failed := errors.AsType[*exec.ExitError](err); {
			case err == nil:
				t.Fatalf("not found within %v: %s\n%s", *within, m.what, tail(string(out), 3))
			case !failed || found == nil:
				t.Fatalf("%v, and no violation is named:\n%s", err, tail(string(out), 60))
			}
			t.Logf("%-16s found in round %s, %.1f s after %.1f s of building: %s", m.name, found[1], (time.Since(began) - built).Seconds(), built.Seconds(), found[2])
			if *show {
				t.Logf("%s", tail(string(out), 70))
			}
		})
	}
}

// TestDocumented: the rule that a mutant breaks names it.
func TestDocumented(t *testing.T) {
	b, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	for i := range mutants {
		if !strings.Contains(string(b), "`"+mutants[i].name+"`") {
			t.Errorf("docs/protocol.md does not name %s", mutants[i].name)
		}
	}
}

func tail(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return fmt.Sprint(strings.Join(lines[max(0, len(lines)-n):], "\n"))
}
