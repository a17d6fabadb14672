package engine

import (
	"fmt"
	"testing"
	"time"

	"kvlift/block"
	"kvlift/meta"
)

type nobody struct{}

func (nobody) Added(block.Ref, *block.Key, uint16, uint32, []block.Extent) {}
func (nobody) Removed(uint64, block.Ref, *block.Key)                       {}

// BenchmarkStore is reserve + commit + finish of batches of 16 in a full arena: every key evicts another.
func BenchmarkStore(b *testing.B) {
	for _, policy := range []string{"lru", "arc"} {
		b.Run(policy, func(b *testing.B) {
			const entries = 100_000
			l := meta.NewLayout(entries, 64)
			t, err := meta.Create(make([]byte, l.Size), meta.Header{ArenaPages: entries, Entries: entries, Overflow: 64})
			if err != nil {
				b.Fatal(err)
			}
			e, _, err := Adopt(t, Options{Policy: policy, SessionID: func() uint64 { return 1 }}, func(int) bool { return false })
			if err != nil {
				b.Fatal(err)
			}
			d := Describe("bench", []meta.Group{{ChunkTokens: 16}})
			m, err := e.Join(Joining{Role: meta.Manager, EngineID: "b", WorldSize: 1, Desc: d})
			if err != nil {
				b.Fatal(err)
			}
			w, err := e.Join(Joining{Role: meta.Worker, EngineID: "b", WorldSize: 1, Desc: d, Parts: []uint32{4096}})
			if err != nil {
				b.Fatal(err)
			}
			e.Mapped(w)
			s := m.Session()
			if _, err := e.Ready(s, nobody{}, nil); err != nil {
				b.Fatal(err)
			}
			offers := make([]block.Offer, 16)
			n := 0
			var out Reply
			batch := func() {
				for i := range offers {
					offers[i] = block.Offer{Key: testKey(n), Position: uint32(i+1) * 16}
					n++
				}
				job := uint64(n)
				if err := e.Reserve(s, job, job, offers, &out); err != nil {
					b.Fatal(err)
				}
				if err := e.Commit(s, job); err != nil {
					b.Fatal(err)
				}
				e.Finish(s, Finished{Request: job})
			}
			for n < entries+entries/2 {
				batch()
			}
			b.ReportAllocs()
			start, from := time.Now(), n
			for b.Loop() {
				batch()
			}
			b.ReportMetric(float64(time.Since(start).Nanoseconds())/float64(n-from), "ns/key")
			b.ReportMetric(0, "ns/op")
			if out.Reason != Fits {
				b.Fatal(fmt.Errorf("refused: %v", out.Reason))
			}
		})
	}
}

// BenchmarkAdopt is a start on a table of a million entries.
func BenchmarkAdopt(b *testing.B) {
	const entries = 1_000_000
	l := meta.NewLayout(entries, 64)
	file := make([]byte, l.Size)
	t, err := meta.Create(file, meta.Header{ArenaPages: entries, Entries: entries, Overflow: 64})
	if err != nil {
		b.Fatal(err)
	}
	g := meta.Group{ChunkTokens: 16, Parts: []uint32{4096}}
	if err := t.PutNamespace(0, &meta.Namespace{Groups: []meta.Group{g}}); err != nil {
		b.Fatal(err)
	}
	for i := range uint32(entries) {
		t.Reserve(i, &meta.Entry{Tick: uint64(i / 64), Position: i%64*16 + 16, Parent: block.Ref{Entry: block.NoEntry}, Key: testKey(int(i)), Payload: 4096, Pages: 1,
			Extents: []block.Extent{{Page: i, Count: 1}}}, nil)
		t.SetState(i, meta.Ready)
	}
	for b.Loop() {
		if _, rep, err := Adopt(t, Options{SessionID: func() uint64 { return 1 }}, func(int) bool { return false }); err != nil || rep.Ready != entries {
			b.Fatal(rep, err)
		}
	}
}
