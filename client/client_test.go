package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvlift/client"
	"kvlift/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake answers every connection with the same bytes behind its hello, and closes it when the client does, or at once.
func fake(t *testing.T, answer []byte, closes bool) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			head := make([]byte, wire.HeaderSize)
			if _, err := io.ReadFull(c, head); err == nil {
				_, _ = io.CopyN(io.Discard, c, int64(binary.LittleEndian.Uint32(head)))
				_, _ = c.Write(answer) // the client may be gone
				if !closes {
					_, _ = io.Copy(io.Discard, c)
				}
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		<-done
	})
	return socket
}

func config(socket string) client.Config {
	return client.Config{Socket: socket, EngineID: "e", AttachTimeout: 100 * time.Millisecond, Parts: [][]uint32{{4096}},
		Namespace: wire.Namespace{Groups: []wire.Group{{Kind: "full", ChunkTokens: 16}}}}
}

func message(t *testing.T, typ wire.Type, v any) []byte {
	t.Helper()
	b, err := wire.AppendJSON(nil, v)
	if err != nil {
		t.Fatal(err)
	}
	return wire.Append(nil, typ, 0, 1, b)
}

func descriptors(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// TestBadDaemon: whatever answers on the socket, attaching and asking end with an error that says what it was, in time,
// and leave no descriptor behind.
func TestBadDaemon(t *testing.T) {
	welcome := message(t, wire.TWelcome, &wire.Welcome{Protocol: [2]int{wire.Major, wire.Minor}, ArenaBytes: 4096})
	huge := wire.AppendHeader(nil, wire.TWelcome, 0, 1)
	binary.LittleEndian.PutUint32(huge, wire.MaxFrame+1)
	told := func(err error) bool {
		e, ok := errors.AsType[*client.RemoteError](err)
		return ok && e.Code == "busy" && e.Hint == "try later" && strings.Contains(e.Error(), "daemon: too many")
	}
	is := func(target error) func(error) bool { return func(err error) bool { return errors.Is(err, target) } }
	says := func(text string) func(error) bool {
		return func(err error) bool { return strings.Contains(err.Error(), text) }
	}
	for _, c := range []struct {
		name   string
		answer []byte
		closes bool
		attach func(error) bool
		status func(error) bool
	}{
		{"closes", nil, true, is(io.EOF), is(io.EOF)},
		{"says nothing", nil, false, is(client.ErrDeadline), is(client.ErrDeadline)},
		{"half a frame", welcome[:20], false, is(client.ErrDeadline), is(client.ErrDeadline)},
		{"half a frame and closes", welcome[:20], true, is(io.EOF), is(io.EOF)},
		{"HTTP", []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), true, is(wire.ErrTooLong), is(wire.ErrTooLong)},
		{"a long frame", huge, false, is(wire.ErrTooLong), is(wire.ErrTooLong)},
		{"no JSON", wire.Append(nil, wire.TWelcome, 0, 1, []byte("{")), false, is(wire.ErrMalformed), is(wire.ErrMalformed)},
		{"an answer to something else", wire.Append(nil, wire.TDone, 0, 1, nil), false, says("unexpected done"), says("unexpected done")},
		{"another major", message(t, wire.TWelcome, &wire.Welcome{Protocol: [2]int{9, 3}}), false, says("protocol 9.3, this client 1.0"), says("protocol 9.3, this client 1.0")},
		{"refuses", message(t, wire.TError, &wire.Error{Code: "busy", Message: "too many", Hint: "try later"}), true, told, told},
		{"no descriptor", welcome, false, says("without the arena's descriptor"), is(client.ErrDeadline)},
	} {
		t.Run(c.name, func(t *testing.T) {
			socket := fake(t, c.answer, c.closes)
			before := descriptors(t)
			began := time.Now()
			if _, err := client.Open(t.Context(), config(socket)); err == nil || !c.attach(err) {
				t.Errorf("attach: %v", err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if _, err := client.Status(ctx, socket, false); err == nil || !c.status(err) {
				t.Errorf("status: %v", err)
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("both took %v", took)
			}
			// The listener accepts in its own time.
			for limit := time.Now().Add(5 * time.Second); descriptors(t) > before; {
				if time.Now().After(limit) {
					t.Fatalf("%d descriptors are open, %d were before", descriptors(t), before)
				}
			}
		})
	}
}

func TestNotReachable(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, socket := range []string{filepath.Join(dir, "none"), stale, file, dir, filepath.Join(dir, strings.Repeat("x", 200))} {
		if _, err := client.Open(t.Context(), config(socket)); !errors.Is(err, client.ErrNotReachable) || !strings.Contains(err.Error(), socket) {
			t.Errorf("attach: %v", err)
		}
		if _, err := client.Status(t.Context(), socket, false); !errors.Is(err, client.ErrNotReachable) {
			t.Errorf("status: %v", err)
		}
	}
}

// TestStatusPieces: a document that is longer than a frame comes in pieces.
func TestStatusPieces(t *testing.T) {
	want := bytes.Repeat([]byte("0123456789abcdef"), 3*wire.MaxFrame/16)
	answer := message(t, wire.TWelcome, &wire.Welcome{Protocol: [2]int{wire.Major, wire.Minor}})
	for lo := 0; lo < len(want); lo += wire.MaxFrame {
		flags := uint16(0)
		if lo+wire.MaxFrame == len(want) {
			flags = wire.FlagLast
		}
		answer = wire.Append(answer, wire.TState, flags, 2, want[lo:lo+wire.MaxFrame])
	}
	got, err := client.Status(t.Context(), fake(t, answer, false), false)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v; want %d", len(got), err, len(want))
	}
}
