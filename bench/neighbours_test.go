package bench_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"kvlift/bench"
)

func neighbours() bench.Neighbours {
	return bench.Neighbours{Binary: binary, RAM: 16 << 20, BytesPerBlock: 4096, Blocks: 16, Hot: 60, Pace: 5 * time.Millisecond, Phase: 100 * time.Millisecond, Rounds: 1, EvictAhead: 0.05}
}

// TestNeighbours goes through every phase once, with real processes that are stopped, continued and killed. What the figures
// are says nothing here; that hits go on, stores are counted where they are refused, and everything comes back, does.
func TestNeighbours(t *testing.T) {
	n := neighbours()
	var phases []string
	n.Progress = func(_ int, phase string) { phases = append(phases, phase) }
	r, err := n.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := 13; len(phases) != want || phases[0] != bench.PhaseAlone || phases[want-1] != bench.PhaseAlone {
		t.Errorf("phases: %q", phases)
	}
	var names []string
	for i := range r.Phases {
		p := &r.Phases[i]
		names = append(names, p.Phase)
		if p.Hits.Min == 0 || p.Checked == 0 || p.P99.Min == 0 {
			t.Errorf("%s: %+v", p.Phase, p)
		}
		if p.Phase == bench.PhaseHit {
			if p.Skipped == 0 || p.Refused["waiting"] == 0 || p.Pending.Min == 0 {
				t.Errorf("%s: %+v", p.Phase, p)
			}
			if !slices.ContainsFunc(p.Why, func(s string) bool { return strings.HasPrefix(s, "b") && strings.Contains(s, "not acknowledged") }) {
				t.Errorf("%s: nobody is named: %q", p.Phase, p.Why)
			}
		} else if p.Stores.Min == 0 {
			t.Errorf("%s: nothing was stored: %+v", p.Phase, p)
		}
		if stopped := p.Phase == bench.PhasePaused || p.Phase == bench.PhaseLoad; stopped != (p.FencedAfter.Min > 0) || stopped && p.Refused["waiting"] > 0 {
			t.Errorf("%s: fenced after %+v, %v refused since", p.Phase, p.FencedAfter, p.Refused)
		}
	}
	if !slices.Equal(names, []string{bench.PhaseAlone, bench.PhaseElsewhere, bench.PhaseSlow, bench.PhasePaused, bench.PhaseLoad, bench.PhaseHit}) {
		t.Errorf("phases: %q", names)
	}
	if r.Continued.Min <= 0 || r.Killed.Min <= 0 {
		t.Errorf("continued %+v, killed %+v", r.Continued, r.Killed)
	}
}

// TestNeighboursControl: a byte that is wrong is found, and ends the run.
func TestNeighboursControl(t *testing.T) {
	n := neighbours()
	n.CorruptAt = 30
	if _, err := n.Run(t.Context()); !errors.Is(err, bench.ErrWrongBytes) {
		t.Errorf("a wrong byte was not found: %v", err)
	}
}

func TestParseNeighbour(t *testing.T) {
	for _, arg := range []string{"", "{", "[]", "{}", `{"Blocks":1,"Hot":1,"BytesPerBlock":12}`, `{"Blocks":70000,"Hot":1,"BytesPerBlock":8}`, `{"Blocks":1,"Hot":0,"BytesPerBlock":8}`} {
		if o, err := bench.ParseNeighbour(arg); err == nil {
			t.Errorf("%q is taken for %+v", arg, o)
		}
	}
	if o, err := bench.ParseNeighbour(`{"Blocks":1,"Hot":1,"BytesPerBlock":8}`); err != nil || o.Blocks != 1 {
		t.Errorf("%+v, %v", o, err)
	}
}
