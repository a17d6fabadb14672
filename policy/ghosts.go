package policy

// ghosts remembers fingerprints of evicted keys in two lists, 0 for B1 and 1 for B2. Nothing is allocated before the
// first victim; later the arrays grow to the number of ghosts there ever were at once, at most limit.
type ghosts struct {
	l      links // elements from 2 on; 0 and 1 are the ends of the lists
	fp     []uint64
	weight []uint32
	inB2   []bool
	byFP   map[uint64]uint32
	free   uint32 // first unused element, chained through l.next; 0 when there is none
	count  [2]int
	size   [2]uint64 // sum of the weights
	limit  int
}

// makeGhosts returns empty lists that hold one ghost for each entry, and a few more: several victims may go before the
// Add that forgets as many.
func makeGhosts(entries int) ghosts {
	return ghosts{limit: entries + 16}
}

// find returns the ghost of a key.
func (g *ghosts) find(fp uint64) (uint32, bool) {
	i, ok := g.byFP[fp]
	return i, ok
}

// list returns which list ghost i is in.
func (g *ghosts) list(i uint32) int {
	if g.inB2[i] {
		return 1
	}
	return 0
}

// warm makes ghost i the hottest of its list: the key was offered, and the evictions that make room for it must not
// push its ghost out first.
func (g *ghosts) warm(i uint32) {
	g.l.remove(i, absent)
	g.l.pushHot(uint32(g.list(i)), i)
}

// add makes a ghost the hottest of a list. A ghost with the same fingerprint goes.
func (g *ghosts) add(list int, fp uint64, weight uint32) {
	if g.byFP == nil {
		g.byFP = make(map[uint64]uint32)
		g.l = links{next: []uint32{0, 1}, prev: []uint32{0, 1}}
		g.fp, g.weight, g.inB2 = make([]uint64, 2), make([]uint32, 2), make([]bool, 2)
	}
	if i, ok := g.byFP[fp]; ok {
		g.remove(i)
	}
	if len(g.byFP) >= g.limit {
		longer := 0
		if g.count[1] > g.count[0] {
			longer = 1
		}
		g.dropColdest(longer)
	}
	i := g.free
	if i != 0 {
		g.free = g.l.next[i]
	} else {
		i = uint32(len(g.fp))
		g.l.next, g.l.prev = append(g.l.next, absent), append(g.l.prev, absent)
		g.fp, g.weight, g.inB2 = append(g.fp, 0), append(g.weight, 0), append(g.inB2, false)
	}
	g.fp[i], g.weight[i], g.inB2[i] = fp, weight, list == 1
	g.l.pushHot(uint32(list), i)
	g.byFP[fp] = i
	g.count[list]++
	g.size[list] += uint64(weight)
}

// remove forgets ghost i.
func (g *ghosts) remove(i uint32) {
	list := g.list(i)
	g.l.remove(i, g.free)
	g.free = i
	delete(g.byFP, g.fp[i])
	g.count[list]--
	g.size[list] -= uint64(g.weight[i])
}

// dropColdest forgets the coldest ghost of a list, and reports whether there was one.
func (g *ghosts) dropColdest(list int) bool {
	if g.count[list] == 0 {
		return false
	}
	g.remove(g.l.next[list])
	return true
}
