package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/block"
	"kvlift/wire"
)

// Worker is one rank: it maps the arena and copies. It is not safe for concurrent use, except Bytes.
type Worker struct {
	c     *Config
	rank  int
	s     *stream
	arena *os.File // held open as long as the process may copy: it carries the life lock (R13)
	mem   []byte
	id    string // session
	aid   string
}

// attachWorker connects a rank, maps the arena unless it is mapped already, and says so.
func (w *Worker) attach(ctx context.Context) error {
	if w.s != nil {
		_ = w.s.close()
		w.s = nil
	}
	s, err := dial(ctx, w.c.Socket)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, s.interrupt)
	defer stop()
	welcome, f, err := s.hello(&wire.Hello{Protocol: [2]int{wire.Major, wire.Minor}, Client: w.c.Name, Role: "worker", EngineID: w.c.EngineID,
		Rank: w.rank, WorldSize: w.c.world(), Namespace: &w.c.Namespace, Parts: w.c.Parts[w.rank], Session: w.id, ArenaID: w.aid}, w.c.AttachTimeout)
	if err != nil {
		return errors.Join(err, s.close())
	}
	if err := w.take(welcome, f); err != nil {
		return errors.Join(err, s.close())
	}
	s.queue(wire.TMapped, nil)
	if err := s.flush(); err != nil {
		return errors.Join(err, s.close())
	}
	w.s = s
	return nil
}

func (w *Worker) take(welcome *wire.Welcome, f *os.File) error {
	if w.mem != nil && w.aid != welcome.ArenaID {
		return errors.Join(ErrOtherArena, closeIf(f))
	}
	w.id, w.aid = welcome.Session, welcome.ArenaID
	if w.mem != nil {
		if f == nil {
			return nil
		}
		old := w.arena // the daemon knew nothing of this process: the new descriptor carries the lock that counts
		w.arena = f
		return closeIf(old)
	}
	if f == nil {
		return fmt.Errorf("%w: a welcome without the arena's descriptor", wire.ErrMalformed)
	}
	n := welcome.ArenaBytes
	if welcome.HugePage > 0 {
		n = (n + welcome.HugePage - 1) / welcome.HugePage * welcome.HugePage
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return errors.Join(fmt.Errorf("map %d bytes of arena: %w", n, err), f.Close())
	}
	_ = unix.Madvise(mem, unix.MADV_DONTFORK) // a child must not inherit what it does not answer for; old kernels only lack the advice
	w.mem, w.arena = mem[:welcome.ArenaBytes], f
	return nil
}

func closeIf(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

// Bytes is the part of the arena that an extent names. The memory is the arena's own, shared with everybody.
func (w *Worker) Bytes(x block.Extent) []byte {
	return w.mem[uint64(x.Page)*block.PageSize : (uint64(x.Page)+uint64(x.Count))*block.PageSize]
}

// Ended reports that a job's copies are over on this rank (R12) and waits for the acknowledgement.
func (w *Worker) Ended(job uint64, wait time.Duration) error {
	if w.s == nil {
		return ErrNotReachable
	}
	w.s.queue(wire.TEnded, func(b []byte) []byte { return wire.AppendJob(b, job) })
	if err := w.s.flush(); err != nil {
		return err
	}
	w.c.waits()
	_, b, err := w.s.await(wire.TEndedAck, wait)
	if err != nil {
		return err
	}
	if got, err := wire.ParseJob(b); err != nil || got != job {
		return fmt.Errorf("%w: acknowledgement of job %d for %d", wire.ErrMalformed, got, job)
	}
	return nil
}

// Kill ends the rank as the end of its process would: nothing is said. The worker must not be used afterwards.
func (w *Worker) Kill() error {
	err := w.s.close()
	w.s = nil
	return errors.Join(err, w.close())
}

// close unmaps, gives the life lock up and says goodbye.
func (w *Worker) close() error {
	var err error
	if w.mem != nil {
		err = unix.Munmap(w.mem[:cap(w.mem)])
		w.mem = nil
	}
	if w.arena != nil {
		err = errors.Join(err, w.arena.Close())
		w.arena = nil
	}
	if w.s != nil {
		w.s.queue(wire.TBye, nil)
		_ = w.s.flush() // a daemon that is away learns it from the byte lock
		err = errors.Join(err, w.s.close())
		w.s = nil
	}
	return err
}
