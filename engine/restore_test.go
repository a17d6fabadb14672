package engine

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"testing"
	"time"

	"kvlift/block"
	"kvlift/meta"
	"kvlift/restore"
)

// shelf is an engine with one attached session and keys that have names.
type shelf struct {
	t      *testing.T
	file   []byte
	e      *Engine
	s      *Session
	job    uint64
	clock  time.Time
	groups []meta.Group
	wide   uint32 // pages of the first group's chunks, 0 one
	opts   Options
	reason Reason // of the last store
}

func newShelf(t *testing.T, pages uint32, groups ...meta.Group) *shelf {
	return newWideShelf(t, pages, 1, groups...)
}

func newWideShelf(t *testing.T, pages, wide uint32, groups ...meta.Group) *shelf {
	s := &shelf{t: t, wide: wide, clock: time.UnixMilli(1_700_000_000_000), groups: groups}
	l := meta.NewLayout(256, 16)
	s.file = make([]byte, l.Size)
	tb, err := meta.Create(s.file, meta.Header{ArenaPages: pages, Entries: 256, Overflow: 16, Name: "shelf"})
	if err != nil {
		t.Fatal(err)
	}
	s.open(tb)
	return s
}

func (s *shelf) open(tb *meta.Table) {
	ids := uint64(0)
	o := s.opts
	o.Now, o.SessionID = func() time.Time { return s.clock }, func() uint64 { ids++; return ids }
	e, _, err := Adopt(tb, o, func(int) bool { return false })
	if err != nil {
		s.t.Fatal(err)
	}
	s.e = e
	s.s = s.enter("shelf", "shelf", nobody{})
}

// enter attaches an engine that describes its cache with a text.
func (s *shelf) enter(id, text string, sink Sink) *Session {
	s.t.Helper()
	e, d := s.e, Describe(text, s.groups)
	parts := make([]uint32, len(s.groups))
	for i := range parts {
		parts[i] = 4096
	}
	parts[0] *= max(s.wide, 1)
	m, err := e.Join(Joining{Role: meta.Manager, EngineID: id, WorldSize: 1, Desc: d})
	if err != nil {
		s.t.Fatal(err)
	}
	w, err := e.Join(Joining{Role: meta.Worker, EngineID: id, WorldSize: 1, Desc: d, Parts: parts})
	if err != nil {
		s.t.Fatal(err)
	}
	e.Mapped(w)
	if _, err := e.Ready(m.Session(), sink, nil); err != nil {
		s.t.Fatal(err)
	}
	return m.Session()
}

// restart is what a next daemon makes of the file.
func (s *shelf) restart() {
	s.file = slices.Clone(s.file)
	tb, err := meta.Open(s.file)
	if err != nil {
		s.t.Fatal(err)
	}
	s.open(tb)
}

type chunk struct {
	chain string
	group uint16
	end   uint32
}

func (c chunk) key() block.Key {
	h := sha256.Sum256([]byte(fmt.Sprint(c.chain, c.end)))
	k, _ := block.HashKey(h[:], uint32(c.group))
	return k
}

func offersOf(chunks ...chunk) (offers []block.Offer) {
	for _, c := range chunks {
		offers = append(offers, block.Offer{Key: c.key(), Group: c.group, Position: c.end})
	}
	return offers
}

// store offers chunks in one batch, commits what is accepted and returns how many that were.
func (s *shelf) store(req uint64, chunks ...chunk) int {
	s.t.Helper()
	s.job++
	var out Reply
	if err := s.e.Reserve(s.s, s.job, req, offersOf(chunks...), &out); err != nil {
		s.t.Fatal(err)
	}
	n := 0
	s.reason = out.Reason
	for _, sl := range out.Slots {
		if sl.Outcome == Accepted {
			n++
		}
	}
	if n > 0 {
		if err := s.e.Commit(s.s, s.job); err != nil {
			s.t.Fatal(err)
		}
	}
	s.audit()
	return n
}

// load pins stored chunks and unpins them.
func (s *shelf) load(req uint64, chunks ...chunk) {
	s.t.Helper()
	var refs []block.Ref
	for _, c := range chunks {
		k := c.key()
		id, ok := s.e.index.Find(s.e.index.Hash(s.s.ns.index, &k), s.s.ns.index, &k)
		if !ok {
			s.t.Fatalf("%+v is not stored", c)
		}
		refs = append(refs, block.Ref{Entry: id, Gen: s.e.slots[id].gen})
	}
	s.job++
	if err := s.e.Pin(s.s, s.job, req, refs); err != nil {
		s.t.Fatal(err)
	}
	if err := s.e.Unpin(s.s, s.job); err != nil {
		s.t.Fatal(err)
	}
	s.audit()
}

func (s *shelf) finish(req uint64) { s.finishAs(req, NoHint) }

// finishAs ends a request a second later, with a hint.
func (s *shelf) finishAs(req uint64, h Hint) {
	s.t.Helper()
	s.clock = s.clock.Add(time.Second)
	s.e.Finish(s.s, Finished{Request: req, Hint: h})
	s.audit()
}

func (s *shelf) audit() {
	s.t.Helper()
	if err := s.e.Audit(); err != nil {
		s.t.Fatal(err)
	}
}

// has tells whether a chunk is READY, and what it is worth.
func (s *shelf) has(c chunk) (restore.Class, bool) {
	k := c.key()
	id, ok := s.e.index.Find(s.e.index.Hash(s.s.ns.index, &k), s.s.ns.index, &k)
	if !ok || s.e.slots[id].state != meta.Ready {
		return 0, false
	}
	return s.e.slots[id].class, true
}

func (s *shelf) worth(want restore.Class, chunks ...chunk) {
	s.t.Helper()
	for _, c := range chunks {
		if got, ok := s.has(c); !ok || got != want {
			s.t.Errorf("%+v: stored %v, %v; want %v", c, ok, got, want)
		}
	}
}

func (s *shelf) gone(chunks ...chunk) {
	s.t.Helper()
	for _, c := range chunks {
		if _, ok := s.has(c); ok {
			s.t.Errorf("%+v is still stored", c)
		}
	}
}

func chain(name string, group uint16, from, to, step uint32) (out []chunk) {
	for end := from; end <= to; end += step {
		out = append(out, chunk{name, group, end})
	}
	return out
}

var (
	attention = meta.Group{Kind: meta.Full, ChunkTokens: 100}
	state     = meta.Group{Kind: meta.StateG, ChunkTokens: 100}
	window    = meta.Group{Kind: meta.Window, ChunkTokens: 50, Window: 2}
)

// TestRestorePointsOutlive shows what is kept of a hybrid prompt, what goes first, and that a next daemon knows it.
func TestRestorePointsOutlive(t *testing.T) {
	s := newShelf(t, 20, attention, state, window)
	doc := slices.Concat(chain("a", 0, 100, 400, 100), chain("a", 1, 100, 300, 100), chain("a", 2, 50, 400, 50))
	// The states come before the chunks they belong to, as some releases offer them; while the request runs nothing is judged.
	if n := s.store(1, slices.Concat(doc[4:7], doc[:4], doc[7:])...); n != 15 {
		t.Fatalf("%d of 15 were stored", n)
	}
	s.finish(1)
	// The deepest restore point is at 300: the chunk at 400 has no state, the windows behind 300 serve nothing.
	s.worth(restore.Needed, chain("a", 0, 100, 300, 100)...)
	s.worth(restore.Needed, chunk{"a", 1, 300}, chunk{"a", 2, 250}, chunk{"a", 2, 300})
	s.worth(restore.Optional, chunk{"a", 1, 100}, chunk{"a", 1, 200}, chunk{"a", 2, 50}, chunk{"a", 2, 100}, chunk{"a", 2, 150}, chunk{"a", 2, 200})
	s.worth(restore.Useless, chunk{"a", 0, 400}, chunk{"a", 2, 350}, chunk{"a", 2, 400})
	s.restart()
	s.worth(restore.Useless, chunk{"a", 0, 400}, chunk{"a", 2, 350}, chunk{"a", 2, 400})
	s.worth(restore.Optional, chunk{"a", 1, 100})
	s.audit()
	// 5 pages are free; 8 keys of another prompt take the 3 useless ones first, 14 the optional ones as well.
	s.store(2, chain("b", 0, 100, 800, 100)...)
	s.gone(chunk{"a", 0, 400}, chunk{"a", 2, 350}, chunk{"a", 2, 400})
	s.worth(restore.Optional, chunk{"a", 1, 100}, chunk{"a", 1, 200})
	s.store(2, chain("b", 0, 900, 1400, 100)...)
	s.gone(chunk{"a", 1, 100}, chunk{"a", 1, 200}, chunk{"a", 2, 50})
	s.worth(restore.Needed, slices.Concat(chain("a", 0, 100, 300, 100), []chunk{{"a", 1, 300}, {"a", 2, 250}, {"a", 2, 300}})...)
}

// TestOvertakenByItself lets a prompt whose dense keys are larger than the tier keep its deepest restore point.
func TestOvertakenByItself(t *testing.T) {
	s := newShelf(t, 12, attention, state)
	for end := uint32(100); end <= 1000; end += 100 {
		if n := s.store(1, chunk{"a", 0, end}, chunk{"a", 1, end}); n != 2 {
			t.Fatalf("at %d tokens %d of 2 were stored", end, n)
		}
	}
	s.finish(1)
	s.worth(restore.Needed, chain("a", 0, 100, 1000, 100)...)
	s.worth(restore.Needed, chunk{"a", 1, 1000})
}

// TestForksKeepTheirs: a state from which two conversations went on stays needed, one with a single continuation does not.
func TestForksKeepTheirs(t *testing.T) {
	s := newShelf(t, 64, attention, state)
	head := slices.Concat(chain("p", 0, 100, 200, 100), []chunk{{"p", 1, 200}})
	s.store(1, head...)
	s.finish(1)
	for i, name := range []string{"x", "y"} {
		req := uint64(2 + i)
		s.store(req, slices.Concat(head, []chunk{{name, 0, 300}, {name, 1, 300}})...)
		s.finish(req)
		want := restore.Optional
		if name == "y" {
			want = restore.Needed
		}
		s.worth(want, chunk{"p", 1, 200})
		s.worth(restore.Needed, chunk{name, 1, 300})
	}
}

// TestForkOutlivesWhatWentOn: two prompts have parted behind a chunk, and what the first stored behind it has gone since.
func TestForkOutlivesWhatWentOn(t *testing.T) {
	s := newShelf(t, 64, attention, state)
	s.store(1, slices.Concat(chain("p", 0, 100, 300, 100), []chunk{{"p", 1, 100}})...)
	s.finish(1)
	s.worth(restore.Useless, chain("p", 0, 200, 300, 100)...)
	s.store(2, chain("fill", 0, 100, 6200, 100)...) // of 64 pages 4 are taken, and the two useless are the first to go
	s.gone(chain("p", 0, 200, 300, 100)...)
	s.finish(2)
	s.store(3, chunk{"p", 0, 100}, chunk{"p", 1, 100}, chunk{"y", 0, 200}, chunk{"y", 1, 200})
	s.finish(3)
	s.worth(restore.Needed, chunk{"p", 1, 100}, chunk{"y", 1, 200})
}

// TestUsedStaysNeeded: a restore point that a load has used is not optional because that prompt went on from it.
func TestUsedStaysNeeded(t *testing.T) {
	s := newShelf(t, 64, attention, state)
	head := slices.Concat(chain("p", 0, 100, 200, 100), []chunk{{"p", 1, 100}, {"p", 1, 200}})
	s.store(1, head...)
	s.finish(1)
	s.load(2, chain("p", 0, 100, 200, 100)...)
	s.load(2, chunk{"p", 1, 200})
	s.store(2, slices.Concat(head[2:3], chain("p", 0, 300, 400, 100), []chunk{{"p", 1, 400}})...)
	s.finish(2)
	s.worth(restore.Needed, chunk{"p", 1, 200}, chunk{"p", 1, 400})
	s.worth(restore.Optional, chunk{"p", 1, 100})
	s.restart()
	s.store(3, slices.Concat(chain("p", 0, 100, 500, 100), []chunk{{"p", 1, 200}, {"p", 1, 400}, {"p", 1, 500}})...)
	s.finish(3)
	s.worth(restore.Needed, chunk{"p", 1, 200}, chunk{"p", 1, 500})
	s.worth(restore.Optional, chunk{"p", 1, 400})
}

// TestPartOfAChunk: a prompt may end inside a chunk, and its last part is a restore point of its own. A longer prompt goes on
// from the chunk before that part.
func TestPartOfAChunk(t *testing.T) {
	s := newShelf(t, 64, attention, state)
	s.store(1, slices.Concat(chain("p", 0, 100, 200, 100), []chunk{{"p", 1, 200}})...)
	s.store(1, chunk{"p", 1, 230}, chunk{"p", 0, 230})
	s.finish(1)
	s.worth(restore.Needed, chunk{"p", 0, 200}, chunk{"p", 1, 200}, chunk{"p", 0, 230}, chunk{"p", 1, 230})
	s.store(2, chunk{"p", 0, 100}, chunk{"p", 0, 200}, chunk{"p", 0, 230}, chunk{"p", 1, 230}, chunk{"p", 0, 300}, chunk{"p", 0, 400}, chunk{"p", 1, 400})
	s.finish(2)
	s.worth(restore.Needed, chunk{"p", 0, 300}, chunk{"p", 0, 400}, chunk{"p", 1, 400})
	s.worth(restore.Optional, chunk{"p", 0, 230}, chunk{"p", 1, 230})
}

// TestBehindAGap: a chunk whose predecessor was refused serves nothing and goes first.
func TestBehindAGap(t *testing.T) {
	s := newShelf(t, 64, attention)
	s.store(1, chain("a", 0, 100, 200, 100)...)
	s.store(1, chain("a", 0, 400, 500, 100)...)
	s.finish(1)
	s.worth(restore.Needed, chain("a", 0, 100, 200, 100)...)
	s.worth(restore.Useless, chain("a", 0, 400, 500, 100)...)
}

// TestInterleavedConversations is a tier smaller than two conversations that take turns: the head of the one that still
// runs is never the victim, and what is left is always a head.
func TestInterleavedConversations(t *testing.T) {
	s := newShelf(t, 8, attention)
	if n := s.store(1, chain("p", 0, 100, 600, 100)...); n != 6 {
		t.Fatalf("%d of 6 were stored", n)
	}
	if n := s.store(2, chain("q", 0, 100, 600, 100)...); n != 2 {
		t.Fatalf("%d of Q's chunks were stored while P runs, want the two that fit", n)
	}
	s.worth(restore.Needed, chain("p", 0, 100, 600, 100)...)
	s.worth(restore.Needed, chain("q", 0, 100, 200, 100)...)
	s.finish(1)
	s.finish(2)
	if n := s.store(3, chain("q", 0, 300, 600, 100)...); n != 4 {
		t.Fatalf("%d of 4 were stored after P", n)
	}
	s.finish(3)
	s.worth(restore.Needed, chain("p", 0, 100, 200, 100)...)
	s.gone(chain("p", 0, 300, 600, 100)...)
}

// TestGuardKeepsWhatIsNeeded: the idle guard keeps a prompt from pushing another one out, but not from taking the place of
// what none needs.
func TestGuardKeepsWhatIsNeeded(t *testing.T) {
	s := newWideShelf(t, 14, 2, attention, state) // a chunk of attention takes more than one victim
	s.e.opts.MinIdle = 30 * time.Second
	s.store(1, chunk{"a", 0, 100}, chunk{"a", 1, 100}, chunk{"a", 0, 200}, chunk{"a", 1, 200}, chunk{"a", 0, 300}, chunk{"a", 1, 300})
	s.finish(1)
	s.worth(restore.Optional, chunk{"a", 1, 100}, chunk{"a", 1, 200})
	if n := s.store(2, slices.Concat(chain("b", 0, 100, 300, 100), []chunk{{"b", 1, 300}, {"b", 0, 400}})...); n != 4 {
		t.Errorf("%d of 5 were stored, want 4 into free pages and those of the optional ones", n)
	}
	s.finish(2)
	s.gone(chunk{"a", 1, 100}, chunk{"a", 1, 200})
	s.worth(restore.Needed, slices.Concat(chain("a", 0, 100, 300, 100), []chunk{{"a", 1, 300}, {"b", 1, 300}})...)
	s.clock = s.clock.Add(time.Minute)
	if n := s.store(3, chunk{"c", 0, 100}, chunk{"c", 1, 100}); n != 2 {
		t.Errorf("%d of 2 were stored over what is a minute old", n)
	}
}
