package engine

import (
	"errors"
	"testing"

	"pgregory.net/rapid"

	"kvlift/meta"
)

// TestComesBackDifferent: a rank that comes back to a session with parts, groups or a world that are not its own is refused,
// and nothing of what it said sticks: the session's own rank comes back after it.
func TestComesBackDifferent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newRig(t, 8, 16, Options{})
		r.groups = []meta.Group{{ChunkTokens: 16}, {ChunkTokens: 32}}
		s, m, w := r.join("a", "m", 5000, 9000)
		r.attach(s, nil)
		private := rapid.Bool().Draw(t, "reset before")
		if private {
			if err := r.e.Reset(s, [32]byte{1}); err != nil {
				t.Fatal(err)
			}
		}
		if rapid.Bool().Draw(t, "the daemon has died") {
			tb, err := meta.Open(r.file)
			if err != nil {
				t.Fatal(err)
			}
			r.adopt(tb, func(slot int) bool { return slot == m.slot || slot == w.slot })
			m, w = r.e.procs[m.slot], r.e.procs[w.slot]
			s = w.session
		} else if rapid.Bool().Draw(t, "the rank has died") {
			r.e.ProcessEnded(w)
		}
		own := Joining{Role: meta.Worker, EngineID: "a", WorldSize: 1, PID: 1, Session: s.id, Parts: []uint32{5000, 9000}, Desc: r.describe("m")}
		for name, change := range map[string]func(*Joining){
			"parts":       func(j *Joining) { j.Parts = []uint32{5000, 9001} },
			"fewer parts": func(j *Joining) { j.Parts = j.Parts[:1] },
			"fewer groups": func(j *Joining) {
				j.Parts, j.Desc = j.Parts[:1], Describe("another model", r.groups[:1])
			},
			"more groups": func(j *Joining) {
				j.Parts, j.Desc = []uint32{1, 2, 3}, Describe("another model", append(r.groups, r.groups[0]))
			},
			"world":            func(j *Joining) { j.WorldSize = 2 },
			"rank of no world": func(j *Joining) { j.WorldSize, j.Rank = 2, 1 },
		} {
			j := own
			change(&j)
			procs := s.procs
			if p, err := r.e.Join(j); !errors.Is(err, ErrGeometry) || p != nil {
				t.Fatalf("%s: %v, %v", name, p, err)
			}
			if s.procs != procs || s.state == Ended {
				t.Fatalf("%s: %d processes, were %d; %v", name, s.procs, procs, s.state)
			}
		}
		p, err := r.e.Join(own)
		if err != nil || p.session != s {
			t.Fatalf("its own rank: %v", err)
		}
		if !r.e.Mapped(p) {
			t.Fatal("the only rank has mapped, the engine waits for more")
		}
		own.Role, own.Parts = meta.Manager, nil
		if _, err := r.e.Join(own); err != nil {
			t.Fatalf("its own manager: %v", err)
		}
		r.attach(s, nil)
		if err := r.e.Audit(); err != nil {
			t.Fatal(err)
		}
	})
}
