package main

import (
	"encoding/json"
	"fmt"
	"os"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/urfave/cli/v2"

	"kvlift/bench"
)

func storyCommand() *cli.Command {
	return &cli.Command{
		Name:  "story",
		Usage: "ask for documents again and again, of a model with several KV-cache groups",
		Description: `Each document is looked up, loaded to its deepest restore point with every byte compared, computed and stored step by step. The
model is the one that kvlift was born from: nine groups, of which the tier that came before it served nothing in 4 GiB.

   kvlift bench story
   kvlift bench story --ram 4GiB --documents 3 --rounds 2 --json
   kvlift bench story --groups groups.json --tokens 16384`,
		Flags: []cli.Flag{
			sizeFlag("ram", "size of the arena (default 4GiB)", "", ""),
			&cli.StringFlag{Name: "groups", Usage: "`FILE` with a JSON list of groups (name, kind, chunk_tokens, payload_bytes, window_chunks)"},
			&cli.UintFlag{Name: "tokens", Value: 23552, Usage: "length of a document"},
			&cli.IntFlag{Name: "documents", Value: 3, Usage: "documents of a round"},
			&cli.IntFlag{Name: "rounds", Value: 2, Usage: "rounds"},
			&cli.UintFlag{Name: "step", Value: 2048, Usage: "tokens computed per step"},
			&cli.DurationFlag{Name: "min-idle", Value: 0, Usage: "of the daemon"},
			&cli.BoolFlag{Name: "json", Usage: "print one JSON object per request"},
		},
		Action: story,
	}
}

func story(c *cli.Context) error {
	s := bench.Story{Groups: bench.BirthGroups(), Tokens: uint32(c.Uint("tokens")), Documents: c.Int("documents"), Rounds: c.Int("rounds"), Step: uint32(c.Uint("step"))}
	if s.Tokens < 2 || s.Tokens > 1<<24 || s.Documents < 1 || s.Rounds < 1 || s.Step < 1 || c.Duration("min-idle") < 0 {
		return &usageError{"--tokens 2 to 16777216, --documents, --rounds and --step at least 1", ""}
	}
	if path := c.String("groups"); path != "" {
		var err error
		if s.Groups, err = bench.ReadStoryGroups(path); err != nil {
			return err
		}
	}
	ram := sizeOf(c, "ram")
	if ram == 0 {
		ram = 4 << 30
	}
	binary, err := os.Executable()
	if err != nil {
		return err
	}
	start := time.Now()
	d, err := bench.StartDaemon(c.Context, binary, "--ram", fmt.Sprint(ram), "--min-idle", c.Duration("min-idle").String())
	if err != nil {
		return err
	}
	defer d.Close()
	if c.Bool("json") {
		enc := json.NewEncoder(c.App.Writer)
		var encErr error
		err := s.Run(c.Context, d.Socket, func(v bench.StoryVisit) {
			if encErr == nil {
				encErr = enc.Encode(&v)
			}
		})
		if err != nil {
			return err
		}
		return encErr
	}
	t := tabwriter.NewWriter(c.App.Writer, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "round\tdocument\thit tokens\tloaded\tkeys stored\tstored\trefused\trestore points\tspare\t")
	err = s.Run(c.Context, d.Socket, func(v bench.StoryVisit) {
		fmt.Fprintf(t, "%d\t%c\t%d of %d\t%s\t%d\t%s\t%d\t%s\t%s\t\n", v.Round, 'A'+rune(v.Document%26), v.HitTokens, s.Tokens, mb(v.LoadedBytes), v.StoredKeys, mb(v.StoredBytes),
			v.RefusedKeys, mb(v.NeededBytes), mb(v.SpareBytes))
	})
	if err != nil {
		return err
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.App.Writer, "%s arena, %d groups, %.1f s\n", humanize.IBytes(ram), len(s.Groups), time.Since(start).Seconds())
	return err
}

// mb writes decimal megabytes, as the published figures do.
func mb(n uint64) string { return fmt.Sprintf("%.0f MB", float64(n)/1e6) }
