package meta

import (
	"fmt"
	"hash/crc32"
)

// GroupKind says what the bytes of a group are good for.
type GroupKind uint8

const (
	Full   GroupKind = iota // every chunk up to the boundary is needed
	Window                  // the last chunks before the boundary
	StateG                  // one state at the boundary
	Draft                   // a drafter's layers
	lastKind
)

func (k GroupKind) String() string {
	if k >= lastKind {
		return fmt.Sprintf("kind %d", uint8(k))
	}
	return [...]string{"full", "window", "state", "draft"}[k]
}

// ParseGroupKind reads the name of a kind; an unknown one counts as full, since keeping more than is needed is never wrong.
func ParseGroupKind(s string) GroupKind {
	for k := range lastKind {
		if k.String() == s {
			return k
		}
	}
	return Full
}

// Group is one KV-cache group of a namespace.
type Group struct {
	Kind        GroupKind
	ChunkTokens uint32
	Window      uint32 // chunks that a load needs; 0 for full and unknown
	Parts       []uint32
}

// Payload returns the bytes of one chunk over all ranks, and the pages that hold them with each rank's part rounded up.
func (g *Group) Payload() (bytes, pages uint64) {
	for _, p := range g.Parts {
		bytes += uint64(p)
		pages += (uint64(p) + 4095) / 4096
	}
	return bytes, pages
}

// Namespace is one record of the namespace table: all keys of engines whose bytes may be exchanged.
type Namespace struct {
	Private     bool // made by a reset: no other session may join it
	ID          [32]byte
	Groups      []Group
	Description string // canonical JSON, cut at MaxDescription
}

// namespace: offset of each field, see docs/formats.md
const (
	nWord, nMagic, nCRC, nFlags, nGroups, nRanks = 0, 8, 12, 16, 20, 22
	nID, nDescLen, nGroup, nParts, nDesc         = 24, 56, 256, 2304, 8208
	nGroupSize                                   = 32
)

func (t *Table) namespaceOff(i int) int { return t.namespaces + i*NamespaceSize }

func namespaceCRC(b []byte) uint32 { return crc32.Checksum(b[nFlags:NamespaceSize], castagnoli) }

// PutNamespace writes record i, which must be free, and marks it used last.
func (t *Table) PutNamespace(i int, n *Namespace) error {
	ranks := 0
	if len(n.Groups) == 0 || len(n.Groups) > MaxGroups {
		return fmt.Errorf("namespace of %d groups: want 1 to %d", len(n.Groups), MaxGroups)
	}
	for _, g := range n.Groups {
		if ranks = len(n.Groups[0].Parts); len(g.Parts) != ranks {
			return fmt.Errorf("groups of %d and %d rank parts in one namespace", ranks, len(g.Parts))
		}
	}
	if ranks == 0 || ranks*len(n.Groups) > MaxParts {
		return fmt.Errorf("%d groups of %d rank parts: at most %d parts", len(n.Groups), ranks, MaxParts)
	}
	off := t.namespaceOff(i)
	b := t.b[off : off+NamespaceSize]
	clear(b[8:])
	le.PutUint32(b[nMagic:], namespaceMagic)
	if n.Private {
		le.PutUint32(b[nFlags:], 1)
	}
	le.PutUint16(b[nGroups:], uint16(len(n.Groups)))
	le.PutUint16(b[nRanks:], uint16(ranks))
	copy(b[nID:nDescLen], n.ID[:])
	for g, v := range n.Groups {
		p := b[nGroup+g*nGroupSize:]
		p[0] = byte(v.Kind)
		le.PutUint32(p[4:], v.ChunkTokens)
		le.PutUint32(p[8:], v.Window)
		for r, part := range v.Parts {
			le.PutUint32(b[nParts+4*(g*ranks+r):], part)
		}
	}
	d := n.Description[:min(len(n.Description), MaxDescription)]
	le.PutUint32(b[nDescLen:], uint32(len(d)))
	copy(b[nDesc:], d)
	le.PutUint32(b[nCRC:], namespaceCRC(b))
	t.wrote(off+8, NamespaceSize-8)
	storeWord(t.b, off, usedWord)
	t.wrote(off, 8)
	return nil
}

// DropNamespace frees record i. No entry and no session may name it.
func (t *Table) DropNamespace(i int) {
	storeWord(t.b, t.namespaceOff(i), 0)
	t.wrote(t.namespaceOff(i), 8)
}

// Namespace reads record i; used is false when it is free. The error wraps ErrDamaged.
func (t *Table) Namespace(i int) (n Namespace, used bool, err error) {
	off := t.namespaceOff(i)
	b := t.b[off : off+NamespaceSize]
	switch w := le.Uint64(b); {
	case w == 0:
		return n, false, nil
	case w != usedWord || le.Uint32(b[nMagic:]) != namespaceMagic || le.Uint32(b[nCRC:]) != namespaceCRC(b):
		return n, true, fmt.Errorf("%w: namespace record %d", ErrDamaged, i)
	}
	groups, ranks, desc := int(le.Uint16(b[nGroups:])), int(le.Uint16(b[nRanks:])), int(le.Uint32(b[nDescLen:]))
	if groups == 0 || groups > MaxGroups || ranks == 0 || groups*ranks > MaxParts || desc > MaxDescription {
		return n, true, fmt.Errorf("%w: namespace record %d: %d groups, %d ranks", ErrDamaged, i, groups, ranks)
	}
	n.Private = le.Uint32(b[nFlags:])&1 != 0
	copy(n.ID[:], b[nID:])
	n.Description = string(b[nDesc : nDesc+desc])
	for g := range groups {
		p := b[nGroup+g*nGroupSize:]
		if p[0] >= byte(lastKind) {
			return n, true, fmt.Errorf("%w: namespace record %d: group kind %d", ErrDamaged, i, p[0])
		}
		v := Group{Kind: GroupKind(p[0]), ChunkTokens: le.Uint32(p[4:]), Window: le.Uint32(p[8:])}
		for r := range ranks {
			v.Parts = append(v.Parts, le.Uint32(b[nParts+4*(g*ranks+r):]))
		}
		n.Groups = append(n.Groups, v)
	}
	return n, true, nil
}
