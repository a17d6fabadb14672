package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"kvlift/sweep"
)

// sweepCalls are the calls of kvlift sweep in a recipe, as words: in a shell's line, a unit's, or a list of YAML.
func sweepCalls(text string) [][]string {
	var calls [][]string
	for line := range strings.SplitSeq(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "#") {
			continue
		}
		for _, m := range regexp.MustCompile(`kvlift,? (sweep\b[^]\n]*)`).FindAllStringSubmatch(line, -1) {
			calls = append(calls, strings.Fields(strings.ReplaceAll(m[1], ",", " ")))
		}
	}
	return calls
}

// TestRecipesSweep runs every call of kvlift sweep that the recipes ship, on a folder with a dead region and a living one. The
// wrapper is run whole, by testdata/script/entrypoint.txt.
func TestRecipesSweep(t *testing.T) {
	for name, want := range map[string]int{"kvlift-sweep.cron": 1, "kvlift-sweep.service": 1, "engine.service": 2, "sweep.kubernetes.yaml": 1} {
		calls := sweepCalls(page(t, "contrib/"+name))
		if len(calls) != want {
			t.Errorf("%s: %d calls, want %d: %q", name, len(calls), want, calls)
		}
		for _, call := range calls {
			t.Run(name+" "+strings.Join(call, " "), func(t *testing.T) {
				dir, err := os.MkdirTemp("/dev/shm", "kvlift-test-")
				if err != nil {
					t.Fatal(err)
				}
				defer os.RemoveAll(dir)
				dead, live := filepath.Join(dir, "vllm_offload_1.mmap"), filepath.Join(dir, "vllm_offload_2.mmap")
				for _, p := range []string{dead, live} {
					if err := os.WriteFile(p, []byte("bytes"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				f, err := os.Open(live)
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				for i, w := range call { // there is nothing to wait for: the living one lives
					if w == "--wait" {
						call[i+1] = "1ms"
					}
				}
				var stdout, stderr bytes.Buffer
				if code := run(append(append([]string{"kvlift"}, call...), "--dir", dir), &stdout, &stderr); code != exitDone {
					t.Errorf("exit status %d: %s%s", code, &stdout, &stderr)
				}
				if _, err := os.Lstat(dead); err == nil {
					t.Error("the dead region is there")
				}
				if _, err := os.Lstat(live); err != nil {
					t.Errorf("the living region: %v", err)
				}
				if !strings.Contains(stdout.String(), dead) {
					t.Errorf("nothing says that it was removed: %s", &stdout)
				}
			})
		}
	}
}

// TestUnits lets systemd read the units, with programs that are here in the place of theirs.
func TestUnits(t *testing.T) {
	tool, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze")
	}
	dir := t.TempDir()
	args := []string{"verify"}
	for _, name := range []string{"kvlift-sweep.service", "kvlift-sweep.timer", "engine.service"} {
		text := regexp.MustCompile(`/usr/local/bin/\S+`).ReplaceAllString(page(t, "contrib/"+name), "/bin/true")
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, name)
	}
	if out, err := exec.Command(tool, args...).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze: %v\n%s", err, out)
	}
}

// TestCompose lets docker compose read its file; it needs no daemon for that.
func TestCompose(t *testing.T) {
	if err := exec.Command("docker", "compose", "version").Run(); err != nil {
		t.Skip("no docker compose")
	}
	c := exec.Command("docker", "compose", "-f", "contrib/sweep.compose.yaml", "config")
	c.Env = append(os.Environ(), "ENGINE_IMAGE=engine", "ENGINE_COMMAND=vllm serve MODEL")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("docker compose: %v\n%s", err, out)
	}
	for _, want := range []string{"ipc: host", "/usr/local/bin/entrypoint.sh", "- serve", "stop_grace_period: 1m0s"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

// TestFamiliesDocumented compares the table of families with the families.
func TestFamiliesDocumented(t *testing.T) {
	const name, mark = "docs/operations.md", "<!-- sweep families -->\n"
	text, want := page(t, name), familyTable()
	got := section(t, text, "sweep families")
	if got == want {
		return
	}
	if !*update {
		t.Fatalf("the families in %s are not those of sweep: go test . -run TestFamiliesDocumented -update writes them; want\n%s", name, want)
	}
	if err := os.WriteFile(name, []byte(strings.Replace(text, mark+got, mark+want, 1)), 0o644); err != nil {
		t.Fatal(err)
	}
}

func familyTable() string {
	var b strings.Builder
	b.WriteString("| family | files | pattern | what proves that nobody uses one | default |\n|---|---|---|---|---|\n")
	for _, f := range sweep.Families() {
		proof, asked := "lease", "swept"
		if f.Proof == sweep.ByConnect {
			proof = "a connection is refused, and the socket is older than a minute"
		}
		if f.MinAge > 0 {
			proof = fmt.Sprintf("lease, and unchanged for %v", f.MinAge.String())
		}
		if f.Optional {
			asked = "`--family " + f.Name + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | `%s` | %s | %s |\n", f.Name, f.Of, strings.ReplaceAll(strings.Join(f.Shapes, "`, `"), "|", "\\|"), proof, asked)
	}
	return b.String()
}
