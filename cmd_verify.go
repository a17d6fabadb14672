package main

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/urfave/cli/v2"

	"kvlift/arena"
	"kvlift/block"
	"kvlift/engine"
	"kvlift/meta"
)

func verifyCommand() *cli.Command {
	return &cli.Command{
		Name:  "verify",
		Usage: "check every invariant of a stopped daemon's files",
		Description: `Reads headers, tables and records without changing them: checksums, extents that overlap or leave the arena, keys that
stand twice, chains that do not end. Exit 3 when something does not hold.

   kvlift verify
   kvlift verify --arena /dev/shm/kvlift-llama --json`,
		Flags: append(nameFlags()[:1],
			&cli.StringFlag{Name: "arena", Usage: "`DIR` of the arena (default: /dev/shm/kvlift-NAME)", EnvVars: []string{"KVLIFT_ARENA"}},
			&cli.StringFlag{Name: "hugetlbfs", Usage: "`DIR` on hugetlbfs, when the pages lie there", EnvVars: []string{"KVLIFT_HUGETLBFS"}},
			&cli.BoolFlag{Name: "json", Usage: "print one JSON document"},
		),
		Action: verify,
	}
}

// verifyReport is the JSON of verify.
type verifyReport struct {
	Schema     int      `json:"schema"`
	Dir        string   `json:"dir"`
	Clean      bool     `json:"clean"` // the last daemon ended by itself
	ArenaBytes uint64   `json:"arena_bytes"`
	Records    uint32   `json:"records"`
	Ready      int      `json:"ready"`
	Reserved   int      `json:"reserved"`
	Evicting   int      `json:"evicting"`
	Removed    int      `json:"removed"`
	Namespaces int      `json:"namespaces"`
	Processes  int      `json:"processes"` // records of the session table
	UsedBytes  uint64   `json:"used_bytes"`
	CreatedMS  uint64   `json:"created_unix_ms"`
	Problems   []string `json:"problems"`
}

func verify(c *cli.Context) error {
	name, err := nameOf(c)
	if err != nil {
		return err
	}
	cfg := arena.Config{Name: name, Dir: c.String("arena"), HugeDir: c.String("hugetlbfs")}
	if cfg.Dir == "" {
		cfg.Dir = arena.DirFor(name)
	}
	r := verifyReport{Schema: 1, Dir: cfg.Dir, Problems: []string{}}
	err = arena.Inspect(cfg, func(t *meta.Table) error {
		v := engine.Check(t)
		h := &t.Header
		r.Clean, r.ArenaBytes, r.Records, r.CreatedMS = h.Clean, uint64(h.ArenaPages)*block.PageSize, h.Entries, h.CreatedMS
		r.Ready, r.Reserved, r.Evicting, r.Removed = v.Ready-v.Revived, v.Reserved, v.Revived, v.Removed
		r.Namespaces, r.Processes, r.UsedBytes = v.Namespaces, v.Sessions, v.Pages*block.PageSize
		for _, p := range v.Problems {
			r.Problems = append(r.Problems, p.Error())
		}
		return nil
	})
	if err != nil {
		return err
	}
	if c.Bool("json") {
		if err := json.NewEncoder(c.App.Writer).Encode(&r); err != nil {
			return err
		}
	} else {
		how := "ended without draining"
		if r.Clean {
			how = "drained"
		}
		fmt.Fprintf(c.App.Writer, "%s: %s, made %s, last daemon %s\n", r.Dir, humanize.IBytes(r.ArenaBytes), time.UnixMilli(int64(r.CreatedMS)).UTC().Format(time.RFC3339), how)
		fmt.Fprintf(c.App.Writer, "%d keys in %s; %d reserved, %d evicting, %d removed; %d of %s records used; %d namespaces, %d processes\n", r.Ready, humanize.IBytes(r.UsedBytes),
			r.Reserved, r.Evicting, r.Removed, r.Ready+r.Reserved+r.Evicting+r.Removed, humanize.Comma(int64(r.Records)), r.Namespaces, r.Processes)
		for _, p := range r.Problems {
			fmt.Fprintln(c.App.Writer, "damaged:", p)
		}
		if len(r.Problems) == 0 {
			fmt.Fprintln(c.App.Writer, "sound")
		}
	}
	if n := len(r.Problems); n > 0 {
		return &hintedError{&foundError{fmt.Sprintf("%d problems in %s", n, r.Dir)}, "kvlift serve --drop-damaged keeps what is sound; --reset begins empty"}
	}
	return nil
}
