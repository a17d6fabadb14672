package bench_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvlift/bench"
	"kvlift/recording"
)

const recordings = "../testdata/recordings"

// load opens recordings of a folder by name, all of them when none is named. Names are in order, so that a cold engine comes
// before the one that goes on from it.
func load(t *testing.T, dir string, names ...string) (out []*recording.Session) {
	t.Helper()
	if len(names) == 0 {
		files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if name := strings.TrimSuffix(filepath.Base(f), ".jsonl"); !strings.Contains(name, ".worker") {
				names = append(names, name)
			}
		}
	}
	for _, name := range names {
		s, err := recording.Open(filepath.Join(dir, name+".jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, s)
	}
	if len(out) == 0 {
		t.Fatalf("no recordings in %s", dir)
	}
	return out
}

// TestRecordings plays real sessions: every call gets the answer that the engine had.
func TestRecordings(t *testing.T) {
	want := map[string]struct{ hits, stored, early int }{"llama_chunk4": {10, 33, 0}, "llama_v0.33.0": {42, 138, 0}, "qwen3next_pmu32": {12, 36, 18}}
	err := bench.Recordings{Binary: binary, Sessions: load(t, recordings)}.Run(t.Context(), func(p *bench.Played) {
		if err := p.Err(); err != nil {
			t.Error(err)
		}
		w, ok := want[p.Name]
		if !ok || p.Hits != w.hits || p.RecordedHits != w.hits || p.Stored != w.stored || p.RecordedStores != w.stored || p.EarlyStates != w.early || len(p.Differences) != 0 || p.LoadedBytes == 0 {
			t.Errorf("%+v", p)
		}
		delete(want, p.Name)
	})
	if err != nil || len(want) > 0 {
		t.Fatalf("%v; not played: %v", err, want)
	}
}

// TestSharedRecordings plays every recording there is.
func TestSharedRecordings(t *testing.T) {
	sessions, n := load(t, shared(t, "vllm_cpu/sessions")), 0
	ranks := map[int]int{}
	err := bench.Recordings{Binary: binary, Sessions: sessions}.Run(t.Context(), func(p *bench.Played) {
		n++
		ranks[p.Ranks]++
		if err := p.Err(); err != nil {
			t.Error(err)
		}
		// The tier of one is smaller than what its four conversations store, and it asked again where kvlift answers at once.
		full, more := 0, 0
		switch p.Name {
		case "llama_preempt":
			full = 19
		case "llama_retry_conc":
			more = 126
		}
		if p.RefusedFull != full || p.MoreHits != more || p.StoredAgain != 0 || p.Lookups == 0 || p.LoadedBytes == 0 {
			t.Errorf("%+v", p)
		}
	})
	if err != nil || n != len(sessions) || ranks[2] == 0 {
		t.Fatalf("%d of %d were played, %v with so many ranks: %v", n, len(sessions), ranks, err)
	}
}

// TestTightRecording plays a hybrid session to tiers that hold a part of it. Hits are lost then, but no state is refused whose
// chain comes later, and no byte is wrong.
func TestTightRecording(t *testing.T) {
	for _, ram := range []uint64{256 << 10, 512 << 10, 768 << 10, 1 << 20, 2 << 20, 3 << 20} {
		lost := false
		err := bench.Recordings{Binary: binary, Sessions: load(t, recordings, "qwen3next_pmu32"), RAM: ram}.Run(t.Context(), func(p *bench.Played) {
			lost = p.LostHits > 0
			if p.RefusedStates != 0 || p.RefusedOtherwise != 0 {
				t.Errorf("%d bytes: %+v", ram, p)
			}
		})
		if err != nil || lost != (ram < 3<<20) {
			t.Errorf("%d bytes: lost %v, %v", ram, lost, err)
		}
	}
}

// made writes a recording of an engine with a group of attention, a page a chunk, and one of states, three pages each.
func made(t *testing.T, recovered string, calls ...string) string {
	t.Helper()
	dir := t.TempDir()
	head := `{"m":"session","name":"made","phases":[]}
{"m":"config","groups":[{"group_id":0,"tokens_per_block":16,"layer_names":["attn"]},{"group_id":1,"tokens_per_block":16,"layer_names":["mamba"]}],"worker_kv_bytes_per_block":12288,"tokens_per_hash":16,"blocks_per_chunk":1,"model":"made","world_size":1}
{"m":"recovered","keys":` + recovered + "}\n"
	worker := `{"m":"register","group_refs":[[[0,4096]],[[0,12288]]],"file_bytes":16384}`
	for name, text := range map[string]string{"made.jsonl": head + strings.Join(calls, "\n"), "made.worker.jsonl": worker} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestRecordingControls: each check of a played recording fails where it has to.
func TestRecordingControls(t *testing.T) {
	const (
		fills   = `{"m":"prepare_store","req":"other","keys":["aa00000000","ab00000000"],"ret":{"store":["aa00000000","ab00000000"]}}`
		offers  = `{"m":"prepare_store","req":"r","keys":["0100000001"],"ret":{"store":["0100000001"]}}`
		chunk   = `{"m":"prepare_store","req":"r","keys":["0100000000"],"ret":{"store":["0100000000"]}}`
		done    = `{"m":"complete_store","req":"r","keys":["0100000000"]}`
		end     = `{"m":"on_schedule_end"}`
		hit     = `{"m":"lookup","req":"s","key":"0100000000","ret":"HIT"}`
		miss    = `{"m":"lookup","req":"s","key":"0100000000","ret":"MISS"}`
		loads   = `{"m":"prepare_load","req":"s","keys":["0100000000"]}`
		reset   = `{"m":"reset_cache"}`
		loadEnd = `{"m":"complete_load","req":"s","keys":["0100000000"]}`
	)
	for _, c := range []struct {
		name  string
		calls []string
		check func(*bench.Played) bool
		holds bool
	}{
		{"all is well", []string{chunk, end, done, hit, loads, end}, func(p *bench.Played) bool { return p.Hits == 1 && len(p.Differences) == 0 }, true},
		{"a hit that nobody stored", []string{hit, end}, func(p *bench.Played) bool { return p.LostHits == 1 && len(p.Differences) == 1 }, false},
		{"a load that nobody stored", []string{loads, end}, func(p *bench.Played) bool { return p.LostLoads == 1 }, false},
		{"a hit more", []string{chunk, end, done, miss, end}, func(p *bench.Played) bool { return p.MoreHits == 1 && p.Hits == 1 }, true},
		{"not complete, no hit", []string{chunk, end, miss, end}, func(p *bench.Played) bool { return p.Hits == 0 }, true},
		{"a store that the recorded manager had no need of", []string{strings.Replace(chunk, `"ret":{"store":["0100000000"]}`, `"ret":{"store":[]}`, 1), end, hit, end},
			func(p *bench.Played) bool { return p.StoredAgain == 1 && p.Hits == 1 }, true},
		{"a state refused, its chain never came", []string{fills, offers, end}, func(p *bench.Played) bool { return p.RefusedFull == 1 && p.RefusedStates == 0 }, true},
		{"a state refused, its chain came later", []string{fills, offers, chunk, end}, func(p *bench.Played) bool { return p.RefusedFull == 1 && p.RefusedStates == 1 }, false},
		{"a state before its chunk", []string{offers, chunk, end}, func(p *bench.Played) bool { return p.EarlyStates == 1 && p.Stored == 2 }, true},
		{"reset", []string{chunk, end, done, hit, loads, offers, end, reset, miss, chunk, end, done, hit, end}, func(p *bench.Played) bool { return p.Hits == 2 && p.Stored == 3 }, true},
	} {
		err := bench.Recordings{Binary: binary, Sessions: load(t, made(t, "0", c.calls...))}.Run(t.Context(), func(p *bench.Played) {
			if !c.check(p) || (p.Err() == nil) != c.holds || p.Err() != nil && !errors.Is(p.Err(), bench.ErrFewer) {
				t.Errorf("%s: %v, %+v", c.name, p.Err(), p)
			}
		})
		if err != nil && !strings.Contains(err.Error(), "the recorded workers copied 0") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	none := func(p *bench.Played) { t.Errorf("%+v", p) }
	if err := (bench.Recordings{Binary: binary, Sessions: load(t, made(t, "3"))}).Run(t.Context(), none); !errors.Is(err, bench.ErrCold) {
		t.Errorf("it goes on from nothing: %v", err)
	}
	if err := (bench.Recordings{Binary: binary, Sessions: load(t, recordings, "qwen3next_pmu32"), CorruptAt: 1}).Run(t.Context(), none); !errors.Is(err, bench.ErrWrongBytes) {
		t.Errorf("a byte is flipped: %v", err)
	}
	if err := (bench.Recordings{Binary: binary, Sessions: load(t, recordings, "qwen3next_pmu32"), CorruptAt: 2}).Run(t.Context(), none); err == nil || !strings.Contains(err.Error(), "no byte was corrupted") {
		t.Errorf("a load that never comes: %v", err)
	}
	if err := (bench.Recordings{Binary: binary, Sessions: load(t, made(t, "0", chunk, end, done, loads, loadEnd))}).Run(t.Context(), none); err == nil || !strings.Contains(err.Error(), "the recorded workers copied 0") {
		t.Errorf("workers that copied something else: %v", err)
	}
	played := 0
	sessions := append(load(t, made(t, "0", chunk, end, done)), load(t, made(t, "2", miss))...)
	if err := (bench.Recordings{Binary: binary, Sessions: sessions}).Run(t.Context(), func(*bench.Played) { played++ }); !errors.Is(err, bench.ErrFewer) || played != 1 {
		t.Errorf("keys that were lost: %v", err)
	}
}
