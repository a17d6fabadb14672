package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"text/tabwriter"

	"github.com/dustin/go-humanize"
	"github.com/urfave/cli/v2"

	"kvlift/bench"
	"kvlift/recording"
)

func recordingCommand() *cli.Command {
	return &cli.Command{
		Name:      "recording",
		Usage:     "play recorded sessions of real engines, and compare what they saw with what the daemon answers",
		ArgsUsage: "FILE...",
		Description: `FILE is what the scheduler of a vLLM asked of its offloading manager, one JSON object a line; beside FILE.jsonl, FILE.worker.jsonl
has the sizes of the caches. Every call is made in its place, and every loaded byte of every rank is compared. A hit that the
engine had and the daemon has not makes the exit status 1, and so does a key that is refused though there is room, or a
state that is refused though its chain comes later.

A recording that goes on from another one stands behind it: the daemon is killed and started again in between.

   kvlift bench recording session.jsonl
   kvlift bench recording --json cold.jsonl warm.jsonl`,
		Flags: []cli.Flag{
			sizeFlag("ram", "size of the arena (default: that of the recorded tier)", "", ""),
			&cli.IntFlag{Name: "corrupt-at", Usage: "flip a byte of the arena before load `N` is compared: a control that must fail"},
			&cli.BoolFlag{Name: "json", Usage: "print one JSON object per recording"},
		},
		Action: playRecordings,
	}
}

func playRecordings(c *cli.Context) error {
	if c.NArg() == 0 {
		return &usageError{"a recording is needed (flags stand before it)", "kvlift bench recording FILE.jsonl"}
	}
	if c.Int("corrupt-at") < 0 {
		return &usageError{"a number cannot be negative", ""}
	}
	var sessions []*recording.Session
	for _, name := range c.Args().Slice() {
		s, err := recording.Open(name)
		if err != nil {
			return err
		}
		sessions = append(sessions, s)
	}
	binary, err := os.Executable()
	if err != nil {
		return err
	}
	enc := json.NewEncoder(c.App.Writer)
	t := tabwriter.NewWriter(c.App.Writer, 0, 0, 2, ' ', tabwriter.AlignRight)
	if !c.Bool("json") {
		fmt.Fprintln(t, "vLLM\tgroups\tranks\ttier\tlookups\thits\trecorded\tlost\tloaded\toffered\tstored\trecorded\trefused, full\totherwise\tearly states\trefused\t recording")
	}
	var found, out error
	err = bench.Recordings{Binary: binary, Sessions: sessions, RAM: sizeOf(c, "ram"), CorruptAt: c.Int("corrupt-at")}.Run(c.Context, func(p *bench.Played) {
		found = errors.Join(found, p.Err())
		if out != nil {
			return
		}
		if c.Bool("json") {
			out = enc.Encode(p)
			return
		}
		_, out = fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%d\t%d\t%d\t%d\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t %s\n", p.Version, p.Groups, p.Ranks, humanize.IBytes(p.TierBytes), p.Lookups, p.Hits, p.RecordedHits,
			p.LostHits+p.LostLoads, humanize.IBytes(p.LoadedBytes), p.Offered, p.Stored, p.RecordedStores, p.RefusedFull, p.RefusedOtherwise, p.EarlyStates, p.RefusedStates, p.Name)
	})
	if !c.Bool("json") {
		out = errors.Join(out, t.Flush())
	}
	if errors.Is(err, bench.ErrCold) {
		return &hintedError{err, "give the recording that it goes on from before it"}
	}
	return errors.Join(err, out, found)
}
