// Package recording reads what passed between the scheduler of a real engine and its offloading manager, so that it can be
// played to another manager.
//
// A recording is a file of JSON lines, one call a line, in the order of the calls. Before them stand what was asked of the
// engine and how it was configured:
//
//	{"m":"session","name":"qwen3next","phases":[{"name":"A1","n":1500,"cached":0,"metrics":{…}}]}
//	{"m":"config","groups":[{"group_id":0,"tokens_per_block":288,"layer_names":[…]}],"blocks_per_chunk":1,"world_size":1,…}
//	{"m":"recovered","keys":0}
//	{"m":"lookup","req":"r0","key":"68a7…00000003","ret":"MISS"}
//	{"m":"prepare_store","req":"r0","keys":[…],"ret":{"store":[…],"evicted":[]}}
//	{"m":"repeat_previous_step","x":13,"rows":1}
//
// Keys are the hash of a block and everything before it, then the number of the KV-cache group, in hexadecimal. Beside NAME.jsonl
// lies what each worker did, NAME.worker.jsonl of rank 0 and NAME.worker1.jsonl and so on of the others: first the sizes of
// the cache's parts, then the copies.
//
// A recording does not say what kinds of groups there are, nor where in its prompt a key stands. Both follow from the calls;
// see Session.
package recording

import (
	"encoding/binary"
	"iter"

	"kvlift/block"
)

// Limits of a recording.
const (
	MaxLine  = 8 << 20 // bytes
	MaxLines = 1 << 20
	MaxCalls = 1 << 22 // with all repetitions
)

// Method of a manager.
type Method uint8

// Methods that a recording may call.
const (
	NewRequest Method = iota + 1
	Lookup
	Touch
	PrepareLoad
	CompleteLoad
	PrepareStore
	CompleteStore
	RequestFinished
	ScheduleEnd
	Reset
)

var methods = map[string]Method{
	"on_new_request": NewRequest, "lookup": Lookup, "touch": Touch, "prepare_load": PrepareLoad, "complete_load": CompleteLoad,
	"prepare_store": PrepareStore, "complete_store": CompleteStore, "on_request_finished": RequestFinished, "on_schedule_end": ScheduleEnd,
	"reset_cache": Reset,
}

// String is the name of the method in vLLM.
func (m Method) String() string {
	for name, v := range methods {
		if v == m {
			return name
		}
	}
	return "unknown"
}

// Call is one call of a manager and what it answered.
type Call struct {
	Line    int // of the file, from 1
	Method  Method
	Request int         // number of the request in order of arrival; -1 for calls that belong to none
	Keys    []block.Key // one of a lookup
	Hit     bool        // of a lookup: the answer was HIT
	Retry   bool        // of a lookup: the answer was to ask again
	Stored  []block.Key // of prepare_store: the keys that were to be stored
	None    bool        // of prepare_store: nothing could be stored
}

// Group is a KV-cache group of the engine.
type Group struct {
	ID          uint32 // as keys name it
	ChunkTokens uint32
	Layers      []string
	Kind        string // full, state or window
	Window      uint32 // chunks that a load reads, of a window group
}

// Phase is a prompt that was asked of the engine, one or more times at once.
type Phase struct {
	Name     string
	Tokens   uint32 // of the prompt
	Cached   uint32 // of these, not computed
	Requests int
}

// Session is a recording. It owns its memory and is not changed once it was read.
//
// The kind of a group is told from its layers' names (recurrent ones are states) and from loads: a group of which a load reads
// less than of the others has windows as long as the longest that was read; the rest is full. The position of a key is told
// from the full groups, whose chunks are offered in order from where the request goes on; a key of another group stands where
// the full group's key of the same hash does.
type Session struct {
	Name      string
	Version   string // of vLLM
	Model     string
	DType     string
	Groups    []Group
	Phases    []Phase
	Requests  int
	Prompts   []uint32   // tokens of each request's prompt; empty when the phases do not tell
	Recovered int        // keys that the manager found at its start
	Parts     [][]uint32 // per rank, payload bytes of a chunk of each group
	TierBytes uint64     // of the recorded tier, all ranks; 0 unknown
	Loaded    []uint64   // per rank, bytes that loads have copied; empty without the workers' files
	Calls     []Call

	hashTokens  uint32
	chunkBlocks uint32
	world       int
	repeats     map[int]repeat // by the number of calls before it
	groupOf     map[uint32]int
	positions   map[string]uint32 // by hash
}

// repeat says that the calls from a number on happened so many more times.
type repeat struct{ from, times int }

// All gives every call in order, those of repeated steps as often as they happened.
func (s *Session) All() iter.Seq[*Call] {
	return func(yield func(*Call) bool) {
		for i := 0; i <= len(s.Calls); i++ {
			if r, ok := s.repeats[i]; ok {
				for range r.times {
					for j := r.from; j < i; j++ {
						if !yield(&s.Calls[j]) {
							return
						}
					}
				}
			}
			if i < len(s.Calls) && !yield(&s.Calls[i]) {
				return
			}
		}
	}
}

// Group is the number in Groups of a key's group.
func (s *Session) Group(k *block.Key) int {
	_, id := split(k)
	return s.groupOf[id]
}

// Position is where the chunk of a key ends in its prompt, in tokens; 0 when the recording does not tell.
func (s *Session) Position(k *block.Key) uint32 {
	hash, _ := split(k)
	return s.positions[hash]
}

// In is the key of the same hash in another group, by its number in Groups.
func (s *Session) In(k *block.Key, group int) block.Key {
	out := *k
	binary.BigEndian.PutUint32(out.Bytes[int(out.Len)-4:], s.Groups[group].ID)
	return out
}

func split(k *block.Key) (hash string, group uint32) {
	n := int(k.Len) - 4
	return string(k.Bytes[:n]), binary.BigEndian.Uint32(k.Bytes[n:])
}
