package crash

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"

	"kvlift/bench"
	"kvlift/block"
	"kvlift/client"
	"kvlift/trace"
	"kvlift/wire"
)

// An engine process stores and loads random prompts until it is killed, and writes one line for every change of its
// mirror to its standard output: what it has read is what is kept.
//
//	A <key> <entry> <generation>
//	R <key> <entry> <generation>
//	W <what was wrong>

func config(socket, id string) client.Config {
	return client.Config{
		Socket: socket, EngineID: id, Deadline: 2 * time.Second, AttachTimeout: 20 * time.Second,
		Namespace: wire.Namespace{Identity: map[string]any{"model": "crash"}, Groups: []wire.Group{{Kind: "full", ChunkTokens: 16}}},
		Parts:     [][]uint32{{payload}},
	}
}

// engine is the main function of an engine process.
func engine(socket string) int {
	out := bufio.NewWriter(os.Stdout)
	var mu sync.Mutex
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(out, format+"\n", args...)
		_ = out.Flush() // a line is a fact from here on; nobody reads: nobody cares
	}
	c := config(socket, "engine-"+os.Getenv("KVLIFT_CRASH_ID"))
	c.Observe = func(e client.Event) {
		what := "R"
		if e.Added {
			what = "A"
		}
		say("%s %v %d %d", what, e.Key, e.Ref.Entry, e.Ref.Gen)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	e, err := client.Open(ctx, c)
	for errors.Is(err, client.ErrNotReachable) && ctx.Err() == nil { // the daemon may be dead at this moment
		time.Sleep(5 * time.Millisecond)
		e, err = client.Open(ctx, c)
	}
	if err != nil {
		if ctx.Err() == nil && !transient(err) {
			say("W attach: %v", err)
			return 1
		}
		return 0
	}
	s, _ := strconv.ParseUint(os.Getenv("KVLIFT_CRASH_SEED"), 10, 64)
	rng := rand.New(rand.NewPCG(s, 1))
	for id := uint64(1); ; id++ {
		if !e.Attached() {
			time.Sleep(time.Millisecond)
			e.StepEnd()
			continue
		}
		// Half of the prompts are shared by all engines, so that they store, load and evict each other's keys.
		doc := uint64(rng.IntN(200))
		if rng.IntN(2) == 0 {
			doc = 1000 + rng.Uint64N(1<<40)
		}
		if _, err := request(e, id, doc, 1+rng.IntN(40), rng); err != nil {
			say("W %v", err)
			return 1
		}
		if d := rng.IntN(2000); d > 0 {
			time.Sleep(time.Duration(d) * time.Microsecond)
		}
	}
}

// transient tells whether an attach failed only because the daemon was killed meanwhile.
func transient(err error) bool {
	return errors.Is(err, client.ErrNotReachable) || errors.Is(err, client.ErrAway) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) ||
		errors.Is(err, syscall.EPIPE) || errors.Is(err, client.ErrDeadline)
}

func keyOf(doc uint64, chunk int) block.Key { return trace.KeyOf(doc<<16|uint64(chunk), 0) }

// request is one prompt of n chunks: look up, load and compare, store the rest in batches, end. It returns the hits; an
// error means wrong bytes. The daemon may die anywhere in it.
func request(e *client.Engine, id, doc uint64, n int, rng *rand.Rand) (int, error) {
	keys := make([]block.Key, n)
	for i := range keys {
		keys[i] = keyOf(doc, i)
	}
	e.Begin(id, 0)
	copies := e.Prefix(keys, nil)
	hits := len(copies)
	if hits > 0 {
		job := e.PrepareLoad(id, copies)
		for i := range copies {
			if at := check(e, &keys[i], &copies[i]); at >= 0 {
				return hits, fmt.Errorf("document %d, chunk %d (entry %d generation %d): byte %d is wrong", doc, i, copies[i].Ref.Entry, copies[i].Ref.Gen, at)
			}
		}
		e.CompleteLoad(job)
	}
	var r client.Reservation
	for lo := hits; lo < n; {
		hi := min(lo+8, n)
		var offers []block.Offer
		for i := lo; i < hi; i++ {
			offers = append(offers, block.Offer{Key: keys[i], Position: uint32(i+1) * 16})
		}
		if err := e.Reserve(id, offers, &r); err != nil {
			break // away or late: nothing is stored
		}
		for _, k := range r.Keys {
			fill(e, &offers[k.Index].Key, k.Extents)
		}
		if rng != nil && rng.IntN(10) == 0 && r.Job != 0 {
			e.Abort(r.Job) // as if no worker had been given it
		} else if r.Job != 0 {
			e.Commit(r.Job)
		}
		if r.Refused > 0 {
			break
		}
		lo = hi
	}
	if rng == nil {
		if err := e.Sync(5 * time.Second); err != nil {
			return hits, err
		}
	}
	e.Finish(id, uint32(n*16), uint32(hits*16), wire.NoHint)
	e.StepEnd()
	return hits, nil
}

func fill(e *client.Engine, k *block.Key, xs []block.Extent) {
	off := 0
	for _, x := range xs {
		b := e.Workers[0].Bytes(x)
		bench.Fill(b, k, off)
		off += len(b)
	}
}

func check(e *client.Engine, k *block.Key, c *client.Copy) int {
	off := 0
	for _, x := range c.Extents(nil) {
		b := e.Workers[0].Bytes(x)
		if at := bench.Check(b, k, off); at >= 0 {
			return at
		}
		off += len(b)
	}
	return -1
}

// process is an engine process as its parent sees it.
type process struct {
	id   int
	cmd  *exec.Cmd
	mu   sync.Mutex
	list []event
	read chan struct{}
}

type event struct {
	added bool
	key   block.Key
	ref   block.Ref
	wrong string
}

func start(socket string, id int, seed uint64) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{id: id, cmd: exec.Command(self), read: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), "KVLIFT_CRASH_SOCKET="+socket, fmt.Sprintf("KVLIFT_CRASH_ID=%d", id), fmt.Sprintf("KVLIFT_CRASH_SEED=%d", seed))
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.cmd.Stdout = w
	err = p.cmd.Start()
	if err = errors.Join(err, w.Close()); err != nil {
		return nil, err
	}
	go p.follow(r)
	return p, nil
}

func (p *process) follow(r *os.File) {
	defer close(p.read)
	defer r.Close()
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		e := parse(sc.Text())
		p.mu.Lock()
		p.list = append(p.list, e)
		p.mu.Unlock()
	}
}

func parse(line string) event {
	if len(line) > 2 && line[0] == 'W' {
		return event{wrong: line[2:]}
	}
	var what, key string
	var e event
	if _, err := fmt.Sscan(line, &what, &key, &e.ref.Entry, &e.ref.Gen); err != nil {
		return event{added: false, wrong: ""} // a line that the kill cut off
	}
	b, err := hex.DecodeString(key)
	if err != nil {
		return event{wrong: "line " + line}
	}
	if e.key, err = block.MakeKey(b); err != nil {
		return event{wrong: err.Error()}
	}
	e.added = what == "A"
	return e
}

// events returns what the engine has said since the last call.
func (p *process) events() []event {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.list
	p.list = nil
	return l
}
