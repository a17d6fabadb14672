package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v2"

	"kvlift/client"
	"kvlift/status"
)

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:  "status",
		Usage: "show what a running daemon holds",
		Description: `One screen: tiers, groups, engines, hit ratio in tokens, evictions by reason.

   kvlift status
   kvlift status --watch
   kvlift status --json | jq '.tiers[0].used_bytes'`,
		Flags: append(nameFlags(),
			&cli.BoolFlag{Name: "json", Usage: "print one JSON document"},
			&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "print again every --interval until interrupted"},
			&cli.DurationFlag{Name: "interval", Value: time.Second, Usage: "of --watch"},
			&cli.DurationFlag{Name: "timeout", Value: 10 * time.Second, Usage: "how long to wait for the daemon"},
			&cli.BoolFlag{Name: "collect", Usage: "run the daemon's garbage collector first, so that heap_bytes counts what is in use"},
		),
		Action: showStatus,
	}
}

func showStatus(c *cli.Context) error {
	name, err := nameOf(c)
	if err != nil {
		return err
	}
	if c.Duration("interval") <= 0 || c.Duration("timeout") <= 0 {
		return &usageError{"--interval and --timeout: a time above zero", ""}
	}
	socket, live := socketOf(c, name), isTerminal(c.App.Writer)
	for {
		raw, err := askStatus(c.Context, socket, c.Duration("timeout"), c.Bool("collect"))
		if err != nil {
			return err
		}
		if c.Bool("watch") && live {
			if _, err := io.WriteString(c.App.Writer, "\x1b[H\x1b[J"); err != nil {
				return err
			}
		}
		if err := renderStatus(c.App.Writer, raw, c.Bool("json")); err != nil {
			return err
		}
		if !c.Bool("watch") {
			return nil
		}
		select {
		case <-c.Context.Done():
			return nil
		case <-time.After(c.Duration("interval")):
		}
	}
}

func askStatus(ctx context.Context, socket string, timeout time.Duration, collect bool) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return client.Status(ctx, socket, collect)
}

func renderStatus(w io.Writer, raw []byte, asJSON bool) error {
	if asJSON {
		_, err := fmt.Fprintf(w, "%s\n", raw)
		return err
	}
	d, err := status.Parse(raw)
	if err != nil {
		return err
	}
	return d.Text(w, 100)
}
