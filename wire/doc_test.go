package wire

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"kvlift/block"
)

// section is a heading of docs/formats.md and the cells of the tables under it.
type section struct {
	heading string
	rows    [][]string
}

func formats(t *testing.T) (text string, sections []section) {
	t.Helper()
	b, err := os.ReadFile("../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "#"):
			sections = append(sections, section{heading: strings.TrimLeft(line, "# ")})
		case strings.HasPrefix(line, "|") && len(sections) > 0:
			s := &sections[len(sections)-1]
			var cells []string
			for _, c := range strings.Split(strings.Trim(line, "|"), "|") {
				cells = append(cells, strings.TrimSpace(c))
			}
			s.rows = append(s.rows, cells)
		}
	}
	return string(b), sections
}

func find(t *testing.T, sections []section, heading string) section {
	t.Helper()
	i := slices.IndexFunc(sections, func(s section) bool { return s.heading == heading })
	if i < 0 {
		t.Fatalf("docs/formats.md has no heading %q", heading)
	}
	return sections[i]
}

// TestDocumentedRecords holds the byte tables to the sizes of the code, and each field to where the encoder puts it: a
// message whose field alone is not zero differs from the zero message in the bytes of that row.
func TestDocumentedRecords(t *testing.T) {
	_, sections := formats(t)
	sized := regexp.MustCompile(`^(.+), (\d+) bytes$`)
	ones := block.Key{Len: block.MaxKeyLen}
	for i := range ones.Bytes {
		ones.Bytes[i] = 0xff
	}
	key := func(o block.Offer) []byte { return appendKey(nil, &o.Key, o.Group, o.Position) }
	zeroKey := block.Offer{}
	ref := block.Ref{Entry: 1<<32 - 1, Gen: 1<<32 - 1}
	removed := func(o block.Offer, r block.Ref) []byte {
		return AppendDelta(nil, &Delta{Removed: []GoneKey{{o, r}}})[deltaHead:]
	}
	added := func(o block.Offer, r block.Ref, n int) []byte {
		return AppendDelta(nil, &Delta{Added: []AddedKey{{o, r, n}}})[deltaHead:]
	}
	slot := func(s Slot) []byte { return AppendReserved(nil, &Reserved{Slots: []Slot{s}})[reservedHead:] }
	full := block.Offer{Key: ones, Group: 1<<16 - 1, Position: 1<<32 - 1}
	lengthOnly := block.Offer{Key: block.Key{Len: 0xff}}
	bytesOnly := block.Offer{Key: block.Key{Bytes: ones.Bytes}}
	const many = 1<<32 - 1
	offers := func(n int) []block.Offer { return make([]block.Offer, n) }
	header := func(b []byte, length uint32) []byte { le.PutUint32(b, length); return b }
	tables := map[string]struct {
		size  int
		zero  []byte
		field map[string][]byte // field: the record in which it alone is set
	}{
		"Frame header": {HeaderSize, AppendHeader(nil, 0, 0, 0), map[string][]byte{"length": header(AppendHeader(nil, 0, 0, 0), many), "type": AppendHeader(nil, 1<<16-1, 0, 0),
			"flags": AppendHeader(nil, 0, 1<<16-1, 0), "sequence": AppendHeader(nil, 0, 0, 1<<64-1)}},
		"Key record": {KeySize, key(zeroKey), map[string][]byte{"key": key(bytesOnly), "key length": key(lengthOnly), "group": key(block.Offer{Group: 1<<16 - 1}),
			"position": key(block.Offer{Position: many})}},
		"Ref":            {RefSize, appendRef(nil, block.Ref{}), map[string][]byte{"entry": appendRef(nil, block.Ref{Entry: many}), "generation": appendRef(nil, block.Ref{Gen: many})}},
		"Extent":         {ExtentSize, make([]byte, 8), map[string][]byte{"page": appendExtents(nil, []block.Extent{{Page: many}}), "count": appendExtents(nil, []block.Extent{{Count: many}})}},
		"Removed record": {GoneSize, removed(zeroKey, block.Ref{}), map[string][]byte{"key record": removed(full, block.Ref{}), "ref": removed(zeroKey, ref)}},
		"Added record": {AddedSize, added(zeroKey, block.Ref{}, 0), map[string][]byte{"key record": added(full, block.Ref{}, 0), "ref": added(zeroKey, ref, 0),
			"extents": added(zeroKey, block.Ref{}, many)}},
		"Slot": {SlotSize, slot(Slot{}), map[string][]byte{"outcome": slot(Slot{Outcome: 0xff}), "extents": slot(Slot{Extents: many}), "ref": slot(Slot{Ref: ref})}},
		"Delta head": {deltaHead, AppendDelta(nil, &Delta{}), map[string][]byte{"epoch": AppendDelta(nil, &Delta{Epoch: 1<<64 - 1}),
			"removed": AppendDelta(nil, &Delta{Removed: make([]GoneKey, 1)})[:deltaHead], "added": AppendDelta(nil, &Delta{Added: make([]AddedKey, 1)})[:deltaHead],
			"extents": AppendDelta(nil, &Delta{Extents: make([]block.Extent, 1)})[:deltaHead]}},
		"Reserve head": {reserveHead, AppendReserve(nil, &Reserve{}), map[string][]byte{"job": AppendReserve(nil, &Reserve{Job: 1<<64 - 1}),
			"request": AppendReserve(nil, &Reserve{Request: 1<<64 - 1}), "keys": AppendReserve(nil, &Reserve{Keys: offers(1)})[:reserveHead]}},
		"Reserved head": {reservedHead, AppendReserved(nil, &Reserved{}), map[string][]byte{"job": AppendReserved(nil, &Reserved{Job: 1<<64 - 1}),
			"slots": AppendReserved(nil, &Reserved{Slots: make([]Slot, 1)})[:reservedHead], "removed": AppendReserved(nil, &Reserved{Removed: make([]GoneKey, 1)})[:reservedHead],
			"extents": AppendReserved(nil, &Reserved{Extents: make([]block.Extent, 1)})[:reservedHead], "reason": AppendReserved(nil, &Reserved{Reason: 0xff})}},
		"Refs head": {refsHead, AppendRefs(nil, &Refs{}), map[string][]byte{"job": AppendRefs(nil, &Refs{Job: 1<<64 - 1}), "request": AppendRefs(nil, &Refs{Request: 1<<64 - 1}),
			"refs": AppendRefs(nil, &Refs{Refs: make([]block.Ref, 1)})[:refsHead]}},
		"Number":     {8, AppendJob(nil, 0), map[string][]byte{"number": AppendJob(nil, 1<<64-1)}},
		"Begin head": {16, AppendBegin(nil, &Begin{}), map[string][]byte{"request": AppendBegin(nil, &Begin{Request: 1<<64 - 1}), "clock": AppendBegin(nil, &Begin{ClockMS: -1})}},
		"Finish": {24, AppendFinish(nil, &Finish{}), map[string][]byte{"request": AppendFinish(nil, &Finish{Request: 1<<64 - 1}), "prompt tokens": AppendFinish(nil, &Finish{PromptTokens: many}),
			"hit tokens": AppendFinish(nil, &Finish{HitTokens: many}), "hint": AppendFinish(nil, &Finish{Hint: 0xff})}},
	}
	frames := slices.IndexFunc(sections, func(s section) bool { return s.heading == "Frames" })
	seen := 0
	for _, s := range sections[max(frames, 0):] { // those before it are package meta's
		m := sized.FindStringSubmatch(s.heading)
		if m == nil {
			continue
		}
		c, ok := tables[m[1]]
		if !ok {
			t.Errorf("%s: the test does not know it", s.heading)
			continue
		}
		seen++
		if m[2] != strconv.Itoa(c.size) || len(c.zero) != c.size {
			t.Errorf("%s: the code has %d bytes, its encoder %d", s.heading, c.size, len(c.zero))
		}
		next, fields := 0, 0
		for _, r := range s.rows {
			off, err := strconv.Atoi(r[0])
			if err != nil || len(r) != 4 {
				continue // heads, and tables of values
			}
			size, err := strconv.Atoi(r[1])
			if err != nil {
				continue
			}
			if off != next {
				t.Errorf("%s: %q at %d, the row before ends at %d", s.heading, r[2], off, next)
			}
			next = off + size
			if r[2] == "zero" {
				continue
			}
			fields++
			b, ok := c.field[r[2]]
			if !ok || len(b) != c.size {
				t.Errorf("%s: the code has no field %q", s.heading, r[2])
				continue
			}
			checkRow(t, s.heading, r[2], off, size, c.zero, b)
		}
		if next != c.size || fields != len(c.field) {
			t.Errorf("%s: the rows end at %d with %d fields, the code has %d with %d", s.heading, next, fields, c.size, len(c.field))
		}
	}
	if seen != len(tables) {
		t.Errorf("%d of %d structures are described", seen, len(tables))
	}
}

// checkRow: the bytes of a row change with its field, and no others do. A field that was set to its largest value fills
// its row, a count of one only the first byte, and a nested record all but its zeros.
func checkRow(t *testing.T, heading, field string, off, size int, zero, set []byte) {
	t.Helper()
	changed := 0
	for i := range set {
		if set[i] == zero[i] {
			continue
		}
		changed++
		if i < off || i >= off+size {
			t.Errorf("%s: %q is said to be at %d of %d bytes, the encoder changes byte %d", heading, field, off, size, i)
		}
	}
	if set[off] == zero[off] || changed != size && changed != 1 && field != "key record" {
		t.Errorf("%s: %q of %d bytes at %d: the encoder changes %d bytes", heading, field, size, off, changed)
	}
}

// TestDocumentedTypes compares the table of messages.
func TestDocumentedTypes(t *testing.T) {
	_, sections := formats(t)
	var got []string
	for _, r := range find(t, sections, "Types").rows[2:] {
		got = append(got, r[0]+" "+r[1])
		typ := Type(len(got))
		if _, isJSON := jsonMessage(typ); isJSON != strings.HasPrefix(r[2], "[JSON]") {
			t.Errorf("%v: the payload is said to be %q", typ, r[2])
		}
		if _, err := reencode(typ, nil); (err == nil && typ != TState) != (r[2] == "none") {
			t.Errorf("%v: the payload is said to be %q, an empty one is taken: %v", typ, r[2], err == nil)
		}
	}
	var want []string
	for typ := THello; typ <= TPromote; typ++ {
		want = append(want, fmt.Sprintf("%d `%v`", typ, typ))
	}
	if !slices.Equal(got, want) {
		t.Errorf("types %v, want %v", got, want)
	}
}

// TestDocumentedJSON compares the fields of each JSON message with those of its struct.
func TestDocumentedJSON(t *testing.T) {
	_, sections := formats(t)
	for heading, v := range map[string]any{"hello": Hello{}, "namespace": Namespace{}, "group": Group{}, "open job": OpenJob{}, "welcome": Welcome{}, "ready": Ready{},
		"error": Error{}, "status": StatusRequest{}} {
		var got, want []string
		for _, r := range find(t, sections, heading).rows[2:] {
			got = append(got, fmt.Sprint(r[0], " ", r[1] != "" && jsonKind(r[1]) != "", " ", jsonKind(r[1]), " ", r[2]))
		}
		typ := reflect.TypeOf(v)
		for i := range typ.NumField() {
			name, opt, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
			optional := ""
			if opt == "omitempty" {
				optional = "optional"
			}
			want = append(want, fmt.Sprint("`", name, "` true ", goKind(typ.Field(i).Type), " ", optional))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: fields\n%v, want\n%v", heading, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

// jsonKind reduces a type as the document writes it to one of JSON's.
func jsonKind(s string) string {
	switch {
	case strings.HasPrefix(s, "[") && !strings.HasSuffix(s, ")"), strings.HasPrefix(s, "[["):
		return "array"
	case strings.HasPrefix(s, "["), s == "object": // a link to an object's own table
		return "object"
	}
	return s
}

func goKind(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice, reflect.Array:
		return "array"
	case reflect.Map, reflect.Struct, reflect.Pointer:
		return "object"
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "boolean"
	}
	return "number"
}

// TestDocumentedNumbers: limits and the names of values.
func TestDocumentedNumbers(t *testing.T) {
	text, sections := formats(t)
	for _, want := range []string{
		fmt.Sprintf("a payload of at most %d bytes", MaxFrame),
		fmt.Sprintf("in the order of the prompt; at most %d.", MaxOffers),
		fmt.Sprintf("Head, refs; at most %d.", MaxRefs),
		fmt.Sprintf("Up to %d bytes follow", MaxRequestName),
		fmt.Sprintf("%d none; %d active", NoHint, Active),
		fmt.Sprintf("; %d idle", Idle),
		fmt.Sprintf("; %d closed", Closed),
	} {
		if !strings.Contains(text, want) {
			t.Errorf("docs/formats.md does not say %q", want)
		}
	}
	var outcomes []string
	for _, r := range find(t, sections, "Slot, 16 bytes").rows {
		if len(r) == 3 && r[0] == strconv.Itoa(len(outcomes)) {
			outcomes = append(outcomes, r[1])
		}
	}
	if !slices.Equal(outcomes, outcomeNames) {
		t.Errorf("outcomes %v, want %v", outcomes, outcomeNames)
	}
}
