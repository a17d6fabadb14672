package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/urfave/cli/v2"

	"kvlift/adapter"
)

func adapterCommand() *cli.Command {
	return &cli.Command{
		Name:  "adapter",
		Usage: "write out the Python package for vLLM, and say how an engine is started with it",
		Description: `The package is part of this binary, so that the two always fit.

   kvlift adapter install /opt/kvlift
   kvlift adapter config --dir /opt/kvlift -- vllm serve Qwen/Qwen3-8B`,
		Subcommands: []*cli.Command{adapterInstallCommand(), adapterConfigCommand()},
	}
}

func adapterInstallCommand() *cli.Command {
	return &cli.Command{
		Name:      "install",
		Usage:     "write the package to a folder, in place of an earlier version",
		ArgsUsage: "DIR",
		Description: `Writes DIR/kvlift_vllm and prints what PYTHONPATH has to name. Engines that run keep what they have loaded.

   kvlift adapter install /opt/kvlift
   kvlift adapter install ~/.local/share/kvlift`,
		Action: installAdapter,
	}
}

func installAdapter(c *cli.Context) error {
	if c.NArg() != 1 {
		return &usageError{fmt.Sprintf("%d folders are named, one is needed", c.NArg()), "kvlift adapter install DIR"}
	}
	dir, err := filepath.Abs(c.Args().First())
	if err != nil {
		return err
	}
	path, n, err := adapter.Install(dir)
	if errors.Is(err, adapter.ErrForeign) {
		return &hintedError{err, "name another folder, or remove what stands there"}
	} else if err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.App.Writer, "wrote %s (%d files)\nPYTHONPATH=%s\n", path, n, dir)
	return err
}

func adapterConfigCommand() *cli.Command {
	return &cli.Command{
		Name:      "config",
		Usage:     "print the --kv-transfer-config, the environment and the flags for an engine",
		ArgsUsage: "[-- vllm serve MODEL ...]",
		Description: `With the engine's command behind --, says what that command needs and prints it whole. Nothing is started.

   kvlift adapter config --dir /opt/kvlift --release 0.32.0 -- vllm serve /models/gpt-oss-20b
   kvlift adapter config --json --weights-id finetune-3

What --json prints can be given as it is: --kv-transfer-config "$(kvlift adapter config --json)".`,
		Flags: append(nameFlags(),
			&cli.StringFlag{Name: "dir", Usage: "`DIR` that kvlift adapter install has written to"},
			&cli.StringFlag{Name: "release", Usage: "`VERSION` of vLLM, e.g. 0.32.0 (default: what every tested one needs)"},
			&cli.StringFlag{Name: "weights-id", Usage: "`NAME` of the weights, where neither path nor files tell them apart"},
			&cli.Float64Flag{Name: "deadline-ms", DefaultText: "5", Usage: "milliseconds that a store may wait for the daemon's answer"},
			&cli.IntFlag{Name: "blocks-per-chunk", DefaultText: "1", Usage: "engine blocks of one key; fewer keys, coarser hits"},
			&cli.BoolFlag{Name: "json", Usage: "print the --kv-transfer-config alone, on one line; the rest goes to stderr"},
		),
		Action: configureAdapter,
	}
}

func configureAdapter(c *cli.Context) error {
	name, err := nameOf(c)
	if err != nil {
		return err
	}
	socket, err := filepath.Abs(socketOf(c, name))
	if err != nil {
		return err
	}
	t := adapter.NewTransfer(socket)
	t.Extra.DeadlineMS, t.Extra.WeightsID, t.Extra.BlocksPerChunk = c.Float64("deadline-ms"), c.String("weights-id"), c.Int("blocks-per-chunk")
	if d := t.Extra.DeadlineMS; d != 0 && !(d >= 0.1 && d <= 1000) || t.Extra.BlocksPerChunk < 0 {
		return &usageError{"--deadline-ms: 0.1 to 1000; --blocks-per-chunk: 1 or more", ""}
	}
	transfer, err := json.Marshal(t)
	if err != nil {
		return err
	}
	command := c.Args().Slice()
	a, err := advise(c, command)
	if err != nil {
		return err
	}
	if err := placeOf(c.String("dir"), &a); err != nil {
		return err
	}
	if c.Bool("json") {
		err = plainConfig(c, transfer, &a)
	} else {
		_, err = io.WriteString(c.App.Writer, configText(command, string(transfer), &a))
	}
	if err == nil && len(a.Problems) > 0 {
		return &foundError{fmt.Sprintf("the engine would not start, or not with kvlift: %s", strings.Join(a.Problems, "; "))}
	}
	return err
}

// advise looks at the release, the model and the command.
func advise(c *cli.Context, command []string) (adapter.Advice, error) {
	var release *adapter.Release
	if s := c.String("release"); s != "" {
		r, err := adapter.ParseRelease(s)
		if err != nil {
			return adapter.Advice{}, &usageError{"--release " + err.Error(), ""}
		}
		release = &r
	}
	var model *adapter.Model
	if dir := adapter.ModelOf(command); dir != "" {
		m, err := adapter.ReadModel(dir)
		switch {
		case err == nil:
			model = &m
		case !errors.Is(err, fs.ErrNotExist): // a name on the hub is no folder here
			return adapter.Advice{}, err
		}
	}
	return adapter.Advise(command, release, model, os.Getenv), nil
}

// placeOf adds where Python finds the package, and what is wrong with it there.
func placeOf(dir string, a *adapter.Advice) error {
	if dir == "" {
		a.Notes = append(a.Notes, "the engine finds the package by PYTHONPATH: kvlift adapter install DIR writes it, --dir DIR names it here")
		return nil
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	same, err := adapter.Installed(dir)
	if err != nil {
		return err
	}
	a.Environment = append([]string{"PYTHONPATH=" + dir}, a.Environment...)
	if !same {
		a.Problems = append(a.Problems, fmt.Sprintf("%s does not hold the package of this version: kvlift adapter install %s", dir, shellWord(dir)))
	}
	return nil
}

func plainConfig(c *cli.Context, transfer []byte, a *adapter.Advice) error {
	if _, err := fmt.Fprintf(c.App.Writer, "%s\n", transfer); err != nil {
		return err
	}
	for _, e := range a.Environment {
		fmt.Fprintf(c.App.ErrWriter, "kvlift: set %s\n", shellWord(e))
	}
	if len(a.Flags) > 0 {
		fmt.Fprintf(c.App.ErrWriter, "kvlift: add %s\n", shellWords(a.Flags))
	}
	for _, n := range a.Notes {
		fmt.Fprintf(c.App.ErrWriter, "kvlift: note: %s\n", n)
	}
	return nil
}

func configText(command []string, transfer string, a *adapter.Advice) string {
	var b strings.Builder
	flags := append([]string{"--kv-transfer-config", transfer}, a.Flags...)
	b.WriteString("engine's flags\n")
	for i := 0; i < len(flags); i += 2 { // each has a value
		fmt.Fprintf(&b, "  %s\n", shellWords(flags[i:i+2]))
	}
	if len(a.Environment) > 0 {
		b.WriteString("environment\n")
	}
	for _, e := range a.Environment {
		fmt.Fprintf(&b, "  %s\n", shellWord(e))
	}
	if len(command) > 0 {
		fmt.Fprintf(&b, "command\n  %s\n", shellWords(append(append(append([]string{}, a.Environment...), command...), flags...)))
	}
	if len(a.Notes) > 0 {
		b.WriteString("notes\n")
	}
	for _, n := range a.Notes {
		fmt.Fprintf(&b, "  %s\n", n)
	}
	return b.String()
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// shellWord quotes a word for a POSIX shell where it needs that.
func shellWord(s string) string {
	if plainWord.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

func shellWords(words []string) string {
	out := make([]string, len(words))
	for i, w := range words {
		if name, value, ok := strings.Cut(w, "="); ok && plainWord.MatchString(name) && !plainWord.MatchString(value) {
			out[i] = name + "=" + shellWord(value) // an assignment stays one
			continue
		}
		out[i] = shellWord(w)
	}
	return strings.Join(out, " ")
}
