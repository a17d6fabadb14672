package bench_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"kvlift/bench"
	"kvlift/block"
)

// TestBirthStory asks for three documents twice in an arena that holds their restore points but not all that is stored
// of them, a 64th of the size that the story had: the second round is served whole, and what is kept of a document is
// what its deepest restore point needs. The same for models of other groups.
func TestBirthStory(t *testing.T) {
	const scale, documents = 64, 3
	change := func(f func(*bench.StoryGroup)) (out []bench.StoryGroup) {
		for _, g := range bench.BirthGroups() {
			g.PayloadBytes /= scale
			f(&g)
			if g.PayloadBytes > 0 {
				out = append(out, g)
			}
		}
		return out
	}
	cases := map[string][]bench.StoryGroup{
		"nine groups":        change(func(*bench.StoryGroup) {}),
		"one group fewer":    change(func(g *bench.StoryGroup) { g.PayloadBytes *= map[bool]uint32{true: 0, false: 1}[g.Name == "state-3"] }),
		"no drafter":         change(func(g *bench.StoryGroup) { g.PayloadBytes *= map[bool]uint32{true: 0, false: 1}[g.Kind == "window"] }),
		"windows of 5":       change(func(g *bench.StoryGroup) { g.WindowChunks = min(g.WindowChunks, 5) }),
		"windows of 40":      change(func(g *bench.StoryGroup) { g.WindowChunks *= 40 / 17 }),
		"larger window size": change(func(g *bench.StoryGroup) { g.ChunkTokens = max(g.ChunkTokens, 272) }),
	}
	for name, groups := range cases {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
			defer cancel()
			d, err := bench.StartDaemon(ctx, binary, "--ram", fmt.Sprint((4<<30)/scale), "--min-idle", "0s")
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			s := bench.Story{Groups: groups, Tokens: 23552, Documents: documents, Rounds: 2, Step: 2048}
			point := (s.Tokens - 1) / groups[0].ChunkTokens * groups[0].ChunkTokens
			var need uint64 // of one document, in whole pages
			for _, g := range groups {
				chunks := map[string]uint32{"full": point / g.ChunkTokens, "state": 1, "window": min(g.WindowChunks, point/g.ChunkTokens)}[g.Kind]
				need += uint64(chunks) * block.Pages(uint64(g.PayloadBytes)) * block.PageSize
			}
			if name == "nine groups" {
				if got := float64(need) * scale / 1e6; got < 422*0.97 || got > 422*1.03 {
					t.Errorf("a document needs %.0f MB, want 422 within 3 %%", got)
				}
			}
			err = s.Run(ctx, d.Socket, func(v bench.StoryVisit) {
				switch {
				case v.Round == 1 && v.HitTokens != 0, v.Round > 1 && v.HitTokens != point:
					t.Errorf("%+v: want a hit of %d tokens in the second round alone", v, point)
				case v.Round > 1 && v.NeededBytes != documents*need:
					t.Errorf("%+v: restore points take %d bytes, want %d", v, v.NeededBytes, documents*need)
				case v.RefusedKeys != 0:
					t.Errorf("%+v: keys were refused", v)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}
