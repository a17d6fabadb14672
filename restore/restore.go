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
	"slices"

	"kvlift/meta"
)

// Class is what a stored chunk is worth. The order is that of eviction, the last first.
type Class uint8

const (
	Needed   Class = iota // by the deepest restore point, or by one where conversations fork
	Optional              // by a restore point that a deeper one of the same chain makes optional
	Useless               // by no restore point
)

func (c Class) String() string { return [...]string{"needed", "optional", "useless"}[c] }

// Group is what matters of a group.
type Group struct {
	Kind   meta.GroupKind
	Chunk  uint32 // tokens
	Window uint32 // chunks that a load needs; 0 unknown: then the group counts as full
}

// counts returns how a group is used.
func (g *Group) kind() meta.GroupKind {
	if (g.Kind == meta.Window || g.Kind == meta.Draft) && g.Window == 0 {
		return meta.Full
	}
	if g.Kind == meta.Draft {
		return meta.Window
	}
	return g.Kind
}

// Item is one stored chunk of a chain.
type Item struct {
	Group    uint16
	Position uint32 // tokens from the start to its end
	Gap      bool   // of a full group: its predecessor is known to be missing
	Fork     bool   // of a full group: more than one stored chunk continues it
}

// Classify writes the class of each item to out, which must be as long as items, and returns the deepest restore point,
// 0 when there is none. Positions are known (above zero) and no two items of a group share one. running says that the
// request goes on: then only what a deeper restore point has overtaken loses its place, since what looks useless may be
// waiting for chunks that are offered later.
func Classify(groups []Group, items []Item, out []Class, running bool) (deepest uint32) {
	c := newChain(groups, items)
	points := c.points()
	if len(points) > 0 {
		deepest = points[len(points)-1]
	}
	for i := range items {
		out[i] = c.class(&items[i], points, deepest)
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
	at     []map[uint32]bool // per group: positions that are stored
	reach  []uint32          // per full group: the end of its unbroken run
	forks  map[uint32]bool
	mixed  bool // there are state or window groups
}

func newChain(groups []Group, items []Item) *chain {
	c := &chain{groups: groups, kinds: make([]meta.GroupKind, len(groups)), at: make([]map[uint32]bool, len(groups)), reach: make([]uint32, len(groups)), forks: map[uint32]bool{}}
	for g := range groups {
		c.kinds[g] = groups[g].kind()
		c.mixed = c.mixed || c.kinds[g] != meta.Full
		c.at[g] = map[uint32]bool{}
	}
	runs := make([][]Item, len(groups))
	for _, it := range items {
		c.at[it.Group][it.Position] = true
		if c.kinds[it.Group] == meta.Full {
			runs[it.Group] = append(runs[it.Group], it)
			if it.Fork {
				c.forks[it.Position] = true
			}
		}
	}
	for g, run := range runs {
		slices.SortFunc(run, func(a, b Item) int { return int(int64(a.Position) - int64(b.Position)) })
		for i, it := range run {
			if it.Gap || i > 0 && it.Position-run[i-1].Position != groups[g].Chunk {
				break
			}
			c.reach[g] = it.Position
		}
	}
	return c
}

// points returns all restore points, ascending.
func (c *chain) points() []uint32 {
	limit := ^uint32(0)
	var candidates map[uint32]bool
	for g, k := range c.kinds {
		switch k {
		case meta.Full:
			limit = min(limit, c.reach[g])
		case meta.StateG:
			candidates = c.at[g]
		case meta.Window:
			if candidates == nil {
				candidates = c.at[g]
			}
		}
	}
	if !c.mixed { // the end of the shortest run is the only one that matters
		if limit == 0 || limit == ^uint32(0) {
			return nil
		}
		return []uint32{limit}
	}
	var out []uint32
	for b := range candidates {
		if b <= limit && c.isPoint(b) {
			out = append(out, b)
		}
	}
	slices.Sort(out)
	return out
}

// isPoint tells whether everything that a load to b needs is stored, runs of full groups apart.
func (c *chain) isPoint(b uint32) bool {
	for g, k := range c.kinds {
		chunk := c.groups[g].Chunk
		if chunk == 0 {
			return false
		}
		switch k {
		case meta.Full:
			if b%chunk != 0 {
				return false
			}
		case meta.StateG:
			if !c.at[g][b] {
				return false
			}
		case meta.Window:
			if b%chunk != 0 {
				return false
			}
			for i := range c.span(g, b) {
				if !c.at[g][b-i*chunk] {
					return false
				}
			}
		}
	}
	return true
}

// span is how many chunks of a window group a load to b needs.
func (c *chain) span(g int, b uint32) uint32 { return min(c.groups[g].Window, b/c.groups[g].Chunk) }

func (c *chain) class(it *Item, points []uint32, deepest uint32) Class {
	switch c.kinds[it.Group] {
	case meta.Full:
		switch {
		case !c.mixed && it.Position <= c.reach[it.Group], it.Position <= deepest:
			return Needed
		}
		return Useless
	case meta.StateG:
		return c.best(points, deepest, func(b uint32) bool { return b == it.Position })
	}
	g := int(it.Group)
	return c.best(points, deepest, func(b uint32) bool {
		return it.Position <= b && (b-it.Position)/c.groups[g].Chunk < c.span(g, b)
	})
}

// best is the class of what the restore points for which uses holds need.
func (c *chain) best(points []uint32, deepest uint32, uses func(uint32) bool) Class {
	class := Useless
	for _, b := range points {
		if uses(b) {
			if b == deepest || c.forks[b] {
				return Needed
			}
			class = Optional
		}
	}
	return class
}
