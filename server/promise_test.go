package server

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/engine"
	"kvlift/meta"
	"kvlift/wire"
)

var (
	promiseFor      = flag.Duration("promises-for", 2*time.Second, "how long TestPromises goes on")
	promiseSeed     = flag.Uint64("promises-seed", 0, "of TestPromises; 0 takes one from the clock and prints it")
	promiseScenario = flag.String("promises-scenario", "", "of the rounds of TestPromises; empty: any")
	promiseReplay   = flag.Uint64("promises-replay", 0, "run the one round of TestPromises that printed this number, and print every action")
)

// round plays one round of a seed and returns what was violated, with the world as it was.
func round(dir string, seed uint64, scenario string, echo func(string)) (w *world, bad violation) {
	rng := rand.New(rand.NewPCG(seed, 1))
	w = &world{rng: rng, draw: newDraw(rng, scenario), dir: dir, socket: filepath.Join(dir, "s"), writers: map[uint32]*store{}, echo: echo}
	w.clock.Store(1_000_000)
	defer func() {
		switch v := recover().(type) {
		case nil:
		case violation:
			bad = v
		default:
			panic(v)
		}
	}()
	w.start()
	for range w.draw.engines {
		w.spawn()
	}
	for range w.draw.actions {
		w.act()
		w.check()
	}
	w.settle()
	w.settled()
	w.end()
	return w, ""
}

// alive lists engines of which something lives.
func (w *world) alive() []*player {
	return slices.DeleteFunc(slices.Clone(w.players), func(p *player) bool { return !p.manager && !p.ranks })
}

// act is one action of somebody.
func (w *world) act() {
	w.counts.Actions++
	w.clock.Add(int64(w.rng.IntN(12)))
	if n := w.rng.IntN(1000); n < w.rare() {
		w.disturb()
		return
	}
	weights, total := []int{w.draw.daemon}, w.draw.daemon
	if w.stop != nil && len(w.pending()) == 0 {
		weights[0], total = 5, 5 // it has nothing to do
	}
	ps := w.alive()
	for i, p := range ps {
		speed := w.draw.speed[i%len(w.draw.speed)]
		if p.frozen > 0 {
			p.frozen--
			speed = 0
		}
		weights = append(weights, speed)
		total += speed
	}
	pick := w.rng.IntN(total)
	for i, n := range weights {
		if pick -= n; pick >= 0 {
			continue
		}
		if i == 0 {
			w.daemonActs()
		} else {
			w.engineActs(ps[i-1])
		}
		return
	}
}

func (w *world) rare() int {
	d := &w.draw
	return d.freeze + d.reset + d.drop + d.kill + d.crash
}

// daemonActs lets the daemon take something up, or notice the end of a process.
func (w *world) daemonActs() {
	if w.stop == nil {
		w.note("the daemon starts")
		w.start()
		return
	}
	if w.rng.IntN(100) < w.draw.fence && len(w.eng.Behind()) > 0 {
		w.fence()
	}
	ts := w.pending()
	if len(ts) == 0 || w.rng.IntN(20) == 0 {
		w.poll()
		return
	}
	w.deliver(ts[w.rng.IntN(len(ts))])
}

func (w *world) poll() {
	w.note("daemon looks at the byte locks: %d live", w.srv.pollOnce())
	w.calm()
}

// disturb does what seldom happens.
func (w *world) disturb() {
	d, n := &w.draw, w.rng.IntN(w.rare())
	ps := w.alive()
	var p *player
	if len(ps) > 0 {
		p = ps[w.rng.IntN(len(ps))]
	}
	hit := func(weight int) bool { n -= weight; return n < 0 && n >= -weight }
	switch {
	case hit(d.freeze):
		if p != nil {
			p.frozen = 10 + w.rng.IntN(80)
			w.note("%s: stopped for %d actions", p.id, p.frozen)
		}
	case hit(d.reset):
		if p != nil && p.manager && p.e != nil {
			p.reset()
		}
	case hit(d.drop):
		if w.stop == nil {
			return
		}
		if ts := w.look(); len(ts) > 0 {
			t := ts[w.rng.IntN(len(ts))]
			w.note("connection of %s is lost", t.name())
			w.counts.Lost++
			t.c.shutdown()
			for _, p := range w.players {
				if p.attaching && p.mine(t) && t.try == p.try && (!t.passed || t.hello.Role == "manager") {
					until(p.id+" gives up attaching", p.finished)
				}
			}
		}
	case hit(d.kill):
		switch {
		case p == nil:
		case p.manager && p.e != nil:
			p.kill(w.rng.IntN(2) == 0)
		case p.ranks && p.e != nil:
			p.killRanks()
		}
		if len(w.alive()) < d.engines && w.stop != nil {
			w.spawn()
		}
	case hit(d.crash):
		if w.stop != nil {
			w.note("the daemon dies")
			w.counts.Crashes++
			w.crash()
			for _, p := range w.players {
				if p.attaching {
					until(p.id+" gives up attaching", p.finished)
				}
			}
		}
	}
}

// fence fences whoever is behind, if it may be.
func (w *world) fence() {
	if w.stop == nil {
		return
	}
	behind := w.eng.Behind()
	var ss []*engine.Session
	for s := range behind {
		ss = append(ss, s)
	}
	slices.SortFunc(ss, func(a, b *engine.Session) int { return cmp.Compare(a.ID(), b.ID()) })
	for _, s := range ss {
		done := w.srv.fenceOne(s)
		w.note("session %d has acknowledged %d, and is fenced: %v", s.ID(), behind[s], done)
		if done {
			w.counts.Fenced++
		}
	}
	w.calm()
}

// meanwhile lets others act while an engine is between two of its own instructions.
func (w *world) meanwhile(p *player) {
	if w.nested || p.attaching || w.rng.IntN(100) >= w.draw.between {
		return
	}
	w.nested = true
	defer func() { w.nested = false }()
	w.note("meanwhile")
	for range 1 + w.rng.IntN(8) {
		ps := slices.DeleteFunc(w.alive(), func(o *player) bool { return o == p })
		if n := w.rng.IntN(len(ps) + 1); n < len(ps) {
			w.engineActs(ps[n])
		} else if w.stop != nil {
			w.daemonActs()
		}
		w.check()
	}
	w.note("back to %s", p.id)
}

// engineActs is one action of an engine.
func (w *world) engineActs(p *player) {
	defer p.stir()
	if p.e == nil {
		return
	}
	jobs := slices.Concat(p.loads, p.stores)
	if p.ranks && len(jobs) > 0 && w.rng.IntN(100) < w.draw.copies {
		j := jobs[w.rng.IntN(len(jobs))]
		rank := w.rng.IntN(len(j.parts))
		switch {
		case j.parts[rank] < 2:
			p.progress(j, rank)
			return
		case !p.manager && !j.told[rank]:
			if j.done() { // of a load that is a rank's own affair, too; but it has told before this only if all have
				p.report(j, rank)
			}
			return
		case p.manager && j.done():
			p.complete(j)
			return
		}
	}
	if !p.manager {
		if p.ranks && (len(jobs) == 0 || w.rng.IntN(20) == 0) {
			p.killRanks()
		}
		return
	}
	switch n := w.rng.IntN(100); {
	case n < 30:
		p.lookup(w.rng.IntN(w.draw.keys))
	case n < 50:
		if len(p.hits) > 0 {
			p.load()
		} else {
			p.lookup(w.rng.IntN(w.draw.keys))
		}
	case n < 70:
		if w.rng.IntN(8) > 0 {
			p.nextRequest() // what the last one holds could not go
		}
		p.reserve(w.rng.IntN(100) < w.draw.late)
	case n < 77:
		p.stepEnd()
	case n < 84:
		p.tick()
	case n < 97:
		p.nextRequest()
	default:
		for _, j := range p.stores {
			if slices.Max(j.parts) == 0 && !j.doomed && w.rng.IntN(100) < w.draw.abort {
				p.abort(j)
				break
			}
		}
	}
}

// check looks at every promise, and at the daemon's books.
func (w *world) check() {
	for _, p := range w.players {
		p.check()
	}
	if w.stop != nil {
		if err := w.eng.Audit(); err != nil {
			violated("the daemon's books: %v", err)
		}
	}
}

// settle lets everybody go on in turn, without new work but with lookups, until nothing changes any more.
func (w *world) settle() {
	w.note("settling")
	w.nested = true // nobody does anything new
	if w.stop == nil {
		w.start()
	}
	for turn := range 12 {
		w.clock.Add(2000) // longer than any pause between attempts to reconnect
		for _, p := range w.alive() {
			w.goOn(p, turn > 6)
			p.stir()
			w.check()
		}
		for n := 0; ; n++ {
			ts := w.pending()
			if len(ts) == 0 {
				break
			}
			if n > 1000 {
				violated("L2 the daemon is never at rest")
			}
			w.deliver(ts[0])
			w.check()
		}
		w.poll()
	}
}

// goOn brings an engine's work to its end; its steps go on, with a hit wherever there is one. last ends ranks that live
// without a manager.
func (w *world) goOn(p *player, last bool) {
	p.frozen = 0
	if p.attaching && !slices.ContainsFunc(w.pending(), p.mine) {
		p.giveUp()
	}
	if p.e == nil {
		return
	}
	for _, j := range slices.Concat(p.loads, p.stores) {
		for r := range j.parts {
			for j.parts[r] < 2 {
				p.progress(j, r)
			}
		}
		if p.manager {
			p.complete(j)
			continue
		}
		for r := range j.parts {
			if !j.told[r] {
				p.report(j, r)
			}
		}
	}
	if !p.manager {
		if last || w.rng.IntN(4) == 0 {
			p.killRanks() // not all can report: those of a manager that is gone do not reconnect by themselves
		}
		return
	}
	if p.open {
		p.stepEnd()
	}
	for n := range w.draw.keys {
		p.lookup(n)
	}
	w.check()
	if p.request > 0 {
		p.e.Finish(p.request, 0, 0, wire.NoHint)
	}
	p.stepEnd()
}

// settled compares mirrors and table when everybody has heard everything (L2).
func (w *world) settled() {
	table := w.table()
	for ref, v := range table {
		if v.State != meta.Ready {
			violated("L2 record %v of key %x stays %v though everybody went on", ref, v.Key.Bytes[:4], v.State)
		}
	}
	for _, p := range w.alive() {
		if !p.manager || p.e == nil {
			continue
		}
		if !p.e.Attached() {
			violated("L2 %s never comes back", p.id)
		}
		p.e.Keys(func(k block.Key, c client.Copy) bool {
			if v, ok := table[c.Ref]; !ok || v.Key != k {
				violated("%s has key %x at %v in its mirror, the table has not", p.id, k.Bytes[:4], c.Ref)
			}
			return true
		})
	}
}

// end kills every engine and looks whether anything is left of them (S4).
func (w *world) end() {
	for _, p := range w.alive() {
		if p.manager {
			p.kill(true)
		} else {
			p.killRanks()
		}
	}
	for ts := w.pending(); len(ts) > 0; ts = w.pending() {
		w.deliver(ts[0])
	}
	if n := w.srv.pollOnce(); n > 0 {
		violated("S4 %d processes live for the daemon, none does", n)
	}
	for ref, v := range w.table() {
		if v.State != meta.Ready {
			violated("S4 record %v of key %x stays %v, nobody is left", ref, v.Key.Bytes[:4], v.State)
		}
	}
	w.check()
	w.counts.Removed += int(w.eng.Status().Epoch)
	w.crash()
}

// TestPromises plays rounds until its time is over. The number that a failure prints replays the round.
func TestPromises(t *testing.T) {
	if _, ok := scenarios[*promiseScenario]; !ok && *promiseScenario != "" {
		t.Fatalf("there is no scenario %q: %v", *promiseScenario, slices.Sorted(maps.Keys(scenarios)))
	}
	seed := *promiseSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	seeds := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	var total counts
	rounds := 0
	for end := time.Now().Add(*promiseFor); rounds == 0 || time.Now().Before(end); rounds++ {
		n := seeds.Uint64()
		var echo func(string)
		if *promiseReplay != 0 {
			n, end = *promiseReplay, time.Now()
			echo = func(s string) { t.Log(s) }
		}
		w, bad := playIn(t, n, *promiseScenario, echo)
		total.add(w.counts)
		if bad != "" {
			t.Fatalf("violation in round %d: %s\n%s\nreplay: go test ./server -run TestPromises -v -args -promises-replay=%d -promises-scenario=%s\nthe last actions:\n  %s", rounds, bad,
				fmt.Sprintf("%+v", w.draw), n, *promiseScenario, strings.Join(w.log[max(0, len(w.log)-60):], "\n  "))
		}
	}
	t.Logf("%d rounds, %+v: no violation", rounds, total)
}

func playIn(t *testing.T, seed uint64, scenario string, echo func(string)) (*world, violation) {
	dir, err := os.MkdirTemp("/dev/shm", "kvlift-promises-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	return round(dir, seed, scenario, echo)
}

// TestPromisesReplay plays rounds twice: every action and every answer has to be the same.
func TestPromisesReplay(t *testing.T) {
	for seed := range uint64(6) {
		var first []string
		a, bad := playIn(t, seed, "", func(s string) { first = append(first, s) })
		if bad != "" {
			t.Fatal(bad)
		}
		i := 0
		b, bad := playIn(t, seed, "", func(s string) {
			if i < len(first) && s != first[i] {
				t.Errorf("seed %d, action %d: %q, then %q", seed, i, first[i], s)
				i = len(first)
			}
			i++
		})
		if bad != "" {
			t.Fatal(bad)
		}
		if a.sum != b.sum {
			t.Fatalf("seed %d: two runs differ", seed)
		}
	}
}
