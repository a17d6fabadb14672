package recording

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvlift/block"
)

const bundled = "../testdata/recordings/"

// TestOpen reads the bundled recordings and compares what was inferred with what is known of these engines.
func TestOpen(t *testing.T) {
	for _, c := range []struct {
		file               string
		kinds              string
		chunk              []uint32
		parts              []uint32
		requests, recorded int
		calls              int
		deepest            uint32 // position of the deepest key that is loaded
		loaded             uint64
	}{
		{"llama_chunk4", "full", []uint32{128}, []uint32{131072}, 4, 52, 102, 1408, 1310720},
		{"llama_v0.33.0", "full", []uint32{32}, []uint32{32768}, 4, 84, 134, 1472, 1376256},
		{"qwen3next_pmu32", "state state state full", []uint32{288, 288, 288, 288}, []uint32{68608, 68608, 68608, 73728}, 4, 110, 159, 1472, 648192},
	} {
		s, err := Open(bundled + c.file + ".jsonl")
		if err != nil {
			t.Fatal(err)
		}
		var kinds []string
		for g, v := range s.Groups {
			kinds = append(kinds, v.Kind)
			if v.ChunkTokens != c.chunk[g] || s.Parts[0][g] != c.parts[g] {
				t.Errorf("%s: group %d: %d tokens, %d bytes", c.file, g, v.ChunkTokens, s.Parts[0][g])
			}
		}
		calls, deepest := 0, uint32(0)
		for call := range s.All() {
			calls++
			if call.Method == PrepareLoad {
				for i := range call.Keys {
					p := s.Position(&call.Keys[i])
					if p == 0 {
						t.Errorf("%s: line %d: key %v has no position", c.file, call.Line, call.Keys[i])
					}
					deepest = max(deepest, p)
				}
			}
		}
		if got := strings.Join(kinds, " "); got != c.kinds || s.Requests != c.requests || len(s.Prompts) != c.requests || len(s.Calls) != c.recorded || calls != c.calls ||
			deepest != c.deepest || len(s.Loaded) != 1 || s.Loaded[0] != c.loaded || s.TierBytes == 0 || s.Recovered != 0 {
			t.Errorf("%s: kinds %s, %d requests, prompts %v, %d calls, %d with repetitions, deepest %d, loaded %v, tier %d", c.file, got, s.Requests, s.Prompts, len(s.Calls), calls, deepest, s.Loaded, s.TierBytes)
		}
	}
}

const config = `{"m":"config","groups":[{"group_id":7,"tokens_per_block":16,"layer_names":["a.attn"]},{"group_id":2,"tokens_per_block":16,"layer_names":["b.mamba"]}],"worker_kv_bytes_per_block":64,"tokens_per_hash":16,"blocks_per_chunk":2,"model":"m","world_size":2}` + "\n"

func TestRead(t *testing.T) {
	s, err := Read(strings.NewReader(config + `
{"m":"on_new_request","req":"x"}
{"m":"lookup","req":"x","key":"0100000007","ret":"MISS"}
{"m":"prepare_store","req":"x","keys":["0200000002","0100000007","0200000007"],"ret":{"store":["0100000007"]}}
{"m":"prepare_store","req":"x","keys":["0300000007"],"ret":null}
{"m":"on_schedule_end"}
{"m":"repeat_previous_step","x":2,"rows":2}
{"m":"reset_cache"}
`))
	if err != nil {
		t.Fatal(err)
	}
	var order []int
	for c := range s.All() {
		order = append(order, c.Line)
	}
	want := []int{3, 4, 5, 6, 7, 6, 7, 6, 7, 9}
	if len(order) != len(want) {
		t.Fatalf("calls of lines %v, want %v", order, want)
	}
	for i := range want {
		if order[i] != want[i] {
			t.Fatalf("calls of lines %v, want %v", order, want)
		}
	}
	state := s.Calls[2].Keys[0]
	if s.Group(&state) != 1 || s.Position(&state) != 64 || s.Groups[1].Kind != "state" || !s.Calls[3].None || s.Calls[2].None || len(s.Parts) != 2 || s.Parts[1][0] != 128 {
		t.Errorf("%+v", s)
	}
}

func TestReadRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":                  "",
		"no JSON":                  "what\n",
		"unknown method":           config + `{"m":"surprise","req":"r"}`,
		"two configurations":       config + config,
		"no world":                 strings.Replace(config, `"world_size":2`, `"world_size":0`, 1),
		"group of no tokens":       strings.Replace(config, `"tokens_per_block":16`, `"tokens_per_block":0`, 1),
		"a group twice":            strings.Replace(config, `"group_id":2`, `"group_id":7`, 1),
		"a chunk too large":        strings.Replace(config, `"worker_kv_bytes_per_block":64`, `"worker_kv_bytes_per_block":4294967295`, 1),
		"key of an unknown group":  config + `{"m":"lookup","req":"r","key":"0100000009","ret":"HIT"}`,
		"key too short":            config + `{"m":"lookup","req":"r","key":"00000007","ret":"HIT"}`,
		"key before configuration": `{"m":"lookup","req":"r","key":"0100000007","ret":"HIT"}`,
		"unknown answer":           config + `{"m":"lookup","req":"r","key":"0100000007","ret":"MAYBE"}`,
		"no request":               config + `{"m":"lookup","key":"0100000007","ret":"HIT"}`,
		"repeats more than is":     config + `{"m":"on_schedule_end"}` + "\n" + `{"m":"repeat_previous_step","x":1,"rows":2}`,
		"repeats too often":        config + `{"m":"on_schedule_end"}` + "\n" + `{"m":"repeat_previous_step","x":9999999,"rows":1}`,
		"repeats a repetition":     config + `{"m":"on_schedule_end"}` + "\n" + strings.Repeat(`{"m":"repeat_previous_step","x":1,"rows":1}`+"\n", 2),
	} {
		if _, err := Read(strings.NewReader(text)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none.jsonl")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

// TestOpenWithoutWorkers falls back to what the manager knew; of two ranks both files are needed or none.
func TestOpenWithoutWorkers(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("s.jsonl", config)
	s, err := Open(filepath.Join(dir, "s.jsonl"))
	if err != nil || s.Parts[1][1] != 128 || s.TierBytes != 0 || len(s.Loaded) != 0 {
		t.Fatalf("%+v, %v", s, err)
	}
	write("s.worker.jsonl", `{"m":"register","group_refs":[[[0,8,true],[1,8,true]],[[0,24]]],"file_bytes":4096}`)
	if _, err := Open(filepath.Join(dir, "s.jsonl")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the second rank is missing: %v", err)
	}
	write("s.worker1.jsonl", `{"m":"register","group_refs":[[[0,16]],[[0,24],[1,8]]],"file_bytes":4096}`+"\n"+`{"m":"submit_load","bytes":5}`)
	s, err = Open(filepath.Join(dir, "s.jsonl"))
	if err != nil || s.Parts[0][0] != 32 || s.Parts[0][1] != 48 || s.Parts[1][0] != 32 || s.Parts[1][1] != 64 || s.TierBytes != 4096 || s.Loaded[1] != 5 {
		t.Fatalf("%+v, %v", s, err)
	}
	for name, text := range map[string]string{
		"nothing registered": `{"m":"submit_load","bytes":5}`,
		"another number":     `{"m":"register","group_refs":[[[0,16]]],"file_bytes":4096}`,
		"an empty group":     `{"m":"register","group_refs":[[[0,16]],[]],"file_bytes":4096}`,
		"no size":            `{"m":"register","group_refs":[[[0,16]],[[0]]],"file_bytes":4096}`,
		"too large":          `{"m":"register","group_refs":[[[0,16]],[[0,4000000000]]],"file_bytes":4096}`,
	} {
		write("s.worker1.jsonl", text)
		if _, err := Open(filepath.Join(dir, "s.jsonl")); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(config + `{"m":"prepare_store","req":"x","keys":["0200000002","0100000007"],"ret":{"store":["0100000007"]}}`))
	f.Add([]byte(config + `{"m":"prepare_load","req":"x","keys":["0200000002","0100000007"]}` + "\n" + `{"m":"on_schedule_end"}` + "\n" + `{"m":"repeat_previous_step","x":3,"rows":2}`))
	if b, err := os.ReadFile(bundled + "qwen3next_pmu32.jsonl"); err == nil {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Read(strings.NewReader(string(b)))
		if err != nil {
			return
		}
		n := 0
		for c := range s.All() {
			if n++; n > MaxCalls {
				t.Fatal("more calls than there may be")
			}
			for _, list := range [][]block.Key{c.Keys, c.Stored} {
				for i := range list {
					if g := s.Group(&list[i]); g < 0 || g >= len(s.Groups) {
						t.Fatalf("line %d: group %d", c.Line, g)
					}
					s.Position(&list[i])
				}
			}
		}
	})
}
