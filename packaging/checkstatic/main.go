// Command checkstatic fails unless every named file is a release of kvlift for the architecture that its name ends with:
// an ELF executable that asks for no interpreter and no shared library, built without cgo and without paths of the
// machine that built it.
package main

import (
	"debug/buildinfo"
	"debug/elf"
	"fmt"
	"os"
	"strings"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: checkstatic FILE...")
		os.Exit(2)
	}
	failed := false
	for _, name := range os.Args[1:] {
		arch, err := check(name)
		if err != nil {
			fmt.Fprintf(os.Stderr, "checkstatic: %s: %v\n", name, err)
			failed = true
			continue
		}
		fmt.Printf("%s: static, %s\n", name, arch)
	}
	if failed {
		os.Exit(1)
	}
}

// machines is what each architecture is called in an ELF header.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// check returns the architecture of a static executable.
func check(name string) (arch string, err error) {
	f, err := elf.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close() // opened for reading: Close has nothing to report
	for _, p := range f.Progs {
		switch p.Type {
		case elf.PT_INTERP:
			return "", fmt.Errorf("it is dynamic: it asks for an interpreter")
		case elf.PT_DYNAMIC:
			return "", fmt.Errorf("it is dynamic: it has a dynamic section")
		}
	}
	if libs, err := f.ImportedLibraries(); err == nil && len(libs) > 0 {
		return "", fmt.Errorf("it is dynamic: it needs %s", strings.Join(libs, ", "))
	}
	info, err := buildinfo.ReadFile(name)
	if err != nil {
		return "", err
	}
	set := map[string]string{}
	for _, s := range info.Settings {
		set[s.Key] = s.Value
	}
	arch = set["GOARCH"]
	switch {
	case info.Main.Path != "kvlift":
		return "", fmt.Errorf("it is %q, not kvlift", info.Main.Path)
	case set["CGO_ENABLED"] != "0":
		return "", fmt.Errorf("it was built with CGO_ENABLED=%s", set["CGO_ENABLED"])
	case set["-trimpath"] != "true":
		return "", fmt.Errorf("it was built without -trimpath")
	case set["GOOS"] != "linux" || machines[arch] != f.Machine:
		return "", fmt.Errorf("it is for %s/%s on %v", set["GOOS"], arch, f.Machine)
	case strings.Contains(name, "-linux-") && !strings.HasSuffix(name, "-linux-"+arch):
		return "", fmt.Errorf("it is for %s", arch)
	}
	return arch, nil
}
