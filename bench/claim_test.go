package bench_test

import (
	"container/list"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"kvlift/bench"
	"kvlift/trace"
)

// shared is a file that lies beside the repository and is too large to be in it. Without it the test is skipped, but fails in a
// CI run that sets KVLIFT_NEED_SHARED=1.
func shared(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join("..", "..", "shared", name)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		if os.Getenv("CI") == "true" && os.Getenv("KVLIFT_NEED_SHARED") == "1" {
			t.Fatal(err)
		}
		t.Skip("nothing shared beside the repository:", err)
	}
	return path
}

// TestDocuments drives every row of the table of documents, a 64th of the size or less.
func TestDocuments(t *testing.T) {
	n, better, scale := 0, 0, 64
	if testing.Short() {
		scale = 128 // payloads are whole pages, nearly
	}
	err := bench.Documents{Binary: binary, Scale: scale}.Run(t.Context(), func(c bench.Claim) {
		n++
		if c.Verdict == "better" {
			better++
		}
		if err := c.Err(); err != nil || c.Verdict == "" {
			t.Errorf("%s: %v", c.Text(), err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if n != 18 || better < 6 {
		t.Errorf("%d of %d rows are better than the reference, want 6 of 18", better, n)
	}
}

// placements are those of the table of checkpoints.
var placements = []struct {
	name      string
	place     bench.Placement
	reference float64 // published for mooncake_synthetic and 20,000 blocks
}{
	{"every block, touched", bench.Placement{Every: 1, Touch: true}, .2793},
	{"every block", bench.Placement{Every: 1}, .2969},
	{"every 8 blocks and the end", bench.Placement{Every: 8, End: true}, .5020},
	{"the end and where prompts part", bench.Placement{End: true, Branch: true}, .4748},
	{"the end", bench.Placement{End: true}, .4262},
}

// keyLRU is the reference: an LRU of single keys, blocks of one unit and states of three, in which a prompt touches its chain from
// the tail, and pushes out nothing of its own. It returns the share of blocks that are hit.
func keyLRU(rs []trace.Request, capacity int, p bench.Placement) float64 {
	type key struct {
		id    uint64
		state bool
	}
	size := map[bool]int{false: 1, true: 3}
	order, at := list.New(), map[key]*list.Element{} // the hot end is behind
	used, hits, references := 0, 0, 0
	for _, r := range rs {
		n, m := len(r.IDs), prefix(r.IDs, func(id uint64) bool { return at[key{id, false}] != nil })
		end := max(1, min(n, int(r.InputTokens/trace.BlockTokens)))
		b := m
		for b > 0 && at[key{r.IDs[b-1], true}] == nil {
			b--
		}
		hits += b
		references += n
		var chain []key // tail first
		pinned, need := map[key]bool{}, 0
		for i := n; i > 0; i-- {
			k := key{r.IDs[i-1], true}
			stored := i > b && (p.Every > 0 && i%p.Every == 0 || p.End && i == end || p.Branch && i == m)
			if i == b || stored || p.Touch && at[k] != nil {
				chain = append(chain, k)
			}
			chain = append(chain, key{r.IDs[i-1], false})
		}
		for _, k := range chain {
			pinned[k] = true
			if at[k] == nil {
				need += size[k.state]
			}
		}
		for v := order.Front(); v != nil && used+need > capacity; {
			next := v.Next()
			if k := v.Value.(key); !pinned[k] {
				order.Remove(v)
				delete(at, k)
				used -= size[k.state]
			}
			v = next
		}
		room, fits := capacity-used, map[key]bool{}
		for i := len(chain) - 1; i >= 0; i-- { // head first
			k := chain[i]
			if at[k] != nil {
				continue
			}
			if room < size[k.state] {
				break
			}
			room -= size[k.state]
			fits[k] = true
		}
		for _, k := range chain {
			switch {
			case at[k] != nil:
				order.MoveToBack(at[k])
			case fits[k]:
				at[k] = order.PushBack(k)
				used += size[k.state]
			}
		}
	}
	return float64(hits) / float64(references)
}

// TestCheckpoints compares a hybrid model's hits on a part of a real trace with those of the reference, for tiers that hold a few
// prompts and more.
func TestCheckpoints(t *testing.T) {
	rs, tiers := read(t, slice, 1500), []int{2000, 8000}
	if testing.Short() {
		rs, tiers = rs[:500], []int{3000}
	}
	for _, capacity := range tiers {
		for _, p := range placements {
			r, err := bench.ReplayHybrid(t.Context(), binary, slice, uint64(capacity), len(rs), p.place)
			if err != nil {
				t.Fatal(err)
			}
			want := keyLRU(rs, capacity, p.place)
			t.Logf("%d, %s: %.4f, reference %.4f", capacity, p.name, r.Ratio(), want)
			if r.Ratio() < want {
				t.Errorf("%d, %s: %.4f of the blocks were hit, %.4f by the reference", capacity, p.name, r.Ratio(), want)
			}
			if r.Requests != len(rs) || r.Hits > 0 && r.BytesChecked == 0 {
				t.Errorf("%d, %s: %+v", capacity, p.name, r)
			}
		}
	}
}

// TestCheckpointsTable drives one column of the published table, and sees that the reference of TestCheckpoints is its own.
func TestCheckpointsTable(t *testing.T) {
	dir := shared(t, "data/traces")
	if testing.Short() {
		t.Skip("a whole trace, five times")
	}
	n := 0
	err := bench.Checkpoints{Binary: binary, Dir: dir, Only: []string{"synthetic"}}.Run(t.Context(), func(c bench.Claim) {
		n++
		if err := c.Err(); err != nil || c.Verdict == "" {
			t.Errorf("%s: %v", c.Text(), err)
		}
	})
	if err != nil || n != len(placements) {
		t.Fatalf("%d rows, %v", n, err)
	}
	rs := read(t, filepath.Join(dir, "mooncake_synthetic.jsonl.gz"), 3993)
	for _, p := range placements {
		if got := keyLRU(rs, 20000, p.place); got < p.reference-0.0005 || got > p.reference+0.0005 {
			t.Errorf("%s: the reference has %.4f, published was %.4f", p.name, got, p.reference)
		}
	}
}
