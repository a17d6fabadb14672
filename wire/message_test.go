package wire

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"kvlift/block"
)

func TestParseHeaderLimit(t *testing.T) {
	b := Append(nil, TDelta, FlagLast, 7, make([]byte, 100))
	if h, err := ParseHeader(b, 100); err != nil || h != (Header{100, TDelta, FlagLast, 7}) {
		t.Errorf("ParseHeader at the limit = %+v, %v", h, err)
	}
	if _, err := ParseHeader(b, 99); !errors.Is(err, ErrTooLong) {
		t.Errorf("ParseHeader above the limit: %v, want %v", err, ErrTooLong)
	}
}

// TestRefused names what no encoder writes and a parser could overlook.
func TestRefused(t *testing.T) {
	key, _ := block.MakeKey([]byte{1, 2, 3})
	offer := block.Offer{Key: key}
	one := []block.Extent{{Page: 1, Count: 1}}
	reserve := AppendReserve(nil, &Reserve{Keys: []block.Offer{offer}})
	delta := AppendDelta(nil, &Delta{Removed: []GoneKey{{Offer: offer}}, Added: []AddedKey{{offer, block.Ref{}, 1}}, Extents: one})
	reserved := AppendReserved(nil, &Reserved{Slots: []Slot{{Extents: 1}, {Outcome: 3}}, Removed: []GoneKey{{Offer: offer}}, Extents: one})
	finish := AppendFinish(nil, &Finish{Hint: Closed})
	const added = deltaHead + GoneSize
	for _, c := range []struct {
		name string
		typ  Type
		b    []byte
		at   int
		to   byte
	}{
		{"key without bytes", TReserve, reserve, reserveHead + 40, 0},
		{"key of 41 bytes", TReserve, reserve, reserveHead + 40, 41},
		{"key pad", TReserve, reserve, reserveHead + 41, 1},
		{"bytes behind the key", TReserve, reserve, reserveHead + 39, 1},
		{"reserve: more keys than bytes", TReserve, reserve, 16, 2},
		{"reserve: fewer keys than bytes", TReserve, reserve, 16, 0},
		{"reserve: absurd count", TReserve, reserve, 19, 0xff},
		{"reserve: pad", TReserve, reserve, 20, 1},
		{"delta: pad", TDelta, delta, 20, 1},
		{"delta: bytes behind a removed key", TDelta, delta, deltaHead + 3, 1},
		{"delta: key without extents", TDelta, delta, added + KeySize + RefSize, 0},
		{"delta: more extents than there are", TDelta, delta, added + KeySize + RefSize, 2},
		{"delta: added pad", TDelta, delta, added + KeySize + RefSize + 7, 1},
		{"delta: extent of no page", TDelta, delta, added + AddedSize + 4, 0},
		{"delta: extent beyond the last page", TDelta, delta, added + AddedSize + 7, 0xff},
		{"reserved: outcome 4", TReserved, reserved, reservedHead + SlotSize, 4},
		{"reserved: accepted without extents", TReserved, reserved, reservedHead + 4, 0},
		{"reserved: refused with extents", TReserved, reserved, reservedHead, 3},
		{"reserved: slot pad", TReserved, reserved, reservedHead + 2, 1},
		{"reserved: pad", TReserved, reserved, 22, 1},
		{"finish: hint 4", TFinish, finish, 16, 4},
		{"finish: pad", TFinish, finish, 23, 1},
	} {
		b := slices.Clone(c.b)
		if _, err := reencode(c.typ, b); err != nil {
			t.Fatalf("%s: the sound message is refused: %v", c.name, err)
		}
		b[c.at] = c.to
		if c.name == "delta: extent beyond the last page" {
			copy(b[c.at-7:], []byte{0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0})
		}
		if _, err := reencode(c.typ, b); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: error %v, want %v", c.name, err, ErrMalformed)
		}
	}
	if _, err := ParseBegin(make([]byte, 16+MaxRequestName+1)); !errors.Is(err, ErrMalformed) {
		t.Errorf("a name above the limit: error %v, want %v", err, ErrMalformed)
	}
	long := AppendBegin(nil, &Begin{Name: strings.Repeat("x", MaxRequestName+1)})
	if m, err := ParseBegin(long); err != nil || len(m.Name) != MaxRequestName {
		t.Errorf("AppendBegin cuts a name to %d bytes, %v, want %d", len(m.Name), err, MaxRequestName)
	}
	for _, s := range []string{"", "{", "{}{}", "{} ]", "[]", `{"protocol":[1,0]} x`, `{"rank":"1"}`, `{"rank":1e99}`} {
		var m Hello
		if err := ParseJSON([]byte(s), &m); !errors.Is(err, ErrMalformed) {
			t.Errorf("ParseJSON(%q): error %v, want %v", s, err, ErrMalformed)
		}
	}
	if err := ParseJSON([]byte(" {\"role\":\"worker\",\"later\":{\"minor\":[1]}}\n"), &Hello{}); err != nil {
		t.Errorf("a field of a newer minor: %v, want none", err)
	}
	for _, s := range []string{"", "0", "00112233445566", "001122334455667788", "zz11223344556677"} {
		if _, err := ParseID(s, 8); !errors.Is(err, ErrMalformed) {
			t.Errorf("ParseID(%q, 8): error %v, want %v", s, err, ErrMalformed)
		}
	}
}

// TestLimits: the largest messages fit a frame, and one more does not.
func TestLimits(t *testing.T) {
	if n := reserveHead + MaxOffers*KeySize; n > MaxFrame || n+KeySize <= MaxFrame {
		t.Errorf("%d offers are %d bytes of %d", MaxOffers, n, MaxFrame)
	}
	if n := refsHead + MaxRefs*RefSize; n > MaxFrame || n+RefSize <= MaxFrame {
		t.Errorf("%d refs are %d bytes of %d", MaxRefs, n, MaxFrame)
	}
	for _, v := range readVectors(t) {
		if v.typ == TDelta || v.typ == TSnapshot {
			var d Delta
			if err := d.Parse(v.payload()); err != nil {
				t.Fatal(err)
			}
			if n := DeltaSize(len(d.Removed), len(d.Added), len(d.Extents)); n != len(v.payload()) {
				t.Errorf("%v: DeltaSize = %d, want %d", &v, n, len(v.payload()))
			}
		}
	}
}

// TestNoAllocation: a connection parses its hot messages into the same structs for ever.
func TestNoAllocation(t *testing.T) {
	var (
		delta    Delta
		reserve  Reserve
		reserved Reserved
		refs     Refs
	)
	parse := map[Type]func([]byte) error{TDelta: delta.Parse, TSnapshot: delta.Parse, TReserve: reserve.Parse, TReserved: reserved.Parse, TPin: refs.Parse, TTouch: refs.Parse}
	for range 2 { // once so that every slice is as long as the longest vector needs
		for _, v := range readVectors(t) {
			f := parse[v.typ]
			if f == nil {
				continue
			}
			if err := f(v.payload()); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, v := range readVectors(t) {
		f, b := parse[v.typ], v.payload()
		if f == nil {
			continue
		}
		if n := testing.AllocsPerRun(20, func() { _ = f(b) }); n != 0 {
			t.Errorf("%v: %v allocations, want none", &v, n)
		}
	}
	var buf []byte
	for range 2 {
		buf = AppendReserve(AppendDelta(buf[:0], &delta), &reserve)
	}
	if n := testing.AllocsPerRun(20, func() { buf = AppendReserve(AppendDelta(buf[:0], &delta), &reserve) }); n != 0 {
		t.Errorf("encoding into a buffer that is long enough: %v allocations, want none", n)
	}
}
