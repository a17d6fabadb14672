// Package metrics shows a daemon's status to Prometheus and to probes: /metrics, /healthz and /status.
//
// Every scrape asks for one status document and makes all values from it, so they belong to one moment and the package
// keeps no state of its own that could disagree with the daemon's. The set of label values is bounded by the tables of
// the daemon: tiers, reasons, causes, kinds, and the indices of namespaces and groups, never what an engine chose.
package metrics

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"kvlift/status"
)

// maxScrapes bounds scrapes that are under way; more are answered with 503. They share one reading of the state.
const maxScrapes = 8

// Handler answers GET and HEAD:
//
//	/metrics  the exposition; it has kvlift_up 0 and the process's own metrics when state fails
//	/healthz  200 "ok"; 503 with the state while the daemon is draining, and "unavailable" when state fails
//	/status   the document as JSON; 503 with an error object when state fails
//
// state is called once per request, by several goroutines at a time; the document that it returns is only read. Its
// errors go to log and not to the client. Both arguments must be given. The handler may be used by any number of servers.
func Handler(state func() (status.Document, error), log *slog.Logger) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		&collector{state: state, log: log, now: time.Now, families: families()},
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog:            errorLog{log},
		ErrorHandling:       promhttp.ContinueOnError, // one bad value must not hide the others
		MaxRequestsInFlight: maxScrapes,
		CoalesceGather:      true,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		d, err := state()
		switch {
		case err != nil:
			log.Warn("no state for a health probe", "error", err)
			text(w, http.StatusServiceUnavailable, "unavailable")
		case d.State == status.Draining:
			text(w, http.StatusServiceUnavailable, string(d.State))
		default:
			text(w, http.StatusOK, "ok")
		}
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		var b []byte
		d, err := state()
		if err == nil {
			b, err = json.Marshal(d)
		}
		code := http.StatusOK
		if err != nil {
			log.Warn("no state for a status request", "error", err)
			code, b = http.StatusServiceUnavailable, []byte(`{"error":{"code":"unavailable","message":"the daemon's state cannot be read; its log says why"}}`)
		}
		reply(w, code, "application/json", append(b, '\n'))
	})
	return mux
}

func text(w http.ResponseWriter, code int, s string) {
	reply(w, code, "text/plain; charset=utf-8", []byte(s+"\n"))
}

func reply(w http.ResponseWriter, code int, kind string, b []byte) {
	h := w.Header()
	h.Set("Content-Type", kind)
	h.Set("Content-Length", strconv.Itoa(len(b)))
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff") // engines choose some of the text
	w.WriteHeader(code)
	_, _ = w.Write(b) // the client is gone: there is nobody to tell
}

// errorLog takes what promhttp has to say.
type errorLog struct{ log *slog.Logger }

func (l errorLog) Println(v ...any) { l.log.Warn("metrics", "error", fmt.Sprint(v...)) }
