package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"kvlift/block"
	"kvlift/client"
	"kvlift/trace"
)

// Checkpoints drives a daemon with the rows of a simulation of what a tier gives back of a hybrid model, by where engines put
// their states. The unit is a block of attention; a state takes three. The simulation is an LRU of single keys that touches
// chains from their tails and holds the running one; its figures are shares of all blocks of a trace.
type Checkpoints struct {
	Binary string
	Dir    string // of the traces
	Only   []string
}

// checkpointTraces are the columns of the simulation.
var checkpointTraces = []struct {
	name, file string
	capacity   []uint64
}{
	{"weka", "weka_mix200_512.jsonl.gz", []uint64{5000, 10000, 20000}},
	{"conversation", "mooncake_conversation.jsonl.gz", []uint64{20000, 50000}},
	{"synthetic", "mooncake_synthetic.jsonl.gz", []uint64{20000}},
}

// checkpointRows are its rows, with a figure for each trace and capacity in the order above.
var checkpointRows = []struct {
	name   string
	policy string // which states are refreshed
	place  Placement
	share  []float64
}{
	{"every block", "LRU, all states refreshed", Placement{Every: 1, Touch: true}, []float64{.2250, .4384, .7329, .1118, .2351, .2793}},
	{"every block", "LRU, only the used one", Placement{Every: 1}, []float64{.2809, .5522, .8738, .1158, .2441, .2969}},
	{"every 8 blocks and the end", "LRU, only the used one", Placement{Every: 8, End: true}, []float64{.6247, .8719, .9336, .2442, .3327, .5020}},
	{"the end and where prompts part", "LRU, only the used one", Placement{End: true, Branch: true}, []float64{.6964, .8916, .9377, .2594, .3382, .4748}},
	{"the end", "LRU, only the used one", Placement{End: true}, []float64{.6939, .8906, .9369, .2545, .3298, .4262}},
}

// CheckpointTraces names the traces of the table.
func CheckpointTraces() (names []string) {
	for _, t := range checkpointTraces {
		names = append(names, t.name)
	}
	return names
}

// Run gives a claim for each cell of the table. Every loaded byte is checked. visit hears each of them.
func (c Checkpoints) Run(ctx context.Context, visit func(Claim)) error {
	column := 0
	for _, t := range checkpointTraces {
		for _, capacity := range t.capacity {
			for _, r := range checkpointRows {
				if len(c.Only) > 0 && !slices.Contains(c.Only, t.name) {
					continue
				}
				claim := Claim{Row: fmt.Sprintf("%s, %d, %s", t.name, capacity, r.name), Reference: r.share[column], Policy: r.policy, Decimals: 4}
				if r.place.Touch {
					claim.Row += ", touched"
				}
				res, err := ReplayHybrid(ctx, c.Binary, filepath.Join(c.Dir, t.file), capacity, 0, r.place)
				if err != nil {
					return fmt.Errorf("%s: %w", claim.Row, err)
				}
				claim.Got = res.Ratio()
				claim.judge()
				visit(claim)
			}
			column++
		}
	}
	return nil
}

// ReplayHybrid replays a trace, or limit requests of it, as an engine of a hybrid model on a daemon of its own with room for
// capacity blocks of attention and no idle guard.
func ReplayHybrid(ctx context.Context, binary, path string, capacity uint64, limit int, p Placement) (r HybridResult, err error) {
	src, err := trace.Open(path)
	if err != nil {
		return r, err
	}
	defer src.Close()
	d, err := StartDaemon(ctx, binary, "--ram", fmt.Sprint(capacity*block.PageSize), "--max-keys", fmt.Sprint(capacity), "--min-idle", "0s", "--trace-clock")
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	e, err := client.Open(ctx, HybridEngine(d.Socket, "bench-"+strings.TrimSuffix(filepath.Base(path), ".jsonl.gz")))
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	h := NewHybridReplayer(e, p)
	if err := h.Run(ctx, src, limit); err != nil {
		return r, err
	}
	return h.Result(), nil
}
