// Package bench measures a real daemon through its real socket and arena: it is an engine without a model. Payloads are
// generated from keys, so every byte that is loaded can be compared with what it must be.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/trace"
	"kvlift/wire"
)

// Replay says what to replay and how.
type Replay struct {
	Name          string // of the trace, for the result
	Capacity      uint64 // blocks; only noted here
	Policy        string
	MinIdle       time.Duration
	BytesPerBlock int // a multiple of 8
	Batch         int // blocks per reserve
	Limit         int // requests, 0: all
	// CorruptAt flips a byte of the arena before the n-th load (1 the first): a control that must fail. 0: never.
	CorruptAt int
}

// Result is what a replay found. Times exclude generating and comparing content.
type Result struct {
	Trace          string  `json:"trace"`
	Policy         string  `json:"policy"`
	Capacity       uint64  `json:"capacity_blocks"`
	BytesPerBlock  int     `json:"bytes_per_block"`
	Batch          int     `json:"batch"`
	MinIdleSeconds float64 `json:"min_idle_seconds"`
	Requests       int     `json:"requests"`
	References     uint64  `json:"references"`
	Hits           uint64  `json:"hits"`
	HitRatioBlocks float64 `json:"hit_ratio_blocks"`
	HitRatioTokens float64 `json:"hit_ratio_tokens"`
	StoredBlocks   uint64  `json:"stored_blocks"`
	RefusedBlocks  uint64  `json:"refused_blocks"`
	EvictedBlocks  uint64  `json:"evicted_blocks"`
	BytesWritten   uint64  `json:"bytes_written"`
	BytesChecked   uint64  `json:"bytes_checked"`
	WrongBlocks    uint64  `json:"wrong_blocks"`
	LookupUS       float64 `json:"lookup_us_per_key"`
	StoreUS        float64 `json:"reserve_commit_us_per_key"`
	LoadUS         float64 `json:"pin_unpin_us_per_key"`
	StoreGBps      float64 `json:"store_gb_per_second"`
	LoadGBps       float64 `json:"load_gb_per_second"`
	MemcpyGBps     float64 `json:"memcpy_gb_per_second"`
	WallSeconds    float64 `json:"wall_seconds"`
	DaemonCPU      float64 `json:"daemon_cpu_seconds"`
	DaemonRSS      uint64  `json:"daemon_rss_bytes"`
}

// ErrWrongBytes tells that a load did not hold what was stored.
var ErrWrongBytes = errors.New("wrong bytes")

// Replayer replays requests against one engine.
type Replayer struct {
	o       Replay
	e       *client.Engine
	r       Result
	keys    map[uint64]block.Key
	chain   []block.Key
	copies  []client.Copy
	offers  []block.Offer
	resv    client.Reservation
	scratch []byte
	extents []block.Extent
	loads   int
	request uint64

	tokens, hitTokens                  uint64
	lookup, store, pin, copyIn, copyTo time.Duration
	looked, offered, pinned            uint64
	copiedIn, copiedOut                uint64
}

// NewReplayer makes a replayer on an engine whose only group has BytesPerBlock payload.
func NewReplayer(e *client.Engine, o Replay) *Replayer {
	return &Replayer{o: o, e: e, keys: map[uint64]block.Key{}, scratch: make([]byte, o.BytesPerBlock)}
}

// EngineConfig is the engine of a replay: one rank, one dense group of 512-token blocks.
func EngineConfig(socket, id string, bytesPerBlock int) client.Config {
	return client.Config{
		Socket: socket, Name: "kvlift bench", EngineID: id, Deadline: 10 * time.Second,
		Namespace: wire.Namespace{
			Identity: map[string]any{"model": "kvlift bench", "bytes_per_block": bytesPerBlock},
			Groups:   []wire.Group{{Name: "attention", Kind: "full", ChunkTokens: trace.BlockTokens}},
		},
		Parts: [][]uint32{{uint32(bytesPerBlock)}},
	}
}

// Run replays a stream to its end or its limit. progress hears of the requests done; it may be nil.
func (p *Replayer) Run(ctx context.Context, src interface {
	Next() (trace.Request, error)
}, progress func(requests int)) error {
	start := time.Now()
	defer func() { p.r.WallSeconds += time.Since(start).Seconds() }()
	for n := 0; p.o.Limit == 0 || n < p.o.Limit; n++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		req, err := src.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if err := p.Request(&req); err != nil {
			return err
		}
		if progress != nil {
			progress(n + 1)
		}
	}
	if p.loads < p.o.CorruptAt {
		return fmt.Errorf("no byte was corrupted: there were %d loads, and load %d was to be hit", p.loads, p.o.CorruptAt)
	}
	return nil
}

// Request does what an engine does with one request: look it up, load what is there, store the rest in batches, and end.
// Hits are counted before the request changes the cache.
func (p *Replayer) Request(req *trace.Request) error {
	p.request++
	p.chain = p.chain[:0]
	for _, id := range req.IDs {
		k, ok := p.keys[id]
		if !ok {
			k = trace.KeyOf(id, 0)
			p.keys[id] = k
		}
		p.chain = append(p.chain, k)
	}
	p.e.Begin(p.request, req.TimeMS)
	t := time.Now()
	p.copies = p.e.Prefix(p.chain, p.copies[:0])
	p.lookup += time.Since(t)
	m := len(p.copies)
	p.looked += uint64(min(m+1, len(p.chain)))
	hit := trace.PrefixTokens(m, req.InputTokens)
	p.r.Requests++
	p.r.References += uint64(len(p.chain))
	p.r.Hits += uint64(m)
	p.tokens += uint64(req.InputTokens)
	p.hitTokens += uint64(hit)
	if m > 0 {
		if err := p.load(m); err != nil {
			return err
		}
	}
	if err := p.storeRest(m); err != nil {
		return err
	}
	p.e.Finish(p.request, req.InputTokens, hit, wire.NoHint)
	p.e.StepEnd()
	return nil
}

// load pins the hits, copies them out as a worker would, and compares every byte with the generator.
func (p *Replayer) load(m int) error {
	p.loads++
	if p.loads == p.o.CorruptAt {
		p.e.Workers[0].Bytes(p.copies[0].First)[p.o.BytesPerBlock/2] ^= 1
	}
	t := time.Now()
	job := p.e.PrepareLoad(p.request, p.copies)
	p.pin += time.Since(t)
	for i := range m {
		c := &p.copies[i]
		p.extents = c.Extents(p.extents[:0])
		t = time.Now()
		off := 0
		for _, x := range p.extents {
			off += copy(p.scratch[off:], p.e.Workers[0].Bytes(x))
		}
		p.copyTo += time.Since(t)
		p.copiedOut += uint64(off)
		if at := Check(p.scratch, &p.chain[i], 0); at >= 0 {
			p.r.WrongBlocks++
			return fmt.Errorf("%w: request %d, block %d (key %v, entry %d generation %d): byte %d is %#02x", ErrWrongBytes, p.request, i, p.chain[i], c.Ref.Entry, c.Ref.Gen, at, p.scratch[at])
		}
		p.r.BytesChecked += uint64(len(p.scratch))
	}
	t = time.Now()
	p.e.CompleteLoad(job)
	p.pin += time.Since(t)
	p.pinned += uint64(m)
	return nil
}

// storeRest offers what was not there, head first. Where the tier refuses, the rest of the prompt is not offered: it
// would lie behind a gap.
func (p *Replayer) storeRest(m int) error {
	if m == len(p.chain) {
		return nil
	}
	for m < len(p.chain) {
		n := min(p.o.Batch, len(p.chain)-m)
		p.offers = p.offers[:0]
		for i := range n {
			p.offers = append(p.offers, block.Offer{Key: p.chain[m+i], Position: uint32(m+i+1) * trace.BlockTokens})
		}
		t := time.Now()
		if err := p.e.Reserve(p.request, p.offers, &p.resv); err != nil {
			return fmt.Errorf("reserve %d blocks of request %d: %w", n, p.request, err)
		}
		p.store += time.Since(t)
		for i := range p.resv.Keys {
			k := &p.resv.Keys[i]
			Fill(p.scratch, &p.chain[m+k.Index], 0)
			t = time.Now()
			off := 0
			for _, x := range k.Extents {
				off += copy(p.e.Workers[0].Bytes(x), p.scratch[off:])
			}
			p.copyIn += time.Since(t)
			p.copiedIn += uint64(off)
		}
		t = time.Now()
		if p.resv.Job != 0 {
			p.e.Commit(p.resv.Job)
		}
		p.store += time.Since(t)
		p.offered += uint64(n)
		p.r.StoredBlocks += uint64(len(p.resv.Keys))
		p.r.BytesWritten += uint64(len(p.resv.Keys)) * uint64(p.o.BytesPerBlock)
		if p.resv.Refused > 0 {
			p.r.RefusedBlocks += uint64(p.resv.Refused + len(p.chain) - m - n)
			break
		}
		m += n
	}
	t := time.Now()
	err := p.e.Sync(10 * time.Second)
	p.store += time.Since(t)
	return err
}

// Result sums up. daemon is asked for its counters and may be gone.
func (p *Replayer) Result(ctx context.Context, socket string, pid int) Result {
	r := p.r
	r.Trace, r.Policy, r.Capacity, r.BytesPerBlock, r.Batch, r.MinIdleSeconds = p.o.Name, p.o.Policy, p.o.Capacity, p.o.BytesPerBlock, p.o.Batch, p.o.MinIdle.Seconds()
	r.HitRatioBlocks, r.HitRatioTokens = div(float64(r.Hits), float64(r.References)), div(float64(p.hitTokens), float64(p.tokens))
	r.LookupUS = div(p.lookup.Seconds()*1e6, float64(p.looked))
	r.StoreUS = div(p.store.Seconds()*1e6, float64(p.offered))
	r.LoadUS = div(p.pin.Seconds()*1e6, float64(p.pinned))
	r.StoreGBps = div(float64(p.copiedIn)/1e9, p.copyIn.Seconds())
	r.LoadGBps = div(float64(p.copiedOut)/1e9, p.copyTo.Seconds())
	r.MemcpyGBps = p.memcpy()
	if d, err := AskStatus(ctx, socket, false); err == nil {
		for _, n := range d.Counters.EvictedKeys {
			r.EvictedBlocks += n
		}
		if pid == 0 {
			pid = d.PID
		}
		r.DaemonCPU, r.DaemonRSS = d.Process.CPUUserSeconds+d.Process.CPUSystemSeconds, d.Process.RSSBytes
	}
	if cpu, rss := usage(pid); cpu > 0 {
		r.DaemonCPU, r.DaemonRSS = cpu, rss
	}
	return r
}

func div(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// memcpy is the ceiling of the copies: the same block size, between memory that is as cold as an arena of this size.
func (p *Replayer) memcpy() float64 {
	const total = 64 << 20
	n := p.o.BytesPerBlock
	src := make([]byte, max(total, n))
	for i := 0; i < len(src); i += 4096 {
		src[i] = 1
	}
	dst := p.scratch
	t, moved := time.Now(), 0
	for time.Since(t) < 200*time.Millisecond {
		for off := 0; off+n <= len(src); off += n {
			moved += copy(dst, src[off:off+n])
		}
	}
	return float64(moved) / 1e9 / time.Since(t).Seconds()
}
