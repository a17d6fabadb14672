package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"kvlift/bench"
	"kvlift/block"
)

func benchEngineCommand() *cli.Command {
	return &cli.Command{
		Name:  "engine",
		Usage: "what the daemon costs per key, beside a bare socket echo of the same run",
		Description: `Measures reserve + commit in batches of 16 (wall time to the last added delta, divided by keys) into an empty arena and with
an eviction for every key, a bare echo of the same bytes between two processes, adoption of a full table after kill -9, heap per
entry, and CPU while idle.

   kvlift bench engine
   kvlift bench engine --entries 1000000 --json`,
		Flags: []cli.Flag{
			&cli.IntFlag{Name: "keys", Value: 100_000, Usage: "capacity of the arena of the store runs, in keys"},
			&cli.IntFlag{Name: "batch", Value: 16, Usage: "keys per reserve"},
			&cli.IntFlag{Name: "entries", Value: 1_000_000, Usage: "keys of the adoption run (4 KiB of memory each)"},
			&cli.IntFlag{Name: "runs", Value: 5, Usage: "runs of echo and store"},
			&cli.DurationFlag{Name: "quiet", Value: 5 * time.Second, Usage: "length of the idle run"},
			&cli.BoolFlag{Name: "json", Usage: "print one JSON document"},
		},
		Action: benchEngine,
	}
}

// engineFigures is the JSON of bench engine. Times are microseconds per key unless the name says otherwise.
type engineFigures struct {
	Version  string         `json:"version"`
	Machine  bench.Machine  `json:"machine"`
	Batch    int            `json:"batch"`
	Keys     int            `json:"keys"`
	Fill     bench.Spread   `json:"store_us_per_key"`
	Evict    bench.Spread   `json:"store_evict_us_per_key"`
	Echo     bench.Spread   `json:"echo_us"` // one round trip of the bytes of a reserve and its answer
	EchoKey  float64        `json:"echo_us_per_key"`
	Adoption bench.Adoption `json:"adoption"`
	Idle     float64        `json:"idle_cpu_share"`
}

func benchEngine(c *cli.Context) error {
	binary, err := os.Executable()
	if err != nil {
		return err
	}
	f := engineFigures{Version: versionString(), Machine: bench.ThisMachine(), Batch: c.Int("batch"), Keys: c.Int("keys")}
	if f.Batch < 1 || f.Batch > 4096 || f.Keys < f.Batch || c.Int("entries") < 1 || c.Int("runs") < 1 {
		return &usageError{"--batch 1 to 4096, --keys at least a batch, --entries and --runs at least 1", ""}
	}
	var fill, evict, echo []float64
	for range c.Int("runs") {
		p50, _, err := bench.Echo(c.Context, echoProcess(binary), bench.ReserveBytes(f.Batch), bench.ReservedBytes(f.Batch), 5000)
		if err != nil {
			return err
		}
		echo = append(echo, p50)
		d, err := bench.StartDaemon(c.Context, binary, "--ram", fmt.Sprint(f.Keys*block.PageSize), "--max-keys", fmt.Sprint(f.Keys), "--min-idle", "0s")
		if err != nil {
			return err
		}
		a, b, err := bench.StoreCost(c.Context, d.Socket, f.Keys, f.Batch)
		if err = errors.Join(err, d.Close()); err != nil {
			return err
		}
		fill, evict = append(fill, a), append(evict, b)
	}
	f.Fill, f.Evict, f.Echo = bench.SpreadOf(fill), bench.SpreadOf(evict), bench.SpreadOf(echo)
	f.EchoKey = f.Echo.Median / float64(f.Batch)
	if f.Adoption, err = bench.Adopt(c.Context, binary, c.Int("entries")); err != nil {
		return err
	}
	d, err := bench.StartDaemon(c.Context, binary, "--ram", "16MiB")
	if err != nil {
		return err
	}
	defer d.Close()
	if f.Idle, err = bench.Idle(c.Context, d, c.Duration("quiet")); err != nil {
		return err
	}
	if c.Bool("json") {
		return json.NewEncoder(c.App.Writer).Encode(&f)
	}
	t := tabwriter.NewWriter(c.App.Writer, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "machine\t%s, %d CPUs, Linux %s\n", f.Machine.CPU, f.Machine.CPUs, f.Machine.Kernel)
	fmt.Fprintf(t, "reserve + commit\t%.2f µs per key (%.2f to %.2f), batches of %d\n", f.Fill.Median, f.Fill.Min, f.Fill.Max, f.Batch)
	fmt.Fprintf(t, "with eviction\t%.2f µs per key (%.2f to %.2f)\n", f.Evict.Median, f.Evict.Min, f.Evict.Max)
	fmt.Fprintf(t, "bare echo\t%.1f µs per round trip (%.1f to %.1f), %.2f µs per key\n", f.Echo.Median, f.Echo.Min, f.Echo.Max, f.EchoKey)
	fmt.Fprintf(t, "adoption\t%d entries in %.2f s; %.2f s from start to the first answer\n", f.Adoption.Entries, f.Adoption.Seconds, f.Adoption.StartSeconds)
	fmt.Fprintf(t, "heap\t%.0f bytes per entry\n", f.Adoption.HeapBytes)
	fmt.Fprintf(t, "idle\t%.2f %% of one CPU\n", f.Idle*100)
	return t.Flush()
}

// echoProcess runs this binary as the other end of an echo.
func echoProcess(binary string) func(string) (func() error, error) {
	return func(socket string) (func() error, error) {
		cmd := exec.Command(binary, "bench", "echo-server", socket)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		return func() error {
			_ = cmd.Process.Kill() // it may have ended with the connection
			_ = cmd.Wait()
			return nil
		}, nil
	}
}

func echoServerCommand() *cli.Command {
	return &cli.Command{
		Name: "echo-server", Usage: "the other end of bench engine's echo", ArgsUsage: "SOCKET", Hidden: true,
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return &usageError{"one socket path is needed", ""}
			}
			return bench.EchoServer(c.Args().First())
		},
	}
}
