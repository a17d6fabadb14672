package meta

import (
	"fmt"
	"hash/crc32"

	"kvlift/block"
)

// overflow: offset of each field, see docs/formats.md
const oOwner, oGen, oNext, oCRC, oExtents = 0, 4, 8, 12, 16

// OverflowNeeded returns how many overflow records a key of n extents takes.
func OverflowNeeded(n int) int {
	return max(0, n-InlineExtents+OverflowSlots-1) / OverflowSlots
}

func (t *Table) overflowOff(o uint32) int { return t.overflow + int(o)*OverflowSize }

func overflowCRC(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:oCRC], castagnoli), castagnoli, b[oExtents:OverflowSize])
}

func (t *Table) writeOverflow(o, owner, gen, next uint32, xs []block.Extent) {
	off := t.overflowOff(o)
	b := t.b[off : off+OverflowSize]
	clear(b)
	le.PutUint32(b[oOwner:], owner)
	le.PutUint32(b[oGen:], gen)
	le.PutUint32(b[oNext:], next)
	for i, x := range xs {
		le.PutUint32(b[oExtents+8*i:], x.Page)
		le.PutUint32(b[oExtents+8*i+4:], x.Count)
	}
	le.PutUint32(b[oCRC:], overflowCRC(b))
	t.wrote(off, OverflowSize)
}

// readOverflow follows a chain that must hold exactly n extents of this owner and generation. A loop cannot hold it up:
// every step takes extents off n, and the caller knows that n is not more than the table holds.
func (t *Table) readOverflow(owner, gen, o uint32, n int, dst []block.Extent) ([]block.Extent, error) {
	for ; n > 0; n -= OverflowSlots {
		if o >= t.Overflow {
			return dst, fmt.Errorf("%w: entry %d: overflow record %d of %d", ErrDamaged, owner, o, t.Overflow)
		}
		b := t.b[t.overflowOff(o) : t.overflowOff(o)+OverflowSize]
		if le.Uint32(b[oCRC:]) != overflowCRC(b) || le.Uint32(b[oOwner:]) != owner || le.Uint32(b[oGen:]) != gen {
			return dst, fmt.Errorf("%w: entry %d: overflow record %d is not its own", ErrDamaged, owner, o)
		}
		for i := range min(n, OverflowSlots) {
			dst = append(dst, block.Extent{Page: le.Uint32(b[oExtents+8*i:]), Count: le.Uint32(b[oExtents+8*i+4:])})
		}
		o = le.Uint32(b[oNext:])
	}
	if o != block.NoEntry {
		return dst, fmt.Errorf("%w: entry %d: overflow chain goes on behind its last extent", ErrDamaged, owner)
	}
	return dst, nil
}
