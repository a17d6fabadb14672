package main

import (
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"kvlift/bench"
	"kvlift/status"
	"kvlift/sweep"
	"kvlift/wire"
)

// What the documentation says twice, or says of the code, is held to the code here.

var update = flag.Bool("update", false, "write the flags in docs/operations.md")

func page(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// section returns what stands between <!-- NAME --> and <!-- end of NAME -->.
func section(t *testing.T, text, name string) string {
	t.Helper()
	_, rest, ok := strings.Cut(text, "<!-- "+name+" -->\n")
	body, _, closed := strings.Cut(rest, "<!-- end of "+name+" -->")
	if !ok || !closed {
		t.Fatalf("no section %q", name)
	}
	return body
}

func commands(list []*cli.Command, prefix string, f func(path string, c *cli.Command)) {
	for _, c := range list {
		if !c.Hidden && c.Name != "help" {
			f(prefix+c.Name, c)
			commands(c.Subcommands, prefix+c.Name+" ", f)
		}
	}
}

func flagTables() string {
	var b strings.Builder
	commands(newApp(io.Discard, io.Discard).Commands, "", func(path string, c *cli.Command) {
		rows := ""
		for _, f := range c.Flags {
			d, ok := f.(cli.DocGenerationFlag)
			if !ok || f.Names()[0] == "help" {
				continue
			}
			usage, arg := d.GetUsage(), ""
			if _, rest, ok := strings.Cut(usage, "`"); ok {
				arg, _, _ = strings.Cut(rest, "`")
				usage = strings.Replace(usage, "`"+arg+"`", arg, 1)
			}
			names := ""
			for i, n := range f.Names() {
				if i > 0 {
					names += ", "
				}
				dash := "--"
				if len(n) == 1 {
					dash = "-"
				}
				names += "`" + strings.TrimSpace(dash+n+" "+arg) + "`"
			}
			value := d.GetValue()
			if value == "0" || value == "0s" || value == "false" || value == "[]" {
				value = "" // where that is no ordinary value, the text says what happens
			}
			env := strings.Join(slices.DeleteFunc(slices.Clone(d.GetEnvVars()), func(s string) bool { return s == "" }), "`, `")
			rows += fmt.Sprintf("| %s | %s | %s | %s |\n", names, code(value), code(env), strings.ReplaceAll(usage, "|", "\\|"))
		}
		if rows != "" {
			fmt.Fprintf(&b, "\n`kvlift %s`\n\n| flag | default | environment | meaning |\n|---|---|---|---|\n%s", path, rows)
		}
	})
	return b.String() + "\n"
}

func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

func TestFlagsDocumented(t *testing.T) {
	const name = "docs/operations.md"
	text, want := page(t, name), flagTables()
	got := section(t, text, "flags")
	if got == want {
		return
	}
	if !*update {
		t.Fatalf("the flags in %s are not those of the commands: go test . -run TestFlagsDocumented -update writes them; want\n%s", name, want)
	}
	const mark = "<!-- flags -->\n"
	if err := os.WriteFile(name, []byte(strings.Replace(text, mark+got, mark+want, 1)), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestEveryServeFlagHasAVariable leaves out what is asked once.
func TestEveryServeFlagHasAVariable(t *testing.T) {
	for _, f := range serveCommand().Flags {
		n := f.Names()[0]
		want := "KVLIFT_" + strings.ToUpper(strings.ReplaceAll(n, "-", "_"))
		if d := f.(cli.DocGenerationFlag); n != "print-config" && n != "help" && !slices.Contains(d.GetEnvVars(), want) {
			t.Errorf("--%s has no %s", n, want)
		}
	}
}

// jsonFields lists the leaves of a document as an operator writes them: tiers[].used_bytes.
func jsonFields(v reflect.Type, prefix string) []string {
	switch v.Kind() {
	case reflect.Pointer:
		return jsonFields(v.Elem(), prefix)
	case reflect.Slice:
		return jsonFields(v.Elem(), prefix+"[]")
	case reflect.Struct:
		var out []string
		for f := range v.Fields() {
			if !f.IsExported() {
				continue
			}
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if prefix != "" {
				name = prefix + "." + name
			}
			out = append(out, jsonFields(f.Type, name)...)
		}
		return out
	}
	return []string{prefix}
}

func TestJSONDocumented(t *testing.T) {
	text := page(t, "docs/operations.md")
	for name, v := range map[string]any{"status fields": status.Document{}, "verify fields": verifyReport{}, "replay fields": bench.Result{}, "claim fields": bench.Claim{}, "recording fields": bench.Played{}, "engine fields": engineFigures{}, "neighbours fields": bench.NeighbourResult{}, "sweep fields": sweep.Report{}} {
		var got []string
		for _, m := range regexp.MustCompile("(?m)^\\| (`[^|]+`) \\|").FindAllStringSubmatch(section(t, text, name), -1) {
			for _, f := range strings.Split(m[1], ", ") {
				got = append(got, strings.Trim(f, "`"))
			}
		}
		want := jsonFields(reflect.TypeOf(v), "")
		slices.Sort(got)
		slices.Sort(want)
		for _, f := range want {
			if !slices.Contains(got, f) {
				t.Errorf("%s: %s is not documented", name, f)
			}
		}
		for _, f := range got {
			if !slices.Contains(want, f) {
				t.Errorf("%s: there is no %s", name, f)
			}
		}
		if len(slices.Compact(slices.Clone(got))) != len(got) {
			t.Errorf("%s: a field stands there twice", name)
		}
	}
}

// ownText is every page and file in which people read about the program.
func ownText(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{"README.md": page(t, "README.md"), "Makefile": page(t, "Makefile")}
	for _, dir := range []string{"docs", "packaging", "contrib"} {
		err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && filepath.Ext(p) != ".go" {
				out[p] = page(t, p)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// TestCommandsInText holds what readers may copy, commands and variables, to what there is.
func TestCommandsInText(t *testing.T) {
	flags, variables := map[string][]string{}, map[string]bool{"KVLIFT_NEED_SHARED": true, "KVLIFT_E2E": true}
	for _, m := range regexp.MustCompile(`\$\{(KVLIFT_[A-Z_]+):-`).FindAllStringSubmatch(page(t, "contrib/entrypoint.sh"), -1) {
		variables[m[1]] = true
	}
	scripts, err := filepath.Glob("adapter/e2e/*.py")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no end-to-end tests: %v", err)
	}
	for _, name := range scripts {
		for _, m := range regexp.MustCompile(`environ\.get\("(KVLIFT_[A-Z0-9_]+)"`).FindAllStringSubmatch(page(t, name), -1) {
			variables[m[1]] = true
		}
	}
	commands(newApp(io.Discard, io.Discard).Commands, "", func(path string, c *cli.Command) {
		flags[path] = []string{"help", "h"}
		for _, f := range c.Flags {
			flags[path] = append(flags[path], f.Names()...)
			if d, ok := f.(cli.DocGenerationFlag); ok {
				for _, e := range d.GetEnvVars() {
					variables[e] = true
				}
			}
		}
	})
	call := regexp.MustCompile("(?:^|[ /`\"$])kvlift((?: [a-z][a-z-]*){1,2})([^`|#\n]*)")
	option := regexp.MustCompile(`(?:^|\s)--?([a-z][a-z-]*)`)
	for name, text := range ownText(t) {
		for _, v := range regexp.MustCompile(`KVLIFT_[A-Z0-9_]+`).FindAllString(text, -1) {
			if !variables[v] && v != "KVLIFT_" {
				t.Errorf("%s: there is no variable %s", name, v)
			}
		}
		for _, m := range call.FindAllStringSubmatch(text, -1) {
			words := strings.Fields(m[1])
			path := strings.Join(words, " ")
			known, ok := flags[path]
			if !ok {
				path = words[0]
				known, ok = flags[path]
			}
			if !ok {
				continue // prose: "kvlift keeps"
			}
			for _, o := range option.FindAllStringSubmatch(m[2], -1) {
				if !slices.Contains(known, o[1]) {
					t.Errorf("%s: kvlift %s has no flag --%s: %q", name, path, o[1], m[0])
				}
			}
		}
	}
}

// TestMessagesInText sees that the messages that the troubleshooting table is ordered by are still said.
func TestMessagesInText(t *testing.T) {
	var source strings.Builder
	for _, f := range sources(t) {
		if !f.test {
			source.WriteString(page(t, f.name))
		}
	}
	rows := regexp.MustCompile(`(?m)^\| ([^|]+) \|`).FindAllStringSubmatch(section(t, page(t, "docs/operations.md"), "messages"), -1)
	if len(rows) < 10 {
		t.Fatalf("%d rows", len(rows))
	}
	for _, m := range rows {
		for _, quoted := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(m[1], -1) {
			for _, part := range strings.Split(quoted[1], "…") {
				if part = strings.TrimSpace(part); part != "" && !strings.Contains(source.String(), part) {
					t.Errorf("nothing says %q any more", part)
				}
			}
		}
	}
}

// TestLinks follows the relative links of all pages.
func TestLinks(t *testing.T) {
	for name, text := range ownText(t) {
		if filepath.Ext(name) != ".md" {
			continue
		}
		for _, m := range regexp.MustCompile(`\]\(([^)#]+)(#[^)]*)?\)`).FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(name), m[1])); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// TestDependenciesDocumented compares the reasons with the requirements.
func TestDependenciesDocumented(t *testing.T) {
	var want, got []string
	for _, m := range regexp.MustCompile(`(?m)^(?:require )?\s*([a-z0-9.-]+\.[a-z]+/\S+) v\S+$`).FindAllStringSubmatch(page(t, "go.mod"), -1) {
		want = append(want, m[1])
	}
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(section(t, page(t, "docs/dependencies.md"), "requirements"), -1) {
		got = append(got, m[1])
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("docs/dependencies.md has a reason for\n%v\ngo.mod requires\n%v", got, want)
	}
}

// TestProtocolDocumented sees that every message and every rule has its place.
func TestProtocolDocumented(t *testing.T) {
	text := strings.ReplaceAll(page(t, "docs/protocol.md"), "\n  ", " ") // lines of a list item as one
	for v := wire.THello; !strings.HasPrefix(v.String(), "type "); v++ {
		if !strings.Contains(text, "| `"+v.String()+"` |") {
			t.Errorf("the message %v is not documented", v)
		}
	}
	for _, r := range []struct {
		letter string
		n      int
	}{{"R", 24}, {"F", 4}} {
		for i := 1; i <= r.n; i++ {
			if !strings.Contains(text, fmt.Sprintf("**%s%d**", r.letter, i)) {
				t.Errorf("rule %s%d is not documented", r.letter, i)
			}
		}
	}
	for _, m := range regexp.MustCompile("`(Test[A-Za-z]+)` of package ([a-z]+)").FindAllStringSubmatch(text, -1) {
		if !slices.ContainsFunc(sources(t), func(f sourceFile) bool {
			return f.test && f.dir == m[2] && strings.Contains(page(t, f.name), "\nfunc "+m[1]+"(")
		}) {
			t.Errorf("package %s has no %s", m[2], m[1])
		}
	}
	if want := fmt.Sprintf("version %d.%d", wire.Major, wire.Minor); !strings.Contains(text, want) {
		t.Errorf("the protocol is of %s, which docs/protocol.md does not say", want)
	}
}
