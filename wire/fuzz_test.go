package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"testing"
)

// seed adds the payloads of all vectors of the given types.
func seed(f *testing.F, types ...Type) {
	for _, v := range readVectors(f) {
		if slices.Contains(types, v.typ) {
			f.Add(v.payload())
		}
	}
}

// fuzzPacked: whatever is accepted encodes to the same bytes; everything else is ErrMalformed.
func fuzzPacked(f *testing.F, types ...Type) {
	seed(f, types...)
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := reencode(types[0], b)
		switch {
		case err == nil && !bytes.Equal(got, b):
			t.Errorf("accepted:\n%x, encodes to\n%x", b, got)
		case err != nil && !errors.Is(err, ErrMalformed):
			t.Errorf("error %v, want %v", err, ErrMalformed)
		}
	})
}

func FuzzDelta(f *testing.F)    { fuzzPacked(f, TDelta, TSnapshot) }
func FuzzReserve(f *testing.F)  { fuzzPacked(f, TReserve) }
func FuzzReserved(f *testing.F) { fuzzPacked(f, TReserved) }
func FuzzRefs(f *testing.F)     { fuzzPacked(f, TPin, TTouch, TPromote) }
func FuzzBegin(f *testing.F)    { fuzzPacked(f, TBegin) }
func FuzzFinish(f *testing.F)   { fuzzPacked(f, TFinish) }

func FuzzParseHeader(f *testing.F) {
	for _, v := range readVectors(f) {
		f.Add(v.frame[:HeaderSize])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHeader(b, MaxFrame)
		if err != nil {
			if !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrTooLong) {
				t.Errorf("error %v", err)
			}
			return
		}
		got := AppendHeader(nil, h.Type, h.Flags, h.Seq)
		le.PutUint32(got, h.Length)
		if !bytes.Equal(got, b[:HeaderSize]) {
			t.Errorf("%+v encodes to %x, want %x", h, got, b[:HeaderSize])
		}
		if h.Type.String() == "" {
			t.Errorf("type %d has no name", h.Type)
		}
	})
}

// FuzzHello: what is accepted can be encoded, and means the same then; a namespace that can be read has a canonical text
// that is JSON and its own canonical text.
func FuzzHello(f *testing.F) {
	seed(f, THello)
	for _, c := range readCanonical(f) {
		f.Add(append(append([]byte(`{"namespace":`), c.Namespace...), '}'))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h, again Hello
		if err := ParseJSON(b, &h); err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Errorf("error %v, want %v", err, ErrMalformed)
			}
			return
		}
		first, err := AppendJSON(nil, &h)
		if err != nil {
			t.Fatalf("accepted, and cannot be encoded: %v", err)
		}
		if err := ParseJSON(first, &again); err != nil {
			t.Fatalf("%s: %v", first, err)
		}
		second, err := AppendJSON(nil, &again)
		if err != nil || !bytes.Equal(first, second) {
			t.Errorf("%s, again %s, %v", first, second, err)
		}
		for i := range h.Loads {
			h.Loads[i].RefList()
		}
		if h.Namespace == nil {
			return
		}
		text, err := h.Namespace.Canonical()
		if err != nil {
			t.Fatalf("accepted, and has no canonical text: %v", err)
		}
		var n Namespace
		if err := ParseJSON([]byte(text), &n); err != nil || !json.Valid([]byte(text)) {
			t.Fatalf("canonical text %s: %v", text, err)
		}
		if fixed, err := n.Canonical(); err != nil || fixed != text {
			t.Errorf("canonical text %s, of that %s, %v", text, fixed, err)
		}
	})
}
