package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"

	"github.com/dustin/go-humanize"
	"github.com/urfave/cli/v2"
)

// sizeValue is a flag of bytes. A bare unit like G is refused: it is 10^9 to some and 2^30 to others.
type sizeValue uint64

func (v *sizeValue) Set(s string) error {
	n, err := parseSize(s)
	if err != nil {
		return err
	}
	*v = sizeValue(n)
	return nil
}

// String is exact: what it prints can be given again and means the same size.
func (v *sizeValue) String() string {
	if *v == 0 {
		return ""
	}
	n, unit := uint64(*v), 0
	for n%1024 == 0 && unit < 5 {
		n, unit = n/1024, unit+1
	}
	return strconv.FormatUint(n, 10) + [...]string{"", "KiB", "MiB", "GiB", "TiB", "PiB"}[unit]
}

// Get makes the flag's value readable by name.
func (v *sizeValue) Get() any { return v.String() }

var sizePattern = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?\s*([KMGTP]i?B|B)?$`)

// parseSize reads 8GiB, 512MiB, 4096 or, decimal, 8GB.
func parseSize(s string) (uint64, error) {
	if !sizePattern.MatchString(s) {
		return 0, fmt.Errorf("%q is no size: write 8GiB (2^30), 8GB (10^9) or plain bytes", s)
	}
	n, err := humanize.ParseBytes(s)
	if err != nil {
		return 0, fmt.Errorf("%q is no size: %v", s, err)
	}
	if n > 1<<50 {
		return 0, fmt.Errorf("%q is more than 1 PiB", s)
	}
	return n, nil
}

func sizeFlag(name, usage, env, category string) *cli.GenericFlag {
	f := &cli.GenericFlag{Name: name, Usage: usage, Value: new(sizeValue), Category: category}
	if env != "" {
		f.EnvVars = []string{env}
	}
	return f
}

func sizeOf(c *cli.Context, name string) uint64 { return uint64(*c.Generic(name).(*sizeValue)) }

var namePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)

// nameOf checks the name of a daemon: it becomes part of paths.
func nameOf(c *cli.Context) (string, error) {
	n := c.String("name")
	if !namePattern.MatchString(n) {
		return "", &usageError{fmt.Sprintf("--name %q: letters, digits, '.', '_' and '-', at most 63", n), ""}
	}
	return n, nil
}

// defaultSocket is where the daemon of a name listens: /run/kvlift for root, else below XDG_RUNTIME_DIR.
func defaultSocket(name string, uid int, getenv func(string) string) string {
	if uid == 0 {
		return "/run/kvlift/" + name + ".sock"
	}
	dir := getenv("XDG_RUNTIME_DIR")
	if dir == "" {
		dir = filepath.Join(os.TempDir(), "kvlift-"+strconv.Itoa(uid))
	} else {
		dir = filepath.Join(dir, "kvlift")
	}
	return filepath.Join(dir, name+".sock")
}

func socketOf(c *cli.Context, name string) string {
	if s := c.String("socket"); s != "" {
		return s
	}
	return defaultSocket(name, os.Getuid(), os.Getenv)
}

func nameFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "name", Value: "default", Usage: "which daemon of this host", EnvVars: []string{"KVLIFT_NAME"}},
		&cli.StringFlag{Name: "socket", Usage: "Unix socket `PATH` (default: by name, below /run/kvlift or $XDG_RUNTIME_DIR/kvlift)", EnvVars: []string{"KVLIFT_SOCKET"}},
	}
}
