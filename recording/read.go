package recording

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"

	"kvlift/block"
)

// ErrMalformed tells that a file is no recording, or a damaged one.
var ErrMalformed = errors.New("not a recording")

// line is any line of a manager's or a worker's file.
type line struct {
	Method string          `json:"m"`
	Req    *string         `json:"req"`
	Key    string          `json:"key"`
	Keys   json.RawMessage `json:"keys"` // a list of keys; of "recovered" a number
	Ret    json.RawMessage `json:"ret"`
	X      int             `json:"x"`
	Rows   int             `json:"rows"`

	Name   string `json:"name"`
	Phases []struct {
		Name    string `json:"name"`
		Tokens  uint32 `json:"n"`
		Cached  uint32 `json:"cached"`
		Metrics struct {
			Queries float64 `json:"vllm:prefix_cache_queries"`
		} `json:"metrics"`
	} `json:"phases"`

	Groups []struct {
		ID     *uint32  `json:"group_id"`
		Tokens uint32   `json:"tokens_per_block"`
		Layers []string `json:"layer_names"`
	} `json:"groups"`
	BlockBytes  uint32 `json:"worker_kv_bytes_per_block"`
	HashTokens  uint32 `json:"tokens_per_hash"`
	ChunkBlocks uint32 `json:"blocks_per_chunk"`
	Model       string `json:"model"`
	DType       string `json:"dtype"`
	World       int    `json:"world_size"`
	Version     string `json:"vllm_version"`

	Refs      [][][]json.RawMessage `json:"group_refs"` // of a worker: per group, tensors with the bytes of a block in each
	FileBytes uint64                `json:"file_bytes"`
	Bytes     uint64                `json:"bytes"`
}

// What the numbers of a recording may be at most; far above any engine, and small enough to multiply.
const (
	maxGroups  = 64
	maxWorld   = 64
	maxTokens  = 1 << 24
	maxPayload = 1 << 30
)

// Open reads the recording of a manager and those of its workers beside it. Without these the payload of each group is what
// the manager was told of the largest, and the memory of the recorded tier is unknown.
func Open(path string) (*Session, error) {
	s, err := open(path, Read)
	if err != nil {
		return nil, err
	}
	base := strings.TrimSuffix(path, ".jsonl")
	for rank := range s.world {
		name := base + ".worker.jsonl"
		if rank > 0 {
			name = base + ".worker" + strconv.Itoa(rank) + ".jsonl"
		}
		w, err := open(name, func(r io.Reader) (*Worker, error) { return ReadWorker(r, s) })
		switch {
		case errors.Is(err, fs.ErrNotExist) && rank == 0:
			return s, nil
		case err != nil:
			return nil, err
		}
		s.Parts[rank], s.TierBytes = w.Payload, w.TierBytes
		s.Loaded = append(s.Loaded, w.Loaded)
	}
	return s, nil
}

func open[T any](path string, read func(io.Reader) (T, error)) (T, error) {
	f, err := os.Open(path)
	if err != nil {
		var none T
		return none, fmt.Errorf("open recording: %w", err)
	}
	defer f.Close()
	v, err := read(f)
	if err != nil {
		return v, fmt.Errorf("%s: %w", path, err)
	}
	return v, nil
}

// lines calls f for every line of a file, with its number.
func lines(r io.Reader, f func(n int, l *line) error) error {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 0, 64<<10), MaxLine)
	n := 0
	for s.Scan() {
		n++
		if n > MaxLines {
			return fmt.Errorf("%w: more than %d lines", ErrMalformed, MaxLines)
		}
		if len(strings.TrimSpace(s.Text())) == 0 {
			continue
		}
		var l line
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			return fmt.Errorf("%w: line %d: %w", ErrMalformed, n, err)
		}
		if err := f(n, &l); err != nil {
			return fmt.Errorf("%w: line %d: %w", ErrMalformed, n, err)
		}
	}
	if err := s.Err(); err != nil {
		return fmt.Errorf("line %d: %w", n+1, err)
	}
	return nil
}

// Read reads what a manager was asked. The payload of each group is what the manager was told of the largest.
func Read(r io.Reader) (*Session, error) {
	s := &Session{groupOf: map[uint32]int{}, repeats: map[int]repeat{}}
	requests := map[string]int{}
	rows, total := []int{}, 0 // calls before each row since the last one that cannot be repeated
	err := lines(r, func(n int, l *line) error {
		switch l.Method {
		case "session":
			return s.header(l)
		case "config":
			return s.config(l)
		case "recovered":
			return json.Unmarshal(l.Keys, &s.Recovered)
		case "none_hash", "shutdown", "take_events", "get_stats":
			return nil
		case "repeat_previous_step":
			if l.Rows < 1 || l.Rows > len(rows) || l.X < 1 || l.X > MaxCalls {
				return fmt.Errorf("the last %d calls %d times more, behind %d", l.Rows, l.X, len(rows))
			}
			if total += l.Rows * l.X; total > MaxCalls {
				return fmt.Errorf("more than %d calls", MaxCalls)
			}
			s.repeats[len(s.Calls)] = repeat{rows[len(rows)-l.Rows], l.X}
			rows = rows[:0]
			return nil
		}
		c, err := s.call(n, l, requests)
		if err != nil {
			return err
		}
		if total++; total > MaxCalls {
			return fmt.Errorf("more than %d calls", MaxCalls)
		}
		rows = append(rows, len(s.Calls))
		s.Calls = append(s.Calls, c)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(s.Groups) == 0 {
		return nil, fmt.Errorf("%w: no configuration", ErrMalformed)
	}
	s.Requests = len(requests)
	s.infer()
	return s, nil
}

func (s *Session) header(l *line) error {
	s.Name = l.Name
	for _, p := range l.Phases {
		q := Phase{Name: p.Name, Tokens: p.Tokens, Cached: p.Cached, Requests: 1}
		if n := p.Metrics.Queries / float64(p.Tokens); p.Tokens > 0 && n >= 1 && n < MaxLines {
			q.Requests = int(math.Round(n))
		}
		if p.Tokens > maxTokens {
			return fmt.Errorf("a prompt of %d tokens", p.Tokens)
		}
		s.Phases = append(s.Phases, q)
	}
	return nil
}

func (s *Session) config(l *line) error {
	switch {
	case len(s.Groups) > 0:
		return errors.New("a second configuration")
	case len(l.Groups) == 0 || len(l.Groups) > maxGroups:
		return fmt.Errorf("%d groups", len(l.Groups))
	case l.World < 1 || l.World > maxWorld:
		return fmt.Errorf("world_size %d", l.World)
	case l.ChunkBlocks < 1 || l.ChunkBlocks > 1<<12 || l.BlockBytes < 1 || uint64(l.BlockBytes)*uint64(l.ChunkBlocks) > maxPayload:
		return fmt.Errorf("%d blocks of %d bytes in a chunk", l.ChunkBlocks, l.BlockBytes)
	}
	for i, g := range l.Groups {
		id := uint32(i)
		if g.ID != nil {
			id = *g.ID
		}
		if _, twice := s.groupOf[id]; twice || g.Tokens < 1 || g.Tokens > maxTokens/l.ChunkBlocks {
			return fmt.Errorf("group %d, number %d, of %d tokens in a block", i, id, g.Tokens)
		}
		s.groupOf[id] = i
		s.Groups = append(s.Groups, Group{ID: id, ChunkTokens: g.Tokens * l.ChunkBlocks, Layers: g.Layers})
	}
	s.Model, s.DType, s.Version, s.world, s.hashTokens, s.chunkBlocks = l.Model, l.DType, l.Version, l.World, l.HashTokens, l.ChunkBlocks
	for range l.World {
		part := make([]uint32, len(s.Groups))
		for g := range part {
			part[g] = l.BlockBytes * l.ChunkBlocks
		}
		s.Parts = append(s.Parts, part)
	}
	return nil
}

func (s *Session) call(n int, l *line, requests map[string]int) (Call, error) {
	c := Call{Line: n, Method: methods[l.Method], Request: -1}
	if c.Method == 0 {
		return c, fmt.Errorf("method %q", l.Method)
	}
	if l.Req != nil {
		r, known := requests[*l.Req]
		if !known {
			r = len(requests)
			requests[*l.Req] = r
		}
		c.Request = r
	}
	if c.Request < 0 && c.Method != ScheduleEnd && c.Method != Reset {
		return c, fmt.Errorf("%v of no request", c.Method)
	}
	var err error
	switch c.Method {
	case Lookup:
		k, err := s.key(l.Key)
		if err != nil {
			return c, err
		}
		c.Keys = []block.Key{k}
		var ret string
		if err := json.Unmarshal(l.Ret, &ret); err != nil {
			return c, err
		}
		c.Hit, c.Retry = ret == "HIT", ret == "RETRY" || ret == "HIT_PENDING"
		if !c.Hit && !c.Retry && ret != "MISS" {
			return c, fmt.Errorf("an answer %q", ret)
		}
	case Touch, PrepareLoad, CompleteLoad, CompleteStore, PrepareStore:
		if c.Keys, err = s.keys(l.Keys); err != nil {
			return c, err
		}
	}
	if c.Method == PrepareStore {
		var ret *struct {
			Store json.RawMessage `json:"store"`
		}
		if err := json.Unmarshal(l.Ret, &ret); err != nil {
			return c, err
		}
		if c.None = ret == nil; !c.None {
			c.Stored, err = s.keys(ret.Store)
		}
	}
	return c, err
}

func (s *Session) keys(raw json.RawMessage) ([]block.Key, error) {
	var list []string
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, err
	}
	out := make([]block.Key, 0, len(list))
	for _, t := range list {
		k, err := s.key(t)
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	return out, nil
}

func (s *Session) key(text string) (block.Key, error) {
	b, err := hex.DecodeString(text)
	if err != nil {
		return block.Key{}, err
	}
	k, err := block.MakeKey(b)
	if err != nil {
		return k, err
	}
	if k.Len < 5 {
		return k, fmt.Errorf("a key of %d bytes", k.Len)
	}
	if _, id := split(&k); len(s.Groups) == 0 {
		return k, errors.New("a key before the configuration")
	} else if _, ok := s.groupOf[id]; !ok {
		return k, fmt.Errorf("a key of group %d, which is not configured", id)
	}
	return k, nil
}

// Worker is what one rank recorded.
type Worker struct {
	Payload   []uint32 // bytes of a chunk of each group
	TierBytes uint64   // of the recorded tier's memory, all ranks
	Loaded    uint64   // bytes that loads have copied
}

// ReadWorker reads what a rank of a session recorded.
func ReadWorker(r io.Reader, s *Session) (*Worker, error) {
	w := &Worker{}
	err := lines(r, func(_ int, l *line) error {
		switch l.Method {
		case "register":
			return w.register(l, s)
		case "submit_load":
			w.Loaded += l.Bytes
		}
		return nil
	})
	if err == nil && len(w.Payload) == 0 {
		err = fmt.Errorf("%w: no caches were registered", ErrMalformed)
	}
	return w, err
}

func (w *Worker) register(l *line, s *Session) error {
	if len(l.Refs) != len(s.Groups) || len(w.Payload) > 0 {
		return fmt.Errorf("caches of %d groups, of %d", len(l.Refs), len(s.Groups))
	}
	w.TierBytes = l.FileBytes
	for g, refs := range l.Refs {
		sum := uint64(0)
		for _, ref := range refs {
			var bytes uint32
			if len(ref) < 2 {
				return fmt.Errorf("group %d: a part without its size", g)
			}
			if err := json.Unmarshal(ref[1], &bytes); err != nil {
				return err
			}
			if sum += uint64(bytes) * uint64(s.chunkBlocks); sum > maxPayload {
				return fmt.Errorf("group %d: more than %d bytes", g, maxPayload)
			}
		}
		if sum == 0 {
			return fmt.Errorf("group %d: nothing in it", g)
		}
		w.Payload = append(w.Payload, uint32(sum))
	}
	return nil
}
