package server_test

import (
	"bytes"
	"errors"
	"io"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvlift/block"
	"kvlift/client"
	"kvlift/wire"
)

// TestBusyClient: the Go client hears why it is refused, although the daemon closes while its hello is on the way.
func TestBusyClient(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64, conns: 1})
	r := d.raw(t)
	r.json(wire.THello, helloOf("observer", "", nil))
	r.want(wire.TWelcome)
	for range 200 {
		_, err := client.Status(t.Context(), d.socket, false)
		if e, ok := errors.AsType[*client.RemoteError](err); !ok || e.Code != "busy" {
			t.Fatalf("the client hears %v", err)
		}
	}
}

// TestPieces speaks the protocol byte by byte, and then as much as possible at once. Frames have no other borders than
// their own.
func TestPieces(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 128})
	finish := d.witness()
	slow := func(r *raw, b []byte) {
		for i := range b {
			r.write(b[i : i+1])
		}
	}
	hello := func(role string) []byte {
		b, err := wire.AppendJSON(wire.AppendHeader(nil, wire.THello, 0, 7), helloOf(role, "slow", nil))
		if err != nil {
			t.Fatal(err)
		}
		wire.Seal(b, 0)
		return b
	}
	w, m := d.raw(t), d.raw(t)
	slow(w, hello("worker"))
	w.want(wire.TWelcome)
	slow(w, wire.Append(nil, wire.TMapped, 0, 2, nil))
	slow(m, hello("manager"))
	m.want(wire.TWelcome)
	m.want(wire.TReady)
	m.want(wire.TSnapshot)
	slow(m, wire.Append(nil, wire.TReserve, 0, 8, wire.AppendReserve(nil, &wire.Reserve{Job: 1, Request: 1, Keys: offers(0, 3)})))
	var got wire.Reserved
	if err := got.Parse(m.want(wire.TReserved)); err != nil || len(got.Slots) != 3 || got.Slots[2].Outcome != 0 {
		t.Fatalf("reserve: %+v, %v", got, err)
	}
	slow(m, wire.Append(nil, wire.TCommit, 0, 9, wire.AppendJob(nil, 1)))
	var delta wire.Delta
	if err := delta.Parse(m.want(wire.TDelta)); err != nil || len(delta.Added) != 3 {
		t.Fatalf("commit: %+v, %v", delta, err)
	}

	// Everything at once: a batch of reserves with their commits, then aborts, a touch, pins and unpins, a reset and more.
	var all []byte
	seq := uint64(100)
	add := func(t wire.Type, payload []byte) {
		seq++
		all = wire.Append(all, t, 0, seq, payload)
	}
	for job := uint64(10); job < 20; job++ {
		add(wire.TBegin, wire.AppendBegin(nil, &wire.Begin{Request: job, Name: "request"}))
		add(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: job, Request: job, Keys: offers(int(job)*10, 2)}))
		if job%2 == 0 {
			add(wire.TCommit, wire.AppendJob(nil, job))
		} else {
			add(wire.TAbort, wire.AppendJob(nil, job))
		}
		add(wire.TFinish, wire.AppendFinish(nil, &wire.Finish{Request: job, PromptTokens: 32}))
	}
	refs := []block.Ref{got.Slots[0].Ref, got.Slots[1].Ref}
	add(wire.TTouch, wire.AppendRefs(nil, &wire.Refs{Request: 30, Refs: refs}))
	add(wire.TPin, wire.AppendRefs(nil, &wire.Refs{Job: 30, Request: 30, Refs: refs}))
	add(wire.TUnpin, wire.AppendJob(nil, 30))
	add(wire.TStep, wire.AppendStep(nil, 0))
	add(wire.TReset, nil)
	reset := seq
	add(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: 40, Request: 40, Keys: offers(0, 1)}))
	m.write(all)
	reserved, added, removed, done := 0, 0, 0, false
	for reserved < 11 {
		h, b, err := m.frame()
		if err != nil {
			t.Fatal(err)
		}
		switch h.Type {
		case wire.TReserved:
			if reserved++; h.Seq != 100+uint64(4*reserved-2) && reserved < 11 {
				t.Errorf("reply %d has sequence %d", reserved, h.Seq)
			}
			if err := got.Parse(b); err != nil || got.Slots[0].Outcome != 0 {
				t.Errorf("reserve %d: %+v, %v", reserved, got, err)
			}
		case wire.TDelta:
			if err := delta.Parse(b); err != nil {
				t.Fatal(err)
			}
			added, removed = added+len(delta.Added), removed+len(delta.Removed)
		case wire.TDone:
			done = h.Seq == reset
		default:
			t.Fatalf("unexpected %v", h.Type)
		}
	}
	if added != 10 || removed != 0 || !done { // who asked for the reset has forgotten the keys already
		t.Errorf("%d keys added, %d removed, reset done %v; want 10, 0, true", added, removed, done)
	}
	finish()
}

// TestMute: a client that never reads must not hold anybody up, nor make the daemon remember without bound.
func TestMute(t *testing.T) {
	if testing.Short() {
		t.Skip("64 MiB of deltas take the race detector minutes; it runs without -short as well")
	}
	const pages, batch = 16384, 4096
	d := start(t, t.TempDir(), setup{pages: pages})
	before := heap()
	e := d.open("a", 4096)
	ns := d.config("", 4096).Namespace
	m, w := d.attach(t, "mute", func(h *wire.Hello) { h.Namespace = &ns })
	// It acknowledges blindly, so that keys come and go, and reads nothing of them.
	var r client.Reservation
	peak, stored, began := uint64(0), 0, time.Now()
	for round := uint64(1); d.server.Connections() == 4; round++ {
		for d.server.Connections() == 4 && d.behind("mute") > 0 { // more may go while it says so
			m.send(wire.TStep, wire.AppendStep(nil, d.eng.Status().Epoch))
			runtime.Gosched()
		}
		if err := e.Reserve(round, offers(int(round)*batch, batch), &r); err != nil {
			t.Fatal(err)
		}
		stored += len(r.Keys)
		e.Commit(r.Job)
		e.Finish(round, 0, 0, wire.NoHint)
		if err := e.Sync(10 * time.Second); err != nil {
			t.Fatal(err)
		}
		e.StepEnd()
		if round%16 == 0 {
			peak = max(peak, heap())
		}
		if stored > 2_000_000 {
			t.Fatal("the mute client is still connected")
		}
	}
	t.Logf("%d keys stored in %v before it was given up, heap at most %d MiB", stored, time.Since(began).Round(time.Millisecond), peak>>20)
	if peak > before+160<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before, peak)
	}
	if stored < 100_000 {
		t.Errorf("only %d keys were stored beside it", stored)
	}
	// Its process lives: what it may have promised itself stays. With its end everything comes back.
	if err := w.c.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its session ends", func() bool { return len(d.sessions()) == 1 })
	if now := heap(); now > before+16<<20 {
		t.Errorf("the heap stays at %d bytes, was %d", now, before)
	}
	if got := store(t, e, 1<<40, offers(0, pages)); got != pages {
		t.Errorf("%d of %d keys were accepted afterwards", got, pages)
	}
}

// TestFlood: a client that asks and asks without reading the answers is held up alone.
func TestFlood(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64, state: []byte(`{"text":"` + strings.Repeat("x", 4096) + `"}`)})
	before := heap()
	finish := d.witness()
	r := d.raw(t)
	r.json(wire.THello, helloOf("observer", "", nil))
	b := bytes.Repeat(wire.Append(nil, wire.TStatus, 0, 1, []byte("{}")), 1000)
	total := 0
	for {
		n, err := r.c.Write(b)
		total += n
		if err != nil {
			if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
				t.Fatal(err)
			}
			break
		}
		if total > 1<<30 {
			t.Fatal("1 GiB of questions was taken")
		}
	}
	finish()
	if now := heap(); now > before+16<<20 {
		t.Errorf("the heap stays at %d bytes, was %d", now, before)
	}
	if _, err := io.Copy(io.Discard, r.c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
}

// TestSameEntry: a message may name one entry as often as there is room for it.
func TestSameEntry(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	m, w := d.attach(t, "a", nil)
	ref := m.reserve(1, 0).Slots[0].Ref
	m.send(wire.TCommit, wire.AppendJob(nil, 1))
	m.send(wire.TFinish, wire.AppendFinish(nil, &wire.Finish{Request: 1}))
	m.want(wire.TDelta)
	refs := make([]block.Ref, wire.MaxRefs)
	for i := range refs {
		refs[i] = ref
	}
	for _, open := range []bool{false, true} {
		if open {
			m.send(wire.TBegin, wire.AppendBegin(nil, &wire.Begin{Request: 2}))
		}
		m.send(wire.TTouch, wire.AppendRefs(nil, &wire.Refs{Request: 2, Refs: refs}))
	}
	for job := range uint64(3) { // often, but not too often
		m.send(wire.TPin, wire.AppendRefs(nil, &wire.Refs{Job: 10 + job, Request: 3, Refs: refs[:10000]}))
	}
	for job := range uint64(3) {
		m.send(wire.TUnpin, wire.AppendJob(nil, 10+job))
	}
	m.send(wire.TFinish, wire.AppendFinish(nil, &wire.Finish{Request: 3}))
	m.reserve(20, 1)
	if err := d.eng.Audit(); err != nil {
		t.Error(err)
	}
	d.refuses(t, m, func(m *raw) {
		m.send(wire.TPin, wire.AppendRefs(nil, &wire.Refs{Job: 30, Request: 4, Refs: refs}))
	}, "refused", "pin of entry")
	if err := d.eng.Audit(); err != nil {
		t.Error(err)
	}
	if err := w.c.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "the session ends", func() bool { return len(d.sessions()) == 0 })
	if n := store(t, d.open("b", 8192), 1, offers(100, 32)); n != 32 {
		t.Errorf("%d of 32 accepted: something was kept", n)
	}
}
