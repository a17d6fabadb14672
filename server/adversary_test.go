package server_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/block"
	"kvlift/client"
	"kvlift/wire"
)

func timeoutContext() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	_ = cancel // the process ends before
	return ctx
}

// TestRefused says things that no engine says. Each ends its own connection with a code and a sentence, and nothing else.
func TestRefused(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	before := heap()
	finish := d.witness()
	hello := func(role string, change func(*wire.Hello)) func(*raw) {
		return func(r *raw) { r.json(wire.THello, helloOf(role, "a", change)) }
	}
	observer := func(then func(*raw)) func(*raw) {
		return func(r *raw) { hello("observer", nil)(r); r.want(wire.TWelcome); then(r) }
	}
	worker := func(then func(*raw)) func(*raw) {
		return func(r *raw) { hello("worker", nil)(r); r.want(wire.TWelcome); then(r) }
	}
	waiting := func(then func(*raw)) func(*raw) { // a manager whose rank has not come
		return func(r *raw) {
			r.json(wire.THello, helloOf("manager", "alone", nil))
			r.want(wire.TWelcome)
			then(r)
		}
	}
	said := func(t wire.Type, payload []byte) func(*raw) { return func(r *raw) { r.send(t, payload) } }
	garbage := make([]byte, 4096)
	for i, rng := 0, rand.New(rand.NewPCG(1, 2)); i < len(garbage); i++ {
		garbage[i] = byte(rng.Uint32())
	}
	garbage[3] = 0xff // a length that cannot be
	reserve := func(count uint32, keys ...block.Offer) []byte {
		b := wire.AppendReserve(nil, &wire.Reserve{Job: 1, Request: 1, Keys: keys})
		binary.LittleEndian.PutUint32(b[16:], count)
		return b
	}
	group1 := block.Offer{Key: key(1), Group: 1}
	for _, c := range []struct {
		name    string
		do      func(*raw)
		code    string
		message string
	}{
		{"garbage", func(r *raw) { r.write(garbage) }, "malformed", "too long"},
		{"another protocol", func(r *raw) { r.write([]byte("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")) }, "malformed", "too long"},
		{"zeros", func(r *raw) { r.write(make([]byte, 4096)) }, "malformed", "the first message is type 0"},
		{"4 GiB announced", func(r *raw) {
			h := wire.AppendHeader(nil, wire.THello, 0, 1)
			binary.LittleEndian.PutUint32(h, 1<<32-1)
			r.write(h)
		}, "malformed", "4294967295 bytes of hello, at most 1048576"},
		{"one byte too long", func(r *raw) {
			h := wire.AppendHeader(nil, wire.THello, 0, 1)
			binary.LittleEndian.PutUint32(h, wire.MaxFrame+1)
			r.write(h)
		}, "malformed", "too long"},
		{"no hello", said(wire.TStatus, []byte("{}")), "malformed", "the first message is status"},
		{"hello of nothing", said(wire.THello, nil), "malformed", ""},
		{"hello of no JSON", said(wire.THello, []byte{0xff, 0xfe, '{'}), "malformed", ""},
		{"hello of another shape", said(wire.THello, []byte(`[1,2]`)), "malformed", ""},
		{"hello twice in one", said(wire.THello, []byte(`{"protocol":[1,0],"role":"observer"}{}`)), "malformed", "more than one"},
		{"deep JSON", said(wire.THello, bytes.Repeat([]byte("["), 1<<20)), "malformed", ""},
		{"another major", hello("manager", func(h *wire.Hello) { h.Protocol = [2]int{2, 7} }), "version", "the client speaks 2.7, the daemon 1.0"},
		{"no version", hello("observer", func(h *wire.Hello) { h.Protocol = [2]int{} }), "version", "the client speaks 0.0"},
		{"another role", hello("admin", nil), "malformed", `role "admin"`},
		{"no engine id", hello("worker", func(h *wire.Hello) { h.EngineID = "" }), "malformed", "engine id of 0 bytes"},
		{"a long engine id", hello("manager", func(h *wire.Hello) { h.EngineID = strings.Repeat("x", 96) }), "malformed", "engine id of 96 bytes"},
		{"rank outside", hello("worker", func(h *wire.Hello) { h.Rank = 1 }), "malformed", "rank 1 of 1"},
		{"negative rank", hello("worker", func(h *wire.Hello) { h.Rank = -1 }), "malformed", "rank -1 of 1"},
		{"no ranks", hello("manager", func(h *wire.Hello) { h.WorldSize = 0 }), "malformed", "rank 0 of 0"},
		{"too many ranks", hello("manager", func(h *wire.Hello) { h.WorldSize = 1 << 20 }), "malformed", "rank 0 of"},
		{"no namespace", hello("worker", func(h *wire.Hello) { h.Namespace = nil }), "malformed", "namespace"},
		{"no groups", hello("worker", func(h *wire.Hello) { h.Namespace.Groups = nil }), "malformed", "namespace"},
		{"too many groups", hello("worker", func(h *wire.Hello) { h.Namespace.Groups = make([]wire.Group, 65) }), "malformed", "namespace"},
		{"too many parts", hello("manager", func(h *wire.Hello) {
			h.WorldSize, h.Namespace.Groups = 100, make([]wire.Group, 64)
		}), "geometry", ""},
		{"no parts", hello("worker", func(h *wire.Hello) { h.Parts = nil }), "geometry", "0 parts for 1 groups"},
		{"a part too many", hello("worker", func(h *wire.Hello) { h.Parts = []uint32{1, 2} }), "geometry", "2 parts for 1 groups"},
		{"an empty part", hello("worker", func(h *wire.Hello) { h.Parts = []uint32{0} }), "malformed", "without payload"},
		{"parts beyond 4 GiB", hello("worker", func(h *wire.Hello) {
			h.Namespace.Groups = make([]wire.Group, 2)
			h.Parts = []uint32{1 << 31, 1 << 31}
		}), "malformed", "parts of 4294967296 bytes"},
		{"a session that is no number", hello("worker", func(h *wire.Hello) { h.Session = "x" }), "malformed", ""},
		{"another arena", hello("worker", func(h *wire.Hello) {
			h.Session, h.ArenaID = strings.Repeat("0", 16), strings.Repeat("0", 32)
		}), "malformed", "another arena"},

		{"an observer that reserves", observer(said(wire.TReserve, reserve(0))), "malformed", "reserve from this role"},
		{"an observer that says hello again", observer(hello("observer", nil)), "malformed", "hello from this role"},
		{"an observer that asks for nonsense", observer(said(wire.TStatus, []byte("?"))), "malformed", ""},
		{"type 0", observer(said(0, nil)), "malformed", "type 0"},
		{"type 26", observer(said(26, nil)), "malformed", "type 26"},
		{"type 65535", observer(said(65535, nil)), "malformed", "type 65535"},
		{"an answer", observer(said(wire.TState, nil)), "malformed", "state from this role"},

		{"a worker that commits", worker(said(wire.TCommit, wire.AppendJob(nil, 1))), "malformed", "commit from this role"},
		{"a short end report", worker(said(wire.TEnded, make([]byte, 7))), "malformed", ""},
		{"a long end report", worker(said(wire.TEnded, make([]byte, 9))), "malformed", ""},
		{"a worker of another type", worker(said(99, nil)), "malformed", "type 99"},

		{"reserve before ready", waiting(said(wire.TReserve, reserve(0))), "malformed", "reserve before ready"},
		{"step before ready", waiting(said(wire.TStep, wire.AppendStep(nil, 0))), "malformed", "step before ready"},
		{"reset before ready", waiting(said(wire.TReset, nil)), "malformed", "reset before ready"},
		{"begin before ready", waiting(said(wire.TBegin, wire.AppendBegin(nil, &wire.Begin{}))), "malformed", "begin before ready"},
		{"type 200 before ready", waiting(said(200, nil)), "malformed", "type 200 before ready"},
	} {
		t.Run(c.name, func(t *testing.T) { d.refuses(t, d.raw(t), c.do, c.code, c.message) })
	}
	key41 := wire.AppendReserve(nil, &wire.Reserve{Job: 1, Request: 1, Keys: offers(0, 1)})
	key41[24+40] = 41
	key0 := bytes.Clone(key41)
	key0[24+40] = 0
	for _, c := range []struct {
		name    string
		do      func(*raw)
		code    string
		message string
	}{
		{"hello again", hello("manager", nil), "malformed", "hello from a manager"},
		{"type 0", said(0, nil), "malformed", "type 0 from a manager"},
		{"type 26", said(26, nil), "malformed", "type 26 from a manager"},
		{"an end report", said(wire.TEnded, wire.AppendJob(nil, 1)), "malformed", "ended from a manager"},
		{"status", said(wire.TStatus, []byte("{}")), "malformed", "status from a manager"},
		{"a promotion", said(wire.TPromote, nil), "malformed", "promote from a manager"},
		{"an empty reserve", said(wire.TReserve, nil), "malformed", ""},
		{"a reserve of fewer keys", said(wire.TReserve, reserve(2, offers(0, 1)...)), "malformed", ""},
		{"a reserve of more keys", said(wire.TReserve, reserve(1, offers(0, 2)...)), "malformed", ""},
		{"a reserve of 4 billion keys", said(wire.TReserve, reserve(1<<32-1)), "malformed", ""},
		{"an empty key", said(wire.TReserve, key0), "malformed", ""},
		{"a long key", said(wire.TReserve, key41), "malformed", ""},
		{"a group that is not there", said(wire.TReserve, reserve(1, group1)), "geometry", "group 1 of 1"},
		{"a pin of nothing known", said(wire.TPin, wire.AppendRefs(nil, &wire.Refs{Job: 9, Refs: []block.Ref{{Entry: 5, Gen: 77}}})), "refused", "entry 5 generation 77"},
		{"a pin outside the table", said(wire.TPin, wire.AppendRefs(nil, &wire.Refs{Job: 9, Refs: []block.Ref{{Entry: 1<<32 - 1}}})), "refused", ""},
		{"a step into the future", said(wire.TStep, wire.AppendStep(nil, 1<<40)), "refused", "epoch 1099511627776"},
		{"a short step", said(wire.TStep, make([]byte, 4)), "malformed", ""},
		{"an unpin of no job", said(wire.TUnpin, wire.AppendJob(nil, 9)), "refused", "unpin of job 9"},
		{"a commit of no job", said(wire.TCommit, wire.AppendJob(nil, 9)), "refused", "commit of job 9"},
		{"an abort of no job", said(wire.TAbort, wire.AppendJob(nil, 9)), "refused", "abort of job 9"},
		{"a job twice", func(r *raw) {
			r.reserve(3, 0)
			r.send(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: 3, Request: 1, Keys: offers(1, 1)}))
		}, "refused", "job 3 is open already"},
		{"an unpin of a store", func(r *raw) {
			r.reserve(4, 2)
			r.send(wire.TUnpin, wire.AppendJob(nil, 4))
		}, "refused", "unpin of job 4"},
		{"a long name", said(wire.TBegin, make([]byte, 16+257)), "malformed", ""},
		{"a short finish", said(wire.TFinish, make([]byte, 23)), "malformed", ""},
		{"a finish with a hint of tomorrow", said(wire.TFinish, append(make([]byte, 16), 99, 0, 0, 0, 0, 0, 0, 0)), "malformed", ""},
	} {
		t.Run("manager/"+c.name, func(t *testing.T) {
			m, w := d.attach(t, "raw "+c.name, nil)
			d.refuses(t, m, c.do, c.code, c.message)
			if err := w.c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	finish()
	eventually(t, "all sessions end with their connections", func() bool { return len(d.sessions()) == 0 && d.server.Connections() == 0 })
	if st := d.eng.Status(); st.ReservedKeys != 0 {
		t.Errorf("%d keys are still reserved", st.ReservedKeys)
	}
	if now := heap(); now > before+16<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before, now)
	}
}

// refuses lets a client misbehave and checks what it hears.
func (d *daemon) refuses(t *testing.T, r *raw, do func(*raw), code, message string) {
	t.Helper()
	do(r)
	e, err := r.lastWord()
	if err != nil {
		t.Fatalf("got %+v, then %v", e, err)
	}
	if e.Code != code || !strings.Contains(e.Message, message) {
		t.Errorf("got code %q, message %q; want %q and %q", e.Code, e.Message, code, message)
	}
}

// TestTouchNonsense: touches are hints; entries that are not there are passed over, whatever their numbers.
func TestTouchNonsense(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	m, _ := d.attach(t, "a", nil)
	m.send(wire.TTouch, wire.AppendRefs(nil, &wire.Refs{Request: 1, Refs: []block.Ref{{Entry: 1<<32 - 1}, {Entry: 3, Gen: 9}, {Entry: 0}}}))
	m.send(wire.TFinish, wire.AppendFinish(nil, &wire.Finish{Request: 99}))
	m.send(wire.TReserve, wire.AppendReserve(nil, &wire.Reserve{Job: 1, Request: 1}))
	m.want(wire.TReserved)
}

// TestOtherParts: an engine whose ranks hold other bytes than those of its namespace is told so, and the namespace's own
// engine goes on.
func TestOtherParts(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	finish := d.witness()
	d.attach(t, "a", nil)
	other := func(h *wire.Hello) {
		if h.Role == "worker" {
			h.Parts = []uint32{8192}
		}
	}
	w := d.raw(t)
	w.json(wire.THello, helloOf("worker", "b", other))
	w.want(wire.TWelcome)
	w.send(wire.TMapped, nil)
	d.refuses(t, d.raw(t), func(r *raw) { r.json(wire.THello, helloOf("manager", "b", other)) }, "geometry", "this engine has 8192 bytes, the namespace 4096")
	// The other way about: the manager waits, and it is the rank's word that makes it ready.
	m := d.raw(t)
	m.json(wire.THello, helloOf("manager", "c", other))
	m.want(wire.TWelcome)
	w = d.raw(t)
	w.json(wire.THello, helloOf("worker", "c", other))
	w.want(wire.TWelcome)
	w.send(wire.TMapped, nil)
	d.refuses(t, m, func(*raw) {}, "geometry", "this engine has 8192 bytes, the namespace 4096")
	finish()
}

// TestSilent: who does not say hello in time is given up, however it spends the time.
func TestSilent(t *testing.T) {
	const limit = 100 * time.Millisecond
	d := start(t, t.TempDir(), setup{pages: 64, hello: limit})
	finish := d.witness()
	hello, err := wire.AppendJSON(wire.AppendHeader(nil, wire.THello, 0, 1), helloOf("observer", "", nil))
	if err != nil {
		t.Fatal(err)
	}
	wire.Seal(hello, 0)
	million := wire.AppendHeader(nil, wire.THello, 0, 1)
	binary.LittleEndian.PutUint32(million, wire.MaxFrame)
	for _, c := range []struct {
		name string
		do   func(*raw)
	}{
		{"nothing", func(*raw) {}},
		{"half a header", func(r *raw) { r.write(hello[:7]) }},
		{"a header", func(r *raw) { r.write(hello[:wire.HeaderSize]) }},
		{"half a hello", func(r *raw) { r.write(hello[:len(hello)/2]) }},
		{"1 MiB announced", func(r *raw) { r.write(million) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			d.refuses(t, d.raw(t), c.do, "failed", "no hello within 100ms")
			if took := time.Since(began); took < limit || took > 50*limit {
				t.Errorf("given up after %v", took)
			}
		})
	}
	t.Run("a byte at a time", func(t *testing.T) {
		t.Parallel()
		r := d.raw(t)
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			tick := time.NewTicker(limit / 10)
			defer tick.Stop()
			for i := range hello {
				r.write(hello[i : i+1])
				select {
				case <-tick.C:
				case <-stop:
					return
				}
			}
		})
		e, err := r.lastWord()
		close(stop)
		wg.Wait()
		if err != nil || e.Code != "failed" {
			t.Errorf("got %+v, %v", e, err)
		}
	})
	t.Run("half a hello, then gone", func(t *testing.T) {
		t.Parallel()
		r := d.raw(t)
		r.write(hello[:len(hello)/2])
		if err := r.c.Close(); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { // parallel subtests end before
		finish()
		eventually(t, "connections end", func() bool { return d.server.Connections() == 0 })
	})
}

// TestForeignUser: the peer's credentials decide, and the answer says which flag helps.
func TestForeignUser(t *testing.T) {
	needRoot(t)
	const nobody = 65534
	ask := func(t *testing.T, s setup) string {
		t.Helper()
		dir := t.TempDir()
		for p := dir; p != "/" && p != os.TempDir(); p = filepath.Dir(p) {
			if err := os.Chmod(p, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		d := start(t, dir, s)
		if err := os.Chmod(d.socket, 0o666); err != nil {
			t.Fatal(err)
		}
		finish := d.witness()
		defer finish()
		c := helper("status", "SOCKET="+d.socket)
		c.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if got := ask(t, setup{pages: 64}); !strings.HasPrefix(got, "error") || !strings.Contains(got, `"code":"refused"`) || !strings.Contains(got, "kvlift serve --allow-uid 65534") {
		t.Errorf("a foreign user hears %s", got)
	}
	if got := ask(t, setup{pages: 64, uids: []uint32{nobody}}); !strings.HasPrefix(got, "welcome") {
		t.Errorf("a user that is allowed hears %s", got)
	}
	if got := ask(t, setup{pages: 64, gids: []uint32{nobody}}); !strings.HasPrefix(got, "welcome") {
		t.Errorf("a group that is allowed hears %s", got)
	}
	if got := ask(t, setup{pages: 64, gids: []uint32{1}, uids: []uint32{1}}); !strings.HasPrefix(got, "error") {
		t.Errorf("a user that is not on the lists hears %s", got)
	}
}

// TestManyConnections opens a thousand connections at once and holds them.
func TestManyConnections(t *testing.T) {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	if lim.Cur < 8000 {
		t.Skipf("only %d files may be open, both ends of a connection and what belongs to it need more", lim.Cur)
	}
	const n = 1000
	crowd := func(t *testing.T, max int) (welcome, busy int) {
		d := start(t, t.TempDir(), setup{pages: 64, conns: max})
		before := heap()
		finish := d.witness()
		answers := make([]string, n)
		held := make([]*raw, n)
		var wg sync.WaitGroup
		for i := range n {
			held[i] = d.raw(t)
			wg.Go(func() {
				r := held[i]
				r.json(wire.THello, helloOf("observer", "", nil))
				h, b, err := r.frame()
				switch {
				case err != nil:
					answers[i] = err.Error()
				case h.Type == wire.TError:
					var e wire.Error
					err := wire.ParseJSON(b, &e)
					answers[i] = fmt.Sprint(e.Code, " ", e.Hint, err)
				default:
					answers[i] = h.Type.String()
				}
			})
		}
		wg.Wait()
		for _, a := range answers {
			switch a {
			case "welcome":
				welcome++
			case "busy kvlift serve --max-connections<nil>":
				busy++
			default:
				t.Errorf("a client hears %q", a)
			}
		}
		for _, r := range held {
			if err := r.c.Close(); err != nil {
				t.Error(err)
			}
		}
		finish()
		eventually(t, "connections end", func() bool { return d.server.Connections() == 0 })
		d.stop()
		if now := heap(); now > before+32<<20 {
			t.Errorf("the heap grew from %d to %d bytes", before, now)
		}
		return welcome, busy
	}
	t.Run("room", func(t *testing.T) {
		if welcome, busy := crowd(t, 1024); welcome != n || busy != 0 {
			t.Errorf("%d welcome, %d refused", welcome, busy)
		}
	})
	t.Run("busy", func(t *testing.T) {
		if welcome, busy := crowd(t, 10); welcome != 8 || busy != n-8 { // the witness has two
			t.Errorf("%d welcome, %d refused", welcome, busy)
		}
	})
}

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
		e.Finish(round, 0, 0)
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
