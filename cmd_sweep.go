package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dustin/go-humanize"
	"github.com/urfave/cli/v2"

	"kvlift/sweep"
)

func sweepCommand() *cli.Command {
	const what, how = "what is swept", "what is done"
	return &cli.Command{
		Name:  "sweep",
		Usage: "remove what dead engines leave in shared memory",
		Description: `Finds the files that engines keep in shared memory, proves for each whether anybody still uses it (in whichever container), and
with --delete removes those that nobody does. A file that somebody may use is never removed. Quiet when there is nothing.

   kvlift sweep                   say what would be removed, and why
   kvlift sweep --delete          remove it: before an engine boots, when it has ended, from cron
   kvlift sweep --delete --family nccl --family python

Exit status 0 also says that nothing stale is left, 1 that something is: not removed, or neither proven stale nor in use.`,
		Flags: []cli.Flag{
			&cli.StringSliceFlag{Name: "dir", Usage: "`DIR` to look in; may be repeated (default: /dev/shm, and /tmp for sockets)", Category: what},
			&cli.StringSliceFlag{Name: "family", Usage: "look for the files of optional family `NAME`, too: " + strings.Join(optionalFamilies(), ", ") + "; may be repeated", Category: what},
			&cli.StringSliceFlag{Name: "owner", Usage: "remove the files of `UID`, too, or of any; may be repeated (default: one's own)", Category: what},
			&cli.StringFlag{Name: "root", Usage: "`DIR` that stands for / of the machine: proc is read there", Category: what},
			&cli.BoolFlag{Name: "delete", Usage: "remove what is stale", Category: how},
			&cli.BoolFlag{Name: "dry-run", Usage: "remove nothing: the default", Category: how},
			&cli.DurationFlag{Name: "min-age", Usage: "leave what was changed within this time (default: 0s where the kernel proves that nobody holds a file, else 1m)", Category: how},
			&cli.DurationFlag{Name: "wait", Usage: "look again for this long while something is held or starting: after an engine was told to end", Category: how},
			&cli.StringSliceFlag{Name: "force", Usage: "remove `PATH` on one's own word although its verdict is unknown; may be repeated", Category: how},
			&cli.BoolFlag{Name: "json", Usage: "print one JSON document"},
			&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "say only what was removed, or should have been"},
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "say on stderr what this kernel can prove, and show files that are not swept"},
		},
		Action: sweepFiles,
	}
}

func optionalFamilies() []string {
	var names []string
	for _, f := range sweep.Families() {
		if f.Optional {
			names = append(names, f.Name)
		}
	}
	return names
}

func sweepFiles(c *cli.Context) error {
	o, err := sweepOptions(c)
	if err != nil {
		return err
	}
	r, err := sweep.Run(c.Context, *o)
	if err != nil {
		err = &printableError{err}
	}
	if err != nil && r == nil {
		return err
	}
	if c.Bool("json") {
		err = errors.Join(err, json.NewEncoder(c.App.Writer).Encode(r))
	} else {
		err = errors.Join(err, printSweep(c.App.Writer, r, c.Bool("verbose"), c.Bool("quiet")))
	}
	return errors.Join(err, sweepVerdict(r))
}

// sweepOptions checks the flags.
func sweepOptions(c *cli.Context) (*sweep.Options, error) {
	o := &sweep.Options{
		Dirs: c.StringSlice("dir"), Root: c.String("root"), Families: c.StringSlice("family"), Delete: c.Bool("delete"),
		MinAge: c.Duration("min-age"), DefaultAge: !c.IsSet("min-age"), UID: uint32(os.Geteuid()), Wait: c.Duration("wait"),
		Now: time.Now, Pause: pause, PID: os.Getpid(),
	}
	if c.Bool("verbose") {
		o.Note = func(format string, args ...any) {
			fmt.Fprintf(c.App.ErrWriter, "kvlift: %s\n", printable(fmt.Sprintf(format, args...)))
		}
	}
	switch {
	case o.Delete && c.Bool("dry-run"):
		return nil, &usageError{"--dry-run and --delete exclude each other", ""}
	case o.MinAge < 0, o.Wait < 0:
		return nil, &usageError{"a time cannot be negative", ""}
	}
	var owners []string
	for _, s := range c.StringSlice("owner") {
		if s == "any" {
			o.AnyOwner = true
		} else {
			owners = append(owners, s)
		}
	}
	var err error
	if o.Owners, err = ids(owners, "--owner"); err != nil {
		return nil, err
	}
	for _, dir := range o.Dirs {
		if dir == "" {
			return nil, &usageError{"--dir is empty", ""}
		}
	}
	for _, p := range c.StringSlice("force") {
		o.Force = append(o.Force, filepath.Clean(p))
	}
	switch err := o.Check(); {
	case errors.Is(err, sweep.ErrNeedsDir):
		return nil, &usageError{err.Error(), "name the folder with --dir"}
	case err != nil:
		return nil, &usageError{err.Error(), "optional families: " + strings.Join(optionalFamilies(), ", ")}
	}
	return o, nil
}

// pause waits, or until the context ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// sweepVerdict is nil when nothing stale is left, and nothing of which that is not known.
func sweepVerdict(r *sweep.Report) error {
	failed, unknown, would := r.Count("", sweep.Failed), r.Count(sweep.Unknown, sweep.Kept), r.Count("", sweep.WouldRemove)
	var parts, hints []string
	if failed > 0 {
		parts = append(parts, fmt.Sprintf("%s could not be removed", files(failed)))
	}
	if unknown > 0 {
		parts = append(parts, fmt.Sprintf("%s kept: it is not known whether anybody holds them", files(unknown)))
		hints = append(hints, "run it as the files' owner, or with CAP_LEASE and CAP_DAC_OVERRIDE; --verbose says what the kernel can prove here; --force PATH removes one on your word")
	}
	if would > 0 {
		var bytes int64
		for _, f := range r.Files {
			if f.Action == sweep.WouldRemove {
				bytes += f.AllocatedBytes
			}
		}
		parts = append(parts, fmt.Sprintf("%s left that nobody uses, %s", files(would), humanize.IBytes(uint64(bytes))))
		hints = append(hints, "kvlift sweep --delete removes what is stale")
	}
	if len(parts) == 0 {
		return nil
	}
	return &hintedError{errors.New(strings.Join(parts, "; ")), strings.Join(hints, "; ")}
}

func files(n int) string {
	if n == 1 {
		return "1 file"
	}
	return humanize.Comma(int64(n)) + " files"
}

// printSweep writes a line for each file that says why, and where the memory is that has no name.
func printSweep(w io.Writer, r *sweep.Report, all, quiet bool) error {
	var b strings.Builder
	for _, f := range r.Files {
		changed := f.Action != sweep.Kept || f.Verdict == sweep.Unknown
		if quiet && !changed || f.Verdict == sweep.Foreign && !f.OtherUser() && !all {
			continue
		}
		fmt.Fprintf(&b, "%-13s%-9s%9s  %s  %s\n", strings.ReplaceAll(string(f.Action), "-", " "), f.Verdict, humanize.IBytes(uint64(max(0, f.AllocatedBytes))), printablePath(f.Path), printable(f.Reason))
	}
	if !quiet {
		for _, n := range r.Nameless {
			fmt.Fprintf(&b, "%-13s%-9s%9s  held by %d (%s) in files without a name: it is free when the process ends\n", "kept", "nameless", humanize.IBytes(n.Bytes), n.PID, n.Comm)
		}
	}
	if n := r.Count("", sweep.Removed); n > 0 {
		fmt.Fprintf(&b, "%s removed, %s freed\n", files(n), humanize.IBytes(min(r.FreedBytes, math.MaxInt64)))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// printable escapes what would move a terminal's cursor, change its colours or begin a line: names are other users' words.
func printable(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if strconv.IsPrint(r) && (r != utf8.RuneError || n > 1) {
			b.WriteString(s[:n])
		} else {
			q := strconv.Quote(s[:n])
			b.WriteString(q[1 : len(q)-1])
		}
		s = s[n:]
	}
	return b.String()
}

// printablePath quotes a path that is not printable as it is, so that it can be told from one that contains a backslash.
func printablePath(path string) string {
	if printable(path) == path {
		return path
	}
	return strconv.Quote(path)
}

// printableError says in printable characters what the error says, which may name other users' files.
type printableError struct{ err error }

func (e *printableError) Error() string {
	if all, ok := e.err.(interface{ Unwrap() []error }); ok {
		var parts []string
		for _, err := range all.Unwrap() {
			parts = append(parts, (&printableError{err}).Error())
		}
		return strings.Join(parts, "\n")
	}
	return printable(e.err.Error())
}
func (e *printableError) Unwrap() error { return e.err }
