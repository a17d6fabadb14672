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

// Placement says at which boundaries an engine of a hybrid model stores a recurrent state.
type Placement struct {
	Every  int  // at multiples of so many blocks, 0 none
	End    bool // at the last whole block of the prompt (its only one, if it has no more)
	Branch bool // at the last block that was in the tier, when no restore point was there
	Touch  bool // every key of the prompt is touched, as releases that have a touch do
}

// The model of the hybrid table: one block of attention in one page, one state in three.
const (
	attentionBytes = block.PageSize
	stateBytes     = 3 * block.PageSize
)

// HybridEngine is an engine with a group of attention in blocks of 512 tokens and a group of states three times as large.
func HybridEngine(socket, id string) client.Config {
	return client.Config{
		Socket: socket, Name: "kvlift bench", EngineID: id, Deadline: 10 * time.Second,
		Namespace: wire.Namespace{
			Identity: map[string]any{"model": "kvlift bench hybrid"},
			Groups: []wire.Group{
				{Name: "attention", Kind: "full", ChunkTokens: trace.BlockTokens},
				{Name: "state", Kind: "state", ChunkTokens: trace.BlockTokens},
			},
		},
		Parts: [][]uint32{{attentionBytes, stateBytes}},
	}
}

// HybridResult is what a replay with states found.
type HybridResult struct {
	Requests     int    `json:"requests"`
	References   uint64 `json:"references"` // blocks of the prompts
	Hits         uint64 `json:"hits"`       // blocks up to the deepest restore point of each prompt
	StoredBlocks uint64 `json:"stored_blocks"`
	StoredStates uint64 `json:"stored_states"`
	Refused      uint64 `json:"refused_keys"`
	BytesChecked uint64 `json:"bytes_checked"`
}

// Ratio of hits.
func (r *HybridResult) Ratio() float64 { return div(float64(r.Hits), float64(r.References)) }

// HybridReplayer replays the requests of a trace as an engine of a hybrid model. The part of a block that a prompt ends in is
// stored like a block, at the position where it ends.
type HybridReplayer struct {
	e       *client.Engine
	p       Placement
	r       HybridResult
	request uint64
	keys    [2][]block.Key
	copies  []client.Copy
	offers  []block.Offer
	load    []block.Key
	resv    client.Reservation
	scratch []byte
}

// NewHybridReplayer makes a replayer on an engine of HybridEngine.
func NewHybridReplayer(e *client.Engine, p Placement) *HybridReplayer {
	return &HybridReplayer{e: e, p: p, scratch: make([]byte, stateBytes)}
}

// Run replays a stream to its end, or limit requests of it.
func (h *HybridReplayer) Run(ctx context.Context, src interface {
	Next() (trace.Request, error)
}, limit int) error {
	for n := 0; limit == 0 || n < limit; n++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		req, err := src.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := h.Request(&req); err != nil {
			return fmt.Errorf("request %d: %w", n+1, err)
		}
	}
	return nil
}

// Result sums up.
func (h *HybridReplayer) Result() HybridResult { return h.r }

// Request looks one prompt up, loads its deepest restore point, and stores what is computed behind it.
func (h *HybridReplayer) Request(req *trace.Request) error {
	h.request++
	ids, end := req.IDs, max(1, min(len(req.IDs), int(req.InputTokens/trace.BlockTokens)))
	position := func(blocks int) uint32 { return trace.PrefixTokens(blocks, req.InputTokens) }
	h.r.Requests++
	h.r.References += uint64(len(req.IDs))
	for g := range h.keys {
		h.keys[g] = h.keys[g][:0]
		for _, id := range ids {
			h.keys[g] = append(h.keys[g], trace.KeyOf(id, uint32(g)))
		}
	}
	h.e.Begin(h.request, req.TimeMS)
	h.copies = h.e.Prefix(h.keys[0], h.copies[:0])
	b, m := len(h.copies), len(h.copies)
	for ; b > 0; b-- {
		if c, ok := h.e.Lookup(&h.keys[1][b-1]); ok {
			h.copies = append(h.copies[:b], c)
			break
		}
	}
	h.r.Hits += uint64(b)
	if b > 0 {
		h.load = append(append(h.load[:0], h.keys[0][:b]...), h.keys[1][b-1])
		job := h.e.PrepareLoad(h.request, h.copies)
		for i := range h.copies {
			n, err := compare(h.e, &h.load[i], &h.copies[i], size(i == b))
			if err != nil {
				return err
			}
			h.r.BytesChecked += uint64(n)
		}
		h.e.CompleteLoad(job)
	}
	if h.p.Touch {
		h.e.Touch(h.request, h.keys[0])
		h.e.Touch(h.request, h.keys[1])
	}
	if err := h.store(len(ids), b, position, func(at int) bool {
		return h.p.Every > 0 && at%h.p.Every == 0 || h.p.End && at == end || h.p.Branch && at == m
	}); err != nil {
		return err
	}
	h.e.Finish(h.request, req.InputTokens, position(b), wire.NoHint)
	h.e.StepEnd()
	return nil
}

func size(state bool) int {
	if state {
		return stateBytes
	}
	return attentionBytes
}

// stepBlocks is how many blocks an engine computes between two offers: 8,192 tokens.
const stepBlocks = 16

// store offers the blocks of a prompt of n behind b, and their states, a step at a time, until the tier refuses: the rest would
// lie behind a gap.
func (h *HybridReplayer) store(n, b int, position func(blocks int) uint32, state func(at int) bool) error {
	for from := b; from < n; {
		to := min(from+stepBlocks, n)
		h.offers = h.offers[:0]
		for i := from; i < to; i++ {
			h.offers = append(h.offers, block.Offer{Key: h.keys[0][i], Position: position(i + 1)})
		}
		for i := from; i < to; i++ {
			if state(i + 1) {
				h.offers = append(h.offers, block.Offer{Key: h.keys[1][i], Group: 1, Position: position(i + 1)})
			}
		}
		if err := h.e.Reserve(h.request, h.offers, &h.resv); err != nil {
			return err
		}
		for i := range h.resv.Keys {
			k := &h.resv.Keys[i]
			o := &h.offers[k.Index]
			fillExtents(h.e, &o.Key, k.Extents, size(o.Group == 1))
			if o.Group == 1 {
				h.r.StoredStates++
			} else {
				h.r.StoredBlocks++
			}
		}
		if h.resv.Job != 0 {
			h.e.Commit(h.resv.Job)
		}
		if h.resv.Refused > 0 {
			h.r.Refused += uint64(h.resv.Refused)
			break
		}
		from = to
	}
	return h.e.Sync(10 * time.Second)
}
