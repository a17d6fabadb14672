package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"kvlift/block"
)

var update = flag.Bool("update", false, "write the hex of the golden vectors")

const vectorDir = "../testdata/wire"

// vector is one frame of testdata/wire and what it means.
type vector struct {
	file, name, direction string
	typ                   Type
	flags                 uint16
	seq                   uint64
	fields                []field
	frame                 []byte
	hexLine               int // where the hex begins in its file
}

type field struct {
	name  string
	value json.RawMessage
}

func (v *vector) payload() []byte { return v.frame[HeaderSize:] }

func (v *vector) String() string { return v.file + "/" + strings.ReplaceAll(v.name, " ", "_") }

// readVectors reads every vector; its rules are those of testdata/wire/README.md.
func readVectors(t testing.TB) []vector {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(vectorDir, "*.txt"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no vectors in %s: %v", vectorDir, err)
	}
	var all []vector
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		vs, err := parseVectors(strings.TrimSuffix(filepath.Base(f), ".txt"), string(b))
		if err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		all = append(all, vs...)
	}
	return all
}

func parseVectors(file, text string) ([]vector, error) {
	var out []vector
	var v *vector
	section := ""
	for i, line := range strings.Split(text, "\n") {
		bad := func(err error) error { return fmt.Errorf("line %d: %q: %w", i+1, line, err) }
		body, indented := strings.CutPrefix(line, "  ")
		name, value, ok := strings.Cut(body, ":")
		value = strings.TrimSpace(value)
		switch {
		case line == "", strings.HasPrefix(line, "#"):
			v, section = nil, ""
		case indented && section == "hex":
			b, err := hex.DecodeString(strings.ReplaceAll(body, " ", ""))
			if err != nil {
				return nil, bad(err)
			}
			v.frame = append(v.frame, b...)
		case !ok:
			return nil, bad(errors.New("neither a field nor hex"))
		case indented && section == "fields":
			v.fields = append(v.fields, field{name, json.RawMessage(value)})
		case indented:
			return nil, bad(errors.New("outside of fields and hex"))
		case name == "vector":
			out = append(out, vector{file: file, name: value})
			v = &out[len(out)-1]
		case v == nil:
			return nil, bad(errors.New("a vector begins with its name"))
		case name == "direction":
			v.direction = value
		case name == "type" || name == "flags" || name == "sequence":
			n, err := strconv.ParseUint(value, 10, map[string]int{"type": 16, "flags": 16, "sequence": 64}[name])
			if err != nil {
				return nil, bad(err)
			}
			switch name {
			case "type":
				v.typ = Type(n)
			case "flags":
				v.flags = uint16(n)
			default:
				v.seq = n
			}
		case name == "fields" || name == "hex":
			section, v.hexLine = name, i+1
		default:
			return nil, bad(errors.New("unknown name"))
		}
	}
	return out, nil
}

// object makes one JSON object of the fields; those named in lists are arrays, also when they are missing.
func (v *vector) object(lists ...string) ([]byte, error) {
	var b bytes.Buffer
	sep := "{"
	for _, f := range v.fields {
		if !slices.Contains(lists, f.name) {
			fmt.Fprintf(&b, "%s%q:%s", sep, f.name, f.value)
			sep = ","
		}
	}
	for _, l := range lists {
		var items []string
		for _, f := range v.fields {
			if f.name == l {
				items = append(items, string(f.value))
			}
		}
		fmt.Fprintf(&b, "%s%q:[%s]", sep, l, strings.Join(items, ","))
		sep = ","
	}
	if sep == "{" {
		return []byte("{}"), nil
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// into reads the fields into m and refuses those that m lacks.
func (v *vector) into(m any, lists ...string) error {
	b, err := v.object(lists...)
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	return d.Decode(m)
}

type textKey struct {
	Key      string
	Group    uint16
	Position uint32
	Entry    uint32
	Gen      uint32
	Outcome  string
	Extents  [][2]uint32
}

func (k *textKey) offer() (block.Offer, error) {
	b, err := hex.DecodeString(k.Key)
	if err != nil {
		return block.Offer{}, err
	}
	key, err := block.MakeKey(b)
	return block.Offer{Key: key, Group: k.Group, Position: k.Position}, err
}

func (k *textKey) ref() block.Ref { return block.Ref{Entry: k.Entry, Gen: k.Gen} }

func (k *textKey) extents(dst []block.Extent) []block.Extent {
	for _, x := range k.Extents {
		dst = append(dst, block.Extent{Page: x[0], Count: x[1]})
	}
	return dst
}

func gone(keys []textKey) (out []GoneKey, err error) {
	for i := range keys {
		o, err := keys[i].offer()
		if err != nil {
			return nil, err
		}
		out = append(out, GoneKey{o, keys[i].ref()})
	}
	return out, nil
}

var (
	outcomeNames = []string{"accepted", "present", "in flight", "refused"}
	hintNames    = []string{"none", "active", "idle", "closed"}
)

// encode builds the payload from the readable fields.
func (v *vector) encode() ([]byte, error) {
	switch v.typ {
	case TSnapshot, TDelta:
		var m struct {
			Epoch          uint64
			Removed, Added []textKey
		}
		if err := v.into(&m, "removed", "added"); err != nil {
			return nil, err
		}
		d := Delta{Epoch: m.Epoch}
		var err error
		if d.Removed, err = gone(m.Removed); err != nil {
			return nil, err
		}
		for i := range m.Added {
			o, err := m.Added[i].offer()
			if err != nil {
				return nil, err
			}
			d.Added = append(d.Added, AddedKey{o, m.Added[i].ref(), len(m.Added[i].Extents)})
			d.Extents = m.Added[i].extents(d.Extents)
		}
		return AppendDelta(nil, &d), nil
	case TReserve:
		var m struct {
			Job, Request uint64
			Key          []textKey
		}
		if err := v.into(&m, "key"); err != nil {
			return nil, err
		}
		r := Reserve{Job: m.Job, Request: m.Request}
		for i := range m.Key {
			o, err := m.Key[i].offer()
			if err != nil {
				return nil, err
			}
			r.Keys = append(r.Keys, o)
		}
		return AppendReserve(nil, &r), nil
	case TReserved:
		var m struct {
			Job           uint64
			Reason        uint8
			Slot, Removed []textKey
		}
		if err := v.into(&m, "slot", "removed"); err != nil {
			return nil, err
		}
		r := Reserved{Job: m.Job, Reason: m.Reason}
		var err error
		if r.Removed, err = gone(m.Removed); err != nil {
			return nil, err
		}
		for i := range m.Slot {
			s := &m.Slot[i]
			o := slices.Index(outcomeNames, s.Outcome)
			if o < 0 {
				return nil, fmt.Errorf("outcome %q", s.Outcome)
			}
			r.Slots = append(r.Slots, Slot{uint8(o), s.ref(), len(s.Extents)})
			r.Extents = s.extents(r.Extents)
		}
		return AppendReserved(nil, &r), nil
	case TTouch, TPin, TPromote:
		var m struct {
			Job, Request uint64
			Ref          [][2]uint32
		}
		if err := v.into(&m, "ref"); err != nil {
			return nil, err
		}
		r := Refs{Job: m.Job, Request: m.Request}
		for _, p := range m.Ref {
			r.Refs = append(r.Refs, block.Ref{Entry: p[0], Gen: p[1]})
		}
		return AppendRefs(nil, &r), nil
	case TUnpin, TCommit, TAbort, TEnded, TEndedAck:
		var m struct{ Job uint64 }
		err := v.into(&m)
		return AppendJob(nil, m.Job), err
	}
	return v.encodeSmall()
}

func (v *vector) encodeSmall() ([]byte, error) {
	switch v.typ {
	case TStep:
		var m struct{ Epoch uint64 }
		err := v.into(&m)
		return AppendStep(nil, m.Epoch), err
	case TBegin:
		var m struct {
			Request uint64
			ClockMS int64 `json:"clock_ms"`
			Name    string
		}
		err := v.into(&m)
		return AppendBegin(nil, &Begin{m.Request, m.ClockMS, m.Name}), err
	case TFinish:
		var m struct {
			Request      uint64
			PromptTokens uint32 `json:"prompt_tokens"`
			HitTokens    uint32 `json:"hit_tokens"`
			Hint         string
		}
		err := v.into(&m)
		h := slices.Index(hintNames, m.Hint)
		if h < 0 {
			err = fmt.Errorf("hint %q", m.Hint)
		}
		return AppendFinish(nil, &Finish{m.Request, m.PromptTokens, m.HitTokens, Hint(h)}), err
	case TMapped, TReset, TDone, TBye:
		return nil, v.into(&struct{}{})
	case TState:
		var m struct{ Text string }
		err := v.into(&m)
		return []byte(m.Text), err
	}
	m, ok := jsonMessage(v.typ)
	if !ok {
		return nil, fmt.Errorf("no encoder for %v", v.typ)
	}
	b, err := v.object()
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber() // as ParseJSON: a float of the identity keeps its digits
	d.DisallowUnknownFields()
	if err := d.Decode(m); err != nil {
		return nil, err
	}
	return AppendJSON(nil, m)
}

// jsonMessage returns a new message of a type whose payload is a JSON object.
func jsonMessage(t Type) (any, bool) {
	switch t {
	case THello:
		return &Hello{}, true
	case TWelcome:
		return &Welcome{}, true
	case TReady:
		return &Ready{}, true
	case TError:
		return &Error{}, true
	case TStatus:
		return &StatusRequest{}, true
	}
	return nil, false
}

// reencode parses a payload and encodes what was found.
func reencode(t Type, b []byte) ([]byte, error) {
	switch t {
	case TSnapshot, TDelta:
		var m Delta
		err := m.Parse(b)
		return AppendDelta(nil, &m), err
	case TReserve:
		var m Reserve
		err := m.Parse(b)
		return AppendReserve(nil, &m), err
	case TReserved:
		var m Reserved
		err := m.Parse(b)
		return AppendReserved(nil, &m), err
	case TTouch, TPin, TPromote:
		var m Refs
		err := m.Parse(b)
		return AppendRefs(nil, &m), err
	case TUnpin, TCommit, TAbort, TEnded, TEndedAck:
		job, err := ParseJob(b)
		return AppendJob(nil, job), err
	case TStep:
		epoch, err := ParseStep(b)
		return AppendStep(nil, epoch), err
	case TBegin:
		m, err := ParseBegin(b)
		return AppendBegin(nil, &m), err
	case TFinish:
		m, err := ParseFinish(b)
		return AppendFinish(nil, &m), err
	case TMapped, TReset, TDone, TBye:
		if len(b) > 0 {
			return nil, malformed(t, b)
		}
		return nil, nil
	case TState:
		return b, nil
	}
	m, ok := jsonMessage(t)
	if !ok {
		return nil, malformed(t, b)
	}
	if err := ParseJSON(b, m); err != nil {
		return nil, err
	}
	return AppendJSON(nil, m)
}

// packed tells whether exactly one text means one message: not so for JSON.
func packed(t Type) bool {
	_, isJSON := jsonMessage(t)
	return !isJSON
}

// reframe is reencode with the header.
func reframe(b []byte) (Type, []byte, error) {
	h, err := ParseHeader(b, MaxFrame)
	if err != nil {
		return h.Type, nil, err
	}
	if len(b) != HeaderSize+int(h.Length) {
		return h.Type, nil, fmt.Errorf("%w: %d bytes of %d", ErrMalformed, len(b)-HeaderSize, h.Length)
	}
	p, err := reencode(h.Type, b[HeaderSize:])
	if err != nil {
		return h.Type, nil, err
	}
	return h.Type, Append(nil, h.Type, h.Flags, h.Seq, p), nil
}

func TestVectors(t *testing.T) {
	if *update {
		writeHex(t)
	}
	for _, v := range readVectors(t) {
		t.Run(v.String(), func(t *testing.T) {
			if v.typ.String() != v.file {
				t.Errorf("type %d is %v, the file is for %s", v.typ, v.typ, v.file)
			}
			p, err := v.encode()
			if err != nil {
				t.Fatal(err)
			}
			if got := Append(nil, v.typ, v.flags, v.seq, p); !bytes.Equal(got, v.frame) {
				t.Fatalf("the fields encode to\n%x, want\n%x", got, v.frame)
			}
			h, err := ParseHeader(v.frame, MaxFrame)
			if err != nil {
				t.Fatal(err)
			}
			if want := (Header{uint32(len(v.payload())), v.typ, v.flags, v.seq}); h != want {
				t.Errorf("ParseHeader = %+v, want %+v", h, want)
			}
			if _, got, err := reframe(v.frame); err != nil || !bytes.Equal(got, v.frame) {
				t.Errorf("parsed and encoded again:\n%x, %v, want\n%x", got, err, v.frame)
			}
			if !packed(v.typ) {
				sameJSON(t, &v)
			}
		})
	}
}

// sameJSON checks that the payload holds the vector's fields and no others.
func sameJSON(t *testing.T, v *vector) {
	text, err := v.object()
	if err != nil {
		t.Fatal(err)
	}
	var got, want any
	if err := errors.Join(json.Unmarshal(v.payload(), &got), json.Unmarshal(text, &want)); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("payload %s, fields %s", v.payload(), text)
	}
}

// writeHex replaces the hex of every vector by what its fields encode to, and leaves the rest of the files alone.
func writeHex(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(vectorDir, "*.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(string(b), "\n")
		vs, err := parseVectors("", string(b))
		if err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		for i := len(vs) - 1; i >= 0; i-- {
			v := &vs[i]
			p, err := v.encode()
			if err != nil {
				t.Fatalf("%s: %s: %v", f, v.name, err)
			}
			end := v.hexLine
			for end < len(lines) && strings.HasPrefix(lines[end], "  ") {
				end++
			}
			lines = slices.Replace(lines, v.hexLine, end, hexLines(Append(nil, v.typ, v.flags, v.seq, p))...)
		}
		if err := os.WriteFile(f, []byte(strings.Join(lines, "\n")), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func hexLines(b []byte) []string {
	out := []string{fmt.Sprintf("  %x %x %x %x", b[:4], b[4:6], b[6:8], b[8:16])}
	for row := range slices.Chunk(b[HeaderSize:], 32) {
		line := " "
		for word := range slices.Chunk(row, 8) {
			line += fmt.Sprintf(" %x", word)
		}
		out = append(out, line)
	}
	return out
}

// TestVectorsComplete sees that every message has a vector, and every direction is the one of frame.go.
func TestVectorsComplete(t *testing.T) {
	fromDaemon := []Type{TWelcome, TReady, TSnapshot, TDelta, TReserved, TEndedAck, TDone, TError, TState}
	seen := map[Type]int{}
	for _, v := range readVectors(t) {
		seen[v.typ]++
		want := "to daemon"
		if slices.Contains(fromDaemon, v.typ) {
			want = "from daemon"
		}
		if v.direction != want {
			t.Errorf("%v: direction %q, want %q", &v, v.direction, want)
		}
	}
	for typ := THello; typ <= TPromote; typ++ {
		if seen[typ] == 0 {
			t.Errorf("no vector for %v", typ)
		}
	}
	if len(seen) != int(TPromote) || Type(TPromote+1).String() != fmt.Sprintf("type %d", TPromote+1) {
		t.Errorf("vectors for %d types of %d", len(seen), TPromote)
	}
}

// TestPrefixes cuts every frame at every byte. A frame that is cut is never taken for a whole one; of the payloads alone,
// only a begin may be shorter, since its name goes to the end, and a piece of a document.
func TestPrefixes(t *testing.T) {
	for _, v := range readVectors(t) {
		for n := range v.frame {
			if _, _, err := reframe(v.frame[:n]); !errors.Is(err, ErrMalformed) {
				t.Errorf("%v: %d bytes of %d: error %v, want %v", &v, n, len(v.frame), err, ErrMalformed)
			}
		}
		for n := range v.payload() {
			_, err := reencode(v.typ, v.payload()[:n])
			if open := v.typ == TState || v.typ == TBegin && n >= 16; !open && !errors.Is(err, ErrMalformed) {
				t.Errorf("%v: payload cut to %d bytes of %d: error %v, want %v", &v, n, len(v.payload()), err, ErrMalformed)
			}
		}
		longer := append(slices.Clone(v.payload()), 0)
		if _, err := reencode(v.typ, longer); v.typ != TState && v.typ != TBegin && !errors.Is(err, ErrMalformed) {
			t.Errorf("%v: a zero behind the payload: error %v, want %v", &v, err, ErrMalformed)
		}
	}
}

// TestFlips changes every byte of every frame in all bits one by one and all at once. Whatever is still accepted means
// what it says: it encodes to the changed bytes.
func TestFlips(t *testing.T) {
	for _, v := range readVectors(t) {
		b := slices.Clone(v.frame)
		for i := range b {
			for _, mask := range []byte{1, 2, 4, 8, 16, 32, 64, 128, 255} {
				b[i] ^= mask
				typ, got, err := reframe(b)
				if err == nil && packed(typ) && !bytes.Equal(got, b) {
					t.Errorf("%v: byte %d ^ %02x is accepted and encodes to other bytes", &v, i, mask)
				}
				b[i] ^= mask
			}
		}
	}
}
