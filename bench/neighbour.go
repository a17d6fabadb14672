package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"sync"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/trace"
	"kvlift/wire"
)

// Neighbour is an engine process of Neighbours: it asks for the same hot documents again and again, loads them and compares
// every byte, and stores new ones in between, which push older ones out. Its parent steers it by lines on its standard
// input and reads JSON lines.
type Neighbour struct {
	Socket        string
	ID            string
	BytesPerBlock int
	Blocks        int           // of a document
	Hot           int           // documents that all neighbours ask for
	Pace          time.Duration // pause after a request; 0 is full speed
	Fresh         uint64        // number of the first document of its own
	CorruptAt     int           // flip a byte of the arena before so many a load (1 the first): a control that must fail; 0: never
	RAM           uint64        // of the arena, to be filled before the first answer; 0: somebody has filled it
}

// Words of the parent. Each is answered by one line: count by a Tally, the others by the word itself once it is so.
const (
	wordCount = "count" // what it has done since the last count
	wordPause = "pause" // it stands between two steps
	wordHit   = "hit"   // it stands inside a window that has promised a document
	wordLoad  = "load"  // it stands outside a window, in the middle of the copy of a load
	wordGo    = "go"    // it goes on, and first ends what it had begun; every byte is compared
	wordEnd   = "end"   // it says goodbye to the daemon and ends
)

// Tally is what a neighbour has done between two counts.
type Tally struct {
	Seconds      float64 `json:"seconds"`
	Stored       uint64  `json:"stored"`  // keys
	Hits         uint64  `json:"hits"`    // keys that were loaded and compared
	Skipped      uint64  `json:"skipped"` // keys that were refused, and those behind them
	BytesChecked uint64  `json:"bytes"`   // of the hits
	Reserves     uint64  `json:"reserves"`
	Late         uint64  `json:"late"`   // reserves without an answer in time
	Gap          float64 `json:"gap"`    // longest time in which no key was stored, in seconds
	P50          float64 `json:"p50_us"` // of the answers to reserves
	P99          float64 `json:"p99_us"`
	Max          float64 `json:"max_us"`
}

// latencies is a histogram of durations with eight buckets between powers of two.
type latencies struct {
	n       [64 * 8]uint64
	total   uint64
	longest time.Duration
}

func (l *latencies) add(d time.Duration) {
	v := uint64(max(d, 1))
	e := bits.Len64(v) - 1
	l.n[e*8+int(v<<3>>e&7)]++
	l.total++
	l.longest = max(l.longest, d)
}

// at returns the upper end of the bucket of a quantile, in microseconds.
func (l *latencies) at(q float64) float64 {
	want, sum := uint64(q*float64(l.total)), uint64(0)
	for i, n := range l.n {
		if sum += n; n > 0 && sum > want {
			return min(float64(uint64(8+i%8+1)<<(i/8)>>3), float64(l.longest)) / 1e3
		}
	}
	return float64(l.longest) / 1e3
}

// neighbour is a Neighbour at work.
type neighbour struct {
	o       Neighbour
	e       *client.Engine
	request uint64
	fresh   uint64
	keys    []block.Key
	copies  []client.Copy
	offers  []block.Offer
	resv    client.Reservation
	extents []block.Extent
	scratch []byte
	loads   int

	mu    sync.Mutex // guards what follows against the answers
	since time.Time  // the last count
	last  time.Time  // the last key stored, or the last count
	tally Tally
	lat   latencies
}

// Run attaches, fills the arena, says "ready" and works until its input ends or says so. A wrong byte is ErrWrongBytes.
func (o Neighbour) Run(ctx context.Context, in io.Reader, out io.Writer) (err error) {
	c := EngineConfig(o.Socket, o.ID, o.BytesPerBlock)
	c.Deadline = time.Second
	e, err := client.Open(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	n := &neighbour{o: o, e: e, fresh: o.Fresh, scratch: make([]byte, o.BytesPerBlock), since: time.Now(), last: time.Now()}
	for i, docs := 0, int(o.RAM/uint64(o.Blocks)/uint64(o.BytesPerBlock)); i < docs; i++ {
		doc := uint64(i-docs+o.Hot) + 1 // the hot ones last: so they are
		if i < docs-o.Hot {
			doc = n.next()
		}
		if err := n.ask(doc); err != nil {
			return err
		}
	}
	words := make(chan string)
	read := make(chan error, 1)
	go func() { read <- n.listen(in, out, words) }()
	if _, err := fmt.Fprintln(out, `"ready"`); err != nil {
		return err
	}
	for i := 0; ; i++ { // a hot document and a new one, in turn
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-read:
			return err
		case w := <-words:
			if err := n.stand(w, words, read, out); err != nil {
				if errors.Is(err, io.EOF) {
					return nil
				}
				return err
			}
		default:
			if i%2 == 0 {
				err = n.ask(uint64(i/2%o.Hot) + 1)
			} else {
				err = n.ask(n.next())
			}
			if err != nil {
				return err
			}
			if o.Pace > 0 {
				time.Sleep(o.Pace)
			}
		}
	}
}

// listen answers counts at once and passes the other words on. The end of the input is nil: the parent is gone.
func (n *neighbour) listen(in io.Reader, out io.Writer, words chan<- string) error {
	s := bufio.NewScanner(in)
	for s.Scan() {
		if s.Text() != wordCount {
			words <- s.Text()
			continue
		}
		t := n.count()
		if err := json.NewEncoder(out).Encode(&t); err != nil {
			return err
		}
	}
	return s.Err()
}

func (n *neighbour) count() Tally {
	late := n.e.Counters().Late
	n.mu.Lock()
	defer n.mu.Unlock()
	t, now := n.tally, time.Now()
	t.Seconds, t.Gap = now.Sub(n.since).Seconds(), max(t.Gap, now.Sub(n.last).Seconds())
	t.P50, t.P99, t.Max, t.Late = n.lat.at(0.5), n.lat.at(0.99), n.lat.at(1), late-n.tally.Late
	n.tally, n.lat, n.since, n.last = Tally{Late: late}, latencies{}, now, now
	return t
}

// next is the number of a document that nobody has asked for before.
func (n *neighbour) next() uint64 { n.fresh++; return n.fresh }

// chain sets the keys of a document.
func (n *neighbour) chain(doc uint64) {
	n.keys = n.keys[:0]
	for i := range n.o.Blocks {
		n.keys = append(n.keys, trace.KeyOf(doc<<16|uint64(i), 0))
	}
}

// ask is one request: what is there is loaded and compared, the rest is stored as far as it is taken.
func (n *neighbour) ask(doc uint64) error {
	n.request++
	n.chain(doc)
	n.e.Begin(n.request, 0)
	n.copies = n.e.Prefix(n.keys, n.copies[:0])
	hits := len(n.copies)
	if hits > 0 {
		job := n.e.PrepareLoad(n.request, n.copies)
		if err := n.load(0, hits); err != nil {
			return err
		}
		n.e.CompleteLoad(job)
	}
	stored, skipped, err := n.store(hits)
	if err != nil {
		return err
	}
	tokens := uint32(len(n.keys)) * trace.BlockTokens
	n.e.Finish(n.request, tokens, uint32(hits)*trace.BlockTokens, wire.NoHint)
	n.e.StepEnd()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tally.Hits += uint64(hits)
	n.tally.BytesChecked += uint64(hits * n.o.BytesPerBlock)
	n.tally.Stored += stored
	n.tally.Skipped += skipped
	if stored > 0 {
		now := time.Now()
		n.tally.Gap, n.last = max(n.tally.Gap, now.Sub(n.last).Seconds()), now
	}
	return nil
}

// load copies some of the hits out and compares every byte.
func (n *neighbour) load(from, to int) error {
	if n.loads++; n.loads == n.o.CorruptAt {
		n.e.Workers[0].Bytes(n.copies[from].First)[n.o.BytesPerBlock/2] ^= 1
	}
	for i := from; i < to; i++ {
		c := &n.copies[i]
		n.extents = c.Extents(n.extents[:0])
		off := 0
		for _, x := range n.extents {
			off += copy(n.scratch[off:], n.e.Workers[0].Bytes(x))
		}
		if at := Check(n.scratch, &n.keys[i], 0); at >= 0 {
			return fmt.Errorf("%w: engine %s, block %d of request %d (key %v, entry %d generation %d): byte %d is %#02x",
				ErrWrongBytes, n.o.ID, i, n.request, n.keys[i], c.Ref.Entry, c.Ref.Gen, at, n.scratch[at])
		}
	}
	return nil
}

const neighbourBatch = 16

// store offers the keys from a number on, in batches, until one is not taken whole.
func (n *neighbour) store(from int) (stored, skipped uint64, err error) {
	for lo := from; lo < len(n.keys); lo += neighbourBatch {
		n.offers = n.offers[:0]
		for i := lo; i < min(lo+neighbourBatch, len(n.keys)); i++ {
			n.offers = append(n.offers, block.Offer{Key: n.keys[i], Position: uint32(i+1) * trace.BlockTokens})
		}
		t := time.Now()
		err := n.e.Reserve(n.request, n.offers, &n.resv)
		took := time.Since(t)
		n.mu.Lock()
		n.tally.Reserves++
		n.lat.add(took)
		n.mu.Unlock()
		if errors.Is(err, client.ErrDeadline) || errors.Is(err, client.ErrAway) {
			return stored, skipped + uint64(len(n.keys)-lo), nil // counted as late, or by the connection
		}
		if err != nil {
			return stored, skipped, err
		}
		for i := range n.resv.Keys {
			k := &n.resv.Keys[i]
			Fill(n.scratch, &n.offers[k.Index].Key, 0)
			off := 0
			for _, x := range k.Extents {
				off += copy(n.e.Workers[0].Bytes(x), n.scratch[off:])
			}
		}
		if n.resv.Job != 0 {
			n.e.Commit(n.resv.Job)
		}
		stored += uint64(len(n.resv.Keys))
		if n.resv.Refused > 0 {
			return stored, skipped + uint64(n.resv.Refused+len(n.keys)-lo-len(n.offers)), nil
		}
	}
	return stored, skipped, nil
}

// stand brings about what the parent asks for, says so, and waits there until it may go on. What it had promised or begun to
// copy is compared afterwards. io.EOF ends it.
func (n *neighbour) stand(word string, words <-chan string, read <-chan error, out io.Writer) error {
	job, half := uint64(0), 0
	switch word {
	case wordEnd:
		return io.EOF
	case wordPause:
	case wordHit, wordLoad:
		if err := n.promise(); err != nil {
			return err
		}
		if word == wordLoad {
			job, half = n.e.PrepareLoad(n.request, n.copies), len(n.copies)/2
			n.e.StepEnd()
			if err := n.load(0, half); err != nil {
				return err
			}
		}
	default:
		return fmt.Errorf("engine %s does not know the word %q", n.o.ID, word)
	}
	if _, err := fmt.Fprintf(out, "%q\n", word); err != nil {
		return err
	}
	select {
	case err := <-read:
		return errors.Join(err, io.EOF)
	case w := <-words:
		if w != wordGo {
			return fmt.Errorf("engine %s stands and hears %q", n.o.ID, w)
		}
	}
	if word == wordPause {
		return nil
	}
	if job == 0 { // the window is still open, so its hits hold
		job = n.e.PrepareLoad(n.request, n.copies)
	}
	if err := n.load(half, len(n.copies)); err != nil {
		return err
	}
	n.e.CompleteLoad(job)
	n.e.Finish(n.request, 0, 0, wire.NoHint)
	n.e.StepEnd()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tally.Hits += uint64(len(n.copies))
	n.tally.BytesChecked += uint64(len(n.copies) * n.o.BytesPerBlock)
	return nil
}

// promise stores a new document and looks it up: its hits are outstanding in an open window.
func (n *neighbour) promise() error {
	for range 100 {
		if err := n.ask(n.next()); err != nil {
			return err
		}
		if err := n.e.Sync(10 * time.Second); err != nil {
			return err
		}
		n.request++
		n.e.Begin(n.request, 0)
		if n.copies = n.e.Prefix(n.keys, n.copies[:0]); len(n.copies) > 0 { // in a small arena not all of it was taken
			return nil
		}
		n.e.Finish(n.request, 0, 0, wire.NoHint)
		n.e.StepEnd()
	}
	return fmt.Errorf("engine %s could not store a document", n.o.ID)
}

// arguments turns a Neighbour into those of the hidden command that runs it.
func (o *Neighbour) arguments() ([]string, error) {
	b, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	return []string{"bench", "neighbour", string(b)}, nil
}

// ParseNeighbour reads what a parent has made of a Neighbour.
func ParseNeighbour(arg string) (Neighbour, error) {
	var o Neighbour
	if err := json.Unmarshal([]byte(arg), &o); err != nil {
		return o, fmt.Errorf("neighbour: %w", err)
	}
	if o.Blocks < 1 || o.Hot < 1 || o.BytesPerBlock < 8 || o.BytesPerBlock%8 != 0 || o.Blocks > 1<<16 {
		return o, errors.New("neighbour: blocks, hot documents and bytes per block are needed")
	}
	return o, nil
}
