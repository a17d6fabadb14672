package meta

import (
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"kvlift/block"
)

func testNamespaces() []Namespace {
	wide := Namespace{ID: [32]byte{0xff, 31: 0xee}, Private: true, Description: strings.Repeat("d", MaxDescription)}
	for g := range MaxGroups {
		v := Group{Kind: GroupKind(g % int(lastKind)), ChunkTokens: uint32(g), Window: uint32(g * g), Parts: make([]uint32, MaxParts/MaxGroups)}
		for r := range v.Parts {
			v.Parts[r] = uint32(1000*g + r)
		}
		wide.Groups = append(wide.Groups, v)
	}
	return []Namespace{
		{ID: [32]byte{1}, Groups: []Group{{ChunkTokens: 16, Parts: []uint32{5000}}}, Description: `{"groups":[],"identity":{"model":"m"}}`},
		wide,
		{ID: [32]byte{2}, Groups: []Group{{Kind: StateG, ChunkTokens: 1<<32 - 1, Parts: make([]uint32, MaxParts)}}},
	}
}

func testProcesses() []Process {
	return []Process{
		{Session: 0xcafe, Role: Manager, WorldSize: 2, PID: 4211, UID: 1000, Start: 1 << 40, EngineID: "vllm-offload-0123456789abcdef-dp0"},
		{Session: 1<<64 - 1, Role: Worker, Rank: 1471, WorldSize: 1472, Namespace: NoNamespace, PID: 1<<32 - 1, UID: 1<<32 - 1, Start: 1<<64 - 1, EngineID: strings.Repeat("e", MaxEngineID)},
		{Role: Worker, Namespace: 63},
	}
}

func TestNamespaceRoundTrip(t *testing.T) {
	tb, b := newTable(t, testHeader())
	for i, want := range testNamespaces() {
		for _, at := range []int{i, MaxNamespaces - 1 - i} {
			if err := tb.PutNamespace(at, &want); err != nil {
				t.Fatal(err)
			}
			got, used, err := reopen(t, b).Namespace(at)
			if !used || err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("namespace %d is %+v, %v, %v, want %+v", at, got, used, err, want)
			}
			tb.DropNamespace(at)
			if _, used, err := tb.Namespace(at); used || err != nil {
				t.Fatalf("dropped namespace %d: used %v, %v", at, used, err)
			}
		}
	}
	// A longer description is cut; the id is of the whole one.
	n := testNamespaces()[0]
	n.Description = strings.Repeat("x", MaxDescription+1)
	if err := tb.PutNamespace(0, &n); err != nil {
		t.Fatal(err)
	}
	if got, _, err := tb.Namespace(0); err != nil || got.Description != n.Description[:MaxDescription] {
		t.Errorf("description of %d bytes, %v, want %d", len(got.Description), err, MaxDescription)
	}
}

func TestNamespaceRefused(t *testing.T) {
	tb, b := newTable(t, testHeader())
	before := slices.Clone(b)
	for name, groups := range map[string][]Group{
		"no groups":     nil,
		"65 groups":     slices.Repeat([]Group{{Parts: []uint32{1}}}, MaxGroups+1),
		"no ranks":      {{}},
		"unequal ranks": {{Parts: []uint32{1}}, {Parts: []uint32{1, 2}}},
		"1473 parts":    {{Parts: make([]uint32, MaxParts+1)}},
		"64 × 24 parts": slices.Repeat([]Group{{Parts: make([]uint32, 24)}}, 64),
	} {
		if err := tb.PutNamespace(0, &Namespace{Groups: groups}); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if !slices.Equal(before, b) {
		t.Error("what was refused left something behind")
	}
}

// TestNamespaceDamaged: counts that a checksum covers are checked all the same, since a checksum can be computed.
func TestNamespaceDamaged(t *testing.T) {
	for name, change := range map[string]func(b []byte){
		"no groups":              func(b []byte) { le.PutUint16(b[nGroups:], 0) },
		"65 groups":              func(b []byte) { le.PutUint16(b[nGroups:], MaxGroups+1) },
		"no ranks":               func(b []byte) { le.PutUint16(b[nRanks:], 0) },
		"more parts than fit":    func(b []byte) { le.PutUint16(b[nRanks:], MaxParts+1) },
		"unknown kind":           func(b []byte) { b[nGroup] = byte(lastKind) },
		"description too long":   func(b []byte) { le.PutUint32(b[nDescLen:], MaxDescription+1) },
		"description of 4 GiB":   func(b []byte) { le.PutUint32(b[nDescLen:], 1<<32-1) },
		"magic":                  func(b []byte) { le.PutUint32(b[nMagic:], sessionMagic) },
		"word of another record": func(b []byte) { le.PutUint64(b, sessionWord(0)) },
		"word of old":            func(b []byte) { le.PutUint64(b, 1) },
	} {
		tb, b := newTable(t, testHeader())
		n := testNamespaces()[0]
		if err := tb.PutNamespace(5, &n); err != nil {
			t.Fatal(err)
		}
		r := b[tb.namespaceOff(5) : tb.namespaceOff(5)+NamespaceSize]
		change(r)
		le.PutUint32(r[nCRC:], namespaceCRC(r))
		if _, used, err := tb.Namespace(5); !used || !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: used %v, error %v, want %v", name, used, err, ErrDamaged)
		}
	}
}

func TestProcessRoundTrip(t *testing.T) {
	tb, b := newTable(t, testHeader())
	for i, want := range testProcesses() {
		for _, at := range []int{i, MaxSessions - 1 - i} {
			tb.PutProcess(at, &want)
			got, used, err := reopen(t, b).Process(at)
			if !used || err != nil || got != want {
				t.Fatalf("process %d is %+v, %v, %v, want %+v", at, got, used, err, want)
			}
			for _, ns := range []uint16{0, 17, NoNamespace} {
				tb.MoveProcess(at, ns)
				moved := want
				moved.Namespace = ns
				if got, used, err := tb.Process(at); !used || err != nil || got != moved {
					t.Fatalf("moved to %d: %+v, %v, %v, want %+v", ns, got, used, err, moved)
				}
			}
			tb.DropProcess(at)
			if _, used, err := tb.Process(at); used || err != nil {
				t.Fatalf("dropped process %d: used %v, %v", at, used, err)
			}
		}
	}
	p := Process{Role: Worker, EngineID: strings.Repeat("e", MaxEngineID+1)}
	tb.PutProcess(0, &p)
	if got, _, err := tb.Process(0); err != nil || len(got.EngineID) != MaxEngineID {
		t.Errorf("engine id of %d bytes, %v, want it cut to %d", len(got.EngineID), err, MaxEngineID)
	}
	for name, change := range map[string]func(b []byte){
		"no role":        func(b []byte) { b[sRole] = 0 },
		"role 3":         func(b []byte) { b[sRole] = 3 },
		"engine id long": func(b []byte) { b[sIDLen] = MaxEngineID + 1 },
		"magic":          func(b []byte) { le.PutUint32(b[sMagic:], namespaceMagic) },
	} {
		tb.PutProcess(1, &testProcesses()[0])
		r := b[tb.sessionOff(1) : tb.sessionOff(1)+SessionSize]
		change(r)
		le.PutUint32(r[sCRC:], crc32.Checksum(r[sSession:], castagnoli))
		if _, used, err := tb.Process(1); !used || !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: used %v, error %v, want %v", name, used, err, ErrDamaged)
		}
		tb.DropProcess(1)
	}
}

func TestEntryRoundTrip(t *testing.T) {
	for _, n := range []int{0, 1, 4, 5, 10, 11, 16, 17, 4 + 6*8} {
		t.Run(fmt.Sprint(n, " extents"), func(t *testing.T) {
			tb, b := newTable(t, testHeader())
			want := testEntry(n)
			want.State, want.Gen = Reserved, 1
			gen := reserve(tb, 5, &want, 0)
			tb = reopen(t, b)
			got, err := tb.Entry(5, nil)
			if err != nil || gen != 1 || !reflect.DeepEqual(got, want) {
				t.Fatalf("Entry = %+v, %v, generation %d, want %+v", got, err, gen, want)
			}
			buf := []block.Extent{{Page: 1, Count: 1}}
			if got, err := tb.Entry(5, buf); err != nil || !slices.Equal(got.Extents, append(buf, want.Extents...)) {
				t.Errorf("appended to a buffer: %v, %v", got.Extents, err)
			}
			if got := tb.Extents(5, nil); !slices.Equal(got, want.Extents) {
				t.Errorf("Extents = %v, want %v", got, want.Extents)
			}
			if got := tb.OverflowOf(5, nil); len(got) != OverflowNeeded(n) {
				t.Errorf("OverflowOf = %v, want %d records", got, OverflowNeeded(n))
			}
			if ns, g, pos, pages := tb.Place(5); ns != want.Namespace || g != want.Group || pos != want.Position || pages != want.Pages {
				t.Errorf("Place = %d, %d, %d, %d", ns, g, pos, pages)
			}
			if got := tb.Key(5); got != want.Key || !tb.KeyEqual(5, want.Namespace, &want.Key) {
				t.Errorf("Key = %v, want %v", got, want.Key)
			}
			other := testKey(200, 36)
			if tb.KeyEqual(5, want.Namespace, &other) || tb.KeyEqual(5, want.Namespace+1, &want.Key) {
				t.Error("KeyEqual takes another key or namespace")
			}
			for _, s := range []State{Ready, Evicting, Removed} {
				tb.SetState(5, s)
				tb.SetMarks(5, s != Evicting, uint8(s)-2)
				tb.SetTick(5, uint64(s)<<40)
				want.State, want.Frequent, want.Class, want.Tick = s, s != Evicting, uint8(s)-2, uint64(s)<<40
				if got, err := tb.Entry(5, nil); err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("%v: Entry = %+v, %v, want %+v", s, got, err, want)
				}
			}
			tb.SetState(5, Free)
			if got, err := tb.Entry(5, nil); err != nil || !reflect.DeepEqual(got, Entry{Gen: 1}) {
				t.Errorf("free: %+v, %v", got, err)
			}
			if gen := reserve(tb, 5, &want, 0); gen != 2 {
				t.Errorf("the next generation is %d, want 2", gen)
			}
		})
	}
}

func TestOverflowNeeded(t *testing.T) {
	for n, want := range map[int]int{0: 0, 1: 0, 4: 0, 5: 1, 10: 1, 11: 2, 16: 2, 17: 3} {
		if got := OverflowNeeded(n); got != want {
			t.Errorf("OverflowNeeded(%d) = %d, want %d", n, got, want)
		}
	}
}

// TestWords: of all words only those of a daemon are taken, and no single bit leads from one used state to another.
func TestWords(t *testing.T) {
	for s := range lastState {
		for m := range marks(6) {
			w := makeWord(s, m, 0xdeadbeef)
			got, f, gen, ok := splitWord(w)
			if !ok || got != s || f != m || gen != 0xdeadbeef || makeMarks(m.frequent(), m.class()) != m {
				t.Errorf("splitWord(makeWord(%v, %v)) = %v, %v, %x, %v", s, m, got, f, gen, ok)
			}
			for bit := range 32 {
				if got, _, _, ok := splitWord(w ^ 1<<bit); ok && got != s {
					t.Errorf("%v with bit %d turned is %v", s, bit, got)
				}
			}
		}
	}
	if s, f, gen, ok := splitWord(0); s != Free || f != 0 || gen != 0 || !ok {
		t.Error("a zeroed record is not free")
	}
	n := 0
	for w := range uint64(1 << 20) {
		if _, _, _, ok := splitWord(w); ok {
			n++
		}
	}
	if n != 6*int(lastState) {
		t.Errorf("%d of the words below 2^20 are taken, want %d", n, 6*lastState)
	}
	if got := State(9).String(); got != "state 9" || Ready.String() != "READY" {
		t.Errorf("state 9 is called %q", got)
	}
}

// TestEntryDamaged: what a checksum covers is checked all the same, since a checksum can be computed.
func TestEntryDamaged(t *testing.T) {
	for name, change := range map[string]func(b []byte){
		"no key":                   func(b []byte) { b[eKeyLen] = 0 },
		"key of 41 bytes":          func(b []byte) { b[eKeyLen] = block.MaxKeyLen + 1 },
		"bytes behind the key":     func(b []byte) { b[eKey+39] = 1 },
		"5 inline extents":         func(b []byte) { b[eInline] = 5 },
		"3 inline extents of 16":   func(b []byte) { b[eInline] = 3 },
		"more extents than pages":  func(b []byte) { le.PutUint32(b[eExtents:], 1<<31) },
		"more than the table has":  func(b []byte) { le.PutUint32(b[eExtents:], 4+6*9); le.PutUint32(b[ePages:], 1<<20) },
		"4 billion of each":        func(b []byte) { le.PutUint32(b[eExtents:], 1<<32-1); le.PutUint32(b[ePages:], 1<<32-1) },
		"one extent more":          func(b []byte) { le.PutUint32(b[eExtents:], 17) },
		"one extent less":          func(b []byte) { le.PutUint32(b[eExtents:], 15) },
		"no chain":                 func(b []byte) { le.PutUint32(b[eOverflow:], block.NoEntry) },
		"chain outside the table":  func(b []byte) { le.PutUint32(b[eOverflow:], 8) },
		"chain from its middle":    func(b []byte) { le.PutUint32(b[eOverflow:], 1) },
		"extent without pages":     func(b []byte) { le.PutUint32(b[eInl+4:], 0) },
		"extent outside the arena": func(b []byte) { le.PutUint32(b[eInl:], 1<<20) },
		"extent over the end":      func(b []byte) { le.PutUint32(b[eInl:], 1<<32-1) },
		"pages do not add up":      func(b []byte) { le.PutUint32(b[ePages:], le.Uint32(b[ePages:])+1) },
		"payload above its pages":  func(b []byte) { le.PutUint32(b[ePayload:], le.Uint32(b[ePages:])*block.PageSize+1) },
	} {
		tb, b := newTable(t, testHeader())
		e := testEntry(16)
		reserve(tb, 2, &e, 0)
		r := b[tb.entryOff(2) : tb.entryOff(2)+EntrySize]
		change(r)
		le.PutUint32(r[eCRC:], entryCRC(r, 1))
		if got, err := tb.Entry(2, nil); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %+v, error %v, want %v", name, got, err, ErrDamaged)
		}
		le.PutUint32(r[eCRC:], entryCRC(r, 2))
		if _, err := tb.Entry(2, nil); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "checksum") {
			t.Errorf("a checksum of another generation: %v", err)
		}
	}
}

// TestOverflowScribbled changes chains and makes the checksums fit: chains of other owners and generations, loops, and
// ends at the wrong place are found, and none holds a reader up.
func TestOverflowScribbled(t *testing.T) {
	rewrite := func(tb *Table, o uint32, change func(b []byte)) {
		b := tb.b[tb.overflowOff(o) : tb.overflowOff(o)+OverflowSize]
		change(b)
		le.PutUint32(b[oCRC:], overflowCRC(b))
	}
	for name, change := range map[string]func(tb *Table){
		"another owner":          func(tb *Table) { rewrite(tb, 0, func(b []byte) { le.PutUint32(b[oOwner:], 3) }) },
		"another owner behind":   func(tb *Table) { rewrite(tb, 1, func(b []byte) { le.PutUint32(b[oOwner:], 0) }) },
		"another generation":     func(tb *Table) { rewrite(tb, 1, func(b []byte) { le.PutUint32(b[oGen:], 2) }) },
		"loop of one":            func(tb *Table) { rewrite(tb, 1, func(b []byte) { le.PutUint32(b[oNext:], 1) }) },
		"loop of two":            func(tb *Table) { rewrite(tb, 1, func(b []byte) { le.PutUint32(b[oNext:], 0) }) },
		"loop at once":           func(tb *Table) { rewrite(tb, 0, func(b []byte) { le.PutUint32(b[oNext:], 0) }) },
		"ends too early":         func(tb *Table) { rewrite(tb, 0, func(b []byte) { le.PutUint32(b[oNext:], block.NoEntry) }) },
		"leaves the table":       func(tb *Table) { rewrite(tb, 0, func(b []byte) { le.PutUint32(b[oNext:], 8) }) },
		"goes on into the other": func(tb *Table) { rewrite(tb, 1, func(b []byte) { le.PutUint32(b[oNext:], 2) }) },
		"is the other's":         func(tb *Table) { rewrite(tb, 0, func(b []byte) { le.PutUint32(b[oNext:], 3) }) },
		"extent without pages":   func(tb *Table) { rewrite(tb, 1, func(b []byte) { le.PutUint32(b[oExtents+4:], 0) }) },
		"extent outside":         func(tb *Table) { rewrite(tb, 1, func(b []byte) { le.PutUint32(b[oExtents:], 1<<20) }) },
		"extent of 4 billion":    func(tb *Table) { rewrite(tb, 1, func(b []byte) { le.PutUint32(b[oExtents+4:], 1<<32-1) }) },
		"loop and 4 billion extents": func(tb *Table) {
			rewrite(tb, 0, func(b []byte) { le.PutUint32(b[oNext:], 0) })
			b := tb.b[tb.entryOff(2) : tb.entryOff(2)+EntrySize]
			le.PutUint32(b[eExtents:], 1<<32-1)
			le.PutUint32(b[ePages:], 1<<32-1)
			le.PutUint32(b[eCRC:], entryCRC(b, 1))
		},
		"written by the next use": func(tb *Table) { tb.writeOverflow(1, 2, 1, block.NoEntry, []block.Extent{{Page: 1, Count: 1}}) },
	} {
		tb, _ := newTable(t, testHeader())
		e := testEntry(16)
		tb.Reserve(2, &e, []uint32{0, 1})
		other := testEntry(11)
		tb.Reserve(3, &other, []uint32{2, 3})
		change(tb)
		if got, err := tb.Entry(2, nil); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v, error %v, want %v", name, got.Extents, err, ErrDamaged)
		}
		if _, err := tb.Entry(3, nil); err != nil {
			t.Errorf("%s: the entry beside it: %v", name, err)
		}
	}
}

// TestRandomRecords writes and frees records in a random order against a map.
func TestRandomRecords(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	h := testHeader()
	h.Entries, h.Overflow = 20, 12
	tb, b := newTable(t, h)
	want := map[uint32]Entry{}
	over := map[uint32][]uint32{}
	gens := map[uint32]uint32{}
	free := []uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}
	for step := range 4000 {
		id := r.Uint32N(h.Entries)
		if e, used := want[id]; used {
			switch r.IntN(4) {
			case 0:
				tb.SetState(id, Free)
				delete(want, id)
				free = append(free, over[id]...)
				continue
			case 1:
				e.State = State(1 + r.IntN(int(lastState)-1))
				tb.SetState(id, e.State)
			case 2:
				e.Tick = r.Uint64()
				tb.SetTick(id, e.Tick)
			default:
				e.Frequent, e.Class = !e.Frequent, uint8(r.IntN(3))
				tb.SetMarks(id, e.Frequent, e.Class)
			}
			want[id] = e
		} else {
			e := testEntry(r.IntN(20))
			need := OverflowNeeded(len(e.Extents))
			if need > len(free) {
				continue
			}
			r.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
			over[id] = slices.Clone(free[:need])
			free = free[need:]
			e.Key, e.Namespace, e.Position = testKey(byte(step), 1+r.IntN(block.MaxKeyLen)), uint16(r.IntN(64)), r.Uint32()
			gens[id]++
			e.State, e.Gen = Reserved, gens[id]
			if gen := tb.Reserve(id, &e, over[id]); gen != e.Gen {
				t.Fatalf("step %d: generation %d, want %d", step, gen, e.Gen)
			}
			want[id] = e
		}
		if step%50 > 0 {
			continue
		}
		again := reopen(t, b)
		for id := range h.Entries {
			e, used := want[id]
			if !used {
				e = Entry{Gen: gens[id]}
			}
			if got, err := again.Entry(id, nil); err != nil || !reflect.DeepEqual(got, e) {
				t.Fatalf("step %d: entry %d is %+v, %v, want %+v", step, id, got, err, e)
			}
		}
	}
}
