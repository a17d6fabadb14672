// Package notify tells the service manager how the daemon is doing, by systemd's sd_notify protocol: one datagram of
// NAME=value lines for each message, to the unix socket that NOTIFY_SOCKET names. See sd_notify(3).
package notify

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	// maxStatusBytes keeps a message well below the 4096 bytes that systemd reads of it.
	maxStatusBytes = 1024
	// maxAddrBytes is what fits into a socket address, with the zero byte at the end of a path.
	maxAddrBytes = 107
	// sendTimeout bounds a call when the manager does not read its socket. The daemon must not hang with it.
	sendTimeout = time.Second
)

// Notifier sends messages to a service manager. The zero value does nothing: so runs a daemon that no manager started.
// It keeps no connection, so there is nothing to close and it may be copied and used from any goroutine. A call takes at
// most about a second. An error says that the manager was not told; the caller can go on without it.
type Notifier struct {
	addr string
}

// New makes the notifier for the value of NOTIFY_SOCKET: an absolute path, "@name" for an abstract socket, or "" for a
// notifier that does nothing. It fails for anything else, such as "vsock:" addresses, and does not connect yet.
func New(addr string) (Notifier, error) {
	switch {
	case addr == "":
	case addr[0] != '/' && addr[0] != '@' || len(addr) < 2:
		return Notifier{}, fmt.Errorf("notify socket %q: want an absolute path or @name", addr)
	case strings.IndexByte(addr, 0) >= 0:
		return Notifier{}, fmt.Errorf("notify socket %q: holds a zero byte", addr)
	case len(addr) > maxAddrBytes:
		return Notifier{}, fmt.Errorf("notify socket %q: longer than %d bytes", addr, maxAddrBytes)
	}
	return Notifier{addr: addr}, nil
}

// Ready says that the daemon serves, or does so again after a reload; status, unless empty, is shown beside it.
func (n Notifier) Ready(status string) error {
	if status == "" {
		return n.send("READY=1")
	}
	return n.send("READY=1\nSTATUS=" + line(status))
}

// Status sets the text that the manager shows; "" clears it. Control characters, newlines among them, become spaces,
// invalid UTF-8 becomes U+FFFD, and text beyond 1024 bytes is cut.
func (n Notifier) Status(s string) error { return n.send("STATUS=" + line(s)) }

// Stopping says that the daemon is shutting down.
func (n Notifier) Stopping() error { return n.send("STOPPING=1") }

// ExtendTimeout asks for d from now before the manager loses patience with a start or stop in progress; to go on it must
// be called again within d. It is sent in microseconds, rounded up, and must be more than zero.
func (n Notifier) ExtendTimeout(d time.Duration) error {
	if d <= 0 {
		return fmt.Errorf("extend timeout by %v: want more than zero", d)
	}
	usec := int64(d / time.Microsecond)
	if d%time.Microsecond != 0 {
		usec++
	}
	return n.send(fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", usec))
}

// Watchdog says that the daemon is alive; the unit's WatchdogSec says how often it must.
func (n Notifier) Watchdog() error { return n.send("WATCHDOG=1") }

func (n Notifier) send(message string) (err error) {
	if n.addr == "" {
		return nil
	}
	// net turns a leading "@" into the zero byte of an abstract address.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.addr, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	if _, err := conn.Write([]byte(message)); err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	return nil
}

// line makes s safe as the value of one line: status text may quote file names or clients, and a newline in it would
// start a message of its own. systemd drops a status that is not valid UTF-8.
func line(s string) string {
	// Cut before the rest of the work, so that its cost is bounded; replacing may make the text longer again.
	s = cut(s, maxStatusBytes)
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' {
			return ' '
		}
		return r // utf8.RuneError for a byte that is not UTF-8
	}, s)
	return cut(s, maxStatusBytes)
}

// cut shortens s to at most n bytes without breaking a rune.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
