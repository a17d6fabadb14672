package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kvlift/bench"
	"kvlift/block"
	"kvlift/client"
	"kvlift/trace"
)

func benchCommand() *cli.Command {
	return &cli.Command{
		Name:  "bench",
		Usage: "measure a daemon through its real socket and arena, every byte checked",
		Description: `Each command starts a daemon of its own on a temporary arena unless it is told otherwise.

   kvlift bench demo
   kvlift bench replay --capacity-blocks 10000 conversation.jsonl.gz`,
		Subcommands: []*cli.Command{replayCommand(), benchEngineCommand(), demoCommand(), storyCommand(), documentsCommand(), checkpointsCommand(), recordingCommand(), neighboursCommand(), echoServerCommand(), neighbourCommand()},
	}
}

func replayCommand() *cli.Command {
	return &cli.Command{
		Name:      "replay",
		Usage:     "replay a trace of requests with real bytes",
		ArgsUsage: "TRACE",
		Description: `TRACE is a file of requests in Mooncake's format (JSON lines with hash_ids, gzip or plain). Each request is looked up, loaded,
reserved and committed as an engine would; what was loaded is compared with the generator of the content. Without --daemon a
daemon of its own is started on a temporary arena.

   kvlift bench replay --capacity-blocks 10000 --policy lru --min-idle 0 conversation.jsonl.gz
   kvlift bench replay --capacity-blocks 2000 --policy arc --json conversation.jsonl.gz`,
		Flags: []cli.Flag{
			&cli.Uint64Flag{Name: "capacity-blocks", Value: 10000, Usage: "size of the arena, in blocks"},
			&cli.StringFlag{Name: "policy", Value: "lru", Usage: "of the daemon"},
			&cli.DurationFlag{Name: "min-idle", Value: 30 * time.Second, Usage: "of the daemon, on the trace's clock"},
			sizeFlag("bytes-per-block", "payload of a block (default 4KiB)", "", ""),
			&cli.IntFlag{Name: "batch", Value: 16, Usage: "blocks per reserve"},
			&cli.IntFlag{Name: "limit", Usage: "only the first `N` requests; 0 for all"},
			&cli.StringFlag{Name: "daemon", Usage: "`SOCKET` of a running daemon instead of one of its own"},
			&cli.IntFlag{Name: "corrupt-at", Usage: "flip a byte of the arena before load `N`: a control that must fail"},
			&cli.BoolFlag{Name: "json", Usage: "print one JSON document"},
			&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "no progress"},
		},
		Action: benchReplay,
	}
}

func benchReplay(c *cli.Context) error {
	if c.NArg() != 1 {
		return &usageError{fmt.Sprintf("one trace file is needed, %d arguments given (flags stand before it)", c.NArg()), "kvlift bench replay --capacity-blocks 10000 FILE"}
	}
	o := bench.Replay{Policy: c.String("policy"), Capacity: c.Uint64("capacity-blocks"), MinIdle: c.Duration("min-idle"), Batch: c.Int("batch"),
		Limit: c.Int("limit"), CorruptAt: c.Int("corrupt-at"), BytesPerBlock: int(sizeOf(c, "bytes-per-block"))}
	if o.BytesPerBlock == 0 {
		o.BytesPerBlock = block.PageSize
	}
	switch {
	case o.Batch < 1 || o.Batch > 4096:
		return &usageError{"--batch: 1 to 4096", ""}
	case o.BytesPerBlock%8 != 0 || o.BytesPerBlock > 1<<30:
		return &usageError{"--bytes-per-block: a multiple of 8, at most 1GiB", ""}
	case o.Capacity < 1 || o.Capacity > 1<<31:
		return &usageError{"--capacity-blocks: at least 1", ""}
	case o.Limit < 0 || o.CorruptAt < 0 || o.MinIdle < 0:
		return &usageError{"a number cannot be negative", ""}
	}
	src, err := trace.Open(c.Args().First())
	if err != nil {
		return err
	}
	defer src.Close()
	o.Name = strings.TrimSuffix(strings.TrimSuffix(filepath.Base(c.Args().First()), ".gz"), ".jsonl")
	socket, pid := c.String("daemon"), 0
	if socket == "" {
		d, err := ownDaemon(c.Context, o)
		if err != nil {
			return err
		}
		defer d.Close()
		socket, pid = d.Socket, d.PID()
	} else if o.Capacity, err = capacityOf(c.Context, socket, o.BytesPerBlock, &o); err != nil {
		return err
	}
	e, err := client.Open(c.Context, bench.EngineConfig(socket, fmt.Sprintf("bench-%d", os.Getpid()), o.BytesPerBlock))
	if err != nil {
		return err
	}
	defer e.Close()
	p := bench.NewReplayer(e, o)
	if err := p.Run(c.Context, src, progressLine(c)); err != nil {
		return fmt.Errorf("replay %s: %w", c.Args().First(), err)
	}
	r := p.Result(c.Context, socket, pid)
	if c.Bool("json") {
		return json.NewEncoder(c.App.Writer).Encode(&r)
	}
	return r.Text(c.App.Writer)
}

// ownDaemon starts a daemon with room for exactly the capacity, on the trace's clock.
func ownDaemon(ctx context.Context, o bench.Replay, more ...string) (*bench.Daemon, error) {
	binary, err := os.Executable()
	if err != nil {
		return nil, err
	}
	bytes := o.Capacity * block.Pages(uint64(o.BytesPerBlock)) * block.PageSize
	args := append([]string{"--ram", fmt.Sprint(bytes), "--max-keys", fmt.Sprint(o.Capacity), "--policy", o.Policy, "--min-idle", o.MinIdle.String(), "--trace-clock"}, more...)
	return bench.StartDaemon(ctx, binary, args...)
}

// capacityOf reads how many blocks a running daemon holds, and its policy.
func capacityOf(ctx context.Context, socket string, bytesPerBlock int, o *bench.Replay) (uint64, error) {
	d, err := bench.AskStatus(ctx, socket, false)
	if err != nil {
		return 0, err
	}
	if len(d.Tiers) == 0 {
		return 0, errors.New("the daemon has no tier")
	}
	o.Policy, o.MinIdle = d.Policy.Name, time.Duration(d.Policy.MinIdleSeconds*float64(time.Second))
	return d.Tiers[0].TotalBytes / (block.Pages(uint64(bytesPerBlock)) * block.PageSize), nil
}

// progressLine draws the number of requests done on a terminal.
func progressLine(c *cli.Context) func(int) {
	if c.Bool("quiet") || !isTerminal(c.App.ErrWriter) {
		return nil
	}
	last := time.Now()
	return func(n int) {
		if now := time.Now(); now.Sub(last) > 200*time.Millisecond {
			last = now
			fmt.Fprintf(c.App.ErrWriter, "\r\x1b[K%d requests", n)
		}
	}
}
