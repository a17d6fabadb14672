package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"

	"kvlift/block"
)

// Hello is the first message of every connection.
type Hello struct {
	Protocol  [2]int     `json:"protocol"` // major, minor
	Client    string     `json:"client"`   // name and version, for people
	Role      string     `json:"role"`     // "manager", "worker" or "observer"
	EngineID  string     `json:"engine_id,omitempty"`
	Rank      int        `json:"rank,omitempty"`
	WorldSize int        `json:"world_size,omitempty"`
	Namespace *Namespace `json:"namespace,omitempty"`
	Parts     []uint32   `json:"parts,omitempty"`   // worker: payload bytes of this rank, per group
	Session   string     `json:"session,omitempty"` // when it comes back: what welcome said, 16 hex digits
	ArenaID   string     `json:"arena_id,omitempty"`
	Loads     []OpenJob  `json:"loads,omitempty"`  // manager that comes back: loads not completed
	Stores    []OpenJob  `json:"stores,omitempty"` // and stores not completed, or committed without a delta
}

// Namespace describes whose bytes may be exchanged. Its canonical JSON (sorted keys, no spaces) is hashed.
type Namespace struct {
	Identity map[string]any `json:"identity"` // model, weights, dtypes, layout, parallel sizes, …: anything differs, another namespace
	Groups   []Group        `json:"groups"`
}

// Group is one KV-cache group as an engine describes it.
type Group struct {
	Name        string `json:"name,omitempty"`
	Kind        string `json:"kind"` // full, window, state, draft
	ChunkTokens uint32 `json:"chunk_tokens"`
	Window      uint32 `json:"window_chunks,omitempty"`
}

// OpenJob is an unfinished job. Refs are pairs of entry and generation.
type OpenJob struct {
	Job    uint64      `json:"job"`
	Refs   [][2]uint32 `json:"refs"`
	Doomed bool        `json:"doomed,omitempty"` // from before a reset
	Done   bool        `json:"done,omitempty"`   // committed, the delta was not seen
}

// Welcome answers a hello. Descriptors travel with its first byte (SCM_RIGHTS): the arena's when ArenaFD says so, then
// the session page's when SessionPage does. A process that comes back has the arena's already.
type Welcome struct {
	Protocol    [2]int `json:"protocol"`
	Daemon      string `json:"daemon"`
	Session     string `json:"session,omitempty"`
	ArenaID     string `json:"arena_id"`
	ArenaBytes  uint64 `json:"arena_bytes"`
	PageSize    uint32 `json:"page_size"`      // unit of extents, bytes
	HugePage    uint64 `json:"huge_page_size"` // bytes; 0 on plain tmpfs
	TraceClock  bool   `json:"trace_clock,omitempty"`
	ArenaFD     bool   `json:"arena_fd,omitempty"`
	SessionPage bool   `json:"session_page,omitempty"` // of a manager: package fence
}

// Ready tells a manager that every rank has mapped the arena.
type Ready struct {
	Epoch   uint64     `json:"epoch"`
	Keys    uint64     `json:"keys"`          // that the snapshot holds at most
	Payload []uint32   `json:"payload_bytes"` // of one chunk over all ranks, per group
	Parts   [][]uint32 `json:"parts"`         // of these, the bytes of each rank, per group
}

// Error is the daemon's last word on a connection.
type Error struct {
	Code    string `json:"code"` // version, refused, malformed, geometry, busy or failed
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// StatusRequest asks for the daemon's state.
type StatusRequest struct {
	Collect bool `json:"collect,omitempty"` // run a garbage collection first, so that the heap figure counts what is in use
}

// AppendJSON appends v as JSON. v must be one of this package's types or a value that encoding/json takes.
func AppendJSON(dst []byte, v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return dst, fmt.Errorf("encode %T: %w", v, err)
	}
	return append(dst, b...), nil
}

// ParseJSON reads exactly one JSON value into v. Unknown fields are ignored, so that a newer minor can add some.
func ParseJSON(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%w: %T: %v", ErrMalformed, v, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return fmt.Errorf("%w: %T: more than one JSON value", ErrMalformed, v)
	}
	return nil
}

// Canonical returns the text that names a namespace: JSON with sorted keys and without spaces, as Python's
// json.dumps(sort_keys=True, separators=(",", ":"), ensure_ascii=False) writes the same value.
func (n *Namespace) Canonical() (string, error) {
	groups := make([]any, len(n.Groups))
	for i, g := range n.Groups {
		groups[i] = map[string]any{"name": g.Name, "kind": g.Kind, "chunk_tokens": g.ChunkTokens, "window_chunks": g.Window}
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(map[string]any{"identity": n.Identity, "groups": groups}); err != nil {
		return "", fmt.Errorf("%w: namespace: %v", ErrMalformed, err)
	}
	return string(plainSeparators(bytes.TrimSuffix(b.Bytes(), []byte("\n")))), nil
}

// plainSeparators writes U+2028 and U+2029 in JSON text as themselves: encoding/json escapes them whatever it is told,
// for the sake of JavaScript, and nobody else does.
func plainSeparators(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for len(text) > 0 {
		n := 1
		switch {
		case bytes.HasPrefix(text, []byte(`\u2028`)), bytes.HasPrefix(text, []byte(`\u2029`)):
			out = append(out, 0xe2, 0x80, 0xa8+text[5]-'8')
			text = text[6:]
			continue
		case text[0] == '\\':
			n = 2 // an escape, and not the half of one
		}
		out = append(out, text[:n]...)
		text = text[n:]
	}
	return out
}

// RefList turns the pairs of an open job into refs.
func (j *OpenJob) RefList() []block.Ref {
	out := make([]block.Ref, len(j.Refs))
	for i, p := range j.Refs {
		out[i] = block.Ref{Entry: p[0], Gen: p[1]}
	}
	return out
}

// ParseID reads n bytes of hex, as session and arena ids are written.
func ParseID(s string, n int) ([]byte, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != n {
		return nil, fmt.Errorf("%w: %q is not %d hex digits", ErrMalformed, s, 2*n)
	}
	return b, nil
}
