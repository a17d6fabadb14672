package holders

import (
	"cmp"
	"slices"
)

// span is a range of a file's bytes, to exclusive.
type span struct{ from, to uint64 }

// ranges are the parts of files that somebody maps; spans of one file may overlap.
type ranges map[ID][]span

func (r ranges) add(other ranges) {
	for id, s := range other {
		r[id] = append(r[id], s...)
	}
}

// bytes counts each byte of each file once.
func (r ranges) bytes() uint64 {
	var sum uint64
	for _, spans := range r {
		slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.from, b.from) })
		var end uint64
		for _, s := range spans {
			if from := max(s.from, end); s.to > from {
				if sum += s.to - from; sum < s.to-from {
					return ^uint64(0) // no machine has that much: the text was made up
				}
				end = s.to
			}
		}
	}
	return sum
}
