// Package status is what a running daemon says about itself. A Document is made from the engine's state by Build, which
// is pure, and is the same on every way out: the JSON of the status command and of /status, the reply on the socket, and
// what the metrics are read from. Text is its one screen for people.
//
// The JSON is a contract: numbers are in base units that the field's name ends with (_bytes, _seconds, _tokens), fields
// are only ever added, and readers ignore those that they do not know. What cannot be known is null, never a zero that
// looks measured: a hit ratio without prompt tokens, the age of the oldest key of an empty group, the namespace of an
// engine that has none yet. Text may change between versions.
package status

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Schema is the value of Document.Schema that this package writes and reads. It changes only if a field ever has to
// change its meaning.
const Schema = 1

// MaxDocument is the most bytes that Parse reads. Full tables (64 namespaces of 64 groups, 1024 engines) make a document
// of 2 MB.
const MaxDocument = 4 << 20

// ErrSchema tells that a document was written for another schema than this package's.
var ErrSchema = errors.New("status document of another schema")

// State is what the daemon does as a whole.
type State string

// The states of a daemon. Draining outranks Recovering.
const (
	Serving    State = "serving"
	Draining   State = "draining"   // it ends: stores are refused, what is under way may finish
	Recovering State = "recovering" // sessions from before its start are unresolved, so no page is reused
)

// Document is the state of one daemon at one moment. It is a value without locks: whoever has it owns it, and the slices
// and maps in it are shared with nobody.
type Document struct {
	Schema        int         `json:"schema"`
	Version       string      `json:"version"` // of kvlift
	Name          string      `json:"name"`
	PID           int         `json:"pid"`
	Socket        string      `json:"socket"`
	State         State       `json:"state"`
	UptimeSeconds float64     `json:"uptime_seconds"`
	Tiers         []Tier      `json:"tiers"`
	Records       Records     `json:"records"`
	Policy        Policy      `json:"policy"`
	Adoption      Adoption    `json:"adoption"`
	Traffic       Traffic     `json:"traffic"`
	Counters      Counters    `json:"counters"`
	Namespaces    []Namespace `json:"namespaces"`
	Engines       []Engine    `json:"engines"` // oldest first
	Connections   int         `json:"connections"`
	Process       Process     `json:"process"`
}

// Tier is one place where payloads are kept. Used, free, reserved and pending bytes add up to the total.
type Tier struct {
	Name             string `json:"name"` // "ram"
	TotalBytes       uint64 `json:"total_bytes"`
	UsedBytes        uint64 `json:"used_bytes"`         // pages of stored keys
	NeededBytes      uint64 `json:"needed_bytes"`       // of the used: what running requests and restore points need
	OptionalBytes    uint64 `json:"optional_bytes"`     // of the used: restore points that a deeper one makes optional
	UselessBytes     uint64 `json:"useless_bytes"`      // of the used: what no restore point needs; the first to go
	FreeBytes        uint64 `json:"free_bytes"`         // pages that a store may take at once
	ReservedBytes    uint64 `json:"reserved_bytes"`     // pages of stores that are under way
	PendingBytes     uint64 `json:"pending_bytes"`      // pages of removed keys that may not be reused yet
	LongestFreeBytes uint64 `json:"longest_free_bytes"` // longest run of free pages
	Keys             uint64 `json:"keys"`               // stored
	ReservedKeys     uint64 `json:"reserved_keys"`      // stores that are under way
	// Tokens counts a token once, though several groups hold parts of it: of each namespace, those of the full-attention
	// group that has most (of all groups when none is full).
	Tokens        uint64 `json:"tokens"`
	Dir           string `json:"dir"`
	HugePageBytes uint64 `json:"huge_page_bytes"` // 0 on ordinary pages
}

// Records counts the records of the entry table: one per key, in whatever state.
type Records struct {
	Total uint64 `json:"total"`
	Free  uint64 `json:"free"`
}

// Policy is what decides which key goes first.
type Policy struct {
	Name           string  `json:"name"`
	MinIdleSeconds float64 `json:"min_idle_seconds"` // a store may not evict what was used more recently; 0 is off
}

// Adoption is what the daemon found when it started. The numbers do not change while it lives.
type Adoption struct {
	Adopted  bool    `json:"adopted"` // false: the arena was new
	Seconds  float64 `json:"seconds"` // that it took
	Ready    int     `json:"ready"`   // keys taken over, the revived among them
	Reserved int     `json:"reserved"`
	Revived  int     `json:"revived"` // keys whose removal was not finished and that are whole
	Removed  int     `json:"removed"` // keys removed by a reset, on their way out
	Dropped  int     `json:"dropped"` // damaged records that were given up
	Sessions int     `json:"sessions"`
}

// Traffic sums up the requests that engines finished since the daemon's start.
type Traffic struct {
	Requests       uint64   `json:"requests"`
	PromptTokens   uint64   `json:"prompt_tokens"`
	HitTokens      uint64   `json:"hit_tokens"`       // prompt tokens that were loaded instead of computed
	HitRatioTokens *float64 `json:"hit_ratio_tokens"` // hit tokens by prompt tokens; null without prompt tokens
}

// Counters only grow while the daemon lives, and start at zero with it. The maps name every reason and every cause, also
// those that never occurred.
type Counters struct {
	StoredKeys     uint64            `json:"stored_keys"`
	StoredBytes    uint64            `json:"stored_bytes"`
	LoadedKeys     uint64            `json:"loaded_keys"`
	AbortedKeys    uint64            `json:"aborted_keys"` // reserved, and ended without a payload
	RefusedKeys    uint64            `json:"refused_keys"`
	RefusedBatches map[string]uint64 `json:"refused_batches"` // by reason
	EvictedKeys    map[string]uint64 `json:"evicted_keys"`    // by cause
	Fences         uint64            `json:"fences"`          // times an engine was silent for so long that its acknowledgements were done without
}

// Namespace is a set of keys that may be exchanged between engines.
type Namespace struct {
	Index    int     `json:"index"` // what engines and metrics name it by; it may change when another namespace ends
	ID       string  `json:"id"`    // SHA-256 of its description, 64 hex digits
	Private  bool    `json:"private"`
	Model    string  `json:"model"` // as an engine named it, any text up to 255 bytes; empty when it did not
	Sessions int     `json:"sessions"`
	Quota    *Quota  `json:"quota"` // null without one
	Groups   []Group `json:"groups"`
}

// Quota is the cap of a namespace. A private one and the namespace that it came from count together and show the same.
type Quota struct {
	Bytes          uint64 `json:"bytes"`           // that it may hold
	UsedBytes      uint64 `json:"used_bytes"`      // pages of all its keys: stored, being stored, and removed but not reusable yet
	RefusedBatches uint64 `json:"refused_batches"` // of which the rest was refused for its sake; from the daemon's start
}

// Group is what is stored of one KV-cache group.
type Group struct {
	Index         int      `json:"index"`
	Kind          string   `json:"kind"` // full, window, state or draft
	ChunkTokens   uint32   `json:"chunk_tokens"`
	PayloadBytes  uint32   `json:"payload_bytes"` // of one chunk over all ranks
	Keys          uint64   `json:"keys"`
	Tokens        uint64   `json:"tokens"`         // keys × chunk tokens
	Bytes         uint64   `json:"bytes"`          // of the pages that hold them
	OldestSeconds *float64 `json:"oldest_seconds"` // since the least recently used key was used; null without keys
}

// Engine is one session: a manager and its ranks.
type Engine struct {
	Session          string   `json:"session"`   // 16 hex digits
	EngineID         string   `json:"engine_id"` // as the engine named itself, any text
	State            string   `json:"state"`     // forming, attached, detached or unresolved
	Namespace        *int     `json:"namespace"` // index; null without one
	PID              uint32   `json:"pid"`       // of its manager; 0 when that is gone or has not come
	Ranks            int      `json:"ranks"`     // that are there
	WorldSize        int      `json:"world_size"`
	Jobs             int      `json:"jobs"`     // open
	Requests         int      `json:"requests"` // open
	Behind           uint64   `json:"behind"`   // removals that it has not acknowledged
	Fenced           bool     `json:"fenced"`   // it is silent and not waited for: it promises nothing until it has heard everything
	Seconds          float64  `json:"seconds"`  // since it came, or since the daemon's start
	FinishedRequests uint64   `json:"finished_requests"`
	PromptTokens     uint64   `json:"prompt_tokens"`
	HitTokens        uint64   `json:"hit_tokens"`
	HitRatioTokens   *float64 `json:"hit_ratio_tokens"`
	BlocksReuse      bool     `json:"blocks_reuse"` // it keeps pages from being reused at this moment
	Why              string   `json:"why"`          // it does, for people; empty when it does not
}

// Process is what the daemon's own process uses.
type Process struct {
	HeapBytes        uint64  `json:"heap_bytes"`
	Goroutines       int     `json:"goroutines"`
	CPUUserSeconds   float64 `json:"cpu_user_seconds"`
	CPUSystemSeconds float64 `json:"cpu_system_seconds"`
	RSSBytes         uint64  `json:"rss_bytes"` // pages of the arena that the daemon has touched are among them
}

// Parse reads a document of at most MaxDocument bytes. Fields that it does not know are ignored, so that a newer kvlift
// can be asked; another schema is ErrSchema. b is not kept.
func Parse(b []byte) (Document, error) {
	if len(b) > MaxDocument {
		return Document{}, fmt.Errorf("status document of %d bytes: at most %d are read", len(b), MaxDocument)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	var head struct {
		Schema int `json:"schema"`
	}
	// The schema first: of another one, no other field's type is known.
	if err := d.Decode(&head); err != nil {
		return Document{}, fmt.Errorf("status document: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return Document{}, errors.New("status document: more than one JSON value")
	}
	if head.Schema != Schema {
		return Document{}, fmt.Errorf("%w: it has schema %d, this kvlift reads %d", ErrSchema, head.Schema, Schema)
	}
	var doc Document
	if err := json.Unmarshal(b, &doc); err != nil {
		return Document{}, fmt.Errorf("status document: %w", err)
	}
	return doc, nil
}
