package server

import (
	"maps"
	"math/rand/v2"
	"slices"

	"kvlift/engine"
	"kvlift/wire"
)

// draw is what a round is drawn to be: how many there are, and how often what happens. Weights are of a thousand actions.
type draw struct {
	engines, keys, pages int
	least                int // entries for which there is room, at least
	between              int // per cent of openings of a window in which others act
	parts                [][]uint32
	groups               []wire.Group
	policy               string
	ahead                float64
	quotas               []engine.Quota
	actions              int
	daemon               int   // how fast the daemon is
	speed                []int // of each engine, in the order of their births
	copies               int   // per cent: how fast ranks are
	late, abort          int   // per cent of reserves and stores
	freeze, reset, drop  int
	kill, crash          int
	fence                int // per cent of the daemon's actions while somebody is behind
}

// scenarios are rounds in which one kind of thing happens, and often: what needs three steps of one kind in a row is not
// met while everything else happens as well. They are named as those of the model.
var scenarios = map[string]func(d *draw, rng *rand.Rand){
	"steady": func(d *draw, rng *rand.Rand) {
		d.freeze, d.engines, d.keys, d.ahead = 20, 2+rng.IntN(2), 3+rng.IntN(3), 0.3+0.7*rng.Float64()
	},
	"late":    func(d *draw, rng *rand.Rand) { d.late, d.abort = 40, 20 },
	"death":   func(d *draw, rng *rand.Rand) { d.kill, d.copies = 25, 10+rng.IntN(40) },
	"drop":    func(d *draw, rng *rand.Rand) { d.drop, d.freeze = 30, 10 },
	"restart": func(d *draw, rng *rand.Rand) { d.crash, d.kill, d.copies = 15, rng.IntN(8), 10+rng.IntN(40) },
	"reset": func(d *draw, rng *rand.Rand) {
		d.reset, d.crash, d.drop, d.copies = 30, 5+rng.IntN(15), rng.IntN(15), 10+rng.IntN(40)
	},
	"fence": func(d *draw, rng *rand.Rand) {
		d.fence, d.freeze, d.drop, d.engines, d.ahead = 60, 20, rng.IntN(20), 2+rng.IntN(2), 1
	},
}

// newDraw draws a round; name is its scenario, or empty for anything.
func newDraw(rng *rand.Rand, name string) draw {
	some := func(most int) int { // often not at all, so that what remains is met alone
		if rng.IntN(2) == 0 {
			return 0
		}
		return 1 + rng.IntN(most)
	}
	d := draw{engines: 1 + rng.IntN(3), least: 1, between: 30, daemon: 20 + rng.IntN(150), keys: 2 + rng.IntN(7), policy: []string{"lru", "lru", "arc"}[rng.IntN(3)],
		ahead: []float64{0, 0.3, 1, 1}[rng.IntN(4)], actions: 300 + rng.IntN(900), copies: 20 + rng.IntN(75),
		late: some(60), abort: some(20), freeze: some(30), reset: some(15), drop: some(15), kill: some(8), crash: some(10), fence: some(80)}
	if name == "" && rng.IntN(2) == 0 {
		names := slices.Sorted(maps.Keys(scenarios))
		name = names[rng.IntN(len(names))]
	}
	if name != "" {
		quiet := d
		quiet.late, quiet.abort, quiet.freeze, quiet.reset, quiet.drop, quiet.kill, quiet.crash, quiet.fence = 0, 0, 0, 0, 0, 0, 0, 0
		d = quiet
		scenarios[name](&d, rng)
	}
	d.groups = []wire.Group{{Kind: "full", ChunkTokens: 16}}
	if rng.IntN(3) == 0 {
		d.groups = append(d.groups, wire.Group{Kind: "window", ChunkTokens: 16, Window: 16})
	}
	most := 0
	for range 1 + rng.IntN(2) {
		var part []uint32
		for range d.groups {
			part = append(part, []uint32{4096, 100, 6000}[rng.IntN(3)])
		}
		d.parts = append(d.parts, part)
	}
	for g := range d.groups {
		n := 0
		for r := range d.parts {
			n += (int(d.parts[r][g]) + 4095) / 4096
		}
		most = max(most, n)
	}
	d.pages = most * min(d.least+rng.IntN(d.keys), max(d.keys-1, d.least)) // not all keys fit
	if rng.IntN(6) == 0 {
		d.quotas = []engine.Quota{{Name: "*", Bytes: uint64(most+rng.IntN(d.pages)) * 4096}}
	}
	for len(d.speed) < 8 {
		d.speed = append(d.speed, 5+rng.IntN(100))
	}
	return d
}
