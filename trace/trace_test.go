package trace

import (
	"math"
	"testing"
)

func TestKeyOf(t *testing.T) {
	for _, c := range []struct {
		id    uint64
		group uint32
		want  string
	}{ // printf %s ID | sha256sum
		{0, 0, "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9" + "00000000"},
		{46, 0x01020304, "25fc0e7096fc653718202dc30b0c580b8ab87eac11a700cba03a7c021bc35b0c" + "01020304"},
		{math.MaxUint64, 1, "2cdb26265b4dc65e3b44d694f121fd6de99b9e4b8ae7f08d84bfa9537635ae43" + "00000001"},
	} {
		if got := KeyOf(c.id, c.group).String(); got != c.want {
			t.Errorf("KeyOf(%d, %d) = %s, want %s", c.id, c.group, got, c.want)
		}
	}
}

func TestPrefixTokens(t *testing.T) {
	for _, c := range []struct {
		m           int
		input, want uint32
	}{
		{-1, 1000, 0}, {0, 1000, 0}, {1, 1000, 512}, {2, 1000, 1000}, {2, 1024, 1024}, {3, 1024, 1024}, {1, 0, 0},
		{1 << 23, math.MaxUint32, math.MaxUint32}, {1<<23 - 1, math.MaxUint32, math.MaxUint32 - 511},
		{math.MaxInt, math.MaxUint32, math.MaxUint32}, {math.MinInt, 7, 0},
	} {
		if got := PrefixTokens(c.m, c.input); got != c.want {
			t.Errorf("PrefixTokens(%d, %d) = %d, want %d", c.m, c.input, got, c.want)
		}
	}
}
