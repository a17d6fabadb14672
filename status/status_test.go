package status

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"

	"kvlift/engine"
	"kvlift/meta"
)

var update = flag.Bool("update", false, "write the golden files")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (-update writes it); got:\n%s", path, got)
	}
}

func testTime() time.Time { return time.UnixMilli(1_800_000_000_000) }

func testDaemon() Daemon {
	return Daemon{Version: "0.1.0", Name: "default", PID: 4211, Socket: "/run/kvlift/default.sock", Start: testTime().Add(-76*time.Hour - 12*time.Minute),
		Now: testTime(), ArenaDir: "/dev/shm/kvlift-default", HugePageBytes: 2 << 20, Adopted: true,
		Adoption:     engine.Report{Ready: 41_200, Reserved: 12, Revived: 3, Dropped: 1, Sessions: 1},
		AdoptionTime: 412 * time.Millisecond, Connections: 5,
		Process: Process{HeapBytes: 47 << 20, Goroutines: 23, CPUUserSeconds: 12.34, CPUSystemSeconds: 3.21, RSSBytes: 3 << 30}}
}

func testStatus() engine.Status {
	ms := testTime().UnixMilli()
	st := engine.Status{Policy: "lru", MinIdle: 30 * time.Second, ArenaPages: 16 << 20, FreePages: 131_072, LongestRun: 32_768, ReadyPages: 16_573_000,
		PendingPages: 65_000, Records: 1 << 20, FreeRecords: 1<<20 - 45_000, ReadyKeys: 44_000, ReservedKeys: 200, Epoch: 99, Unresolved: 1}
	c := &st.Counters
	c.Stored, c.StoredBytes, c.Loads, c.Aborted, c.RefusedKeys = 101_234, 150<<30, 88_000, 7, 35
	c.Refused[engine.TooYoung], c.Refused[engine.Waiting], c.Refused[engine.OverQuota] = 2, 9, 4
	c.Evicted[engine.ByStore], c.Evicted[engine.Ahead] = 50_000, 7_000
	c.Requests, c.PromptTokens, c.HitTokens = 812, 20_135_790, 12_345_678
	c.Fenced = 4
	st.Namespaces = []engine.NamespaceStatus{
		{ID: [32]byte{0xab, 1}, Description: `{"groups":[{"kind":"full"}],"identity":{"dtype":"bf16","model":"Qwen/Qwen3.8-27B-Instruct","tp":2}}`, Sessions: 2,
			Quota: &engine.QuotaStatus{Pages: 16 << 18, UsedPages: 16<<18 - 1000, Refused: 4},
			Groups: []engine.GroupStatus{
				{Kind: meta.Full, ChunkTokens: 832, PayloadBytes: 14_600_000, Keys: 4_000, Tokens: 3_328_000, Bytes: 4_000 * 14_602_240, OldestMS: 7_260_000},
				{Kind: meta.StateG, ChunkTokens: 832, PayloadBytes: 1_000_000, Keys: 900, Tokens: 748_800, Bytes: 900 * 1_003_520, OldestMS: 90_500},
				{Kind: meta.Draft, ChunkTokens: 128, PayloadBytes: 4_096, OldestMS: -1},
			}},
		{Index: 1, ID: [32]byte{0xcd, 2}, Private: true, Description: `{"identity":{"model":["a","list"]}}`, Sessions: 1,
			Groups: []engine.GroupStatus{{Kind: meta.Window, ChunkTokens: 128, PayloadBytes: 65_536, Keys: 39_100, Tokens: 5_004_800, Bytes: 39_100 * 65_536, OldestMS: 1_500}}},
	}
	st.Sessions = []engine.SessionStatus{
		{ID: 0xbeef, EngineID: "engine-a\x1b[31m\n", State: engine.Attached, Namespace: 0, PID: 990, Ranks: 2, World: 2, Jobs: 3, Requests: 4, Behind: 12,
			SinceMS: ms - 3_600_000, Stats: engine.SessionStats{Requests: 800, PromptTokens: 20_000_000, HitTokens: 19_999_999}},
		{ID: 0xcafe, EngineID: "engine-b", State: engine.Detached, Namespace: 0, Ranks: 1, World: 2, Jobs: 2, Requests: 1, Behind: 1, SinceMS: ms - 7_200_000},
		{ID: 0xf00d, EngineID: "vllm-offload-0123456789abcdef-dp0", State: engine.Unresolved, Namespace: 1, PID: 77, Ranks: 1, World: 1, SinceMS: ms - 76*3_600_000},
		{ID: 0x2, EngineID: "engine-d", State: engine.Attached, Fenced: true, Namespace: 0, PID: 991, Ranks: 2, World: 2, SinceMS: ms - 1_800_000},
		{ID: 0x1, EngineID: "engine-c", State: engine.Forming, Namespace: -1, Ranks: 1, World: 2, SinceMS: ms - 1_200},
	}
	return st
}

func TestDocument(t *testing.T) {
	doc := Build(testStatus(), testDaemon())
	b, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "document.json", append(b, '\n'))
	back, err := Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back, doc) {
		t.Errorf("Parse(Marshal(doc)) = %+v, want %+v", back, doc)
	}
	ram := doc.Tiers[0]
	if sum := ram.UsedBytes + ram.FreeBytes + ram.ReservedBytes + ram.PendingBytes; sum != ram.TotalBytes {
		t.Errorf("the tier's parts sum up to %d, want %d", sum, ram.TotalBytes)
	}
	if want := uint64(3_328_000 + 5_004_800); ram.Tokens != want {
		t.Errorf("tokens = %d, want %d: each token once", ram.Tokens, want)
	}
}

func TestDocumentEmpty(t *testing.T) {
	b, err := json.MarshalIndent(Build(engine.Status{}, Daemon{}), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "empty.json", append(b, '\n'))
}

func TestState(t *testing.T) {
	for _, c := range []struct {
		st   engine.Status
		want State
	}{
		{engine.Status{}, Serving},
		{engine.Status{Unresolved: 2}, Recovering},
		{engine.Status{Draining: true}, Draining},
		{engine.Status{Draining: true, Unresolved: 1}, Draining},
	} {
		if got := Build(c.st, Daemon{}).State; got != c.want {
			t.Errorf("state with draining %v and %d unresolved = %q, want %q", c.st.Draining, c.st.Unresolved, got, c.want)
		}
	}
}

func TestWhy(t *testing.T) {
	for _, c := range []struct {
		name string
		s    engine.SessionStatus
		want string
	}{
		{"attached, idle", engine.SessionStatus{State: engine.Attached}, ""},
		{"attached, working", engine.SessionStatus{State: engine.Attached, Jobs: 3, Requests: 2}, ""},
		{"attached, behind", engine.SessionStatus{State: engine.Attached, Behind: 1}, "1 removal not acknowledged"},
		{"forming", engine.SessionStatus{State: engine.Forming}, ""},
		{"detached, nothing open", engine.SessionStatus{State: engine.Detached}, ""},
		{"detached, behind", engine.SessionStatus{State: engine.Detached, Behind: 1200}, "its manager is not connected: 1,200 removals not acknowledged"},
		{"detached, jobs", engine.SessionStatus{State: engine.Detached, Jobs: 2, Requests: 1}, "its manager is not connected: 2 jobs open, 1 request open"},
		{"fenced, nothing open", engine.SessionStatus{State: engine.Attached, Fenced: true}, ""},
		{"fenced, loading", engine.SessionStatus{State: engine.Attached, Fenced: true, Jobs: 1, Requests: 2},
			"it says nothing and is not waited for, but it has begun: 1 job open, 2 requests open"},
		{"fenced, then disconnected", engine.SessionStatus{State: engine.Detached, Fenced: true, Jobs: 1}, "its manager is not connected: 1 job open"},
		{"unresolved", engine.SessionStatus{State: engine.Unresolved}, "unresolved since the daemon's start: no page is reused until it comes back or ends"},
	} {
		doc := Build(engine.Status{Sessions: []engine.SessionStatus{c.s}}, Daemon{})
		if e := doc.Engines[0]; e.Why != c.want || e.BlocksReuse != (c.want != "") {
			t.Errorf("%s: why = %q, blocks %v, want %q", c.name, e.Why, e.BlocksReuse, c.want)
		}
	}
}

func TestModel(t *testing.T) {
	long := `{"groups":[{"kind":"full"}],"identity":{"dtype":"bf16","model":"m","weights":"` + strings.Repeat("x", 9000)
	for _, c := range []struct{ name, in, want string }{
		{"plain", `{"identity":{"model":"m"}}`, "m"},
		{"after others", `{"groups":[{"model":"no"}],"identity":{"a":{"model":"no"},"model":"yes","z":1}}`, "yes"},
		{"cut behind it", long[:meta.MaxDescription], "m"},
		{"cut before it", `{"groups":[{"kind":"full"}],"identity":{"dty`, ""},
		{"cut inside it", `{"identity":{"model":"Qwe`, ""},
		{"not a string", `{"identity":{"model":7}}`, ""},
		{"null", `{"identity":{"model":null}}`, ""},
		{"absent", `{"identity":{}}`, ""},
		{"only elsewhere", `{"model":"no"}`, ""},
		{"identity is a list", `{"identity":["model","no"]}`, ""},
		{"a value that reads like the name", `{"x":"identity","identity":{"y":"model","model":"m"}}`, "m"},
		{"long", `{"identity":{"model":"` + strings.Repeat("é", 1000) + `"}}`, strings.Repeat("é", 127)},
		{"not JSON", "\x00", ""},
		{"empty", "", ""},
	} {
		if got := model(c.in); got != c.want {
			t.Errorf("%s: model = %q, want %q", c.name, got, c.want)
		}
	}
}

func TestParse(t *testing.T) {
	for _, c := range []struct{ name, in, err string }{
		{"unknown fields", `{"schema":1,"name":"n","new":{"deep":[1,2]},"tiers":[{"name":"ram","new_bytes":1}]}`, ""},
		{"another schema", `{"schema":2,"name":["changed"]}`, "it has schema 2, this kvlift reads 1"},
		{"no schema", `{}`, "it has schema 0"},
		{"not an object", `[1]`, "cannot unmarshal"},
		{"two values", `{"schema":1}{"schema":1}`, "more than one"},
		{"garbage behind it", `{"schema":1}x`, "more than one"},
		{"a wrong type", `{"schema":1,"pid":"x"}`, "cannot unmarshal"},
		{"negative bytes", `{"schema":1,"tiers":[{"total_bytes":-1}]}`, "cannot unmarshal"},
		{"too long", `{"schema":1}` + strings.Repeat(" ", MaxDocument), "at most"},
	} {
		_, err := Parse([]byte(c.in))
		switch {
		case c.err == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
			t.Errorf("%s: error %v, want one with %q", c.name, err, c.err)
		}
	}
	if _, err := Parse([]byte(`{"schema":2}`)); !errors.Is(err, ErrSchema) {
		t.Errorf("another schema: %v is not ErrSchema", err)
	}
}

func TestParsePrefixes(t *testing.T) {
	b, err := json.Marshal(Build(testStatus(), testDaemon()))
	if err != nil {
		t.Fatal(err)
	}
	for n := range b {
		if _, err := Parse(b[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes were accepted", n, len(b))
		}
	}
}

// TestFullTables sees that the largest document that a daemon can make can be read.
func TestFullTables(t *testing.T) {
	var st engine.Status
	for range meta.MaxNamespaces {
		n := engine.NamespaceStatus{Description: `{"identity":{"model":"` + strings.Repeat("\u2028", 2_700) + `"}}`}
		for range meta.MaxGroups {
			n.Groups = append(n.Groups, engine.GroupStatus{ChunkTokens: 1 << 31, PayloadBytes: 1 << 31, Keys: 1 << 62, Tokens: 1 << 62, Bytes: 1 << 62, OldestMS: 1 << 40})
		}
		st.Namespaces = append(st.Namespaces, n)
	}
	for range meta.MaxSessions {
		st.Sessions = append(st.Sessions, engine.SessionStatus{ID: 1 << 63, EngineID: strings.Repeat("\x01", meta.MaxEngineID), State: engine.Detached,
			PID: 1 << 31, Ranks: 9999, World: 9999, Jobs: 1 << 16, Requests: 1 << 16, Behind: 1 << 62,
			Stats: engine.SessionStats{Requests: 1 << 62, PromptTokens: 1 << 62, HitTokens: 1 << 61}})
	}
	doc := Build(st, testDaemon())
	b, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", len(b))
	if _, err := Parse(b); err != nil {
		t.Error(err)
	}
	var out bytes.Buffer
	if err := doc.Text(&out, 100); err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(out.Bytes(), []byte("\n")); n > 120 {
		t.Errorf("%d lines are no screen", n)
	}
}

func TestText(t *testing.T) {
	doc := Build(testStatus(), testDaemon())
	for name, width := range map[string]int{"text.txt": 0, "text80.txt": 80} {
		var b bytes.Buffer
		if err := doc.Text(&b, width); err != nil {
			t.Fatal(err)
		}
		golden(t, name, b.Bytes())
		for l := range strings.Lines(b.String()) {
			if n := len([]rune(l)) - 1; width > 0 && n > width {
				t.Errorf("%s: a line of %d columns: %q", name, n, l)
			}
		}
	}
}

func TestTextEmpty(t *testing.T) {
	doc := Build(engine.Status{Policy: "lru", ArenaPages: 1 << 20, FreePages: 1 << 20, LongestRun: 1 << 20, Records: 1 << 18, FreeRecords: 1 << 18},
		Daemon{Version: "0.1.0", Name: "default", PID: 1, Socket: "/run/kvlift/default.sock", Start: testTime(), Now: testTime(), ArenaDir: "/dev/shm/kvlift-default"})
	var b bytes.Buffer
	if err := doc.Text(&b, 80); err != nil {
		t.Fatal(err)
	}
	golden(t, "text_empty.txt", b.Bytes())
	// A document of nothing at all must not divide by zero or show what was not measured.
	b.Reset()
	if err := new(Document).Text(&b, 80); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"NaN", "Inf", "%!", "0.0 %"} {
		if strings.Contains(b.String(), bad) {
			t.Errorf("the empty document shows %q:\n%s", bad, b.String())
		}
	}
}

type fullWriter struct{}

var errFull = errors.New("full")

func (fullWriter) Write([]byte) (int, error) { return 0, errFull }

func TestTextReturnsWriteErrors(t *testing.T) {
	if err := new(Document).Text(fullWriter{}, 80); !errors.Is(err, errFull) {
		t.Errorf("Text to a full writer = %v", err)
	}
}

func TestClean(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"Qwen/Qwen3-8B", "Qwen/Qwen3-8B"},
		{"a b", "a b"},
		{"模型 é", "模型 é"},
		{"\x1b[2J", `\x1b[2J`},
		{"a\tb\r\n", `a\tb\r\n`},
		{"\u009b31m", `\u009b31m`}, // C1: the 8-bit form of ESC [
		{"\u202eabc", `\u202eabc`}, // turns the direction of writing
		{"\u200bx", `\u200bx`},     // invisible
		{"\xff\xfe", `\xff\xfe`},   // not UTF-8; 0xff is tabwriter's escape
		{`back\slash`, `back\\slash`},
		{"it's \"x\"", "it's \"x\""},
		{"\ufffd", "\ufffd"},
	} {
		if got := clean(c.in); got != c.want {
			t.Errorf("clean(%q) = %q, want %q", c.in, got, c.want)
		}
	}
}

// FuzzText sees that whatever a document says, only printable lines reach the terminal.
func FuzzText(f *testing.F) {
	f.Add("engine\x1b]0;x\x07", "model\v\f", "ram\u2028", "\u0085", 80)
	f.Add("", "", "", "", 1)
	f.Fuzz(func(t *testing.T, id, model, dir, state string, width int) {
		ns := 0
		d := Document{Name: id, Version: model, Socket: dir, State: State(state),
			Tiers:      []Tier{{Name: model, Dir: dir}},
			Policy:     Policy{Name: id},
			Counters:   Counters{RefusedBatches: map[string]uint64{state: 1}, EvictedKeys: map[string]uint64{dir: 1}},
			Namespaces: []Namespace{{Model: model, Groups: []Group{{Kind: state}}}},
			Engines:    []Engine{{EngineID: id, State: state, Namespace: &ns, BlocksReuse: true, Why: dir}}}
		var b bytes.Buffer
		if err := d.Text(&b, width%300); err != nil {
			t.Fatal(err)
		}
		for _, r := range b.String() {
			if r != '\n' && !unicode.IsPrint(r) {
				t.Fatalf("%U reached the terminal:\n%q", r, b.String())
			}
		}
	})
}

func TestSpan(t *testing.T) {
	for _, c := range []struct {
		in   float64
		want string
	}{{0, "0.0s"}, {9.94, "9.9s"}, {59.9, "59s"}, {61, "1m1s"}, {3_660, "1h1m"}, {90_000, "1d1h"}, {1e300, "104166d16h"}} {
		if got := span(c.in); got != c.want {
			t.Errorf("span(%g) = %q, want %q", c.in, got, c.want)
		}
	}
}

func TestPercent(t *testing.T) {
	for _, c := range []struct {
		in   float64
		want string
	}{{0, "0.0 %"}, {1e-9, "<0.1 %"}, {0.613, "61.3 %"}, {0.99996, "99.9 %"}, {1, "100.0 %"}, {0.001, "0.1 %"}} {
		if got := percent(c.in); got != c.want {
			t.Errorf("percent(%g) = %q, want %q", c.in, got, c.want)
		}
	}
}
