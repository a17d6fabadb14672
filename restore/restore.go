// Package restore says what a chain of stored chunks is good for. The unit that a user gets back is a restore point: a
// boundary b for which the tier has all full-attention chunks from 0 to b, one state at b for every state group, and the
// last chunks before b for every window group. A chunk that belongs to none can serve nothing.
//
//	tokens      0         832        1664       2496
//	full        ├────0────┼────1─────┼────2─────┼────3──  …   all of them up to b
//	state                 ●          ●          ●             one, at b
//	window (2)                  ├──┼──┤   ├──┼──┤             the last ones before b
//
// The package is pure: no clock, no I/O, no state. All functions may be called concurrently.
package restore

import (
	"cmp"
	"slices"

	"kvlift/meta"
)

// Class is what a stored chunk is worth. The order is that of eviction, the last first.
type Class uint8

const (
	Needed   Class = iota // by a restore point that is kept: the deepest, or another that has shown its worth
	Optional              // by a restore point that a deeper one of the same chain makes optional
	Useless               // by no restore point
)

func (c Class) String() string { return [...]string{"needed", "optional", "useless"}[c] }

// Group is what matters of a group.
type Group struct {
	Kind   meta.GroupKind
	Chunk  uint32 // tokens
	Window uint32 // chunks that a load needs; 0 unknown: then the group counts as full
	Pages  uint32 // of one chunk; 0 unknown
}

// kind returns how a group is used.
func (g *Group) kind() meta.GroupKind {
	if (g.Kind == meta.Window || g.Kind == meta.Draft) && g.Window == 0 {
		return meta.Full
	}
	if g.Kind == meta.Draft {
		return meta.Window
	}
	return g.Kind
}

// Item is one stored chunk of a chain. At a position that is no multiple of its group's chunk stands the part of a chunk in
// which a prompt has ended; of a full group it serves a load to that position alone.
type Item struct {
	Group    uint16
	Position uint32 // tokens from the start to its end
	Gap      bool   // of a full group: its predecessor is known to be missing
	Fork     bool   // of a full group: more than one chunk has gone on from it
	Used     bool   // of a state or window group: a load has read it
}

// Classify writes the class of each item to out, which must be as long as items, and returns the deepest restore point,
// 0 when there is none. Positions are known (above zero) and no two items of a group share one. running says that the
// request goes on: then only what a deeper restore point has overtaken loses its place, since what looks useless may be
// waiting for chunks that are offered later; but of what it has overtaken itself only what other prompts share is kept.
func Classify(groups []Group, items []Item, out []Class, running bool) (deepest uint32) {
	c := newChain(groups, items)
	c.points(running)
	if len(c.at) > 0 {
		deepest = c.at[len(c.at)-1].end
	}
	for i := range items {
		out[i] = c.class(&items[i], deepest)
		if running && (items[i].Position >= deepest || c.kinds[items[i].Group] == meta.Full) {
			out[i] = Needed
		}
	}
	return deepest
}

// chain is a set of items in a form that answers questions.
type chain struct {
	groups []Group
	kinds  []meta.GroupKind
	stored []map[uint32]bool // per group: positions that are stored
	used   []map[uint32]bool // per group: of these, what a load has read
	reach  []uint32          // per full group: the end of its unbroken run
	forks  []uint32          // where prompts part
	mixed  bool              // there are state or window groups
	at     []point           // restore points, ascending
}

// point is a restore point.
type point struct {
	end  uint32
	keep bool // more than optional
}

func newChain(groups []Group, items []Item) *chain {
	n := len(groups)
	c := &chain{groups: groups, kinds: make([]meta.GroupKind, n), stored: make([]map[uint32]bool, n), used: make([]map[uint32]bool, n), reach: make([]uint32, n)}
	for g := range groups {
		c.kinds[g] = groups[g].kind()
		c.mixed = c.mixed || c.kinds[g] != meta.Full
		c.stored[g], c.used[g] = map[uint32]bool{}, map[uint32]bool{}
	}
	runs := make([][]Item, n)
	for _, it := range items {
		c.stored[it.Group][it.Position] = true
		switch {
		case c.kinds[it.Group] != meta.Full:
			if it.Used {
				c.used[it.Group][it.Position] = true
			}
		case c.whole(int(it.Group), it.Position):
			runs[it.Group] = append(runs[it.Group], it)
			if it.Fork {
				c.forks = append(c.forks, it.Position)
			}
		}
	}
	for g, run := range runs {
		slices.SortFunc(run, func(a, b Item) int { return cmp.Compare(a.Position, b.Position) })
		for i, it := range run {
			if it.Gap || i > 0 && it.Position-run[i-1].Position != groups[g].Chunk {
				break
			}
			c.reach[g] = it.Position
		}
	}
	return c
}

// whole tells whether a chunk of a group ends at b.
func (c *chain) whole(g int, b uint32) bool {
	return c.groups[g].Chunk == 0 || b%c.groups[g].Chunk == 0
}

// reaches tells whether a full group has everything from 0 to b: the whole chunks, and the part behind them if b is in one.
func (c *chain) reaches(g int, b uint32) bool {
	if c.whole(g, b) {
		return b <= c.reach[g]
	}
	return c.stored[g][b] && b-b%c.groups[g].Chunk <= c.reach[g]
}

// points finds all restore points, and which of them are kept for more than their own sake: the deepest, and where prompts
// part the deepest one that they share; and with one inside a chunk, the one before that chunk. Of a request that has ended
// also what a load has used, and the one before the deepest if it weighs little, since prompts often differ near their ends.
func (c *chain) points(running bool) {
	if !c.mixed { // the end of the shortest run is the only one that matters
		limit := ^uint32(0)
		for _, r := range c.reach {
			limit = min(limit, r)
		}
		if limit > 0 && len(c.reach) > 0 {
			c.at = []point{{limit, true}}
		}
		return
	}
	var candidates map[uint32]bool
	for g, k := range c.kinds {
		if k == meta.StateG || k == meta.Window && candidates == nil {
			candidates = c.stored[g]
		}
	}
	for b := range candidates {
		if c.isPoint(b) {
			c.at = append(c.at, point{b, !running && c.wasUsed(b)})
		}
	}
	if len(c.at) == 0 {
		return
	}
	slices.SortFunc(c.at, func(a, b point) int { return cmp.Compare(a.end, b.end) })
	last := len(c.at) - 1
	c.at[last].keep = true
	for _, f := range c.forks {
		if i := c.upTo(f + 1); i > 0 {
			c.at[i-1].keep = true
		}
	}
	if last > 0 && !running && c.cheap(c.at[last-1].end) {
		c.at[last-1].keep = true
	}
	for i := last; i > 0; i-- { // engines look for the end of a whole chunk first, and for the part of one from there
		if base := c.base(c.at[i].end); c.at[i].keep && base < c.at[i].end && c.at[i-1].end >= base {
			c.at[i-1].keep = true
		}
	}
}

// base is the last end of whole chunks up to a restore point: itself, unless it is inside one.
func (c *chain) base(b uint32) uint32 {
	for g, k := range c.kinds {
		if k == meta.Full && !c.whole(g, b) {
			return b - b%c.groups[g].Chunk
		}
	}
	return b
}

// upTo is the number of restore points below b.
func (c *chain) upTo(b uint32) int {
	i, _ := slices.BinarySearchFunc(c.at, b, func(p point, b uint32) int { return cmp.Compare(p.end, b) })
	return i
}

// isPoint tells whether everything that a load to b needs is stored.
func (c *chain) isPoint(b uint32) bool {
	for g, k := range c.kinds {
		chunk := c.groups[g].Chunk
		if chunk == 0 {
			return false
		}
		switch k {
		case meta.Full:
			if !c.reaches(g, b) {
				return false
			}
		case meta.StateG:
			if !c.stored[g][b] {
				return false
			}
		case meta.Window:
			if b%chunk != 0 {
				return false
			}
			for i := range c.span(g, b) {
				if !c.stored[g][b-i*chunk] {
					return false
				}
			}
		}
	}
	return true
}

// wasUsed tells whether a load to the restore point b has read what it alone needs.
func (c *chain) wasUsed(b uint32) bool {
	for g, k := range c.kinds {
		switch k {
		case meta.StateG:
			if !c.used[g][b] {
				return false
			}
		case meta.Window:
			for i := range c.span(g, b) {
				if !c.used[g][b-i*c.groups[g].Chunk] {
					return false
				}
			}
		}
	}
	return true
}

// cheapPart is how many times more the chunks up to a restore point have to weigh than its states and windows.
const cheapPart = 8

// cheap tells whether the states and windows of a restore point weigh little against the chunks that they make usable.
func (c *chain) cheap(b uint32) bool {
	chunks, own := uint64(0), uint64(0)
	for g, k := range c.kinds {
		n := uint64(c.groups[g].Pages)
		switch {
		case n == 0:
			return false
		case k == meta.Full:
			chunks += uint64(b/c.groups[g].Chunk) * n
		case k == meta.StateG:
			own += n
		default:
			own += uint64(c.span(g, b)) * n
		}
	}
	return chunks >= cheapPart*own
}

// span is how many chunks of a window group a load to b needs.
func (c *chain) span(g int, b uint32) uint32 { return min(c.groups[g].Window, b/c.groups[g].Chunk) }

func (c *chain) class(it *Item, deepest uint32) Class {
	g := int(it.Group)
	switch c.kinds[g] {
	case meta.Full:
		switch {
		case !c.mixed && c.reaches(g, it.Position), c.whole(g, it.Position) && it.Position <= deepest:
			return Needed
		case c.whole(g, it.Position):
			return Useless
		}
		return c.best(it.Position, 1)
	case meta.StateG:
		return c.best(it.Position, 1)
	}
	return c.best(it.Position, uint64(c.groups[g].Window)*uint64(c.groups[g].Chunk))
}

// best is the class of what the restore points from b on, within so many tokens, need.
func (c *chain) best(b uint32, within uint64) Class {
	class := Useless
	for _, p := range c.at[c.upTo(b):] {
		switch {
		case uint64(p.end-b) >= within:
			return class
		case p.keep:
			return Needed
		}
		class = Optional
	}
	return class
}
