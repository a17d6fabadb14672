package main

import (
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// layers says which way imports point: a package may import those of lines above its own, never one of its own line or
// below. A package that does not fit is in the wrong place; do not move the lines to make a build pass.
var layers = [][]string{
	{"block"},
	{"policy", "pages", "index", "meta", "wire", "trace", "recording", "host", "notify", "gpu", "fence", "holders", "lease", "adapter", "packaging/checkstatic"},
	{"restore"},
	{"arena", "engine", "sweep"},
	{"server", "client", "status"},
	{"metrics"},
	{"daemon", "bench"},
	{"crash", "mutants"}, // tests alone
	{"."},
}

// imports is what each package does import of the project, one by one: an edge more is a decision, an edge less is
// struck off.
var imports = map[string]string{
	".":                     "adapter arena bench block client daemon engine meta policy recording status sweep trace",
	"adapter":               "",
	"arena":                 "block host meta",
	"bench":                 "block client host recording status trace wire",
	"block":                 "",
	"client":                "block fence wire",
	"crash":                 "",
	"daemon":                "arena engine host metrics notify server status",
	"engine":                "block index meta pages policy restore",
	"fence":                 "",
	"gpu":                   "",
	"holders":               "",
	"host":                  "",
	"index":                 "block",
	"lease":                 "",
	"meta":                  "block",
	"metrics":               "status",
	"mutants":               "",
	"notify":                "",
	"packaging/checkstatic": "",
	"pages":                 "block",
	"policy":                "",
	"recording":             "block",
	"restore":               "meta",
	"server":                "arena block engine fence host meta wire",
	"status":                "engine meta restore",
	"sweep":                 "holders lease",
	"trace":                 "block",
	"wire":                  "block",
}

// testImports is what test files import beyond that.
var testImports = map[string]string{
	".":      "wire",
	"crash":  "bench block client trace wire",
	"policy": "trace",
	"server": "client",
}

// fences names the packages that may use a library; "" means test files alone, of any package. Types of a library do not
// cross the border of a package behind its fence.
var fences = map[string]string{
	"github.com/urfave/cli/v2":            ".",
	"github.com/prometheus/client_golang": "metrics",
	"github.com/dustin/go-humanize":       ". arena bench daemon status",
	"golang.org/x/sys/unix":               ". arena bench client daemon fence holders host lease server sweep",
	"github.com/rogpeppe/go-internal":     "",
	"go.uber.org/goleak":                  "",
	"pgregory.net/rapid":                  "",
}

// sourceFile is what the tests look at of a file.
type sourceFile struct {
	dir, name string
	test      bool
	imports   []string
}

// sources reads the imports of every Go file of the module. It reads the files itself: a test that asked go list would
// be taken from the test cache when another package changes.
func sources(t *testing.T) []sourceFile {
	t.Helper()
	var out []sourceFile
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && p != "." && (d.Name() == "testdata" || d.Name()[0] == '.' || d.Name()[0] == '_'):
			return filepath.SkipDir
		case d.IsDir() || path.Ext(p) != ".go":
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		s := sourceFile{dir: path.Dir(filepath.ToSlash(p)), name: filepath.ToSlash(p), test: strings.HasSuffix(p, "_test.go")}
		for _, i := range f.Imports {
			name, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return err
			}
			s.imports = append(s.imports, name)
		}
		out = append(out, s)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// ours turns an import path into a folder of this module.
func ours(name string) (dir string, ok bool) {
	if name == "kvlift" {
		return ".", true
	}
	return strings.CutPrefix(name, "kvlift/")
}

func TestImportsPointOneWay(t *testing.T) {
	level := map[string]int{}
	for i, line := range layers {
		for _, p := range line {
			if _, twice := level[p]; twice {
				t.Errorf("%s stands in layers twice", p)
			}
			level[p] = i
		}
	}
	if a, b := slices.Sorted(maps.Keys(level)), slices.Sorted(maps.Keys(imports)); !slices.Equal(a, b) {
		t.Errorf("layers and imports name different packages:\n%v\n%v", a, b)
	}
	for p, list := range imports {
		for _, q := range strings.Fields(list) {
			if level[q] >= level[p] {
				t.Errorf("%s may not import %s: it does not stand in a line above", p, q)
			}
		}
	}
}

func TestImportGraph(t *testing.T) {
	code, tests, folders := map[string]map[string]bool{}, map[string]map[string]bool{}, map[string]bool{}
	for p, list := range imports {
		code[p] = map[string]bool{}
		for _, q := range strings.Fields(list) {
			code[p][q] = false
		}
	}
	for p, list := range testImports {
		tests[p] = map[string]bool{}
		for _, q := range strings.Fields(list) {
			tests[p][q] = false
		}
	}
	for _, f := range sources(t) {
		folders[f.dir] = true
		if _, known := code[f.dir]; !known {
			t.Errorf("%s: package %s stands in no layer of deps_test.go", f.name, f.dir)
			continue
		}
		for _, name := range f.imports {
			q, ok := ours(name)
			if !ok || f.test && q == f.dir {
				continue
			}
			_, allowed := code[f.dir][q]
			_, inTests := tests[f.dir][q]
			switch {
			case allowed && !f.test:
				code[f.dir][q] = true
			case f.test && inTests:
				tests[f.dir][q] = true
			case f.test && allowed:
			default:
				t.Errorf("%s imports %s, which deps_test.go does not allow", f.name, q)
			}
		}
	}
	for p := range code {
		if !folders[p] {
			t.Errorf("there is no package %s", p)
		}
	}
	for what, graph := range map[string]map[string]map[string]bool{"imports": code, "testImports": tests} {
		for p, edges := range graph {
			for q, used := range edges {
				if !used {
					t.Errorf("%s: %s does not import %s any more: strike it off", what, p, q)
				}
			}
		}
	}
}

func TestFences(t *testing.T) {
	used := map[string]map[string]bool{}
	for lib, list := range fences {
		used[lib] = map[string]bool{}
		for _, p := range strings.Fields(list) {
			used[lib][p] = false
		}
	}
	for _, f := range sources(t) {
		for _, name := range f.imports {
			first, _, _ := strings.Cut(name, "/")
			switch {
			case name == "unsafe":
				if f.name != "meta/word.go" && f.name != "fence/page.go" { // words that two processes read and write
					t.Errorf("%s imports unsafe, which only meta/word.go and fence/page.go may", f.name)
				}
				continue
			case name == "C":
				t.Errorf("%s uses cgo: the binary would not be static", f.name)
				continue
			case !strings.Contains(first, "."):
				continue // the standard library, or ours
			}
			lib := ""
			for l := range fences {
				if name == l || strings.HasPrefix(name, l+"/") {
					lib = l
				}
			}
			_, inside := used[lib][f.dir]
			switch {
			case lib == "":
				t.Errorf("%s imports %s, which has no fence in deps_test.go", f.name, name)
			case inside && !f.test:
				used[lib][f.dir] = true
			case inside:
			case f.test && (fences[lib] == "" || lib == "golang.org/x/sys/unix"): // tests ask the kernel, too
			default:
				t.Errorf("%s imports %s, which is fenced into %q", f.name, name, fences[lib])
			}
		}
	}
	for lib, dirs := range used {
		for p, u := range dirs {
			if !u {
				t.Errorf("%s does not use %s any more: strike it off", p, lib)
			}
		}
	}
}
