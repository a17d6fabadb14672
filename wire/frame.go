// Package wire is the protocol between engines and the daemon: frames on a Unix stream socket. docs/protocol.md says
// when each message is sent, docs/formats.md has the byte tables; the constants here are the same numbers.
//
//	┌────────────┬─────────┬──────────┬──────────────┬─────────┐
//	│ length u32 │ type u16│ flags u16│ sequence u64 │ payload │   all little-endian; length counts the payload alone
//	└────────────┴─────────┴──────────┴──────────────┴─────────┘
//
// Control messages carry JSON, so that they can be read in a dump; the hot ones are packed arrays of fixed records that
// NumPy reads without a loop. Every parser is a pure function on bytes that accepts exactly what the encoder writes.
//
// The package does no I/O and holds no state; all functions may be called concurrently.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// These constants are part of the protocol.
const (
	Major = 1 // another major is refused with both numbers
	Minor = 0 // additions that an older peer may ignore

	HeaderSize = 16
	// MaxFrame is the longest payload in bytes. A longer one is an error of its sender.
	MaxFrame = 1 << 20
)

// Type of a message.
type Type uint16

const (
	THello    Type = 1  // → JSON Hello
	TWelcome  Type = 2  // ← JSON Welcome, to a process: its slot, with the arena's descriptor
	TMapped   Type = 3  // → nothing: a rank has mapped the arena
	TReady    Type = 4  // ← JSON Ready: all ranks have; the snapshot follows
	TSnapshot Type = 5  // ← Delta with added keys alone; FlagLast on the last one
	TDelta    Type = 6  // ← Delta
	TStep     Type = 7  // → Step
	TBegin    Type = 8  // → Begin
	TFinish   Type = 9  // → Finish
	TTouch    Type = 10 // → Refs
	TPin      Type = 11 // → Refs
	TUnpin    Type = 12 // → Job
	TReserve  Type = 13 // → Reserve
	TReserved Type = 14 // ← Reserved
	TCommit   Type = 15 // → Job
	TAbort    Type = 16 // → Job
	TEnded    Type = 17 // → Job, from a worker
	TEndedAck Type = 18 // ← Job
	TReset    Type = 19 // → nothing
	TDone     Type = 20 // ← nothing: the reset is in the table
	TBye      Type = 21 // → nothing: this process holds no promise, no job and no mapping any more
	TError    Type = 22 // ← JSON Error; the daemon closes the connection behind it
	TStatus   Type = 23 // → JSON StatusRequest
	TState    Type = 24 // ← JSON, FlagLast on the last piece
	TPromote  Type = 25 // → Refs; reserved for the disk tier
)

func (t Type) String() string {
	names := [...]string{"", "hello", "welcome", "mapped", "ready", "snapshot", "delta", "step", "begin", "finish", "touch", "pin", "unpin",
		"reserve", "reserved", "commit", "abort", "ended", "ended-ack", "reset", "done", "bye", "error", "status", "state", "promote"}
	if t == 0 || int(t) >= len(names) {
		return fmt.Sprintf("type %d", uint16(t))
	}
	return names[t]
}

// FlagLast marks the last frame of a message that needs several.
const FlagLast uint16 = 1

// Errors of parsing. Each is wrapped with what was found.
var (
	ErrTooLong   = errors.New("frame is too long")
	ErrMalformed = errors.New("malformed frame")
)

// Header is a frame's header.
type Header struct {
	Length uint32
	Type   Type
	Flags  uint16
	Seq    uint64 // counts up from 1 in the frames to the daemon; a reply carries that of its request, other frames of the daemon 0
}

var le = binary.LittleEndian

// ParseHeader reads a header from b, which must hold HeaderSize bytes. A length above limit is ErrTooLong, before
// anybody allocates for it.
func ParseHeader(b []byte, limit uint32) (Header, error) {
	if len(b) < HeaderSize {
		return Header{}, fmt.Errorf("%w: %d bytes of header", ErrMalformed, len(b))
	}
	h := Header{Length: le.Uint32(b), Type: Type(le.Uint16(b[4:])), Flags: le.Uint16(b[6:]), Seq: le.Uint64(b[8:])}
	if h.Length > limit {
		return h, fmt.Errorf("%w: %d bytes of %v, at most %d", ErrTooLong, h.Length, h.Type, limit)
	}
	return h, nil
}

// AppendHeader appends a header whose length is filled in by Seal.
func AppendHeader(dst []byte, t Type, flags uint16, seq uint64) []byte {
	dst = append(dst, 0, 0, 0, 0)
	dst = le.AppendUint16(dst, uint16(t))
	dst = le.AppendUint16(dst, flags)
	return le.AppendUint64(dst, seq)
}

// Seal writes the length of the frame that starts at b[start] and ends with b.
func Seal(b []byte, start int) {
	le.PutUint32(b[start:], uint32(len(b)-start-HeaderSize))
}

// Append appends a whole frame.
func Append(dst []byte, t Type, flags uint16, seq uint64, payload []byte) []byte {
	start := len(dst)
	dst = append(AppendHeader(dst, t, flags, seq), payload...)
	Seal(dst, start)
	return dst
}
