package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/urfave/cli/v2"

	"kvlift/bench"
)

func neighboursCommand() *cli.Command {
	return &cli.Command{
		Name:  "neighbours",
		Usage: "what a slow or a stopped engine costs another one that shares its keys",
		Description: `Two engine processes on one namespace of a full arena. One works as fast as it can: it loads documents that both ask for,
every byte compared, and stores new ones, each of which pushes another one out. The other one works slowly, on a daemon of its own
and then on the same; is stopped (SIGSTOP) between two steps, in the middle of a load, and inside a step that has promised a
document; then it goes on, or is killed. Phases without it lie in between, and each ratio is to the two beside it.

   kvlift bench neighbours
   kvlift bench neighbours --phase 30s --rounds 5 --json`,
		Flags: []cli.Flag{
			sizeFlag("ram", "size of each of two arenas (default 2GiB)", "", ""),
			sizeFlag("bytes-per-block", "payload of a block (default 16KiB)", "", ""),
			&cli.IntFlag{Name: "blocks", Value: 64, Usage: "blocks of a document"},
			&cli.DurationFlag{Name: "pace", Value: 20 * time.Millisecond, Usage: "pause of the slow engine after each request"},
			&cli.Float64Flag{Name: "evict-ahead", Value: 0.02, Usage: "of the daemon"},
			&cli.DurationFlag{Name: "phase", Value: 5 * time.Second, Usage: "length of a phase; a round has thirteen"},
			&cli.IntFlag{Name: "rounds", Value: 3, Usage: "rounds; figures are medians"},
			&cli.IntFlag{Name: "corrupt-at", Usage: "flip a byte of the arena before load `N`: a control that must fail"},
			&cli.BoolFlag{Name: "json", Usage: "print one JSON document"},
			&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "no progress"},
		},
		Action: neighbours,
	}
}

func neighbours(c *cli.Context) error {
	binary, err := os.Executable()
	if err != nil {
		return err
	}
	n := bench.Neighbours{Binary: binary, RAM: sizeOf(c, "ram"), BytesPerBlock: int(sizeOf(c, "bytes-per-block")), Blocks: c.Int("blocks"), Pace: c.Duration("pace"),
		Phase: c.Duration("phase"), Rounds: c.Int("rounds"), EvictAhead: c.Float64("evict-ahead"), CorruptAt: c.Int("corrupt-at")}
	if n.RAM == 0 {
		n.RAM = 2 << 30
	}
	if n.BytesPerBlock == 0 {
		n.BytesPerBlock = 16 << 10
	}
	if n.BytesPerBlock%8 != 0 || n.BytesPerBlock > 1<<30 || n.Blocks < 2 || n.Blocks > 1<<16 || n.Pace <= 0 || n.Phase <= 0 || n.Rounds < 1 || n.CorruptAt < 0 {
		return &usageError{"--bytes-per-block: a multiple of 8; --blocks: 2 to 65536; --pace and --phase: above 0; --rounds: at least 1; --corrupt-at: not negative", ""}
	}
	// A quarter of the arena is asked for again and again; the rest is for what comes and goes.
	if n.Hot = int(n.RAM / 4 / uint64(n.Blocks) / uint64(n.BytesPerBlock)); n.Hot < 2 {
		return &usageError{"--ram: room for eight documents at least", ""}
	}
	if !c.Bool("quiet") && isTerminal(c.App.ErrWriter) {
		n.Progress = func(round int, phase string) { fmt.Fprintf(c.App.ErrWriter, "\r\x1b[Kround %d: %s", round, phase) }
		defer fmt.Fprint(c.App.ErrWriter, "\r\x1b[K")
	}
	r, err := n.Run(c.Context)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		return json.NewEncoder(c.App.Writer).Encode(&r)
	}
	t := tabwriter.NewWriter(c.App.Writer, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "the other engine\tstores/s\tto alone\thits/s\tto alone\tlongest gap\tskipped\tnot reusable\treserve p50\tp99\t")
	for i := range r.Phases {
		p := &r.Phases[i]
		fmt.Fprintf(t, "%s\t%.0f\t%s\t%.0f\t%s\t%.0f ms\t%d\t%s\t%.0f µs\t%.0f µs\t\n", p.Phase, p.Stores.Median, toAlone(p, p.StoreRatio), p.Hits.Median, toAlone(p, p.HitRatio),
			p.Gap.Median*1e3, p.Skipped, humanize.IBytes(uint64(p.Pending.Median)), p.P50.Median, p.P99.Median)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for i := range r.Phases {
		p := &r.Phases[i]
		for reason, batches := range p.Refused {
			if batches > 0 {
				fmt.Fprintf(c.App.Writer, "%s: %d batches refused, %s\n", p.Phase, batches, reason)
			}
		}
		if p.FencedAfter.Max > 0 {
			fmt.Fprintf(c.App.Writer, "%s: fenced after %.0f ms (%.0f to %.0f), %d keys skipped until then, fenced again %d times\n", p.Phase,
				p.FencedAfter.Median*1e3, p.FencedAfter.Min*1e3, p.FencedAfter.Max*1e3, p.SkippedBefore, p.Fenced)
		}
		if len(p.Why) > 0 {
			fmt.Fprintf(c.App.Writer, "%s: status names %s\n", p.Phase, strings.Join(p.Why, "; "))
		}
	}
	_, err = fmt.Fprintf(c.App.Writer, "stores succeed again %.0f ms after SIGCONT (%.0f to %.0f), %.0f ms after SIGKILL (%.0f to %.0f)\n",
		r.Continued.Median*1e3, r.Continued.Min*1e3, r.Continued.Max*1e3, r.Killed.Median*1e3, r.Killed.Min*1e3, r.Killed.Max*1e3)
	return err
}

// toAlone writes a ratio with its spread; alone it has none.
func toAlone(p *bench.NeighbourPhase, s bench.Spread) string {
	if p.Phase == bench.PhaseAlone {
		return "-"
	}
	return fmt.Sprintf("%.2f (%.2f–%.2f)", s.Median, s.Min, s.Max)
}

func neighbourCommand() *cli.Command {
	return &cli.Command{
		Name: "neighbour", Usage: "one engine of bench neighbours", ArgsUsage: "JSON", Hidden: true,
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return &usageError{"one JSON object is needed", ""}
			}
			o, err := bench.ParseNeighbour(c.Args().First())
			if err != nil {
				return err
			}
			return o.Run(c.Context, os.Stdin, c.App.Writer)
		},
	}
}
