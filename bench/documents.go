package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Documents drives a daemon with the rows of a simulation of what a tier of 4 GiB gives back when documents of 23,552 tokens
// are asked for in a circle, six times. The model is BirthGroups. The simulation has three policies: a plain LRU of single
// keys; one that lets unreachable keys go first and chains from their tails; and that one with a guard by which a newcomer
// gives way.
type Documents struct {
	Binary string
	Scale  int // the arena and all payloads are so many times smaller; 1 or more
}

// documentsRow is a row of the simulation: shares of the documents' tokens that were not computed again, rounds 2 to 6.
type documentsRow struct {
	uniform   bool // every key takes as much as the largest, as in vLLM's own tier
	endOnly   bool // states and windows at the end of the prompt alone
	documents int
	lru       float64
	reachable float64
	guard     float64
}

var documentsTable = []documentsRow{
	{true, false, 3, 0, 0, 0},
	{true, true, 4, 1, 1, 1},
	{true, true, 8, 0, 0, 0.75},
	{false, false, 3, 0, 1, 1},
	{false, false, 4, 0, 0, 0.70},
	{false, false, 8, 0, 0, 0.30},
	{false, true, 8, 1, 1, 1},
	{false, true, 12, 0, 0, 0.83},
	{false, true, 16, 0, 0, 0.62},
}

func (r *documentsRow) name() string {
	rows, keys := "own sizes", "dense keys"
	if r.uniform {
		rows = "uniform rows"
	}
	if r.endOnly {
		keys = "keys of the end"
	}
	return fmt.Sprintf("%s, %s, %d documents", rows, keys, r.documents)
}

// documentsRounds is how often each document is asked for; the first time does not count.
const documentsRounds = 6

// Run gives two claims for each row: without an idle guard beside the better one of the two policies without a guard, and with
// the daemon's default of 30 s, requests being a second apart, beside the policy with one. visit hears each of them.
func (d Documents) Run(ctx context.Context, visit func(Claim)) error {
	for _, r := range documentsTable {
		c := Claim{Row: r.name(), Reference: r.lru, Policy: "plain LRU", Decimals: 2}
		if r.uniform {
			c.Note = "every group's payload is as large as the largest, which kvlift asks of nobody"
		}
		if r.reachable > r.lru {
			c.Reference, c.Policy = r.reachable, "unreachable first"
		}
		guarded := c
		guarded.Row, guarded.Reference, guarded.Policy = r.name()+", guard", r.guard, "unreachable first, guard"
		for _, run := range []struct {
			claim *Claim
			idle  time.Duration
		}{{&c, 0}, {&guarded, 30 * time.Second}} {
			var err error
			if run.claim.Got, err = d.reuse(ctx, &r, run.idle); err != nil {
				return fmt.Errorf("%s: %w", run.claim.Row, err)
			}
			run.claim.judge()
			visit(*run.claim)
		}
	}
	return nil
}

// reuse is the share of tokens that can be served and were.
func (d Documents) reuse(ctx context.Context, r *documentsRow, idle time.Duration) (share float64, err error) {
	s := Story{Groups: BirthGroups(), Tokens: 23552, Documents: r.documents, Rounds: documentsRounds, Step: 2048, EndOnly: r.endOnly, Every: time.Second}
	largest := uint32(0)
	for _, g := range s.Groups {
		largest = max(largest, g.PayloadBytes)
	}
	for i := range s.Groups {
		if r.uniform {
			s.Groups[i].PayloadBytes = largest
		}
		s.Groups[i].PayloadBytes = s.Groups[i].PayloadBytes / uint32(d.Scale) / 8 * 8
	}
	dm, err := StartDaemon(ctx, d.Binary, "--ram", fmt.Sprint((4<<30)/d.Scale), "--min-idle", idle.String(), "--trace-clock")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, dm.Close()) }()
	var served, asked uint64
	err = s.Run(ctx, dm.Socket, func(v StoryVisit) {
		if v.Round > 1 {
			served += uint64(v.HitTokens)
			asked += uint64(s.boundary())
		}
	})
	return div(float64(served), float64(asked)), err
}
