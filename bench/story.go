package bench

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/status"
	"kvlift/wire"
)

// StoryGroup is one KV-cache group of a story's model.
type StoryGroup struct {
	Name         string `json:"name"`
	Kind         string `json:"kind"` // full, state, window
	ChunkTokens  uint32 `json:"chunk_tokens"`
	PayloadBytes uint32 `json:"payload_bytes"`
	WindowChunks uint32 `json:"window_chunks,omitempty"`
}

// BirthGroups is the model that kvlift was born from: a hybrid of 27 billion parameters with a quantised cache. Two full
// groups of 8 attention layers (2,176 tokens × 840 B), six state groups of 8 layers (1,777,664 B each) and the window
// group of a drafter of 5 layers (524,288 B for 128 tokens), of which a load needs the last 17 chunks.
func BirthGroups() []StoryGroup {
	var out []StoryGroup
	for i := range 2 {
		out = append(out, StoryGroup{Name: fmt.Sprintf("attention-%d", i), Kind: "full", ChunkTokens: 2176, PayloadBytes: 8 * 1_827_840})
	}
	for i := range 6 {
		out = append(out, StoryGroup{Name: fmt.Sprintf("state-%d", i), Kind: "state", ChunkTokens: 2176, PayloadBytes: 8 * 1_777_664})
	}
	return append(out, StoryGroup{Name: "drafter", Kind: "window", ChunkTokens: 128, PayloadBytes: 5 * 524_288, WindowChunks: 17})
}

// Story tells which documents are asked for, again and again, of a model with several groups.
type Story struct {
	Groups    []StoryGroup
	Tokens    uint32 // of each document
	Documents int
	Rounds    int
	Step      uint32 // tokens computed per scheduler step
	// EndOnly stores states and windows for the last boundary of a document alone, else for every one.
	EndOnly bool
	// Every is the time between two requests on the trace's clock, for daemons that run on it.
	Every time.Duration
}

// boundary is the deepest one that a document can be served to: its last token is always computed.
func (s *Story) boundary() uint32 {
	return (s.Tokens - 1) / s.Groups[0].ChunkTokens * s.Groups[0].ChunkTokens
}

// ReadStoryGroups reads a JSON list of groups.
func ReadStoryGroups(path string) ([]StoryGroup, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []StoryGroup
	d := json.NewDecoder(io.LimitReader(f, 1<<20))
	d.DisallowUnknownFields()
	if err := d.Decode(&out); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for i, g := range out {
		if g.ChunkTokens == 0 || g.PayloadBytes == 0 || g.PayloadBytes%8 != 0 || g.Kind != "full" && g.Kind != "state" && g.Kind != "window" {
			return nil, fmt.Errorf("%s: group %d: kind full, state or window, chunk_tokens and payload_bytes (a multiple of 8) above 0", path, i)
		}
	}
	if len(out) == 0 || out[0].Kind != "full" {
		return nil, fmt.Errorf("%s: the first group must be a full one", path)
	}
	return out, nil
}

// StoryVisit is what one request for a document found.
type StoryVisit struct {
	Round        int    `json:"round"`
	Document     int    `json:"document"`
	HitTokens    uint32 `json:"hit_tokens"`
	LoadedBytes  uint64 `json:"loaded_bytes"`
	StoredKeys   int    `json:"stored_keys"`
	StoredBytes  uint64 `json:"stored_bytes"`
	RefusedKeys  int    `json:"refused_keys"`
	NeededBytes  uint64 `json:"needed_bytes"` // of restore points, in the tier, after the request
	SpareBytes   uint64 `json:"spare_bytes"`  // of keys that no deepest restore point needs
	ComputedFrom uint32 `json:"computed_from_tokens"`
}

// engineConfig is an engine of the story's model.
func (s *Story) engineConfig(socket string) client.Config {
	c := client.Config{Socket: socket, Name: "kvlift bench", EngineID: fmt.Sprintf("story-%d", os.Getpid()), Deadline: 10 * time.Second,
		Namespace: wire.Namespace{Identity: map[string]any{"model": "kvlift story"}}, Parts: [][]uint32{nil}}
	for _, g := range s.Groups {
		c.Namespace.Groups = append(c.Namespace.Groups, wire.Group{Name: g.Name, Kind: g.Kind, ChunkTokens: g.ChunkTokens, Window: g.WindowChunks})
		c.Parts[0] = append(c.Parts[0], g.PayloadBytes)
	}
	return c
}

// Run asks for every document in every round, as a scheduler would: look up, load the deepest restore point, compute and
// store the rest a step at a time, end. Every loaded byte is compared.
func (s *Story) Run(ctx context.Context, socket string, visit func(StoryVisit)) error {
	e, err := client.Open(ctx, s.engineConfig(socket))
	if err != nil {
		return err
	}
	defer e.Close()
	request := uint64(0)
	for round := range s.Rounds {
		for doc := range s.Documents {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			request++
			v, err := s.ask(e, request, doc)
			if err != nil {
				return fmt.Errorf("round %d, document %d: %w", round+1, doc, err)
			}
			v.Round, v.Document = round+1, doc
			st, err := settled(ctx, socket)
			if err != nil {
				return err
			}
			v.NeededBytes, v.SpareBytes = st.Tiers[0].NeededBytes, st.Tiers[0].OptionalBytes+st.Tiers[0].UselessBytes
			visit(v)
		}
	}
	return nil
}

// settled asks for the daemon's state until it has read the end of every request: a finish has no answer.
func settled(ctx context.Context, socket string) (status.Document, error) {
	for {
		st, err := AskStatus(ctx, socket, false)
		if err != nil {
			return st, err
		}
		open := 0
		for i := range st.Engines {
			open += st.Engines[i].Requests
		}
		if open == 0 {
			return st, nil
		}
		if ctx.Err() != nil {
			return st, context.Cause(ctx)
		}
	}
}

// storyKey is the key of the chunk of a group that ends at a position: the hash stands for all tokens up to there, so it
// is the same in every group.
func storyKey(doc int, end uint32, group int) block.Key {
	var h [32]byte
	binary.LittleEndian.PutUint64(h[:], uint64(doc+1)*0x9e3779b97f4a7c15^uint64(end)*0xc2b2ae3d27d4eb4f)
	binary.LittleEndian.PutUint32(h[8:], uint32(doc))
	binary.LittleEndian.PutUint32(h[12:], end)
	k, _ := block.HashKey(h[:], uint32(group)) // 36 bytes: it fits
	return k
}

func (s *Story) ask(e *client.Engine, request uint64, doc int) (StoryVisit, error) {
	var v StoryVisit
	e.Begin(request, int64(request)*s.Every.Milliseconds())
	b, copies, keys := s.lookup(e, doc)
	v.HitTokens, v.ComputedFrom = b, b
	if b > 0 {
		job := e.PrepareLoad(request, copies)
		for i := range copies {
			n, err := compare(e, &keys[i], &copies[i], s.payload(&keys[i]))
			if err != nil {
				return v, err
			}
			v.LoadedBytes += uint64(n)
		}
		e.CompleteLoad(job)
	}
	// The whole prompt is offered from its start, step by step; what is there is only held.
	for done := uint32(0); done < s.Tokens; {
		end := min(done+s.Step, s.Tokens)
		if err := s.store(e, request, doc, done, end, &v); err != nil {
			return v, err
		}
		done = end
	}
	if err := e.Sync(30 * time.Second); err != nil {
		return v, err
	}
	e.Finish(request, s.Tokens, b, wire.NoHint)
	e.StepEnd()
	return v, nil
}

func (s *Story) payload(k *block.Key) int {
	return int(s.Groups[binary.BigEndian.Uint32(k.Bytes[k.Len-4:])].PayloadBytes)
}

// lookup finds the deepest boundary that every group can serve, as vLLM's scheduler does: full groups from the front,
// states and windows from the back, until nothing shrinks. The last token is always computed.
func (s *Story) lookup(e *client.Engine, doc int) (uint32, []client.Copy, []block.Key) {
	has := func(end uint32, g int) (client.Copy, block.Key, bool) {
		k := storyKey(doc, end, g)
		c, ok := e.Lookup(&k)
		return c, k, ok
	}
	limit := s.Tokens - 1
	for g, v := range s.Groups {
		if v.Kind != "full" {
			continue
		}
		n := uint32(0)
		for n+v.ChunkTokens <= limit {
			if _, _, ok := has(n+v.ChunkTokens, g); !ok {
				break
			}
			n += v.ChunkTokens
		}
		limit = min(limit, n)
	}
	align := s.Groups[0].ChunkTokens
	for b := limit / align * align; b > 0; b -= align {
		if copies, keys, ok := s.serves(b, has); ok {
			return b, copies, keys
		}
	}
	return 0, nil, nil
}

// serves gathers what a load to b needs; ok is false when something is missing.
func (s *Story) serves(b uint32, has func(uint32, int) (client.Copy, block.Key, bool)) (copies []client.Copy, keys []block.Key, ok bool) {
	for g, v := range s.Groups {
		first := v.ChunkTokens
		switch v.Kind {
		case "state":
			first = b
		case "window":
			if n := v.WindowChunks * v.ChunkTokens; n < b {
				first = b - n + v.ChunkTokens
			}
		}
		if b%v.ChunkTokens != 0 {
			return nil, nil, false
		}
		for end := first; end <= b; end += v.ChunkTokens {
			c, k, found := has(end, g)
			if !found {
				return nil, nil, false
			}
			copies, keys = append(copies, c), append(keys, k)
		}
	}
	return copies, keys, true
}

// store offers every chunk that ends in (from, to], group by group, as one prepare_store does.
func (s *Story) store(e *client.Engine, request uint64, doc int, from, to uint32, v *StoryVisit) error {
	var offers []block.Offer
	for g, grp := range s.Groups {
		for end := (from/grp.ChunkTokens + 1) * grp.ChunkTokens; end <= to; end += grp.ChunkTokens {
			if s.EndOnly && !s.atEnd(grp, end) {
				continue
			}
			offers = append(offers, block.Offer{Key: storyKey(doc, end, g), Group: uint16(g), Position: end})
		}
	}
	if len(offers) == 0 {
		return nil
	}
	var r client.Reservation
	if err := e.Reserve(request, offers, &r); err != nil {
		return err
	}
	for _, k := range r.Keys {
		key, n := &offers[k.Index].Key, s.payload(&offers[k.Index].Key)
		fillExtents(e, key, k.Extents, n)
		v.StoredKeys++
		v.StoredBytes += uint64(n)
	}
	v.RefusedKeys += r.Refused
	if r.Job != 0 {
		e.Commit(r.Job)
	}
	return nil
}

// fillExtents writes the content of a chunk of n bytes.
func fillExtents(e *client.Engine, k *block.Key, extents []block.Extent, n int) {
	off := 0
	for _, x := range extents {
		b := e.Workers[0].Bytes(x)
		b = b[:min(len(b), n-off)]
		Fill(b, k, off)
		off += len(b)
	}
}

// atEnd tells whether a load to the last boundary needs the chunk of a group that ends at a position, or would if the document
// went on.
func (s *Story) atEnd(g StoryGroup, end uint32) bool {
	b := s.boundary()
	switch g.Kind {
	case "state":
		return end == b
	case "window":
		return end <= b && b-end < g.WindowChunks*g.ChunkTokens
	}
	return true
}

// compare checks the content of one loaded chunk of n bytes.
func compare(e *client.Engine, k *block.Key, c *client.Copy, n int) (int, error) {
	off := 0
	for _, x := range c.Extents(nil) {
		b := e.Workers[0].Bytes(x)
		b = b[:min(len(b), n-off)]
		if at := Check(b, k, off); at >= 0 {
			return off, fmt.Errorf("%w: key %v, byte %d", ErrWrongBytes, *k, at)
		}
		off += len(b)
	}
	if off != n {
		return off, errors.New("a copy of another length than its group's payload")
	}
	return off, nil
}
