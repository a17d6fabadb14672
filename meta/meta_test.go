package meta

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"reflect"
	"slices"
	"strings"
	"testing"

	"kvlift/block"
)

func testHeader() Header {
	return Header{ArenaPages: 1 << 20, Entries: 8, Overflow: 8, ArenaID: [16]byte{1, 2, 3, 15: 16}, ArenaInode: 0x1122334455667788, HugePage: 2 << 20,
		CreatedMS: 1_700_000_000_123, Name: "llama-70b"}
}

func newTable(t testing.TB, h Header) (*Table, []byte) {
	t.Helper()
	b := make([]byte, NewLayout(h.Entries, h.Overflow).Size)
	tb, err := Create(b, h)
	if err != nil {
		t.Fatal(err)
	}
	return tb, b
}

func reopen(t testing.TB, b []byte) *Table {
	t.Helper()
	tb, err := Open(b)
	if err != nil {
		t.Fatal(err)
	}
	return tb
}

func testKey(n byte, length int) block.Key {
	k, _ := block.MakeKey(bytes.Repeat([]byte{n}, length))
	return k
}

// testEntry is an entry of n extents, each a page longer than the one before.
func testEntry(n int) Entry {
	e := Entry{Tick: 1_700_000_000_000<<22 | 5, Namespace: 3, Group: 2, Position: 4096, Parent: block.Ref{Entry: 7, Gen: 9}, Key: testKey(byte(n+1), 36)}
	for i := range n {
		e.Extents = append(e.Extents, block.Extent{Page: uint32(1000 * (i + 1)), Count: uint32(i + 1)})
		e.Pages += uint32(i + 1)
	}
	e.Payload = e.Pages*block.PageSize - 5*uint32(min(n, 1))
	return e
}

// reserve stores an entry at id, its overflow records being taken from the first ones.
func reserve(t *Table, id uint32, e *Entry, first uint32) uint32 {
	var over []uint32
	for i := range OverflowNeeded(len(e.Extents)) {
		over = append(over, first+uint32(i))
	}
	return t.Reserve(id, e, over)
}

func TestHeaderRoundTrip(t *testing.T) {
	for _, h := range []Header{
		testHeader(),
		{},
		{ArenaPages: 1 << 31, Name: strings.Repeat("n", MaxName)},
		{Clean: true, Entries: 3, Overflow: 1, Name: "süd", HugePage: 1 << 30},
	} {
		tb, b := newTable(t, h)
		h.Generation = 1
		if tb.Header != h {
			t.Errorf("Create has header %+v, want %+v", tb.Header, h)
		}
		if got := reopen(t, b); got.Header != h || got.Layout != tb.Layout || int64(len(b)) != got.Size {
			t.Errorf("Open has header %+v of %d bytes, want %+v of %d", got.Header, got.Size, h, len(b))
		}
	}
	if _, err := Create(make([]byte, NewLayout(0, 0).Size), Header{Name: strings.Repeat("n", MaxName+1)}); err == nil {
		t.Error("a name above the limit was taken")
	}
	if _, err := Create(make([]byte, NewLayout(1, 0).Size-1), Header{Entries: 1}); !errors.Is(err, ErrTruncated) {
		t.Errorf("Create in too short a slice: %v, want %v", err, ErrTruncated)
	}
}

func TestHeaderErrors(t *testing.T) {
	_, b := newTable(t, testHeader())
	sound := b[HeaderSize : 2*HeaderSize] // the first generation is odd
	fix := func(b []byte) { le.PutUint32(b[hCRC:], crc32.Checksum(b[:hCRC], castagnoli)) }
	for _, c := range []struct {
		name   string
		change func(b []byte)
		want   error
		says   []string
	}{
		{"magic", func(b []byte) { b[0] = 'k' }, ErrNotMeta, nil},
		{"zeros", func(b []byte) { clear(b) }, ErrNotMeta, nil},
		{"magic before version", func(b []byte) { le.PutUint32(b[hVersion:], 77); b[3] = 0 }, ErrNotMeta, nil},
		{"newer version", func(b []byte) { le.PutUint32(b[hVersion:], 77) }, ErrVersion, []string{"version 77", fmt.Sprintf("writes %d", Version)}},
		{"newer version with a checksum", func(b []byte) { le.PutUint32(b[hVersion:], 2); fix(b) }, ErrVersion, []string{"version 2", fmt.Sprintf("writes %d", Version)}},
		{"no version", func(b []byte) { le.PutUint32(b[hVersion:], 0) }, ErrDamaged, nil},
		{"checksum", func(b []byte) { b[hCRC]++ }, ErrDamaged, []string{"checksum"}},
		{"a byte of the name", func(b []byte) { b[hName]++ }, ErrDamaged, []string{"checksum"}},
		{"a byte that means nothing", func(b []byte) { b[2000]++ }, ErrDamaged, []string{"checksum"}},
		{"last byte of the magic", func(b []byte) { b[7] = 2; fix(b) }, ErrDamaged, []string{"fields"}},
		{"header size", func(b []byte) { le.PutUint32(b[hSize:], 512); fix(b) }, ErrDamaged, []string{"fields"}},
		{"page size", func(b []byte) { le.PutUint32(b[hPageSize:], 8192); fix(b) }, ErrDamaged, []string{"fields"}},
		{"namespaces", func(b []byte) { le.PutUint32(b[hNamespaces:], 65); fix(b) }, ErrDamaged, []string{"fields"}},
		{"sessions", func(b []byte) { le.PutUint32(b[hSessions:], 0); fix(b) }, ErrDamaged, []string{"fields"}},
		{"length of the name", func(b []byte) { b[hNameLen] = MaxName + 1; fix(b) }, ErrDamaged, []string{"fields"}},
	} {
		changed := slices.Clone(sound)
		c.change(changed)
		_, err := DecodeHeader(changed)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", c.name, err, c.want)
			continue
		}
		for _, s := range c.says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%s: error %q does not say %q", c.name, err, s)
			}
		}
		// The same by the way of Open, where the other copy is zero.
		file := slices.Clone(b)
		copy(file[HeaderSize:], changed)
		if _, err := Open(file); !errors.Is(err, c.want) {
			t.Errorf("%s: Open: %v, want %v", c.name, err, c.want)
		}
	}
	for n := range HeaderSize {
		if _, err := DecodeHeader(sound[:n]); !errors.Is(err, ErrTruncated) {
			t.Fatalf("header of %d bytes: %v, want %v", n, err, ErrTruncated)
		}
	}
}

// TestHeaderAlternates: each generation goes to the other copy, so that one copy is sound at every moment.
func TestHeaderAlternates(t *testing.T) {
	tb, b := newTable(t, testHeader())
	for gen := uint64(2); gen < 8; gen++ {
		before := slices.Clone(b)
		wrote := 0
		tb.OnWrite = func(off, n int) {
			wrote++
			if off != int(gen%2)*HeaderSize || n != HeaderSize {
				t.Errorf("generation %d: %d bytes at %d", gen, n, off)
			}
		}
		tb.SetHeader(gen%3 == 0)
		tb.OnWrite = nil
		if wrote != 1 {
			t.Fatalf("generation %d: %d writes", gen, wrote)
		}
		at := int(gen%2) * HeaderSize
		now := slices.Clone(b)
		copy(now[at:at+HeaderSize], before[at:])
		if !bytes.Equal(now, before) {
			t.Fatalf("generation %d changed more than its own copy", gen)
		}
		if got := reopen(t, b).Header; got.Generation != gen || got.Clean != (gen%3 == 0) {
			t.Fatalf("generation %d is read as %d, clean %v", gen, got.Generation, got.Clean)
		}
	}
}

// tear returns what may be seen of a write of now over before after a kill: its head of k bytes, with the rest as it was
// or, since writers clear a structure first, zero.
func tear(before, now []byte, k int) [][]byte {
	old, zero := slices.Clone(now), slices.Clone(now)
	copy(old[k:], before[k:])
	clear(zero[k:])
	return [][]byte{old, zero}
}

// TestHeaderTorn tears the newest copy at every 8 bytes: the file opens with the older generation or, when nothing of
// substance is missing, with the new one; and the next generation repairs the torn copy.
func TestHeaderTorn(t *testing.T) {
	for _, generations := range []int{1, 2, 3} { // the copy that is torn was never written, or holds an older generation
		tb, b := newTable(t, testHeader())
		for range generations - 1 {
			tb.SetHeader(true)
		}
		before, older := slices.Clone(b), tb.Header
		tb.SetHeader(false)
		newer := tb.Header
		at := int(newer.Generation%2) * HeaderSize
		for k := 0; k <= HeaderSize; k += 8 {
			for i, torn := range tear(before[at:at+HeaderSize], b[at:at+HeaderSize], k) {
				file := slices.Clone(b[:2*HeaderSize])
				copy(file[at:], torn)
				h, err := openHeaders(file)
				if err != nil {
					t.Fatalf("generation %d torn after %d bytes (%d): %v", newer.Generation, k, i, err)
				}
				if h != older && h != newer {
					t.Fatalf("generation %d torn after %d bytes (%d): header %+v, want %+v or %+v", newer.Generation, k, i, h, older, newer)
				}
				if whole := bytes.Equal(torn, b[at:at+HeaderSize]); whole != (h == newer) {
					t.Fatalf("generation %d torn after %d bytes (%d): generation %d was taken", newer.Generation, k, i, h.Generation)
				}
			}
		}
		copy(b[at:], tear(before[at:at+HeaderSize], b[at:at+HeaderSize], 64)[1])
		tb = reopen(t, b)
		tb.SetHeader(true)
		if got := reopen(t, b).Header; got.Generation != newer.Generation || !got.Clean {
			t.Errorf("the generation after a torn one is %d, want %d again", got.Generation, newer.Generation)
		}
	}
}

// openHeaders is Open on the headers of a file whose rest is zero.
func openHeaders(headers []byte) (Header, error) {
	b := fileOf(headers)
	tb, err := Open(b)
	if err != nil {
		return Header{}, err
	}
	return tb.Header, nil
}

var scratch []byte

// fileOf places headers before the tables of testHeader, which stay zero. The slice is valid until the next call.
func fileOf(headers []byte) []byte {
	h := testHeader()
	if scratch == nil {
		scratch = make([]byte, NewLayout(h.Entries, h.Overflow).Size)
	}
	copy(scratch, headers)
	return scratch
}

func TestOpenNeitherCopy(t *testing.T) {
	tb, b := newTable(t, testHeader())
	tb.SetHeader(false)
	damage := func(at int) { b[at+hName] ^= 1 }
	damage(0)
	damage(HeaderSize)
	if _, err := Open(b); !errors.Is(err, ErrDamaged) {
		t.Errorf("both copies damaged: %v, want %v", err, ErrDamaged)
	}
	clear(b[:HeaderSize])
	if _, err := Open(b); !errors.Is(err, ErrDamaged) {
		t.Errorf("one copy zero, one damaged: %v, want %v: it says more", err, ErrDamaged)
	}
	// A newer kvlift has written one copy: its file is not read by the other one, which it would fall behind.
	le.PutUint32(b[HeaderSize+hVersion:], 2)
	encodeHeader(b[:HeaderSize], &tb.Header)
	if _, err := Open(b); !errors.Is(err, ErrVersion) {
		t.Errorf("one copy of another version: %v, want %v", err, ErrVersion)
	}
	b[HeaderSize], b[0] = 0, 0
	if _, err := Open(b); !errors.Is(err, ErrNotMeta) {
		t.Errorf("no magic: %v, want %v", err, ErrNotMeta)
	}
}

// fullTable makes a file in which every structure is used.
func fullTable(t testing.TB) (*Table, []byte) {
	tb, b := newTable(t, testHeader())
	for i, n := range testNamespaces() {
		if err := tb.PutNamespace(i, &n); err != nil {
			t.Fatal(err)
		}
	}
	for i, p := range testProcesses() {
		tb.PutProcess(i, &p)
	}
	over := uint32(0)
	for i, n := range []int{1, 4, 5, 10, 11, 16} {
		e := testEntry(n)
		reserve(tb, uint32(i), &e, over)
		over += uint32(OverflowNeeded(n))
		tb.SetState(uint32(i), []State{Ready, Reserved, Evicting, Ready, Removed, Ready}[i])
	}
	tb.SetMarks(0, true, 0)
	tb.SetHeader(false)
	return tb, b
}

// TestPrefixes cuts a file at every length: shorter is never taken for whole, and neither is longer.
func TestPrefixes(t *testing.T) {
	_, b := fullTable(t)
	step := 1
	for n := 0; n < len(b); n += step {
		if n > 3*HeaderSize { // behind the headers only the length is looked at
			step = 61
		}
		if _, err := Open(b[:n]); !errors.Is(err, ErrTruncated) {
			t.Fatalf("%d bytes of %d: %v, want %v", n, len(b), err, ErrTruncated)
		}
	}
	if _, err := Open(append(slices.Clone(b), make([]byte, 4096)...)); !errors.Is(err, ErrTruncated) {
		t.Errorf("a page too many: %v, want %v", err, ErrTruncated)
	}
}

// contents is everything that can be read from a file.
type contents struct {
	Header     Header
	Namespaces [MaxNamespaces]Namespace
	Processes  [MaxSessions]Process
	Entries    []Entry
}

// read reads everything and gives up at the first error.
func read(tb *Table) (contents, error) {
	c := contents{Header: tb.Header}
	for i := range c.Namespaces {
		n, used, err := tb.Namespace(i)
		if err != nil {
			return c, err
		}
		if !used && !reflect.DeepEqual(n, Namespace{}) {
			return c, fmt.Errorf("free namespace %d has content", i)
		}
		c.Namespaces[i] = n
	}
	for i := range c.Processes {
		p, _, err := tb.Process(i)
		if err != nil {
			return c, err
		}
		c.Processes[i] = p
	}
	for i := range tb.Entries {
		e, err := tb.Entry(i, nil)
		if err != nil {
			return c, err
		}
		c.Entries = append(c.Entries, e)
	}
	return c, nil
}

// flips turns every bit of b[from:to] in turn and hands the bit's number in it to check, which looks at the file.
func flips(b []byte, from, to int, check func(bit int)) {
	for i := 0; i < 8*(to-from); i++ {
		b[from+i/8] ^= 1 << (i % 8)
		check(i)
		b[from+i/8] ^= 1 << (i % 8)
	}
}

// TestFlippedBits turns every single bit of one structure of each kind. Each is noticed, but for those that are outside
// of every checksum for a reason: the stamp and the mark of an entry, which cost it its place in the eviction order, and
// the generation of a free record, to which nobody holds a promise any more.
func TestFlippedBits(t *testing.T) {
	tb, b := fullTable(t)
	want, err := read(tb)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("header", func(t *testing.T) {
		older := testHeader()
		older.Generation = tb.Header.Generation - 1
		at := int(tb.Header.Generation%2) * HeaderSize
		flips(b, at, at+HeaderSize, func(bit int) {
			got, err := Open(b)
			if err == nil && got.Header != older {
				t.Errorf("bit %d: header %+v, want an error or %+v", bit, got.Header, older)
			}
		})
	})
	damaged := func(t *testing.T, bit int, err error) {
		if !errors.Is(err, ErrDamaged) {
			t.Errorf("byte %d bit %d: error %v, want %v", bit/8, bit%8, err, ErrDamaged)
		}
	}
	t.Run("namespace", func(t *testing.T) {
		at := tb.namespaceOff(1)
		flips(b, at, at+NamespaceSize, func(bit int) {
			_, _, err := tb.Namespace(1)
			damaged(t, bit, err)
		})
	})
	for i := range 2 { // of namespace 0 and of none
		t.Run(fmt.Sprint("session ", i), func(t *testing.T) {
			at := tb.sessionOff(i)
			flips(b, at, at+SessionSize, func(bit int) {
				_, _, err := tb.Process(i)
				damaged(t, bit, err)
			})
		})
	}
	for id := range uint32(6) {
		t.Run(fmt.Sprint("entry ", id), func(t *testing.T) {
			at := tb.entryOff(id)
			flips(b, at, at+EntrySize, func(bit int) {
				got, err := tb.Entry(id, nil)
				switch byt := bit / 8; {
				case bit >= 16 && bit <= 18:
					w := want.Entries[id]
					if bit == 16 {
						w.Frequent = !w.Frequent
					} else {
						w.Class ^= uint8(1 << (bit - 17))
					}
					if w.State != Free && w.Class == 3 {
						damaged(t, bit, err)
						return
					}
					if err != nil || !reflect.DeepEqual(got, w) {
						t.Errorf("the marks: %+v, %v, want %+v", got, err, w)
					}
				case byt >= eTick && byt < eCRC:
					w := want.Entries[id]
					w.Tick = got.Tick
					if err != nil || !reflect.DeepEqual(got, w) {
						t.Errorf("the stamp: %+v, %v, want %+v", got, err, w)
					}
				default:
					damaged(t, bit, err)
				}
			})
		})
	}
	t.Run("free entry", func(t *testing.T) {
		at := tb.entryOff(6)
		flips(b, at, at+EntrySize, func(bit int) {
			got, err := tb.Entry(6, nil)
			if err == nil && got.State != Free {
				t.Errorf("bit %d made a free record %+v", bit, got)
			}
			if err != nil && bit >= 64 {
				t.Errorf("bit %d of the body of a free record: %v", bit, err)
			}
		})
	})
	t.Run("overflow", func(t *testing.T) {
		for o := range uint32(1 + 1 + 2 + 2) {
			at := tb.overflowOff(o)
			flips(b, at, at+OverflowSize, func(bit int) {
				_, err := read(tb)
				damaged(t, bit, err)
			})
			if t.Failed() {
				return
			}
		}
	})
	if got, err := read(tb); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("after all: %v", err)
	}
}

// TestOrderOfStores: a record's body is complete before its state word says so, and freeing one is a single store.
func TestOrderOfStores(t *testing.T) {
	tb, _ := newTable(t, testHeader())
	type store struct{ off, n int }
	var got []store
	tb.OnWrite = func(off, n int) { got = append(got, store{off, n}) }
	check := func(name string, want ...store) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("%s: stores %v, want %v", name, got, want)
		}
		got = nil
	}
	e := testEntry(11)
	off := tb.entryOff(2)
	tb.Reserve(2, &e, []uint32{5, 1})
	check("Reserve", store{tb.overflowOff(1), OverflowSize}, store{tb.overflowOff(5), OverflowSize}, store{off + 8, EntrySize - 8}, store{off, 8})
	tb.SetState(2, Ready)
	check("SetState", store{off, 8})
	tb.SetMarks(2, true, 1)
	check("SetMarks", store{off, 8})
	tb.SetMarks(2, true, 1)
	check("SetMarks again")
	tb.SetTick(2, 7)
	check("SetTick", store{off + eTick, 8})
	tb.SetState(2, Free)
	check("SetState to free", store{off, 8})
	tb.SetMarks(2, true, 1)
	check("SetMarks of a free record")
	n, p := testNamespaces()[0], testProcesses()[0]
	if err := tb.PutNamespace(3, &n); err != nil {
		t.Fatal(err)
	}
	check("PutNamespace", store{tb.namespaceOff(3) + 8, NamespaceSize - 8}, store{tb.namespaceOff(3), 8})
	tb.DropNamespace(3)
	check("DropNamespace", store{tb.namespaceOff(3), 8})
	tb.PutProcess(9, &p)
	check("PutProcess", store{tb.sessionOff(9) + 8, SessionSize - 8}, store{tb.sessionOff(9), 8})
	tb.MoveProcess(9, 4)
	check("MoveProcess", store{tb.sessionOff(9), 8})
	tb.DropProcess(9)
	check("DropProcess", store{tb.sessionOff(9), 8})
	tb.SetHeader(true)
	check("SetHeader", store{0, HeaderSize})
}

// TestWordAligned: a word that could be torn is never stored.
func TestWordAligned(t *testing.T) {
	b := make([]byte, 64)
	defer func() {
		if recover() == nil {
			t.Error("a word was stored at an odd address")
		}
	}()
	storeWord(b, 4, 1)
}
