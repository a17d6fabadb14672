package trace

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

const slice = "../testdata/traces/conversation_slice.jsonl.gz"

func line(ms int) string {
	return fmt.Sprintf(`{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}`, ms)
}

func readAll(r *Reader) ([]Request, error) {
	var reqs []Request
	for {
		req, err := r.Next()
		if err == io.EOF {
			return reqs, nil
		}
		if err != nil {
			return reqs, err
		}
		reqs = append(reqs, req)
	}
}

func compress(t testing.TB, text []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestReader(t *testing.T) {
	text := `{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 18446744073709551615]}

{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":[],"session":0,"agent":"main","stop":"end_turn","new":{"a":[1]}}` +
		"\r\n" + `{"hash_ids":[ 7
` // a value may not run over the end of a line
	want := []Request{
		{0, 6758, 500, []uint64{0, 1, 1<<64 - 1}, -1, "", ""},
		{0, 1, 0, []uint64{}, 0, "main", "end_turn"},
	}
	for name, in := range map[string]io.Reader{
		"plain":       strings.NewReader(text),
		"gzip":        bytes.NewReader(compress(t, []byte(text))),
		"byte a time": iotest.OneByteReader(bytes.NewReader(compress(t, []byte(text)))),
	} {
		r, err := NewReader(in)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got, err := readAll(r)
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
		if err == nil || !strings.HasPrefix(err.Error(), "line 4: ") || r.Line() != 4 {
			t.Errorf("%s: at line %d error %v, want one for line 4", name, r.Line(), err)
		}
		if _, again := r.Next(); again != err {
			t.Errorf("%s: the next error is %v, want %v again", name, again, err)
		}
		if err := r.Close(); err != nil {
			t.Errorf("%s: close: %v", name, err)
		}
	}
}

func TestReaderErrors(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"no JSON", "hello", "line 1: invalid character 'h'"},
		{"cut off", line(0)[:40], "line 1: unexpected end of JSON input"},
		{"two objects", line(0) + line(0), "line 1: invalid character '{' after top-level value"},
		{"no object", "[1]", "line 1: json: cannot unmarshal array"},
		{"second line", line(0) + "\n\n" + "{", "line 3: unexpected end of JSON input"},
		{"no timestamp", `{"input_length":1,"output_length":1,"hash_ids":[]}`, "line 1: timestamp is missing"},
		{"null timestamp", `{"timestamp":null,"input_length":1,"output_length":1,"hash_ids":[]}`, "line 1: timestamp is missing"},
		{"no input_length", `{"timestamp":1,"output_length":1,"hash_ids":[]}`, "line 1: input_length is missing"},
		{"no output_length", `{"timestamp":1,"input_length":1,"hash_ids":[]}`, "line 1: output_length is missing"},
		{"no hash_ids", `{"timestamp":1,"input_length":1,"output_length":1}`, "line 1: hash_ids is missing"},
		{"null hash_ids", `{"timestamp":1,"input_length":1,"output_length":1,"hash_ids":null}`, "line 1: hash_ids is missing"},
		{"hash_ids is no array", strings.Replace(line(0), "[1, 2]", "3", 1), "line 1: hash_ids is not an array"},
		{"negative id", strings.Replace(line(0), "2]", "-2]", 1), "line 1: hash_ids[1] is not a whole number from 0"},
		{"fraction id", strings.Replace(line(0), "2]", "2.5]", 1), "line 1: hash_ids[1] is not a whole number from 0"},
		{"huge id", strings.Replace(line(0), "2]", "18446744073709551616]", 1), "line 1: hash_ids[1] is above 18446744073709551615"},
		{"string id", strings.Replace(line(0), "2]", `"2"]`, 1), "line 1: hash_ids[1] is not a whole number from 0"},
		{"negative timestamp", line(-1), "line 1: timestamp is -1: want 0 to 9223372036854"},
		{"large timestamp", strings.Replace(line(0), ": 0", ": 9223372036855", 1), "line 1: timestamp is 9223372036855: want 0 to"},
		{"huge timestamp", strings.Replace(line(0), ": 0", ": 1e99", 1), "line 1: timestamp: unexpected number 1e99"},
		{"fraction timestamp", strings.Replace(line(0), ": 0", ": 0.5", 1), "line 1: timestamp: unexpected number 0.5"},
		{"negative length", strings.Replace(line(0), "600", "-600", 1), "line 1: input_length is -600: want 0 to 4294967295"},
		{"large length", strings.Replace(line(0), "5,", "4294967296,", 1), "line 1: output_length is 4294967296: want 0 to 4294967295"},
		{"negative session", strings.Replace(line(0), "{", `{"session":-1,`, 1), "line 1: session is -1: want 0 to"},
		{"agent is a number", strings.Replace(line(0), "{", `{"agent":1,`, 1), "line 1: agent: unexpected number"},
		{"back in time", line(7) + "\n" + line(7) + "\n" + line(6), "line 3: timestamp is 6, after 7"},
		{"long line", line(0) + "\n" + strings.Repeat(" ", MaxLine), "line 2: longer than 16 MiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := NewReader(strings.NewReader(c.text))
			if err != nil {
				t.Fatal(err)
			}
			if _, err = readAll(r); err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("error %v, want %s...", err, c.want)
			}
		})
	}
}

func TestReaderLongestLine(t *testing.T) {
	text := line(1)
	text = strings.Repeat(" ", MaxLine-1-len(text)) + text + "\n" + line(2)
	r, err := NewReader(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if reqs, err := readAll(r); err != nil || len(reqs) != 2 {
		t.Errorf("%d requests, error %v, want 2", len(reqs), err)
	}
}

func TestReaderOwnership(t *testing.T) {
	r, err := NewReader(strings.NewReader(line(1) + "\n" + strings.ReplaceAll(line(2), "[1, 2]", "[8, 9]")))
	if err != nil {
		t.Fatal(err)
	}
	a, _ := r.Next()
	b, _ := r.Next()
	if want := []uint64{1, 2}; !slices.Equal(a.IDs, want) {
		t.Errorf("ids of the first request became %v, want %v", a.IDs, want)
	}
	if want := []uint64{8, 9}; !slices.Equal(b.IDs, want) {
		t.Errorf("ids of the second request are %v, want %v", b.IDs, want)
	}
}

// A stream cut off anywhere must never pass for a shorter trace, unless it was cut between two lines of plain text.
func TestReaderTruncated(t *testing.T) {
	text := []byte(line(1) + "\n" + line(2) + "\n")
	packed := compress(t, text)
	for n := 1; n < len(packed); n++ { // one byte is no gzip yet, and no JSON
		r, err := NewReader(bytes.NewReader(packed[:n]))
		if err == nil {
			_, err = readAll(r)
		}
		if err == nil || errors.Is(err, io.EOF) {
			t.Errorf("gzip cut after %d of %d bytes: error %v", n, len(packed), err)
		}
	}
	for n := range text {
		r, err := NewReader(bytes.NewReader(text[:n]))
		if err != nil {
			t.Fatal(err)
		}
		reqs, err := readAll(r)
		rest := n % (len(line(1)) + 1)
		if whole := rest == 0 || rest == len(line(1)); whole != (err == nil) {
			t.Errorf("text cut after %d of %d bytes: %d requests, error %v", n, len(text), len(reqs), err)
		}
	}
}

func TestReaderReadError(t *testing.T) {
	broken := errors.New("broken")
	if _, err := NewReader(iotest.ErrReader(broken)); !errors.Is(err, broken) {
		t.Errorf("NewReader: error %v, want %v", err, broken)
	}
	r, err := NewReader(io.MultiReader(strings.NewReader(line(0)+"\n"), iotest.ErrReader(broken)))
	if err != nil {
		t.Fatal(err)
	}
	if reqs, err := readAll(r); len(reqs) != 1 || !errors.Is(err, broken) || !strings.HasPrefix(err.Error(), "line 2: ") {
		t.Errorf("%d requests, error %v, want 1 and %v in line 2", len(reqs), err, broken)
	}
}

func TestOpen(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v, want %v", err, fs.ErrNotExist)
	}
	bad := filepath.Join(t.TempDir(), "bad.gz")
	if err := os.WriteFile(bad, []byte{0x1f, 0x8b, 0xff}, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(bad); err == nil || !strings.Contains(err.Error(), bad) {
		t.Errorf("error %v does not name the file", err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := Open(empty)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Next(); err != io.EOF {
		t.Errorf("an empty trace: error %v, want %v", err, io.EOF)
	}
	for range 2 {
		if err := r.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
}

// The bundled slice is what its README says.
func TestSlice(t *testing.T) {
	f, err := os.Open(slice)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	if _, err := io.Copy(h, z); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprintf("%x", h.Sum(nil)), "8c442067efa09b73baec7d13c8e7a9097e57fa1ec528bf17d3658d0331854386"; got != want {
		t.Errorf("sha256 %s, want %s", got, want)
	}

	r, err := Open(slice)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	reqs, err := readAll(r)
	if err != nil {
		t.Fatal(err)
	}
	refs, input, distinct := 0, 0, map[uint64]bool{}
	for i, q := range reqs {
		refs, input = refs+len(q.IDs), input+int(q.InputTokens)
		for _, id := range q.IDs {
			distinct[id] = true
		}
		if want := (int(q.InputTokens) + BlockTokens - 1) / BlockTokens; len(q.IDs) != want {
			t.Errorf("request %d: %d ids for %d tokens, want %d", i, len(q.IDs), q.InputTokens, want)
		}
		if q.Session != -1 || q.Agent != "" || q.Stop != "" {
			t.Errorf("request %d has a session: %v", i, q)
		}
	}
	got := [5]int{len(reqs), refs, len(distinct), input, int(reqs[len(reqs)-1].TimeMS)}
	if want := [5]int{1500, 41702, 30634, 20981721, 509999}; got != want {
		t.Errorf("requests, references, distinct ids, tokens and span are %v, want %v", got, want)
	}
}

// What appendIDs accepts, encoding/json accepts with the same values; what encoding/json accepts and appendIDs does not
// has a null in it.
func FuzzIDs(f *testing.F) {
	for _, s := range []string{"[]", "[ ]", "[1]", " [ 0 ,\t18446744073709551615\r\n] ", "[01]", "[-1]", "[1.0]", "[1e2]", "[1,]", "[,1]",
		"[1 2]", "[1", "[", "", "null", "[null]", "[18446744073709551616]", "[99999999999999999999]", "[1]]", "[[1]]", `["1"]`, "[1]x"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := appendIDs(nil, b)
		var want []uint64
		wantErr := json.Unmarshal(b, &want)
		switch {
		case err == nil && wantErr != nil:
			t.Errorf("%q: accepted as %v, but encoding/json says %v", b, got, wantErr)
		case err == nil && !slices.Equal(got, want):
			t.Errorf("%q: got %v, want %v", b, got, want)
		case err != nil && wantErr == nil && !bytes.Contains(b, []byte("null")):
			t.Errorf("%q: refused (%v), but encoding/json reads %v", b, err, want)
		}
	})
}

// No input makes a Reader panic, and what it accepts keeps its promises.
func FuzzReader(f *testing.F) {
	f.Add([]byte(line(0) + "\n" + line(3)))
	f.Add(compress(f, []byte(line(0)+"\n"+line(3))))
	f.Add([]byte(`{"timestamp":1,"input_length":1,"output_length":1,"hash_ids":[3],"hash_ids":null,"Session":4,"HASH_IDS":[5]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := NewReader(bytes.NewReader(b))
		if err != nil {
			return
		}
		reqs, err := readAll(r)
		if err != nil && !strings.HasPrefix(err.Error(), "line ") {
			t.Errorf("error %v names no line", err)
		}
		last := int64(0)
		for _, q := range reqs {
			if q.TimeMS < last || q.TimeMS > MaxTimeMS || q.Session < -1 {
				t.Errorf("accepted %+v after %d ms", q, last)
			}
			last = q.TimeMS
		}
	})
}

func BenchmarkReader(b *testing.B) {
	packed, err := os.ReadFile(slice)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		r, err := NewReader(bytes.NewReader(packed))
		if err != nil {
			b.Fatal(err)
		}
		reqs, err := readAll(r)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(len(reqs)), "requests/op")
	}
}
