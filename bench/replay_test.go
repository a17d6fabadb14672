package bench_test

import (
	"bytes"
	"cmp"
	"container/heap"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"kvlift/bench"
	"kvlift/trace"
)

// binary is kvlift as it is in this tree.
var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "kvlift-test-")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(dir, "kvlift")
	if out, err := exec.Command("go", "build", "-o", binary, "kvlift").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build kvlift: %v\n%s", err, out)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir) // the result counts
		os.Exit(code)
	}))
}

const slice = "../testdata/traces/conversation_slice.jsonl.gz"

func read(t *testing.T, path string, limit int) []trace.Request {
	t.Helper()
	r, err := trace.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var out []trace.Request
	for len(out) < limit {
		q, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, q)
	}
	return out
}

// agents writes a trace of sessions that share a few beginnings, grow, and now and then go back and fork: nearly all of
// it can hit, so what it hits tells policies apart. Several requests have one time, as in the published traces.
func agents(t *testing.T, requests int) (path string) {
	t.Helper()
	rng := rand.New(rand.NewPCG(7, 11))
	chains, next := make([][]uint64, 40), uint64(1000)
	for i := range chains {
		for b := range 4 {
			chains[i] = append(chains[i], uint64(10*(i%3)+b))
		}
	}
	var text bytes.Buffer
	for i := range requests {
		s := min(rng.IntN(len(chains)), rng.IntN(len(chains)))
		c := chains[s]
		if rng.IntN(8) == 0 {
			c = slices.Clone(c[:4+rng.IntN(len(c)-3)])
		}
		for range 1 + rng.IntN(8) {
			c = append(c, next)
			next++
		}
		chains[s] = c
		ids, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&text, `{"timestamp": %d, "input_length": %d, "output_length": 1, "hash_ids": %s}`+"\n", i/4*3000, len(c)*trace.BlockTokens, ids)
	}
	path = filepath.Join(t.TempDir(), "agents.jsonl")
	if err := os.WriteFile(path, text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// replay runs bench replay, which starts a daemon of its own, and returns what it printed.
func replay(t *testing.T, path string, limit int, args ...string) (bench.Result, error) {
	t.Helper()
	var r bench.Result
	var stdout, stderr bytes.Buffer
	c := exec.Command(binary, append(append([]string{"bench", "replay", "--json", "--limit", strconv.Itoa(limit)}, args...), path)...)
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Run(); err != nil {
		return r, fmt.Errorf("%w: %s", err, &stderr)
	}
	if err := json.NewDecoder(&stdout).Decode(&r); err != nil {
		t.Fatal(err)
	}
	if r.Requests != limit || r.WrongBlocks != 0 || r.BytesChecked != r.Hits*uint64(r.BytesPerBlock) || r.BytesWritten != r.StoredBlocks*uint64(r.BytesPerBlock) {
		t.Errorf("%v: %+v", args, r)
	}
	return r, nil
}

// prefix is how many blocks of a chain are there from its start on.
func prefix(ids []uint64, has func(uint64) bool) int {
	for i, id := range ids {
		if !has(id) {
			return i
		}
	}
	return len(ids)
}

// leafLRU is LRU whose chains are touched from the tail to the head, with the running chain pinned: LRU on the leaves of
// the prefix tree. last is the hot end.
func leafLRU(rs []trace.Request, capacity int) (hits int) {
	var order []uint64
	for _, r := range rs {
		hits += prefix(r.IDs, func(id uint64) bool { return slices.Contains(order, id) })
		c := slices.Clone(r.IDs[:min(len(r.IDs), capacity)])
		order = slices.DeleteFunc(order, func(id uint64) bool { return slices.Contains(c, id) })
		order = order[max(0, len(order)+len(c)-capacity):]
		slices.Reverse(c)
		order = append(order, c...)
	}
	return hits
}

// leaf is a block in the heap of guarded: the coldest first, of one time the deepest.
type leaf struct {
	ms    int64
	depth int
	seq   int // of its request
	id    uint64
}

type leaves struct {
	all  []leaf
	less func(a, b leaf) int
}

func (h *leaves) Len() int           { return len(h.all) }
func (h *leaves) Less(i, j int) bool { return h.less(h.all[i], h.all[j]) < 0 }
func (h *leaves) Swap(i, j int)      { h.all[i], h.all[j] = h.all[j], h.all[i] }
func (h *leaves) Push(x any)         { h.all = append(h.all, x.(leaf)) }
func (h *leaves) Pop() any {
	x := h.all[len(h.all)-1]
	h.all = h.all[:len(h.all)-1]
	return x
}

// Two ways to order blocks that were used at the same time; the traces' clock ticks every 3 s, so there are many.
func byDepth(a, b leaf) int { // of the reference: whatever request they are of
	return cmp.Or(cmp.Compare(a.ms, b.ms), cmp.Compare(b.depth, a.depth), cmp.Compare(a.id, b.id))
}

func byRequest(a, b leaf) int { // of the daemon: requests in their order
	return cmp.Or(cmp.Compare(a.ms, b.ms), cmp.Compare(a.seq, b.seq), cmp.Compare(b.depth, a.depth))
}

// guarded is leafLRU with an idle guard: a store evicts only what was not used for tau; where that is not enough, the
// head of the chain is kept and the rest is not stored.
func guarded(rs []trace.Request, capacity int, tauMS int64, less func(a, b leaf) int) (hits, refused int) {
	at, children, parent := map[uint64]leaf{}, map[uint64]int{}, map[uint64]uint64{}
	h := &leaves{less: less}
	for seq, r := range rs {
		m := prefix(r.IDs, func(id uint64) bool { _, ok := at[id]; return ok })
		hits += m
		c := r.IDs[:min(len(r.IDs), capacity)]
		touch := func(i int) {
			at[c[i]] = leaf{r.TimeMS, i, seq, c[i]}
			if children[c[i]] == 0 {
				heap.Push(h, at[c[i]])
			}
		}
		for i := range min(m, len(c)) {
			touch(i)
		}
		need := len(at) + len(c) - m - capacity
		var stash []leaf
		for need > 0 && h.Len() > 0 {
			v := heap.Pop(h).(leaf)
			if at[v.id] != v || children[v.id] != 0 {
				continue
			}
			if slices.Contains(c, v.id) {
				stash = append(stash, v)
				continue
			}
			if r.TimeMS-v.ms < tauMS {
				stash = append(stash, v)
				break
			}
			delete(at, v.id)
			if p, ok := parent[v.id]; ok {
				if children[p]--; children[p] == 0 {
					heap.Push(h, at[p])
				}
			}
			delete(parent, v.id)
			need--
		}
		for _, v := range stash {
			heap.Push(h, v)
		}
		n := len(c)
		if need > 0 {
			n = max(m, len(c)-need)
			refused += len(c) - n
		}
		for i := m; i < n; i++ {
			if i > 0 {
				parent[c[i]] = c[i-1]
				children[c[i-1]]++
			}
			at[c[i]] = leaf{r.TimeMS, i, seq, c[i]}
		}
		if m < n {
			heap.Push(h, at[c[n-1]])
		}
	}
	return hits, refused
}

// TestReplay compares the hits of a real daemon, every loaded byte checked, with a reference that knows nothing of pages,
// batches or sockets.
func TestReplay(t *testing.T) {
	made := agents(t, 600)
	for _, c := range []struct {
		name, path string
		requests   int
		capacity   []int
		batch      []int
	}{
		{"conversation", slice, 300, []int{50, 200, 1000}, []int{1, 16, 64}},
		{"long conversation", slice, 1500, []int{1000, 5000}, []int{16}},
		{"agents", made, 600, []int{200}, []int{1, 16, 64}},
		{"agents", made, 600, []int{50, 1000}, []int{16}},
	} {
		rs := read(t, c.path, c.requests)
		for _, capacity := range c.capacity {
			want := uint64(leafLRU(rs, capacity))
			for _, batch := range c.batch {
				t.Run(fmt.Sprintf("%s/%d blocks, batches of %d", c.name, capacity, batch), func(t *testing.T) {
					r, err := replay(t, c.path, c.requests, "--capacity-blocks", strconv.Itoa(capacity), "--batch", strconv.Itoa(batch), "--min-idle", "0s")
					if err != nil {
						t.Fatal(err)
					}
					if r.Hits != want {
						t.Errorf("%d hits, want %d", r.Hits, want)
					}
					t.Logf("%d hits of %d, %d stored, %d evicted, %d refused", r.Hits, r.References, r.StoredBlocks, r.EvictedBlocks, r.RefusedBlocks)
				})
			}
		}
	}
	t.Run("64 KiB", func(t *testing.T) {
		r, err := replay(t, made, 600, "--capacity-blocks", "200", "--bytes-per-block", "64KiB", "--min-idle", "0s")
		if err != nil {
			t.Fatal(err)
		}
		if want := uint64(leafLRU(read(t, made, 600), 200)); r.Hits != want || r.BytesPerBlock != 64<<10 {
			t.Errorf("%d hits, want %d: %+v", r.Hits, want, r)
		}
	})
}

// TestGuard compares the idle guard, on the trace's clock.
func TestGuard(t *testing.T) {
	made := agents(t, 600)
	for _, c := range []struct {
		name, path string
		requests   int
		capacity   []int
	}{
		{"conversation", slice, 300, []int{50, 200, 1000}},
		{"long conversation", slice, 1500, []int{1000, 5000}},
		{"agents", made, 600, []int{50, 400, 1000}},
	} {
		rs := read(t, c.path, c.requests)
		for _, capacity := range c.capacity {
			t.Run(fmt.Sprintf("%s/%d", c.name, capacity), func(t *testing.T) {
				want, refused := guarded(rs, capacity, 30_000, byRequest)
				other, otherRefused := guarded(rs, capacity, 30_000, byDepth)
				r, err := replay(t, c.path, c.requests, "--capacity-blocks", strconv.Itoa(capacity), "--min-idle", "30s")
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("%d hits, %d refused; by request %d, %d; by depth %d, %d", r.Hits, r.RefusedBlocks, want, refused, other, otherRefused)
				if r.Hits != uint64(want) {
					t.Errorf("%d hits, want %d", r.Hits, want)
				}
			})
		}
	}
}

// TestControl: the check of the bytes is worth something only if it sees a flipped bit.
func TestControl(t *testing.T) {
	for _, n := range []string{"1", "100"} {
		_, err := replay(t, slice, 300, "--capacity-blocks", "1000", "--min-idle", "0s", "--corrupt-at", n)
		e, ok := errors.AsType[*exec.ExitError](err)
		if !ok || e.ExitCode() != 1 || !strings.Contains(err.Error(), "wrong bytes: request ") {
			t.Errorf("load %s is corrupted: %v", n, err)
		}
	}
	if _, err := replay(t, slice, 300, "--capacity-blocks", "1000", "--corrupt-at", "1000000"); err == nil || !strings.Contains(err.Error(), "no byte was corrupted") {
		t.Errorf("a load that never comes is corrupted: %v", err)
	}
}
