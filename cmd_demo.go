package main

import (
	"bytes"
	_ "embed" // the demo runs on a fresh machine without any file beside the binary
	"os"

	"github.com/urfave/cli/v2"

	"kvlift/bench"
	"kvlift/trace"
)

//go:embed testdata/traces/conversation_slice.jsonl.gz
var demoTrace []byte

func demoCommand() *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "show the daemon at work on a slice of a real trace, kill -9 included",
		Description: `Starts a daemon on a temporary arena, replays real requests through its socket with every loaded byte checked, kills the daemon
with SIGKILL, starts it again, and shows that nothing was lost. Everything is removed at the end.

   kvlift bench demo
   kvlift bench demo --bytes-per-block 64KiB`,
		Flags: []cli.Flag{
			&cli.Uint64Flag{Name: "capacity-blocks", Value: 5000, Usage: "size of the arena, in blocks"},
			sizeFlag("bytes-per-block", "payload of a block (default 16KiB)", "", ""),
		},
		Action: demo,
	}
}

// demoRequests is how many requests the bundled slice holds.
const demoRequests = 1500

func demo(c *cli.Context) error {
	binary, err := os.Executable()
	if err != nil {
		return err
	}
	d := bench.Demo{Binary: binary, Capacity: c.Uint64("capacity-blocks"), BytesPerBlock: int(sizeOf(c, "bytes-per-block")), Out: c.App.Writer}
	if d.BytesPerBlock == 0 {
		d.BytesPerBlock = 16 << 10
	}
	if d.BytesPerBlock%8 != 0 || d.BytesPerBlock > 1<<30 || d.Capacity < 1 || d.Capacity > 1<<24 {
		return &usageError{"--bytes-per-block: a multiple of 8; --capacity-blocks: 1 to 16777216", ""}
	}
	src, err := trace.NewReader(bytes.NewReader(demoTrace))
	if err != nil {
		return err
	}
	return d.Run(c.Context, src, demoRequests)
}
