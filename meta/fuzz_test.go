package meta

import (
	"errors"
	"hash/crc32"
	"reflect"
	"slices"
	"sync"
	"testing"
)

// FuzzOpen reads any two headers, whose checksums are made to fit when repair says so. What is accepted means what it
// says: the header that it is encoded to is read as the same one.
func FuzzOpen(f *testing.F) {
	_, b := fullTable(f)
	f.Add(b[:2*HeaderSize], uint8(0))
	f.Add(b[:2*HeaderSize], uint8(3))
	f.Add(make([]byte, 2*HeaderSize), uint8(0))
	f.Add([]byte(headerMagic), uint8(1))
	file := make([]byte, len(b))
	var mu sync.Mutex // guards file, which is too long to be made anew each time
	f.Fuzz(func(t *testing.T, headers []byte, repair uint8) {
		mu.Lock()
		defer mu.Unlock()
		clear(file[:2*HeaderSize])
		copy(file[:2*HeaderSize], headers)
		for i := range 2 {
			if h := file[i*HeaderSize : (i+1)*HeaderSize]; repair>>i&1 != 0 {
				le.PutUint32(h[hCRC:], crc32.Checksum(h[:hCRC], castagnoli))
			}
		}
		tb, err := Open(file)
		if err != nil {
			if !errors.Is(err, ErrNotMeta) && !errors.Is(err, ErrVersion) && !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrTruncated) {
				t.Errorf("error %v is none of those that are documented", err)
			}
			return
		}
		again := make([]byte, HeaderSize)
		encodeHeader(again, &tb.Header)
		if h, err := DecodeHeader(again); err != nil || h != tb.Header {
			t.Errorf("header %+v is encoded and read as %+v, %v", tb.Header, h, err)
		}
		tb.SetHeader(true)
		if now, err := Open(file); err != nil || tb.Header.Generation > 0 && now.Header != tb.Header {
			t.Errorf("after the next generation: %v", err)
		}
	})
}

// FuzzEntry reads any entry record with any overflow table behind it, whose checksums are made to fit. What is accepted
// is something that could have been stored: stored again, it is read as the same entry.
func FuzzEntry(f *testing.F) {
	full, _ := fullTable(f)
	for id := range uint32(8) {
		f.Add(id, slices.Clone(full.b[full.entryOff(id):full.entryOff(id)+EntrySize]), slices.Clone(full.b[full.overflow:full.overflow+8*OverflowSize]), true)
	}
	tb, _ := newTable(f, testHeader())
	other, _ := newTable(f, testHeader())
	var mu sync.Mutex // guards both
	f.Fuzz(func(t *testing.T, id uint32, entry, overflow []byte, repair bool) {
		mu.Lock()
		defer mu.Unlock()
		id %= tb.Entries
		r := tb.b[tb.entryOff(id) : tb.entryOff(id)+EntrySize]
		clear(r)
		copy(r, entry)
		o := tb.b[tb.overflow : tb.overflow+8*OverflowSize]
		clear(o)
		copy(o, overflow)
		if repair {
			_, _, gen, _ := splitWord(le.Uint64(r))
			le.PutUint32(r[eCRC:], entryCRC(r, gen))
			for ; len(o) > 0; o = o[OverflowSize:] {
				le.PutUint32(o[oCRC:], overflowCRC(o[:OverflowSize]))
			}
		}
		e, err := tb.Entry(id, nil)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Errorf("error %v, want %v", err, ErrDamaged)
			}
			return
		}
		if e.State == Free {
			return
		}
		if xs := tb.Extents(id, nil); !slices.Equal(xs, e.Extents) {
			t.Fatalf("Extents = %v, Entry has %v", xs, e.Extents)
		}
		chain := tb.OverflowOf(id, nil)
		if len(chain) != OverflowNeeded(len(e.Extents)) {
			t.Fatalf("%d extents with an overflow chain of %v", len(e.Extents), chain)
		}
		over := []uint32{0, 1, 2, 3, 4, 5, 6, 7}
		if len(chain) > len(over) {
			t.Fatalf("a chain of %d records in a table of %d", len(chain), len(over))
		}
		storeWord(other.b, other.entryOff(id), makeWord(Free, 0, e.Gen-1))
		other.Reserve(id, &e, over[:len(chain)])
		other.SetState(id, e.State)
		other.SetMarks(id, e.Frequent, e.Class)
		if got, err := other.Entry(id, nil); err != nil || !reflect.DeepEqual(got, e) {
			t.Errorf("stored again: %+v, %v, want %+v", got, err, e)
		}
	})
}

// FuzzRecord reads any namespace and any session record, with checksums that fit.
func FuzzRecord(f *testing.F) {
	full, _ := fullTable(f)
	for i := range 3 {
		f.Add(slices.Clone(full.b[full.namespaceOff(i):full.namespaceOff(i)+512]), slices.Clone(full.b[full.sessionOff(i):full.sessionOff(i)+SessionSize]))
	}
	tb, _ := newTable(f, testHeader())
	other, _ := newTable(f, testHeader())
	var mu sync.Mutex // guards both
	f.Fuzz(func(t *testing.T, namespace, session []byte) {
		mu.Lock()
		defer mu.Unlock()
		n := tb.b[tb.namespaceOff(1) : tb.namespaceOff(1)+NamespaceSize]
		clear(n)
		copy(n, namespace)
		le.PutUint32(n[nCRC:], namespaceCRC(n))
		switch v, used, err := tb.Namespace(1); {
		case err != nil && (!used || !errors.Is(err, ErrDamaged)):
			t.Errorf("namespace: used %v, error %v, want %v", used, err, ErrDamaged)
		case err == nil && used:
			if err := other.PutNamespace(1, &v); err != nil {
				t.Fatalf("%+v cannot be stored again: %v", v, err)
			}
			if got, _, err := other.Namespace(1); err != nil || !reflect.DeepEqual(got, v) {
				t.Errorf("namespace stored again: %+v, %v, want %+v", got, err, v)
			}
			other.DropNamespace(1)
		}
		s := tb.b[tb.sessionOff(1) : tb.sessionOff(1)+SessionSize]
		clear(s)
		copy(s, session)
		le.PutUint32(s[sCRC:], crc32.Checksum(s[sSession:], castagnoli))
		switch v, used, err := tb.Process(1); {
		case err != nil && (!used || !errors.Is(err, ErrDamaged)):
			t.Errorf("session: used %v, error %v, want %v", used, err, ErrDamaged)
		case err == nil && used:
			other.PutProcess(1, &v)
			if got, _, err := other.Process(1); err != nil || got != v {
				t.Errorf("session stored again: %+v, %v, want %+v", got, err, v)
			}
			other.DropProcess(1)
		}
	})
}
