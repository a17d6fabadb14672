package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// ErrPublic tells that an address can be reached from other machines, which was not allowed.
var ErrPublic = errors.New("the address can be reached from other machines")

// Limits of the server. What it serves is small and its clients are near.
const (
	headerTimeout  = 5 * time.Second
	readTimeout    = 10 * time.Second
	writeTimeout   = 30 * time.Second
	idleTimeout    = 60 * time.Second
	maxHeaderBytes = 8 << 10
	shutdownWithin = 2 * time.Second
)

// Serve listens on addr and answers with h until ctx ends; what is under way then has two seconds to finish. It returns
// the address that it listens on, with the port that was chosen when addr says 0.
//
// addr is HOST:PORT with an IP address or localhost as the host. Without a host it is 127.0.0.1. Any other than a
// loopback address must be given in full and be allowed by public, else the error wraps ErrPublic and nothing was opened.
//
// wait blocks until the server has ended and returns why, nil after ctx. It may be called any number of times, by any
// goroutine; whoever called Serve calls it before it counts the server as gone. Panics of h and broken connections go to
// log, which must be given.
func Serve(ctx context.Context, addr string, public bool, h http.Handler, log *slog.Logger) (boundAddr string, wait func() error, err error) {
	at, err := resolve(addr, public)
	if err != nil {
		return "", nil, fmt.Errorf("metrics address %q: %w", addr, err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", at)
	if err != nil {
		return "", nil, fmt.Errorf("listen for metrics: %w", err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: headerTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeaderBytes, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	done := make(chan struct{})
	var failed error
	go func() {
		defer close(done)
		served := make(chan error, 1)
		go func() { served <- srv.Serve(l) }()
		select {
		case failed = <-served:
		case <-ctx.Done():
			within, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWithin)
			defer cancel()
			if srv.Shutdown(within) != nil {
				_ = srv.Close() // a client that does not read has had its time
			}
			<-served
		}
	}()
	return l.Addr().String(), func() error { <-done; return failed }, nil
}

// resolve turns an address into one to listen on. Names are not looked up: what they mean is not ours to promise.
func resolve(addr string, public bool) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", errors.New("want HOST:PORT or :PORT")
	}
	if host == "" || host == "localhost" {
		return net.JoinHostPort("127.0.0.1", port), nil
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return "", fmt.Errorf("the host %q is neither an IP address nor localhost", host)
	}
	if !ip.IsLoopback() && !public {
		return "", fmt.Errorf("%w, and this is not allowed; a loopback address is 127.0.0.1:%s", ErrPublic, port)
	}
	return net.JoinHostPort(host, port), nil
}
