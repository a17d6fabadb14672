package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/recording"
	"kvlift/wire"
)

// Played is what came of playing a recording to a daemon, beside what the recorded manager answered.
type Played struct {
	Name      string `json:"name"`
	Version   string `json:"vllm_version"`
	Groups    int    `json:"groups"`
	Ranks     int    `json:"ranks"`
	TierBytes uint64 `json:"tier_bytes"`
	Requests  int    `json:"requests"`
	Steps     int    `json:"steps"`

	Lookups      int `json:"lookups"`
	RecordedHits int `json:"recorded_hits"`
	Hits         int `json:"hits"`
	MoreHits     int `json:"more_hits"` // where the recorded manager missed, or had to be asked again
	LostHits     int `json:"lost_hits"` // where it hit

	LoadedKeys  int    `json:"loaded_keys"`
	LoadedBytes uint64 `json:"loaded_bytes"` // all ranks, every one compared
	LostLoads   int    `json:"lost_loads"`   // keys that the recorded manager loaded and the daemon did not have

	Offered          int `json:"offered_keys"`
	RecordedStores   int `json:"recorded_stored_keys"`
	Stored           int `json:"stored_keys"`
	Kept             int `json:"kept_keys"`              // were there, where the recorded manager stored them again
	StoredAgain      int `json:"stored_again_keys"`      // were stored, where the recorded manager had them
	RefusedFull      int `json:"refused_full_keys"`      // all of the tier was held by requests that run
	RefusedOtherwise int `json:"refused_otherwise_keys"` // and the recorded manager had stored them

	EarlyStates   int `json:"early_states"`   // states and windows that were offered before their chunk and stored
	RefusedStates int `json:"refused_states"` // that were refused, and whose chain was stored later

	Differences []Difference `json:"differences,omitempty"` // the first of them
	More        int          `json:"more_differences,omitempty"`
}

// Difference is one place where the daemon did something else than the recorded manager.
type Difference struct {
	Line    int    `json:"line"` // of the recording
	Request int    `json:"request"`
	What    string `json:"what"`
	Key     string `json:"key"`
}

// maxDifferences is how many are listed.
const maxDifferences = 100

// ErrFewer tells that a daemon gave an engine less than the recorded manager had.
var ErrFewer = errors.New("less than the recorded engine saw")

// Err is an error of ErrFewer if a hit or load was lost, a key was refused for which there was room, or a state was
// refused whose chain came later.
func (p *Played) Err() error {
	if p.LostHits+p.LostLoads+p.RefusedOtherwise+p.RefusedStates == 0 {
		return nil
	}
	return fmt.Errorf("%s: %d hits lost, %d loads lost, %d keys refused with room, %d states refused whose chain came later: %w", p.Name, p.LostHits, p.LostLoads, p.RefusedOtherwise, p.RefusedStates, ErrFewer)
}

func (p *Played) differ(c *recording.Call, k *block.Key, what string) {
	if len(p.Differences) == maxDifferences {
		p.More++
		return
	}
	p.Differences = append(p.Differences, Difference{c.Line, c.Request, what, k.String()})
}

// ErrCold tells that a recording begins with what another one has stored.
var ErrCold = errors.New("this recording goes on from another one, which has to be played before it")

// Recordings says what to play, and how.
type Recordings struct {
	Binary   string
	Sessions []*recording.Session
	RAM      uint64 // bytes of the arena; 0: as many as the recorded tier had
	// CorruptAt flips a byte of the arena before the n-th load of each session is compared (1 the first): a control that must
	// fail. 0: never.
	CorruptAt int
}

// Run plays recordings one after the other, each to a daemon of its own. One whose manager found keys at its start goes on with
// the daemon of the one before it, which is killed and started again in between. visit hears what came of each.
func (r Recordings) Run(ctx context.Context, visit func(*Played)) (err error) {
	var d *Daemon
	defer func() {
		if d != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	for _, s := range r.Sessions {
		size := r.RAM
		if size == 0 {
			size = s.TierBytes
		}
		switch {
		case s.Recovered > 0 && d == nil:
			return fmt.Errorf("%s: %w", s.Name, ErrCold)
		case s.Recovered > 0:
			if err := d.Kill(); err != nil {
				return err
			}
			if err := d.Start(ctx); err != nil {
				return err
			}
		default:
			if size == 0 {
				return fmt.Errorf("%s: the recording does not tell how large its tier was", s.Name)
			}
			if d != nil {
				if err := d.Close(); err != nil {
					return err
				}
			}
			if d, err = StartDaemon(ctx, r.Binary, "--ram", fmt.Sprint(size), "--min-idle", "0s"); err != nil {
				return err
			}
		}
		p, err := r.playOn(ctx, d, s)
		if err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		visit(p)
	}
	return nil
}

// playOn attaches an engine of the recording's kind to a daemon and plays.
func (r Recordings) playOn(ctx context.Context, d *Daemon, s *recording.Session) (_ *Played, err error) {
	c := client.Config{Socket: d.Socket, Name: "kvlift bench", EngineID: fmt.Sprintf("recording-%d", os.Getpid()), Deadline: 10 * time.Second,
		Namespace: wire.Namespace{Identity: map[string]any{"model": s.Model, "dtype": s.DType}}, Parts: s.Parts}
	for i, g := range s.Groups {
		c.Namespace.Groups = append(c.Namespace.Groups, wire.Group{Name: fmt.Sprintf("group-%d", i), Kind: g.Kind, ChunkTokens: g.ChunkTokens, Window: g.Window})
		for _, part := range s.Parts {
			if part[i]%8 != 0 {
				return nil, fmt.Errorf("group %d: a payload of %d bytes, no multiple of 8", i, part[i])
			}
		}
	}
	st, err := d.Status(ctx, false)
	if err != nil {
		return nil, err
	}
	e, err := client.Open(ctx, c)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	p := newPlayer(e, s, st.Tiers[0].TotalBytes)
	p.corruptAt = r.CorruptAt
	found := 0
	e.Keys(func(block.Key, client.Copy) bool { found++; return true })
	if found < s.Recovered {
		return nil, fmt.Errorf("%d keys were found where the recorded manager had %d: %w", found, s.Recovered, ErrFewer)
	}
	for call := range s.All() {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err := p.play(call); err != nil {
			return nil, fmt.Errorf("line %d, %v: %w", call.Line, call.Method, err)
		}
	}
	p.judgeStates()
	if p.loads < r.CorruptAt {
		return nil, fmt.Errorf("no byte was corrupted: there were %d loads, and load %d was to be hit", p.loads, r.CorruptAt)
	}
	recorded := uint64(0)
	for _, n := range s.Loaded {
		recorded += n
	}
	if len(s.Loaded) > 0 && p.LostLoads == 0 && p.LoadedBytes != recorded {
		return nil, fmt.Errorf("%d bytes were loaded, the recorded workers copied %d", p.LoadedBytes, recorded)
	}
	return &p.Played, nil
}
