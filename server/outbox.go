package server

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	"kvlift/block"
	"kvlift/fence"
	"kvlift/wire"
)

// maxQueued is how many bytes may wait for a client that does not read. Beyond it the connection is closed: the client
// gets a fresh snapshot when it comes back, and nothing that it promised is forgotten meanwhile (R14).
const maxQueued = 64 << 20

// frameRoom leaves a delta below the frame limit with room for one key of many extents.
const frameRoom = wire.MaxFrame - 64<<10

// outbox holds what a client is still to be told, in order. Deltas gather in an open message that is sealed before
// anything else is queued behind it, so the stream keeps the order of the engine's decisions.
type outbox struct {
	fd   int
	seal func() // called once when the client is to be given up; must not block

	room  sync.Cond  // on mu: bytes were sent, or the client is given up
	mu    sync.Mutex // guards everything below; taken under the engine's mutex, so never held across a system call that blocks
	buf   []byte     // sealed frames
	sent  int        // bytes of buf that are gone
	held  []byte     // frames that wait for the end of a snapshot
	hold  bool
	delta wire.Delta
	size  int // of the open delta's payload
	epoch uint64
	dead  bool
	busy  bool        // the writer is inside a blocking send
	page  *fence.Page // of a manager: it counts the sends there; nil of others, and once it may be unmapped
	// attended: the reader is handling a frame of this client and will flush, so the writer need not wake for what that
	// frame causes.
	attended bool
	wake     chan struct{}
	closed   bool
}

func newOutbox(fd int, giveUp func()) *outbox {
	o := &outbox{fd: fd, seal: giveUp, wake: make(chan struct{}, 1)}
	o.room.L = &o.mu
	return o
}

// Added and Removed make an outbox the engine's sink of a session.
func (o *outbox) Added(ref block.Ref, key *block.Key, group uint16, position uint32, extents []block.Extent) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over() {
		return
	}
	o.add(ref, key, group, position, extents)
	o.stir()
}

// attend says that the caller will flush; see attended.
func (o *outbox) attend() {
	o.mu.Lock()
	o.attended = true
	o.mu.Unlock()
}

// stir wakes the writer for a change of the mirror unless the reader sees to it. The caller holds mu.
func (o *outbox) stir() {
	if !o.attended {
		o.notify()
	}
}

func (o *outbox) add(ref block.Ref, key *block.Key, group uint16, position uint32, extents []block.Extent) {
	need := wire.DeltaSize(0, 1, len(extents))
	if o.size+need > frameRoom {
		o.sealDelta(wire.TDelta, 0)
	}
	o.size += need
	o.delta.Added = append(o.delta.Added, wire.AddedKey{Offer: block.Offer{Key: *key, Group: group, Position: position}, Ref: ref, Extents: len(extents)})
	o.delta.Extents = append(o.delta.Extents, extents...)
}

// Removed queues a removal. A message applies its removals first, so one with additions is sealed before.
func (o *outbox) Removed(epoch uint64, ref block.Ref, key *block.Key) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over() {
		return
	}
	o.remove(ref, key)
	o.epoch = epoch
	o.stir()
}

// taken queues a removal that needs no acknowledgement: it belongs to the answer of a reserve that comes behind it.
func (o *outbox) taken(ref block.Ref, key *block.Key) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.over() {
		o.remove(ref, key)
	}
}

func (o *outbox) remove(ref block.Ref, key *block.Key) {
	if len(o.delta.Added) > 0 || o.size > frameRoom {
		o.sealDelta(wire.TDelta, 0)
	}
	o.size += wire.GoneSize
	o.delta.Removed = append(o.delta.Removed, wire.GoneKey{Offer: block.Offer{Key: *key}, Ref: ref})
}

// over tells that nothing will be sent any more, so that nothing need be kept. The caller holds mu.
func (o *outbox) over() bool { return o.dead || o.closed }

// die gives the client up. The caller holds mu.
func (o *outbox) die() {
	o.dead = true
	o.buf, o.held, o.sent = nil, nil, 0
	o.room.Broadcast()
	o.seal()
}

// sealDelta closes the open message. The caller holds mu.
func (o *outbox) sealDelta(t wire.Type, flags uint16) {
	if o.size == 0 && t == wire.TDelta {
		return
	}
	o.delta.Epoch = o.epoch
	dst := &o.buf
	if o.hold && t == wire.TDelta {
		dst = &o.held
	}
	start := len(*dst)
	*dst = wire.AppendHeader(*dst, t, flags, 0)
	*dst = wire.AppendDelta(*dst, &o.delta)
	wire.Seal(*dst, start)
	o.delta.Removed, o.delta.Added, o.delta.Extents, o.size = o.delta.Removed[:0], o.delta.Added[:0], o.delta.Extents[:0], 0
	o.bound()
}

// bound gives a client up that does not read. A piece of a snapshot has none.
func (o *outbox) bound() {
	if o.seal != nil && len(o.buf)-o.sent+len(o.held) > maxQueued && !o.dead {
		o.die()
	}
}

// post queues a frame behind everything queued so far. seq is that of the request it answers, else 0. encode appends the
// payload.
func (o *outbox) post(t wire.Type, flags uint16, seq uint64, encode func([]byte) []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over() {
		return
	}
	o.sealDelta(wire.TDelta, 0)
	dst := &o.buf
	if o.hold && t != wire.TReady && t != wire.TError {
		dst = &o.held
	}
	start := len(*dst)
	*dst = encode(wire.AppendHeader(*dst, t, flags, seq))
	wire.Seal(*dst, start)
	o.bound()
}

// holdBack makes deltas wait until snapshot has queued what was there before them.
func (o *outbox) holdBack() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.hold = true
}

// maxAhead is how many bytes of a snapshot may wait to be sent while more is read from the table. A snapshot may be many
// times what may wait for a client: it is made as fast as the client reads.
const maxAhead = 4 << 20

// snapshot queues READY keys in pieces while later deltas wait in held (R20). visit is called with a function that adds
// one key; it runs under the engine's mutex, so the outbox is locked inside that one, as everywhere. It waits for the
// client, and returns when that is given up.
func (o *outbox) snapshot(epoch uint64, refs []block.Ref, details func([]block.Ref, func(block.Ref, *block.Key, uint16, uint32, []block.Extent))) {
	const piece = 2048
	for lo := 0; lo < len(refs); lo += piece {
		var part outbox // of its own, so that deltas and snapshot do not mix
		details(refs[lo:min(lo+piece, len(refs))], func(ref block.Ref, k *block.Key, g uint16, pos uint32, xs []block.Extent) {
			if part.size+wire.DeltaSize(0, 1, len(xs)) > frameRoom {
				part.sealDelta(wire.TSnapshot, 0)
			}
			part.add(ref, k, g, pos, xs)
		})
		if part.size > 0 {
			part.sealDelta(wire.TSnapshot, 0)
		}
		o.mu.Lock()
		o.buf = append(o.buf, part.buf...)
		o.bound()
		o.mu.Unlock()
		o.flush()
		o.mu.Lock()
		for len(o.buf)-o.sent > maxAhead && !o.over() {
			o.room.Wait()
		}
		o.mu.Unlock()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over() {
		return
	}
	last := outbox{epoch: epoch}
	last.sealDelta(wire.TSnapshot, wire.FlagLast)
	o.buf = append(append(o.buf, last.buf...), o.held...)
	o.held, o.hold = nil, false
	o.notify()
}

// notify wakes the writer. The caller holds mu.
func (o *outbox) notify() {
	if o.closed {
		return
	}
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// flush sends what is queued as far as the socket takes it now; the rest is left to the writer.
func (o *outbox) flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.attended = false
	o.sealDelta(wire.TDelta, 0)
	for !o.busy && !o.over() && o.sent < len(o.buf) { // once closed, the descriptor may be another connection's
		n, err := unix.SendmsgN(o.fd, o.buf[o.sent:], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.EAGAIN) {
			o.notify()
			return
		}
		if err != nil {
			o.die()
			return
		}
		o.sent += n
		o.count()
	}
	o.reclaim()
}

// countOn makes sends count in a manager's page; nil before that is unmapped.
func (o *outbox) countOn(p *fence.Page) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.page = p
}

// count notes a send. The caller holds mu.
func (o *outbox) count() {
	if o.page != nil {
		o.page.Sent()
	}
}

// reclaim forgets what was sent. The caller holds mu.
func (o *outbox) reclaim() {
	if o.sent == len(o.buf) {
		if cap(o.buf) > 1<<20 {
			o.buf = nil // a snapshot's worth is not kept for ever
		}
		o.buf, o.sent = o.buf[:0], 0
	}
}

// write sends what flush could not and what other sessions cause, until the outbox is closed. It may block in a send;
// shutting the socket down ends that.
func (o *outbox) write() {
	var chunk []byte
	for range o.wake {
		for {
			o.mu.Lock()
			if o.closed || o.dead {
				o.mu.Unlock()
				break
			}
			o.sealDelta(wire.TDelta, 0)
			if o.sent == len(o.buf) {
				o.reclaim()
				o.mu.Unlock()
				break
			}
			chunk = append(chunk[:0], o.buf[o.sent:min(len(o.buf), o.sent+256<<10)]...)
			o.busy = true
			o.mu.Unlock()
			n, err := unix.SendmsgN(o.fd, chunk, nil, nil, unix.MSG_NOSIGNAL)
			o.mu.Lock()
			o.busy = false
			switch {
			case o.dead: // given up meanwhile: there is no queue any more
			case err == nil:
				o.sent += n
				o.count()
				o.room.Broadcast()
				if o.sent > 4<<20 { // do not let the sent part of a long queue grow
					o.buf = append([]byte(nil), o.buf[o.sent:]...)
					o.sent = 0
				}
			case !errors.Is(err, unix.EINTR):
				o.die()
			}
			o.mu.Unlock()
		}
	}
}

// close ends the writer.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.closed {
		o.closed = true
		close(o.wake)
		o.room.Broadcast()
	}
}
