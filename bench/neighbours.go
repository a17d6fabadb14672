package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"kvlift/block"
	"kvlift/status"
)

// Neighbours measures what one engine costs another one on the same keys: alone, beside a slow one, and beside one that is
// stopped at the worst moments. Phases without the other engine lie before and after each phase with it, so that what
// the machine does meanwhile meets both.
type Neighbours struct {
	Binary        string
	RAM           uint64
	BytesPerBlock int // a multiple of 8
	Blocks        int // of a document
	Hot           int // documents that both ask for again and again
	Pace          time.Duration
	Phase         time.Duration
	Rounds        int
	EvictAhead    float64                       // of the daemon
	CorruptAt     int                           // flip a byte before so many a load of the first engine: a control that must fail; 0: never
	Progress      func(round int, phase string) // may be nil
}

// The phases of a round in which there is another engine.
const (
	PhaseElsewhere = "slow, elsewhere"   // works, with a pause after each request, on a daemon of its own: what it takes of the machine
	PhaseSlow      = "slow"              // does the same on the same keys
	PhasePaused    = "stopped, idle"     // SIGSTOP between two steps
	PhaseLoad      = "stopped, loading"  // SIGSTOP outside a window, in the middle of a load's copy
	PhaseHit       = "stopped in a step" // SIGSTOP inside a window that has promised a document
	PhaseAlone     = "alone"
)

// NeighbourPhase sums up one kind of phase over all rounds.
type NeighbourPhase struct {
	Phase      string            `json:"phase"`
	Stores     Spread            `json:"stores_per_second"`
	Hits       Spread            `json:"hits_per_second"`
	StoreRatio Spread            `json:"stores_to_alone"` // to the mean of the phases alone before and after
	HitRatio   Spread            `json:"hits_to_alone"`
	Skipped    uint64            `json:"skipped_keys"`    // as the engine counts them
	Refused    map[string]uint64 `json:"refused_batches"` // by reason, as the daemon counts them
	// For an engine that is stopped outside a window: how long until it was fenced, and what the first one could not store
	// until then. The other figures count from there.
	FencedAfter   Spread   `json:"fenced_after_seconds"`
	SkippedBefore uint64   `json:"skipped_until_fenced"`
	Fenced        uint64   `json:"fences"`        // further ones
	Pending       Spread   `json:"pending_bytes"` // at the end: removed, and not reusable
	Why           []string `json:"why"`           // what the daemon says of engines that block reuse, at the end of the last one
	Gap           Spread   `json:"gap_seconds"`   // longest time in which no key was stored
	P50           Spread   `json:"reserve_p50_us"`
	P99           Spread   `json:"reserve_p99_us"`
	Late          uint64   `json:"late_reserves"`
	Checked       uint64   `json:"bytes_checked"`
}

// samples are a phase with the figures of each round.
type samples struct {
	NeighbourPhase
	stores, hits, storeRatio, hitRatio, pending, gap, p50, p99, fenced []float64
}

// NeighbourResult is what Neighbours found.
type NeighbourResult struct {
	Machine       Machine          `json:"machine"`
	RAM           uint64           `json:"ram_bytes"`
	BytesPerBlock int              `json:"bytes_per_block"`
	Blocks        int              `json:"blocks"`
	EvictAhead    float64          `json:"evict_ahead"`
	Pace          float64          `json:"pace_seconds"`
	PhaseSeconds  float64          `json:"phase_seconds"`
	Rounds        int              `json:"rounds"`
	Phases        []NeighbourPhase `json:"phases"`
	Continued     Spread           `json:"continued_seconds"` // from SIGCONT in a window until the next key is stored
	Killed        Spread           `json:"killed_seconds"`    // from SIGKILL in a window until the next key is stored
}

// peer is a Neighbour's process as its parent sees it.
type peer struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	log *tail
}

// start runs an engine and waits until it works. The end of ctx kills it.
func (n *Neighbours) start(ctx context.Context, o Neighbour) (*peer, error) {
	o.BytesPerBlock, o.Blocks, o.Hot = n.BytesPerBlock, n.Blocks, n.Hot
	args, err := o.arguments()
	if err != nil {
		return nil, err
	}
	p := &peer{cmd: exec.CommandContext(ctx, n.Binary, args...), log: &tail{}}
	p.cmd.Stderr = p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewScanner(out)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start an engine: %w", err)
	}
	var ready string
	if err := p.hear(&ready); err != nil {
		return nil, errors.Join(err, p.kill())
	}
	return p, nil
}

// hear reads the next line.
func (p *peer) hear(v any) error {
	if !p.out.Scan() {
		return p.ended(p.cmd.Wait())
	}
	if err := json.Unmarshal(p.out.Bytes(), v); err != nil {
		return fmt.Errorf("an engine says %q: %w", p.out.Text(), err)
	}
	return nil
}

// ended says why a process has ended, in its own words.
func (p *peer) ended(err error) error {
	text := p.log.String()
	if strings.Contains(text, ErrWrongBytes.Error()) {
		return fmt.Errorf("%w: %s", ErrWrongBytes, text)
	}
	return fmt.Errorf("an engine ended (%v): %s", err, text)
}

func (p *peer) say(word string) error {
	if _, err := fmt.Fprintln(p.in, word); err != nil { // it reads as long as it lives
		for p.out.Scan() {
		}
		return p.ended(p.cmd.Wait())
	}
	return nil
}

// stop brings the process to a point and stops it there.
func (p *peer) stop(word string) error {
	var at string
	if err := errors.Join(p.say(word), p.hear(&at)); err != nil {
		return err
	}
	return p.cmd.Process.Signal(syscall.SIGSTOP)
}

func (p *peer) count() (t Tally, err error) {
	if err = p.say(wordCount); err == nil {
		err = p.hear(&t)
	}
	return t, err
}

// end lets the process say goodbye and waits for it.
func (p *peer) end() error {
	if err := p.say(wordEnd); err != nil {
		return errors.Join(err, p.kill())
	}
	for p.out.Scan() {
	}
	if err := p.cmd.Wait(); err != nil {
		return p.ended(err)
	}
	return nil
}

// kill ends the process with SIGKILL and waits for it; it may have ended by itself.
func (p *peer) kill() error {
	if p.cmd.ProcessState != nil {
		return nil
	}
	_ = p.cmd.Process.Kill() // it is gone already, or it will be
	_ = p.cmd.Wait()         // it was killed
	return nil
}

// contest is a run of Neighbours.
type contest struct {
	*Neighbours
	d     *Daemon
	other *Daemon // for PhaseElsewhere
	full  bool    // its arena is
	a     *peer
	b     *peer // nil while there is none
	fresh uint64
	names []string
	by    map[string]*samples
	r     NeighbourResult
	// continued and killed are times until stores succeed, in seconds.
	continued, killed []float64
}

// Run measures. A round has thirteen phases. A wrong byte in either engine is ErrWrongBytes.
func (n *Neighbours) Run(ctx context.Context) (r NeighbourResult, err error) {
	keys := n.RAM / block.PageSize / block.Pages(uint64(n.BytesPerBlock)) // as many records as there is room for
	flags := []string{"--ram", fmt.Sprint(n.RAM), "--max-keys", fmt.Sprint(keys), "--min-idle", "0s", "--evict-ahead", fmt.Sprint(n.EvictAhead)}
	d, err := StartDaemon(ctx, n.Binary, flags...)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	other, err := StartDaemon(ctx, n.Binary, flags...)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, other.Close()) }()
	c := &contest{Neighbours: n, d: d, other: other, by: map[string]*samples{}}
	c.r = NeighbourResult{Machine: ThisMachine(), RAM: n.RAM, BytesPerBlock: n.BytesPerBlock, Blocks: n.Blocks, EvictAhead: n.EvictAhead, Pace: n.Pace.Seconds(),
		PhaseSeconds: n.Phase.Seconds(), Rounds: n.Rounds}
	if c.a, err = n.start(ctx, Neighbour{Socket: d.Socket, ID: "a", Fresh: 1 << 20, RAM: n.RAM, CorruptAt: n.CorruptAt}); err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, c.a.kill()) }()
	defer func() {
		if c.b != nil {
			err = errors.Join(err, c.b.kill())
		}
	}()
	for round := range n.Rounds {
		if err := c.round(ctx, round+1); err != nil {
			return r, err
		}
	}
	if err := c.a.end(); err != nil {
		return r, err
	}
	return c.result(), nil
}

// round goes through all phases once.
func (c *contest) round(ctx context.Context, round int) error {
	before, err := c.measure(ctx, round, PhaseAlone)
	if err != nil {
		return err
	}
	for _, s := range []struct {
		phase, word string
		kill        bool
	}{{PhaseElsewhere, "", false}, {PhaseSlow, "", false}, {PhasePaused, wordPause, false}, {PhaseLoad, wordLoad, false}, {PhaseHit, wordHit, false}, {PhaseHit, wordHit, true}} {
		if err := c.enter(ctx, s.phase, s.word); err != nil {
			return err
		}
		with, err := c.measure(ctx, round, s.phase)
		if err != nil {
			return err
		}
		if err := c.leave(ctx, s.word, s.kill); err != nil {
			return err
		}
		after, err := c.measure(ctx, round, PhaseAlone)
		if err != nil {
			return err
		}
		p := c.by[s.phase]
		p.storeRatio = append(p.storeRatio, div(2*rate(with.Stored, &with), rate(before.Stored, &before)+rate(after.Stored, &after)))
		p.hitRatio = append(p.hitRatio, div(2*rate(with.Hits, &with), rate(before.Hits, &before)+rate(after.Hits, &after)))
		before = after
	}
	return nil
}

func rate(n uint64, t *Tally) float64 { return div(float64(n), t.Seconds) }

// enter attaches the other engine and stops it where a word says; an empty word lets it work. Outside a window it is waited
// for until the daemon does without it.
func (c *contest) enter(ctx context.Context, phase, word string) (err error) {
	c.fresh++
	o := Neighbour{Socket: c.d.Socket, ID: fmt.Sprint("b", c.fresh), Fresh: 1<<40 + c.fresh<<20, Pace: c.Pace}
	if phase == PhaseElsewhere {
		if o.Socket = c.other.Socket; !c.full {
			o.RAM, c.full = c.RAM, true
		}
	}
	if c.b, err = c.start(ctx, o); err != nil || word == "" {
		return err
	}
	if _, err := c.a.count(); err != nil {
		return err
	}
	began := time.Now()
	if err := c.b.stop(word); err != nil || word == wordHit {
		return err
	}
	if err := until(ctx, "the stopped engine is not fenced", func() (bool, error) {
		d, err := c.d.Status(ctx, false)
		return slices.ContainsFunc(d.Engines, func(e status.Engine) bool { return e.EngineID == o.ID && e.Fenced }), err
	}); err != nil {
		return err
	}
	t, err := c.a.count()
	p := c.phase(phase)
	p.fenced = append(p.fenced, time.Since(began).Seconds())
	p.SkippedBefore += t.Skipped
	return err
}

// until waits for something that other processes bring about.
func until(ctx context.Context, what string, cond func() (bool, error)) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for limit := time.Now().Add(30 * time.Second); ; {
		if ok, err := cond(); ok || err != nil {
			return err
		}
		if time.Now().After(limit) {
			return fmt.Errorf("%s within 30 s", what)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// leave makes the other engine go on and say goodbye, or kills it, and notes how long the first one waited for pages then.
func (c *contest) leave(ctx context.Context, word string, kill bool) error {
	if word != "" {
		if _, err := c.a.count(); err != nil {
			return err
		}
		began := time.Now()
		if kill {
			if err := c.b.kill(); err != nil {
				return err
			}
		} else if err := errors.Join(c.b.cmd.Process.Signal(syscall.SIGCONT), c.b.say(wordGo)); err != nil {
			return err
		}
		if err := until(ctx, "the first engine stores nothing", func() (bool, error) {
			t, err := c.a.count()
			return t.Stored > 0, err
		}); err != nil {
			return err
		}
		if took := time.Since(began).Seconds(); kill {
			c.killed = append(c.killed, took)
		} else if word == wordHit {
			c.continued = append(c.continued, took)
		}
	}
	b := c.b
	c.b = nil
	if kill {
		return nil
	}
	return b.end()
}

// measure lets the first engine work for one phase.
func (c *contest) measure(ctx context.Context, round int, name string) (Tally, error) {
	if c.Progress != nil {
		c.Progress(round, name)
	}
	before, err := c.d.Status(ctx, false)
	if err != nil {
		return Tally{}, err
	}
	if _, err := c.a.count(); err != nil {
		return Tally{}, err
	}
	select {
	case <-ctx.Done():
		return Tally{}, context.Cause(ctx)
	case <-time.After(c.Phase):
	}
	t, err := c.a.count()
	if err != nil {
		return t, err
	}
	after, err := c.d.Status(ctx, false)
	if err != nil {
		return t, err
	}
	c.phase(name).add(&t, &before, &after)
	return t, nil
}

func (c *contest) phase(name string) *samples {
	p := c.by[name]
	if p == nil {
		p = &samples{NeighbourPhase: NeighbourPhase{Phase: name, Refused: map[string]uint64{}, Why: []string{}}}
		c.by[name], c.names = p, append(c.names, name)
	}
	return p
}

func (p *samples) add(t *Tally, before, after *status.Document) {
	p.stores, p.hits = append(p.stores, rate(t.Stored, t)), append(p.hits, rate(t.Hits, t))
	p.gap = append(p.gap, t.Gap)
	p.p50, p.p99 = append(p.p50, t.P50), append(p.p99, t.P99)
	p.Skipped += t.Skipped
	p.Late += t.Late
	p.Checked += t.BytesChecked
	for reason, n := range after.Counters.RefusedBatches {
		p.Refused[reason] += n - before.Counters.RefusedBatches[reason]
	}
	p.Fenced += after.Counters.Fences - before.Counters.Fences
	p.pending = append(p.pending, float64(after.Tiers[0].PendingBytes))
	p.Why = p.Why[:0] // the last round's
	for i := range after.Engines {
		if e := &after.Engines[i]; e.BlocksReuse {
			p.Why = append(p.Why, e.EngineID+": "+e.Why)
		}
	}
}

func (c *contest) result() NeighbourResult {
	for _, name := range c.names {
		p := c.by[name]
		p.Stores, p.Hits, p.StoreRatio, p.HitRatio = SpreadOf(p.stores), SpreadOf(p.hits), SpreadOf(p.storeRatio), SpreadOf(p.hitRatio)
		p.Pending, p.Gap, p.P50, p.P99 = SpreadOf(p.pending), SpreadOf(p.gap), SpreadOf(p.p50), SpreadOf(p.p99)
		p.FencedAfter = SpreadOf(p.fenced)
		c.r.Phases = append(c.r.Phases, p.NeighbourPhase)
	}
	c.r.Continued, c.r.Killed = SpreadOf(c.continued), SpreadOf(c.killed)
	return c.r
}
