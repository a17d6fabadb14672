// Command kvlift keeps an LLM engine's KV cache in host memory, in a daemon of its own.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"kvlift/arena"
	"kvlift/client"
)

// version is set by the linker for releases; otherwise the build's own information says what there is.
var version = ""

// Exit codes. Unknown ones mean failure.
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitFound       = 3 // the command ran and found problems
	exitUnreachable = 4 // no daemon answers
)

// usageError is a mistake in how the command was called.
type usageError struct {
	message string
	hint    string
}

func (e *usageError) Error() string { return e.message }

// foundError ends a command that did its work and found problems, which it has printed.
type foundError struct{ message string }

func (e *foundError) Error() string { return e.message }

// hintedError is a failure with the command or flag that helps.
type hintedError struct {
	err  error
	hint string
}

func (e *hintedError) Error() string { return e.err.Error() }
func (e *hintedError) Unwrap() error { return e.err }

func main() { os.Exit(run(os.Args, os.Stdout, os.Stderr)) }

// run is the whole program; it alone prints errors and chooses the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // the first signal ends the context, a second one the process
	app := newApp(stdout, stderr)
	app.Metadata = map[string]any{"args": args}
	err := app.RunContext(ctx, args)
	if err == nil {
		return exitDone
	}
	code, hint := classify(err)
	if errors.Is(err, syscall.EPIPE) { // whoever read the answer has seen enough
		return code
	}
	if wantsJSON(args) {
		_ = json.NewEncoder(stderr).Encode(map[string]any{"error": map[string]any{"code": code, "message": err.Error(), "hint": hint}})
		return code
	}
	fmt.Fprintf(stderr, "kvlift: error: %v\n", err)
	if hint != "" {
		fmt.Fprintf(stderr, "kvlift: hint: %s\n", hint)
	}
	return code
}

// classify turns an error into an exit code and a hint.
func classify(err error) (code int, hint string) {
	if e, ok := errors.AsType[*hintedError](err); ok {
		hint = e.hint
	}
	if e, ok := errors.AsType[*arena.Error](err); ok && hint == "" {
		hint = e.Hint
	}
	if e, ok := errors.AsType[*client.RemoteError](err); ok && hint == "" {
		hint = e.Hint
	}
	if e, ok := errors.AsType[*usageError](err); ok {
		return exitUsage, e.hint
	}
	if _, ok := errors.AsType[*foundError](err); ok {
		return exitFound, hint
	}
	if errors.Is(err, client.ErrNotReachable) {
		if hint == "" {
			hint = "start one with kvlift serve --ram 8GiB, or name its socket with --socket"
		}
		return exitUnreachable, hint
	}
	return exitFailed, hint
}

// wantsJSON looks for the flag itself: the error may be that flags could not be parsed.
func wantsJSON(args []string) bool {
	for _, a := range args {
		if a == "--" {
			return false
		}
		if a == "--json" || a == "-json" || a == "--json=true" {
			return true
		}
	}
	return false
}

func newApp(stdout, stderr io.Writer) *cli.App {
	app := &cli.App{
		Name:      "kvlift",
		Usage:     "keep an LLM engine's KV cache in host memory, outside the engine",
		Version:   versionString(),
		Writer:    stdout,
		ErrWriter: stderr,
		Suggest:   true,
		Description: `Two commands to begin with:
  kvlift serve --ram 8GiB        run the daemon
  kvlift status                  see what it holds

Exit status: 0 done, 1 failed, 2 usage, 3 found problems, 4 daemon not reachable.`,
		HideHelpCommand: true,
		OnUsageError:    onUsageError,
		CommandNotFound: func(c *cli.Context, name string) {},
		ExitErrHandler:  func(*cli.Context, error) {},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return &usageError{fmt.Sprintf("no command %q", c.Args().First()), "kvlift --help lists the commands"}
			}
			return cli.ShowAppHelp(c)
		},
		Commands: []*cli.Command{serveCommand(), statusCommand(), verifyCommand(), benchCommand(), adapterCommand(), sweepCommand(), traceCommand(), doctorCommand()},
	}
	for _, c := range app.Commands {
		harden(c)
	}
	return app
}

// harden gives a command and those below it what urfave/cli does not inherit: usage errors that come back as errors, and
// no arguments where none are expected (a flag behind one would be taken for an argument and silently ignored).
func harden(c *cli.Command) {
	c.HideHelpCommand = true
	c.OnUsageError = onUsageError
	if c.CustomHelpTemplate == "" {
		c.CustomHelpTemplate = helpTemplate
	}
	for _, s := range c.Subcommands {
		harden(s)
	}
	if len(c.Subcommands) > 0 && c.Action == nil {
		c.Action = func(x *cli.Context) error {
			if x.NArg() > 0 {
				return &usageError{fmt.Sprintf("no command %q", c.Name+" "+x.Args().First()), "kvlift " + c.Name + " --help lists them"}
			}
			return cli.ShowSubcommandHelp(x)
		}
		return
	}
	if c.ArgsUsage == "" && !c.SkipFlagParsing {
		act := c.Action
		c.Action = func(x *cli.Context) error {
			if x.NArg() > 0 {
				return &usageError{fmt.Sprintf("unexpected argument %q", x.Args().First()), "flags stand before arguments; kvlift " + c.Name + " --help"}
			}
			return act(x)
		}
	}
}

func onUsageError(c *cli.Context, err error, _ bool) error {
	name := "kvlift"
	if c.Command != nil && c.Command.HelpName != "" {
		name = c.Command.HelpName
	}
	return &usageError{err.Error(), name + " --help lists the flags"}
}

const helpTemplate = `NAME:
   {{template "helpNameTemplate" .}}

USAGE:
   {{template "usageTemplate" .}}{{if .Description}}

DESCRIPTION:
   {{template "descriptionTemplate" .}}{{end}}{{if .VisibleCommands}}

COMMANDS:{{template "visibleCommandTemplate" .}}{{end}}{{if .VisibleFlagCategories}}

OPTIONS:{{template "visibleFlagCategoryTemplate" .}}{{else if .VisibleFlags}}

OPTIONS:{{template "visibleFlagTemplate" .}}{{end}}

EXIT STATUS:
   0 done, 1 failed, 2 usage, 3 found problems, 4 daemon not reachable
`

func versionString() string {
	if version != "" {
		return version
	}
	if b, ok := debug.ReadBuildInfo(); ok {
		if b.Main.Version != "" && b.Main.Version != "(devel)" {
			return b.Main.Version
		}
		for _, s := range b.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return "0.1.0-dev+" + s.Value[:12]
			}
		}
	}
	return "0.1.0-dev"
}

// notYet is the action of a command that a later version builds. Its flags are not known yet, so the command skips their
// parsing and the help flag is looked for here.
func notYet(name string) cli.ActionFunc {
	return func(c *cli.Context) error {
		for _, a := range c.Args().Slice() {
			if a == "--" {
				break
			}
			if a == "--help" || a == "-help" || a == "-h" {
				return cli.ShowSubcommandHelp(c)
			}
		}
		return &hintedError{fmt.Errorf("%s is not built yet", name), strings.TrimSpace("kvlift " + name + " --help says what it will do")}
	}
}
