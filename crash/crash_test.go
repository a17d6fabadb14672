// Package crash kills the daemon and its engines at random moments under load and looks at what is left. All processes
// are real: kvlift serve, and engines that are this test binary run again.
package crash

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"kvlift/bench"
	"kvlift/block"
	"kvlift/client"
	"kvlift/wire"
)

var (
	rounds = flag.Int("rounds", 20, "rounds of TestCrash")
	seed   = flag.Uint64("seed", 0, "of the random choices; 0 takes one from the clock and prints it")
)

const (
	payload  = 6000 // bytes of a key: two pages, the second one not full
	perArena = 10   // rounds before the arena is thrown away
)

func TestMain(m *testing.M) {
	if socket := os.Getenv("KVLIFT_CRASH_SOCKET"); socket != "" {
		os.Exit(engine(socket))
	}
	flag.Parse()
	os.Exit(m.Run())
}

// world is a daemon with its engines, and what is known of its keys.
type world struct {
	t       *testing.T
	rng     *rand.Rand
	d       *bench.Daemon
	strict  bool // nothing is ever evicted: what was kept must stay
	engines []*process
	next    int
	kept    map[block.Key]block.Ref
	stats   struct{ rounds, daemonKills, engineKills, keys, checked, survived int }
}

// TestCrash is make crash. In a strict arena the idle guard forbids every eviction, so that each key whose added delta
// an engine has read must be there after every kill, under the same ref and with its bytes. In the others keys come and
// go, and what is there must hold the right bytes. In both, no page may be left over once all engines have ended.
func TestCrash(t *testing.T) {
	s := *seed
	if s == 0 {
		s = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d (replay the choices with -args -seed=%d)", s, s)
	rng := rand.New(rand.NewPCG(s, 0))
	binary := build(t)
	var total, strict int
	for done := 0; done < *rounds; {
		n := min(perArena, *rounds-done)
		w := &world{t: t, rng: rng, strict: strict <= total/2, kept: map[block.Key]block.Ref{}}
		w.run(binary, n)
		total += n
		if w.strict {
			strict += n
		}
		done += n
		t.Logf("%d rounds (strict %v): %d daemon kills, %d engine kills, %d keys read as kept, %d survivors compared in %d looks", n, w.strict,
			w.stats.daemonKills, w.stats.engineKills, w.stats.keys, w.stats.survived, w.stats.checked)
		if w.stats.survived == 0 {
			t.Error("no key was ever compared: the load did nothing")
		}
	}
	t.Logf("%d rounds, %d of them strict: no wrong byte, no lost key, no leak", total, strict)
}

func build(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "kvlift")
	c := exec.Command("go", "build", "-o", binary, "..")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return binary
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	w.t.Cleanup(cancel)
	return ctx
}

func (w *world) run(binary string, n int) {
	t := w.t
	args := []string{"--ram", "24MiB", "--min-idle", "0s"}
	if w.strict {
		args = []string{"--ram", "256MiB", "--min-idle", "10000h"}
	}
	if w.rng.IntN(3) == 0 {
		args = append(args, "--policy", "arc")
	}
	d, err := bench.StartDaemon(w.ctx(), binary, args...)
	if err != nil {
		t.Fatal(err)
	}
	w.d = d
	defer func() {
		for _, p := range w.engines {
			p.kill()
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	for range 2 {
		w.spawn()
	}
	for i := range n {
		w.round()
		w.stats.rounds++
		if i%3 == 2 || i == n-1 {
			w.allEnd()
		}
	}
	if err := d.Stop(); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(binary, "verify", "--name", "bench", "--arena", d.Dir).CombinedOutput()
	if err != nil {
		t.Fatalf("verify: %v\n%s", err, out)
	}
}

// round lets the load run for a moment, kills somebody, and looks at what is left.
func (w *world) round() {
	time.Sleep(time.Duration(w.rng.IntN(60_000)) * time.Microsecond) // the random moment itself
	what := w.rng.IntN(4)
	if what != 0 {
		if err := w.d.Kill(); err != nil {
			w.t.Fatal(err)
		}
		w.stats.daemonKills++
	}
	if what != 1 && len(w.engines) > 0 {
		w.end(w.rng.IntN(len(w.engines)))
		w.stats.engineKills++
	}
	if what != 0 {
		if err := w.d.Start(w.ctx()); err != nil {
			w.t.Fatalf("the daemon does not start again: %v", err)
		}
	}
	w.look()
	for len(w.engines) < 2 {
		w.spawn()
	}
}

// end kills an engine and learns what it had read.
func (w *world) end(i int) {
	p := w.engines[i]
	w.engines = append(w.engines[:i], w.engines[i+1:]...)
	p.kill()
	w.learn(p)
}

// learn takes over what an engine has read as added so far.
func (w *world) learn(p *process) {
	for _, e := range p.events() {
		switch {
		case e.wrong != "":
			w.t.Fatalf("engine %d: %s", p.id, e.wrong)
		case e.added:
			if _, ok := w.kept[e.key]; !ok {
				w.stats.keys++
			}
			w.kept[e.key] = e.ref
		case w.strict:
			w.t.Fatalf("engine %d: key %v was removed though nothing may be evicted", p.id, e.key)
		}
	}
}

// look attaches an engine of our own and compares everything that it can see.
func (w *world) look() {
	w.t.Helper()
	for _, p := range w.engines {
		w.learn(p)
	}
	e, err := client.Open(w.ctx(), config(w.d.Socket, "look"))
	if err != nil {
		w.t.Fatal(err)
	}
	defer e.Close()
	seen := map[block.Key]block.Ref{}
	e.Keys(func(k block.Key, c client.Copy) bool { seen[k] = c.Ref; return true })
	if w.strict {
		for k, ref := range w.kept {
			if got, ok := seen[k]; !ok || got != ref {
				w.t.Fatalf("key %v was kept in entry %d generation %d and is lost (found %v, %v)", k, ref.Entry, ref.Gen, ok, got)
			}
		}
	}
	w.stats.checked++
	w.stats.survived += compare(w.t, e, seen)
}

// compare loads keys as an engine does, in windows of its own, and compares their bytes with the generator. Keys that
// are evicted meanwhile are misses; it returns how many were compared.
func compare(t *testing.T, e *client.Engine, keys map[block.Key]block.Ref) int {
	t.Helper()
	n, request := 0, uint64(1<<40)
	var batch []block.Key
	flush := func() {
		var copies []client.Copy
		var held []block.Key
		for i := range batch {
			if c, ok := e.Lookup(&batch[i]); ok {
				copies, held = append(copies, c), append(held, batch[i])
			}
		}
		request++
		job := e.PrepareLoad(request, copies)
		e.StepEnd()
		for i := range copies {
			if at := check(e, &held[i], &copies[i]); at >= 0 {
				t.Fatalf("key %v: byte %d is wrong", held[i], at)
			}
			n++
		}
		e.CompleteLoad(job)
		e.Finish(request, 0, 0, wire.NoHint)
		e.StepEnd()
		batch = batch[:0]
	}
	for k := range keys {
		if batch = append(batch, k); len(batch) == 256 {
			flush()
		}
	}
	flush()
	return n
}

// allEnd kills all engines and waits until the daemon has taken everything back: then every page is free or holds a
// READY key.
func (w *world) allEnd() {
	w.t.Helper()
	for len(w.engines) > 0 {
		w.end(0)
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		st, err := w.d.Status(w.ctx(), false)
		if err != nil {
			w.t.Fatal(err)
		}
		tier := st.Tiers[0]
		if len(st.Engines) == 0 {
			if tier.ReservedKeys != 0 || tier.PendingBytes != 0 || tier.FreeBytes+tier.UsedBytes != tier.TotalBytes {
				w.t.Fatalf("leak: %+v", tier)
			}
			if st.Records.Total != st.Records.Free+tier.Keys {
				w.t.Fatalf("leak: %+v with %d keys", st.Records, tier.Keys)
			}
			break
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("sessions of dead engines remain: %+v\n%s", st.Engines, w.d.Log())
		}
		time.Sleep(5 * time.Millisecond)
	}
	w.look()
	for range 2 {
		w.spawn()
	}
}

func (w *world) spawn() {
	p, err := start(w.d.Socket, w.next, w.rng.Uint64())
	if err != nil {
		w.t.Fatal(err)
	}
	w.next++
	w.engines = append(w.engines, p)
}

// TestRestartKeepsOrder replays the same requests with and without a kill between: the same hits mean that the eviction
// order survived, not only the keys.
func TestRestartKeepsOrder(t *testing.T) {
	binary := build(t)
	hits := func(kill bool) (hit int) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		d, err := bench.StartDaemon(ctx, binary, "--ram", "4MiB", "--max-keys", "512", "--min-idle", "0s")
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		e, err := client.Open(ctx, config(d.Socket, "order"))
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		rng := rand.New(rand.NewPCG(7, 7))
		for i := range 400 {
			if kill && i%100 == 50 {
				if err := errors.Join(d.Kill(), d.Start(ctx)); err != nil {
					t.Fatal(err)
				}
				for e.StepEnd(); !e.Attached(); e.StepEnd() {
					time.Sleep(time.Millisecond)
				}
			}
			n, err := request(e, uint64(i+1), uint64(rng.IntN(60)), 4+rng.IntN(24), nil)
			if err != nil {
				t.Fatal(err)
			}
			hit += n
		}
		return hit
	}
	want := hits(false)
	if got := hits(true); got != want || want == 0 {
		t.Errorf("%d hits with four kills between, %d without", got, want)
	}
}

// kill ends a process for good.
func (p *process) kill() {
	_ = p.cmd.Process.Signal(syscall.SIGKILL) // it may have ended by itself: its events say why
	_ = p.cmd.Wait()
	<-p.read
}
