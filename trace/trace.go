// Package trace reads request streams of LLM serving: for each request when it came, how long its prompt was, and the
// chain of block hashes of that prompt.
//
// The format is Mooncake's: JSON, one request a line, plain or gzip.
//
//	{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}
//
// timestamp is in milliseconds and does not decrease. A hash id stands for BlockTokens tokens of prompt and everything
// before them, so equal ids mean equal prefixes; the last id may stand for a partial block. Ids are opaque and carry no
// prompt text. Traces of agents add "session", "agent" and "stop"; unknown fields are ignored.
//
// Ties in time are common (the published traces tick every 3 s): the order of a trace is the order of its lines.
package trace

import (
	"crypto/sha256"
	"strconv"

	"kvlift/block"
)

// BlockTokens is the number of prompt tokens that one hash id stands for.
const BlockTokens = 512

// Request is one line of a trace. It owns its memory.
type Request struct {
	TimeMS       int64  // arrival in milliseconds, from 0 to MaxTimeMS
	InputTokens  uint32 // length of the prompt
	OutputTokens uint32 // length of the answer
	IDs          []uint64
	Session      int64  // number of the session, -1 when the trace has none
	Agent        string // agent within the session, "" when the trace has none
	Stop         string // why the answer ended, such as "tool_use" or "end_turn"; "" when unknown
}

// KeyOf returns the key under which replays store the block of a hash id: the SHA-256 of the id in decimal, then the
// group. Benchmarks of other engines derive it in the same way, so that all of them see keys alike.
func KeyOf(id uint64, group uint32) block.Key {
	var digits [20]byte
	sum := sha256.Sum256(strconv.AppendUint(digits[:0], id, 10))
	k, err := block.HashKey(sum[:], group)
	if err != nil {
		panic(err) // a SHA-256 and a group always fit a key
	}
	return k
}

// PrefixTokens returns how many of input prompt tokens the first m blocks hold. The last block of a prompt may be
// partial, so the result never exceeds input. A negative m counts as 0.
func PrefixTokens(m int, input uint32) uint32 {
	if m <= 0 {
		return 0
	}
	if uint64(m) > uint64(input)/BlockTokens {
		return input
	}
	return uint32(m) * BlockTokens
}
