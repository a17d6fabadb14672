package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"kvlift/bench"
)

func documentsCommand() *cli.Command {
	return &cli.Command{
		Name:  "documents",
		Usage: "documents in a circle, beside a simulation of other policies, row by row",
		Description: `Documents of 23,552 tokens are asked for in a circle, six times, of a model with nine groups in an arena of 4 GiB. The reference is a
simulation with three policies. Each row is driven without an idle guard and with the default one; a row that is worse than
the reference makes the exit status 1.

   kvlift bench documents
   kvlift bench documents --scale 64 --json`,
		Flags: []cli.Flag{
			&cli.IntFlag{Name: "scale", Value: 1, Usage: "make arena and payloads `N` times smaller"},
			&cli.BoolFlag{Name: "json", Usage: "print one JSON object per row"},
		},
		Action: func(c *cli.Context) error {
			if n := c.Int("scale"); n < 1 || n > 256 {
				return &usageError{"--scale: 1 to 256", ""}
			}
			binary, err := os.Executable()
			if err != nil {
				return err
			}
			return claims(c, func(visit func(bench.Claim)) error {
				return bench.Documents{Binary: binary, Scale: c.Int("scale")}.Run(c.Context, visit)
			})
		},
	}
}

func checkpointsCommand() *cli.Command {
	names := bench.CheckpointTraces()
	return &cli.Command{
		Name:      "checkpoints",
		Usage:     "real traces on a hybrid model, beside a simulation, by where states are stored",
		ArgsUsage: "[TRACE...]",
		Description: `Replays traces as an engine whose states take three times the room of a block, with every loaded byte checked. The reference is a
simulation of an LRU. TRACE is one of ` + strings.Join(names, ", ") + `; without any, all of them are replayed, which takes about ten
minutes. A row that is worse than the reference makes the exit status 1.

   kvlift bench checkpoints --traces DIR
   kvlift bench checkpoints --traces DIR --json synthetic`,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "traces", Value: ".", Usage: "`DIR` with mooncake_conversation.jsonl.gz, mooncake_synthetic.jsonl.gz and weka_mix200_512.jsonl.gz"},
			&cli.BoolFlag{Name: "json", Usage: "print one JSON object per row"},
		},
		Action: func(c *cli.Context) error {
			for _, t := range c.Args().Slice() {
				if !slices.Contains(names, t) {
					return &usageError{fmt.Sprintf("no trace %q", t), "there are " + strings.Join(names, ", ")}
				}
			}
			binary, err := os.Executable()
			if err != nil {
				return err
			}
			err = claims(c, func(visit func(bench.Claim)) error {
				return bench.Checkpoints{Binary: binary, Dir: c.String("traces"), Only: c.Args().Slice()}.Run(c.Context, visit)
			})
			if errors.Is(err, fs.ErrNotExist) {
				return &hintedError{err, "--traces names the folder of the traces; docs/measurements.md says where they come from"}
			}
			return err
		},
	}
}

// claims prints each row as it comes and fails at the end if one is worse.
func claims(c *cli.Context, run func(visit func(bench.Claim)) error) error {
	enc := json.NewEncoder(c.App.Writer)
	var worse []error
	var out error
	rows := 0
	err := run(func(v bench.Claim) {
		rows++
		if err := v.Err(); err != nil {
			worse = append(worse, err)
		}
		switch {
		case out != nil:
		case c.Bool("json"):
			out = enc.Encode(&v)
		default:
			_, out = fmt.Fprintln(c.App.Writer, v.Text())
		}
	})
	if err = errors.Join(err, out); err != nil {
		return err
	}
	if len(worse) > 0 {
		return fmt.Errorf("%d of %d rows, the first: %w", len(worse), rows, worse[0])
	}
	return nil
}
