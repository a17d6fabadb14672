package server_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/block"
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

// TestReadyNamesParts: ranks may hold different bytes, and a manager is told where in a slot each of them writes.
func TestReadyNamesParts(t *testing.T) {
	d := start(t, t.TempDir(), setup{pages: 64})
	two := func(h *wire.Hello) {
		h.WorldSize = 2
		h.Namespace.Groups = append(h.Namespace.Groups, wire.Group{Kind: "state", ChunkTokens: 16})
	}
	for rank, parts := range [][]uint32{{4096, 100}, {8193, 200}} {
		w := d.raw(t)
		w.json(wire.THello, helloOf("worker", "two", func(h *wire.Hello) {
			two(h)
			h.Rank, h.Parts = rank, parts
		}))
		w.want(wire.TWelcome)
		w.send(wire.TMapped, nil)
	}
	m := d.raw(t)
	m.json(wire.THello, helloOf("manager", "two", two))
	var got wire.Ready
	if err := json.Unmarshal(m.want(wire.TReady), &got); err != nil {
		t.Fatal(err)
	}
	if want := [][]uint32{{4096, 8193}, {100, 200}}; !reflect.DeepEqual(got.Parts, want) || !slices.Equal(got.Payload, []uint32{12289, 300}) {
		t.Errorf("parts %v of payloads %v, want %v", got.Parts, got.Payload, want)
	}
}

// TestSilent: who does not say hello in time is given up, however it spends the time.
func TestSilent(t *testing.T) {
	const limit = 600 * time.Millisecond // the engine beside has to say hello in it, on a busy machine
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
			d.refuses(t, d.raw(t), c.do, "failed", "no hello within "+limit.String())
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
