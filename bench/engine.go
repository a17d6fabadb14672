package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/block"
	"kvlift/client"
	"kvlift/trace"
	"kvlift/wire"
)

// Spread is a figure over several runs.
type Spread struct {
	Median float64 `json:"med"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// SpreadOf sums figures up.
func SpreadOf(v []float64) Spread {
	s := slices.Sorted(slices.Values(v))
	if len(s) == 0 {
		return Spread{}
	}
	return Spread{s[len(s)/2], s[0], s[len(s)-1]}
}

// StoreCost measures reserve + commit through the socket, without payload: wall time to the last added delta, divided by
// keys. The first pass fills an empty arena of capacity keys, the second stores as many again, each evicting one.
func StoreCost(ctx context.Context, socket string, capacity, batch int) (fill, evict float64, err error) {
	e, err := client.Open(ctx, EngineConfig(socket, fmt.Sprintf("bench-store-%d", os.Getpid()), block.PageSize))
	if err != nil {
		return 0, 0, err
	}
	defer e.Close()
	s := storer{e: e, batch: batch}
	if fill, err = s.run(0, capacity); err != nil {
		return 0, 0, err
	}
	evict, err = s.run(capacity, capacity)
	return fill, evict, err
}

// storer stores generated keys without content.
type storer struct {
	e       *client.Engine
	batch   int
	request uint64
	offers  []block.Offer
	resv    client.Reservation
}

// perRequest is how many blocks a generated prompt has: 64 × 512 tokens.
const perRequest = 64

// run stores n keys from number from on and returns microseconds per key until the last delta was read.
func (s *storer) run(from, n int) (float64, error) {
	keys := make([]block.Key, n)
	for i := range keys {
		keys[i] = trace.KeyOf(uint64(from+i), 0)
	}
	start := time.Now()
	for lo := 0; lo < n; lo += perRequest {
		s.request++
		for at := lo; at < min(lo+perRequest, n); at += s.batch {
			s.offers = s.offers[:0]
			for i := at; i < min(at+s.batch, lo+perRequest, n); i++ {
				s.offers = append(s.offers, block.Offer{Key: keys[i], Position: uint32(i-lo+1) * trace.BlockTokens})
			}
			if err := s.e.Reserve(s.request, s.offers, &s.resv); err != nil {
				return 0, err
			}
			if len(s.resv.Keys) != len(s.offers) {
				return 0, fmt.Errorf("%d of %d keys were accepted, reason %d", len(s.resv.Keys), len(s.offers), s.resv.Reason)
			}
			s.e.Commit(s.resv.Job)
		}
		s.e.Finish(s.request, 0, 0, wire.NoHint)
	}
	if err := s.e.Sync(30 * time.Second); err != nil {
		return 0, err
	}
	return time.Since(start).Seconds() * 1e6 / float64(n), nil
}

// Echo measures the floor of a round trip: a bare echo of request and reply bytes on a Unix socket between two
// processes; the other one is binary with the arguments bench echo-server SOCKET.
func Echo(ctx context.Context, serve func(socket string) (stop func() error, err error), requestBytes, replyBytes, trips int) (p50, p99 float64, err error) {
	dir, err := os.MkdirTemp(shm, "kvlift-bench-")
	if err != nil {
		return 0, 0, err
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	stop, err := serve(socket)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	c, err := dialUntil(ctx, socket)
	if err != nil {
		return 0, 0, err
	}
	f, err := c.File()
	if err = errors.Join(err, c.Close()); err != nil {
		return 0, 0, err
	}
	defer f.Close()
	fd := int(f.Fd()) // in blocking mode from here on
	out, in := make([]byte, requestBytes), make([]byte, replyBytes)
	binary.LittleEndian.PutUint32(out, uint32(requestBytes))
	binary.LittleEndian.PutUint32(out[4:], uint32(replyBytes))
	lat := make([]float64, 0, trips)
	for i := range trips + trips/10 {
		t := time.Now()
		if _, err := unix.Write(fd, out); err != nil {
			return 0, 0, err
		}
		for n := 0; n < replyBytes; {
			k, err := unix.Read(fd, in[n:])
			if err != nil {
				return 0, 0, err
			}
			if k == 0 {
				return 0, 0, io.ErrUnexpectedEOF
			}
			n += k
		}
		if i >= trips/10 {
			lat = append(lat, time.Since(t).Seconds()*1e6)
		}
	}
	slices.Sort(lat)
	return lat[len(lat)/2], lat[len(lat)*99/100], nil
}

func dialUntil(ctx context.Context, socket string) (*net.UnixConn, error) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if err == nil {
			return c, nil
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(err, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// EchoServer answers one connection: every message begins with its own length and that of the answer, four
// little-endian bytes each. It returns when the peer has closed.
func EchoServer(socket string) error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := l.AcceptUnix()
	if err != nil {
		return err
	}
	f, err := c.File()
	if err = errors.Join(err, c.Close()); err != nil {
		return err
	}
	defer f.Close()
	fd, buf := int(f.Fd()), make([]byte, 1<<20)
	for {
		have, want := 0, 8
		for have < want {
			n, err := unix.Read(fd, buf[have:])
			if err != nil || n == 0 {
				return err
			}
			if have += n; have >= 8 {
				want = int(binary.LittleEndian.Uint32(buf))
			}
		}
		reply := int(binary.LittleEndian.Uint32(buf[4:]))
		if reply > len(buf) {
			return fmt.Errorf("an answer of %d bytes", reply)
		}
		if _, err := unix.Write(fd, buf[:reply]); err != nil {
			return err
		}
	}
}

// Adoption is the cost of a start on a full table.
type Adoption struct {
	Entries      int     `json:"entries"`
	Seconds      float64 `json:"adoption_seconds"`        // of the adoption itself
	StartSeconds float64 `json:"start_to_answer_seconds"` // from the start of the process to its first answer
	HeapBytes    float64 `json:"heap_bytes_per_entry"`    // in use after a collection, less an empty daemon
}

// Adopt fills a daemon with entries keys, kills it, starts it again and reads what that cost. empty is the heap of a
// daemon without keys.
func Adopt(ctx context.Context, binary string, entries int) (a Adoption, err error) {
	a.Entries = entries
	base, err := StartDaemon(ctx, binary, "--ram", "1MiB", "--min-idle", "0s")
	if err != nil {
		return a, err
	}
	st, err := base.Status(ctx, true)
	if err = errors.Join(err, base.Close()); err != nil {
		return a, err
	}
	empty := float64(st.Process.HeapBytes)
	d, err := StartDaemon(ctx, binary, "--ram", fmt.Sprint(entries*block.PageSize), "--max-keys", fmt.Sprint(entries), "--min-idle", "0s")
	if err != nil {
		return a, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	e, err := client.Open(ctx, EngineConfig(d.Socket, "bench-adopt", block.PageSize))
	if err != nil {
		return a, err
	}
	s := storer{e: e, batch: 256}
	_, err = s.run(0, entries)
	if err = errors.Join(err, e.Close(), d.Kill()); err != nil {
		return a, err
	}
	start := time.Now()
	if err := d.Start(ctx); err != nil {
		return a, err
	}
	a.StartSeconds = time.Since(start).Seconds()
	if st, err = d.Status(ctx, true); err != nil {
		return a, err
	}
	if got := st.Tiers[0].Keys; got != uint64(entries) {
		return a, fmt.Errorf("%d of %d keys were adopted", got, entries)
	}
	a.Seconds = st.Adoption.Seconds
	a.HeapBytes = (float64(st.Process.HeapBytes) - empty) / float64(entries)
	return a, nil
}

// Idle measures the CPU time that a daemon with an attached engine uses while nothing happens, in seconds per second.
func Idle(ctx context.Context, d *Daemon, quiet time.Duration) (float64, error) {
	e, err := client.Open(ctx, EngineConfig(d.Socket, "bench-idle", block.PageSize))
	if err != nil {
		return 0, err
	}
	defer e.Close()
	before, _ := usage(d.PID())
	select {
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	case <-time.After(quiet):
	}
	after, _ := usage(d.PID())
	return (after - before) / quiet.Seconds(), nil
}
