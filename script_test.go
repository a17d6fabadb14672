package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/urfave/cli/v2"

	"kvlift/meta"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"kvlift": func() { os.Exit(run(os.Args, os.Stdout, os.Stderr)) },
	})
}

// TestScripts runs testdata/script/*.txt. Besides the commands of testscript they have
//
//	exits CODE PROGRAM ARGS...   run it and compare its exit status
//	dial SOCKET                  wait until somebody answers on the socket
//	term                         send SIGTERM to the command started in the background last
//	appears FILE                 wait until a file is there
//	hold SOCKET                  connect and stay connected until the script ends, without a word
//	json PATH VALUE              compare a value in the JSON of stdout; PATH is dotted, VALUE is JSON
//	scribble META PART           flip a bit of the first used record of a part: namespace, session or entry
//	flags-have-env               every flag in the help on stdout names an environment variable
//
// and $SHM, an empty folder on the memory file system, $CONTRIB, the folder contrib, and $RECORDINGS, the recordings that are in the
// repository.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                "testdata/script",
		RequireUniqueNames: true,
		Setup: func(env *testscript.Env) error {
			dir, err := os.MkdirTemp("/dev/shm", "kvlift-test-")
			if err != nil {
				return err
			}
			env.Defer(func() { _ = os.RemoveAll(dir) }) // a leftover would be memory; nobody is left to be told
			env.Setenv("SHM", dir)
			env.Setenv("XDG_RUNTIME_DIR", dir)
			for name, dir := range map[string]string{"CONTRIB": "contrib", "RECORDINGS": "testdata/recordings"} {
				path, err := filepath.Abs(dir)
				if err != nil {
					return err
				}
				env.Setenv(name, path)
			}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits, "dial": dial, "appears": appears, "term": term, "hold": hold, "json": jsonValue, "scribble": scribble, "flags-have-env": flagsHaveEnv,
		},
	})
}

func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM ARGS...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		e, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = e.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit status %d, want %d", got, want)
	}
}

func dial(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: dial SOCKET")
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for {
		c, err := net.Dial("unix", args[0])
		if err == nil {
			ts.Check(c.Close())
			return
		}
		select {
		case <-tick.C:
		case <-limit:
			ts.Fatalf("nobody answers: %v", err)
		}
	}
}

func appears(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: appears FILE")
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		_, err := os.Stat(ts.MkAbs(args[0]))
		if err == nil {
			return
		}
		if time.Now().After(end) {
			ts.Fatalf("it does not appear: %v", err)
		}
	}
}

func term(ts *testscript.TestScript, neg bool, args []string) {
	cmds := ts.BackgroundCmds()
	if neg || len(args) != 0 || len(cmds) == 0 {
		ts.Fatalf("usage: term, with a command in the background")
	}
	ts.Check(cmds[len(cmds)-1].Process.Signal(syscall.SIGTERM))
}

func hold(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: hold SOCKET")
	}
	c, err := net.Dial("unix", args[0])
	ts.Check(err)
	ts.Defer(func() { _ = c.Close() }) // the daemon may have closed it
}

func jsonValue(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: json PATH VALUE")
	}
	var v, want any
	ts.Check(json.Unmarshal([]byte(ts.ReadFile("stdout")), &v))
	ts.Check(json.Unmarshal([]byte(args[1]), &want))
	for name := range strings.SplitSeq(args[0], ".") {
		switch at := v.(type) {
		case map[string]any:
			next, ok := at[name]
			if !ok {
				ts.Fatalf("no %q in %s", name, args[0])
			}
			v = next
		case []any:
			i, err := strconv.Atoi(name)
			ts.Check(err)
			if i >= len(at) {
				ts.Fatalf("%d elements at %q of %s", len(at), name, args[0])
			}
			v = at[i]
		default:
			ts.Fatalf("nothing is below %q of %s", name, args[0])
		}
	}
	got, err := json.Marshal(v)
	ts.Check(err)
	if wanted, _ := json.Marshal(want); !bytes.Equal(got, wanted) { // it was JSON
		ts.Fatalf("%s is %s, want %s", args[0], got, wanted)
	}
}

func scribble(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: scribble META PART")
	}
	b, err := os.ReadFile(args[0])
	ts.Check(err)
	namespaces := 2 * meta.HeaderSize
	sessions := namespaces + meta.MaxNamespaces*meta.NamespaceSize
	entries := sessions + meta.MaxSessions*meta.SessionSize
	lo, hi, size := 0, 0, 1
	switch args[1] {
	case "namespace":
		lo, hi, size = namespaces, sessions, meta.NamespaceSize
	case "session":
		lo, hi, size = sessions, entries, meta.SessionSize
	case "entry":
		lo, hi, size = entries, len(b), meta.EntrySize
	default:
		ts.Fatalf("no part %q", args[1])
	}
	for ; lo+size <= hi; lo += size {
		if b[lo] != 0 { // the state word says that it is used
			b[lo+40] ^= 4
			ts.Check(os.WriteFile(args[0], b, 0o600))
			return
		}
	}
	ts.Fatalf("no %s is used", args[1])
}

// flagLine is a line of help that begins with a flag.
var flagLine = regexp.MustCompile(`(?m)^ +--([a-z-]+).*$`)

func flagsHaveEnv(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: flags-have-env")
	}
	n := 0
	for _, m := range flagLine.FindAllStringSubmatch(ts.ReadFile("stdout"), -1) {
		if m[1] == "help" || m[1] == "print-config" { // not settings
			continue
		}
		n++
		if want := "[$KVLIFT_" + strings.ToUpper(strings.ReplaceAll(m[1], "-", "_")) + "]"; !strings.HasSuffix(m[0], want) {
			ts.Fatalf("--%s: the line does not end in %s: %q", m[1], want, m[0])
		}
	}
	if n < 20 {
		ts.Fatalf("only %d flags found", n)
	}
}

// notBuilt are the commands that say what they will do, without examples.
var notBuilt = []string{"trace", "doctor"}

// TestHelp asks every command that there is for help, so that a new one cannot go without.
func TestHelp(t *testing.T) {
	commands := 0
	var walk func(path []string, cs []*cli.Command)
	walk = func(path []string, cs []*cli.Command) {
		for _, c := range cs {
			name := append(slices.Clone(path), c.Name)
			walk(name, c.Subcommands)
			if c.Hidden {
				continue
			}
			commands++
			var stdout, stderr bytes.Buffer
			code := run(append(name, "--help"), &stdout, &stderr)
			if code != exitDone || stderr.Len() > 0 {
				t.Errorf("%v --help: exit status %d, stderr %q", name, code, &stderr)
			}
			example := fmt.Sprintf("\n      %s ", strings.Join(name, " "))
			help := strings.ReplaceAll(stdout.String(), "\n", " \n") // a command without arguments is an example, too
			if !slices.Contains(notBuilt, c.Name) && strings.Count(help, example) < 2 {
				t.Errorf("%v --help: fewer than two examples:\n%s", name, &stdout)
			}
			if !strings.Contains(stdout.String(), "EXIT STATUS:") {
				t.Errorf("%v --help does not tell the exit status", name)
			}
		}
	}
	walk([]string{"kvlift"}, newApp(&bytes.Buffer{}, &bytes.Buffer{}).Commands)
	if commands < 10 {
		t.Errorf("%d commands", commands)
	}
}
