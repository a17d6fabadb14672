package engine

import (
	"fmt"
	"testing"
	"time"

	"kvlift/block"
	"kvlift/meta"
)

// BenchmarkQuota is BenchmarkStore in a namespace that is at its quota, in an arena with room, beside so many entries of
// another namespace that are all colder: every key evicts one of its own, and what it costs does not depend on the others.
func BenchmarkQuota(b *testing.B) {
	for _, others := range []int{0, 1_000, 1_000_000} {
		b.Run(fmt.Sprintf("beside %d", others), func(b *testing.B) {
			const own = 10_000
			entries := uint32(others + 2*own)
			t, err := meta.Create(make([]byte, meta.NewLayout(entries, 64).Size), meta.Header{ArenaPages: entries, Entries: entries, Overflow: 64})
			if err != nil {
				b.Fatal(err)
			}
			ids := uint64(0)
			e, _, err := Adopt(t, Options{Quotas: []Quota{{Name: "mine", Bytes: own * 4096}}, SessionID: func() uint64 { ids++; return ids }}, func(int) bool { return false })
			if err != nil {
				b.Fatal(err)
			}
			enter := func(model string) *Session {
				d := Describe(identity(model), []meta.Group{{ChunkTokens: 16}})
				m, err := e.Join(Joining{Role: meta.Manager, EngineID: model, WorldSize: 1, Desc: d})
				if err != nil {
					b.Fatal(err)
				}
				w, err := e.Join(Joining{Role: meta.Worker, EngineID: model, WorldSize: 1, Desc: d, Parts: []uint32{4096}})
				if err != nil {
					b.Fatal(err)
				}
				e.Mapped(w)
				if _, err := e.Ready(m.Session(), nobody{}, nil); err != nil {
					b.Fatal(err)
				}
				return m.Session()
			}
			other, mine := enter("other"), enter("mine")
			n := 0
			var out Reply
			batch := func(s *Session, size int) {
				offers := make([]block.Offer, size)
				for i := range offers {
					offers[i] = block.Offer{Key: testKey(n), Position: uint32(i+1) * 16}
					n++
				}
				job := uint64(n)
				if err := e.Reserve(s, job, job, offers, &out); err != nil {
					b.Fatal(err)
				}
				if out.Reason != Fits {
					b.Fatalf("refused: %v", out.Reason)
				}
				if err := e.Commit(s, job); err != nil {
					b.Fatal(err)
				}
				e.Finish(s, Finished{Request: job})
			}
			for n < others {
				batch(other, 1000)
			}
			for from := n; n < from+own+own/2; {
				batch(mine, 16)
			}
			b.ReportAllocs()
			start, from := time.Now(), n
			for b.Loop() {
				batch(mine, 16)
			}
			b.ReportMetric(float64(time.Since(start).Nanoseconds())/float64(n-from), "ns/key")
			b.ReportMetric(0, "ns/op")
			if st := e.Status(); st.ReadyKeys != uint64(others+own) || st.Counters.Evicted[ByStore] != uint64(n-others-own) {
				b.Fatalf("%d keys are left of %d and %d, %d went", st.ReadyKeys, others, own, st.Counters.Evicted[ByStore])
			}
		})
	}
}
