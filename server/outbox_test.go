package server

import (
	"encoding/binary"
	"io"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"kvlift/block"
	"kvlift/fence"
	"kvlift/wire"
)

// TestLargeSnapshot sends more keys than may wait for a client: the snapshot is made as fast as it is read. What changes
// meanwhile comes behind it.
func TestLargeSnapshot(t *testing.T) {
	const keys = 2*maxQueued/wire.AddedSize + 1
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	peer := os.NewFile(uintptr(fds[1]), "peer")
	o := newOutbox(fds[0], func() { t.Error("the client was given up") })
	written := make(chan struct{})
	go func() { o.write(); close(written) }()
	refs := make([]block.Ref, keys)
	for i := range refs {
		refs[i] = block.Ref{Entry: uint32(i), Gen: 1}
	}
	most := 0
	details := func(refs []block.Ref, visit func(block.Ref, *block.Key, uint16, uint32, []block.Extent)) {
		o.mu.Lock()
		most = max(most, len(o.buf)-o.sent)
		o.mu.Unlock()
		for _, r := range refs {
			k := block.Key{Len: 36}
			binary.LittleEndian.PutUint32(k.Bytes[:], r.Entry)
			visit(r, &k, 0, 0, []block.Extent{{Page: r.Entry, Count: 1}})
		}
	}
	o.holdBack()
	gone := block.Key{Len: 36}
	o.Removed(8, refs[0], &gone)
	queued := make(chan struct{})
	go func() { o.snapshot(7, refs, details); close(queued) }()
	seen, head, body := 0, make([]byte, wire.HeaderSize), []byte(nil)
	var d wire.Delta
	for last := false; !last; {
		if _, err := io.ReadFull(peer, head); err != nil {
			t.Fatal(err)
		}
		h, err := wire.ParseHeader(head, wire.MaxFrame)
		if err != nil {
			t.Fatal(err)
		}
		body = append(body[:0], make([]byte, h.Length)...)
		if _, err := io.ReadFull(peer, body); err != nil {
			t.Fatal(err)
		}
		if err := d.Parse(body); err != nil {
			t.Fatal(err)
		}
		if h.Type != wire.TSnapshot {
			t.Fatalf("%v inside the snapshot", h.Type)
		}
		for i := range d.Added {
			if d.Added[i].Ref.Entry != uint32(seen) {
				t.Fatalf("entry %d in place %d", d.Added[i].Ref.Entry, seen)
			}
			seen++
		}
		last = h.Flags&wire.FlagLast != 0
	}
	if seen != keys || d.Epoch != 7 {
		t.Errorf("%d keys at epoch %d, want %d at 7", seen, d.Epoch, keys)
	}
	<-queued // from here on most is this goroutine's
	if most > maxAhead+1<<20 {
		t.Errorf("%d bytes waited", most)
	}
	if _, err := io.ReadFull(peer, head); err != nil {
		t.Fatal(err)
	}
	if h, err := wire.ParseHeader(head, wire.MaxFrame); err != nil || h.Type != wire.TDelta {
		t.Errorf("%v behind the snapshot, %v", h.Type, err)
	}
	o.close()
	<-written
	if err := unix.Close(fds[0]); err != nil {
		t.Error(err)
	}
	if err := peer.Close(); err != nil {
		t.Error(err)
	}
}

// TestGivenUp: a client that is given up costs nothing any more, whatever happens in its namespace, and nobody waits
// for it.
func TestGivenUp(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	given := 0
	o := newOutbox(fds[0], func() { given++; _ = unix.Shutdown(fds[0], unix.SHUT_RDWR) })
	written := make(chan struct{})
	go func() { o.write(); close(written) }()
	k, xs := block.Key{Len: 36}, make([]block.Extent, 1000)
	for range 2 * maxQueued / 8000 {
		o.Added(block.Ref{}, &k, 0, 0, xs)
		o.Removed(1, block.Ref{}, &k)
	}
	o.mu.Lock()
	if given != 1 || !o.dead || len(o.buf)+len(o.held)+o.size > 1<<20 {
		t.Errorf("given up %d times, dead %v, %d bytes kept", given, o.dead, len(o.buf)+len(o.held)+o.size)
	}
	o.mu.Unlock()
	o.snapshot(1, make([]block.Ref, 100_000), func(refs []block.Ref, visit func(block.Ref, *block.Key, uint16, uint32, []block.Extent)) {
		for _, r := range refs {
			visit(r, &k, 0, 0, xs[:1])
		}
	})
	o.close()
	<-written
	for _, fd := range fds {
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	}
}

// TestSendsAreCounted: what a manager may read is counted in its page once it lies in the socket, whoever has sent it.
func TestSendsAreCounted(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	page, f, err := fence.New()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	defer page.Close()
	o := newOutbox(fds[0], func() { t.Error("the client was given up") })
	o.countOn(page)
	none := func(b []byte) []byte { return b }
	post := func() { o.post(wire.TDone, 0, 0, none) }
	read := func() {
		t.Helper()
		if n, err := unix.Read(fds[1], make([]byte, 100)); n != wire.HeaderSize || err != nil {
			t.Fatalf("%d bytes, %v", n, err)
		}
	}
	o.flush()
	if n := page.Sends(); n != 0 {
		t.Errorf("%d sends of nothing", n)
	}
	post()
	o.flush()
	if n := page.Sends(); n != 1 {
		t.Errorf("%d sends of one", n)
	}
	read()
	var wg sync.WaitGroup
	wg.Go(o.write)
	post()
	o.mu.Lock()
	o.notify()
	o.mu.Unlock()
	read()
	o.close()
	wg.Wait()
	if n := page.Sends(); n != 2 {
		t.Errorf("%d sends of two", n)
	}
	o.countOn(nil)
	if err := page.Close(); err != nil {
		t.Fatal(err)
	}
	o.count()
}
