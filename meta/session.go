package meta

import (
	"fmt"
	"hash/crc32"
)

// Role of an attached process.
type Role uint8

const (
	Manager Role = 1 // the scheduler process
	Worker  Role = 2 // one rank
)

func (r Role) String() string {
	switch r {
	case Manager:
		return "manager"
	case Worker:
		return "worker"
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// MaxEngineID is the longest engine id in bytes that the table keeps.
const MaxEngineID = 95

// Process is one record of the session table: a process that holds the arena. Its number is the byte of the arena file
// that the process's open file description locks.
type Process struct {
	Session   uint64
	Role      Role
	Rank      uint16
	WorldSize uint16
	Namespace uint16
	PID       uint32
	UID       uint32
	Start     uint64 // clock ticks since boot, to tell a reused pid; 0 unknown
	EngineID  string
}

// NoNamespace is the namespace of a process whose session has none yet.
const NoNamespace = 0xffff

// session: offset of each field, see docs/formats.md
const (
	sWord, sMagic, sCRC, sSession, sRole, sRank = 0, 8, 12, 16, 24, 26
	sWorld, sPID, sUID, sStart                  = 28, 32, 36, 40
	sIDLen, sID                                 = 48, 49
)

// word: bits 0-7 used, 8-15 their complement, 16-31 namespace, 32-47 its complement. A session may move to another
// namespace, and that must be a single store, so the checksum cannot cover it; a survivor in the wrong namespace, or
// none at all, would have its pages reused.
func sessionWord(ns uint16) uint64 { return usedWord | uint64(ns)<<16 | uint64(^ns)<<32 }

func (t *Table) sessionOff(i int) int { return t.sessions + i*SessionSize }

// PutProcess writes record i, which must be free, and marks it used last.
func (t *Table) PutProcess(i int, p *Process) {
	off := t.sessionOff(i)
	b := t.b[off : off+SessionSize]
	clear(b[8:])
	le.PutUint32(b[sMagic:], sessionMagic)
	le.PutUint64(b[sSession:], p.Session)
	b[sRole] = byte(p.Role)
	le.PutUint16(b[sRank:], p.Rank)
	le.PutUint16(b[sWorld:], p.WorldSize)
	le.PutUint32(b[sPID:], p.PID)
	le.PutUint32(b[sUID:], p.UID)
	le.PutUint64(b[sStart:], p.Start)
	b[sIDLen] = byte(copy(b[sID:sID+MaxEngineID], p.EngineID))
	le.PutUint32(b[sCRC:], crc32.Checksum(b[sSession:], castagnoli))
	t.wrote(off+8, SessionSize-8)
	storeWord(t.b, off, sessionWord(p.Namespace))
	t.wrote(off, 8)
}

// MoveProcess changes the namespace of a used record.
func (t *Table) MoveProcess(i int, ns uint16) {
	storeWord(t.b, t.sessionOff(i), sessionWord(ns))
	t.wrote(t.sessionOff(i), 8)
}

// DropProcess frees record i.
func (t *Table) DropProcess(i int) {
	storeWord(t.b, t.sessionOff(i), 0)
	t.wrote(t.sessionOff(i), 8)
}

// Process reads record i; used is false when it is free. The error wraps ErrDamaged.
func (t *Table) Process(i int) (p Process, used bool, err error) {
	off := t.sessionOff(i)
	b := t.b[off : off+SessionSize]
	ns := uint16(le.Uint64(b) >> 16)
	switch w := le.Uint64(b); {
	case w == 0:
		return p, false, nil
	case w != sessionWord(ns) || le.Uint32(b[sMagic:]) != sessionMagic || le.Uint32(b[sCRC:]) != crc32.Checksum(b[sSession:], castagnoli):
		return p, true, fmt.Errorf("%w: session record %d", ErrDamaged, i)
	}
	if b[sIDLen] > MaxEngineID || Role(b[sRole]) != Manager && Role(b[sRole]) != Worker {
		return p, true, fmt.Errorf("%w: session record %d: role %d", ErrDamaged, i, b[sRole])
	}
	return Process{
		Session: le.Uint64(b[sSession:]), Role: Role(b[sRole]), Rank: le.Uint16(b[sRank:]), WorldSize: le.Uint16(b[sWorld:]),
		Namespace: ns, PID: le.Uint32(b[sPID:]), UID: le.Uint32(b[sUID:]), Start: le.Uint64(b[sStart:]),
		EngineID: string(b[sID : sID+int(b[sIDLen])]),
	}, true, nil
}
