package main

import (
	"debug/elf"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestCheck builds a program that is as small as can be and makes of it what a release must not be.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, content, 0o644); err != nil {
			t.Fatal(err)
		}
		return name
	}
	write("main.go", []byte("package main\n\nfunc main() {}\n"))
	build := func(module, name string) string {
		write("go.mod", []byte("module "+module+"\n\ngo 1.26.0\n"))
		out := filepath.Join(dir, name)
		c := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-o", out, ".")
		c.Dir, c.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=", "GOWORK=off")
		if b, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, b)
		}
		return out
	}
	good := build("kvlift", "kvlift-linux-amd64")
	whole, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	// patched turns the first program header into one of another type.
	patched := func(name string, to elf.ProgType) string {
		b := append([]byte(nil), whole...)
		binary.LittleEndian.PutUint32(b[binary.LittleEndian.Uint64(b[32:]):], uint32(to))
		return write(name, b)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ path, want string }{
		{good, ""},
		{write("kvlift-linux-arm64", whole), "it is for amd64"},
		{patched("interpreter", elf.PT_INTERP), "asks for an interpreter"},
		{patched("dynamic", elf.PT_DYNAMIC), "dynamic section"},
		{build("other", "other"), "not kvlift"},
		{filepath.Join(dir, "main.go"), "bad magic"},
		{self, "it "}, // a test binary: cgo, or paths of this machine, in some order
	} {
		_, err := check(c.path)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", filepath.Base(c.path), err, c.want)
		}
	}
}
