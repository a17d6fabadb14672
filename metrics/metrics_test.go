package metrics

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"kvlift/status"
)

var update = flag.Bool("update", false, "write the golden files and the table in docs/operations.md")

func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (-update writes it); got:\n%s", path, got)
	}
}

// fixture is the document that package status keeps as its own golden file.
func fixture(t testing.TB) status.Document {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "status", "testdata", "document.json"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := status.Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func always(d status.Document) func() (status.Document, error) {
	return func() (status.Document, error) { return d, nil }
}

var errState = errors.New("the engine is on fire")

func never() (status.Document, error) { return status.Document{}, errState }

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// registry has the daemon's own metrics only, with every check that the library offers and a clock that stands still.
func registry(t testing.TB, state func() (status.Document, error)) *prometheus.Registry {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(&collector{state: state, log: quiet(), now: func() time.Time { return time.Time{} }, families: families()}); err != nil {
		t.Fatal(err)
	}
	return r
}

func exposition(t testing.TB, state func() (status.Document, error)) []byte {
	t.Helper()
	w := get(t, promhttp.HandlerFor(registry(t, state), promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}), "GET", "/")
	if w.Code != http.StatusOK {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	return w.Body.Bytes()
}

func TestExposition(t *testing.T) {
	golden(t, filepath.Join("testdata", "fixture.prom"), exposition(t, always(fixture(t))))
}

func TestExpositionFailed(t *testing.T) {
	golden(t, filepath.Join("testdata", "failed.prom"), exposition(t, never))
}

func TestLint(t *testing.T) {
	for name, state := range map[string]func() (status.Document, error){"fixture": always(fixture(t)), "failed": never} {
		problems, err := testutil.GatherAndLint(registry(t, state))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			t.Errorf("%s: %s: %s", name, p.Metric, p.Text)
		}
	}
}

// TestDocumented compares the table for readers with what a scrape of a document in which nothing is missing exposes.
func TestDocumented(t *testing.T) {
	path := filepath.Join("..", "docs", "operations.md")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, _ := strings.Cut(string(b), "<!-- metrics -->\n")
	table, tail, ok := strings.Cut(rest, "<!-- end of metrics -->")
	if !ok {
		t.Fatalf("%s has no place for the metrics", path)
	}
	if want := "\n" + string(markdown()) + "\n"; table != want {
		if !*update {
			t.Errorf("the metrics in %s differ (-update writes them); want:\n%s", path, want)
		} else if err := os.WriteFile(path, []byte(head+"<!-- metrics -->\n"+want+"<!-- end of metrics -->"+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		table = want
	}
	documented := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| ([a-z]+) \\| ([^|]+) \\| [^|]+ \\|$").FindAllStringSubmatch(table, -1) {
		documented[m[1]] = m[2] + " " + m[3]
	}
	got, err := registry(t, always(fixture(t))).Gather()
	if err != nil {
		t.Fatal(err)
	}
	exposed := map[string]string{}
	for _, f := range got {
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, "`"+l.GetName()+"`")
		}
		if len(labels) == 0 {
			labels = []string{"none"}
		}
		exposed[f.GetName()] = strings.ToLower(f.GetType().String()) + " " + strings.Join(labels, ", ")
	}
	if !maps.Equal(documented, exposed) {
		t.Errorf("documented:\n%v\nexposed:\n%v", documented, exposed)
	}
}

// markdown is the documentation of the table in families.
func markdown() []byte {
	var b bytes.Buffer
	b.WriteString("| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, f := range families() {
		kind := "gauge"
		if f.kind == prometheus.CounterValue {
			kind = "counter"
		}
		labels := "none"
		if len(f.labels) > 0 {
			labels = "`" + strings.Join(slices.Sorted(slices.Values(f.labels)), "`, `") + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.name, kind, labels, f.help)
	}
	b.WriteString("\nBesides these, the Go runtime's own (`go_*`) and the daemon process's (`process_*`) are exposed.\n")
	return b.Bytes()
}

// TestBounded sees that what engines choose reaches no label, and that full tables do not grow without limit.
func TestBounded(t *testing.T) {
	d := fixture(t)
	d.Engines[0].EngineID, d.Namespaces[0].Model, d.Namespaces[0].ID, d.Tiers[0].Dir, d.Socket = "SECRET", "SECRET", "SECRET", "SECRET", "SECRET"
	d.Engines[0].Session, d.Engines[0].Why, d.Engines[0].State = "SECRET", "SECRET", "SECRET"
	if b := exposition(t, always(d)); bytes.Contains(b, []byte("SECRET")) {
		t.Errorf("an engine's words are in the exposition:\n%s", b)
	}
	d = status.Document{Schema: status.Schema}
	for i := range 100 {
		n := status.Namespace{Index: i}
		for g := range 100 {
			n.Groups = append(n.Groups, status.Group{Index: g, Kind: "full"})
		}
		d.Namespaces = append(d.Namespaces, n)
	}
	if n := bytes.Count(exposition(t, always(d)), []byte("\nkvlift_group_keys{")); n != 64*64 {
		t.Errorf("%d groups are shown, want %d", n, 64*64)
	}
}

func TestEscaping(t *testing.T) {
	d := fixture(t)
	d.Version = "1\"\\\n\xff"
	b := exposition(t, always(d))
	if want := `kvlift_build_info{version="1\"\\\n` + "\ufffd" + `"} 1`; !bytes.Contains(b, []byte(want)) {
		t.Errorf("no %s in:\n%s", want, b)
	}
}

func get(t testing.TB, h http.Handler, method, path string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, nil))
	return w
}

func TestHandler(t *testing.T) {
	serving := fixture(t)
	serving.State = status.Serving
	draining := serving
	draining.State = status.Draining
	for _, c := range []struct {
		name         string
		state        func() (status.Document, error)
		method, path string
		code         int
		body         string // contained
	}{
		{"healthy", always(serving), "GET", "/healthz", 200, "ok\n"},
		{"recovering is healthy", always(fixture(t)), "GET", "/healthz", 200, "ok\n"},
		{"draining", always(draining), "GET", "/healthz", 503, "draining\n"},
		{"no state", never, "GET", "/healthz", 503, "unavailable\n"},
		{"status", always(serving), "GET", "/status", 200, `{"schema":1,`},
		{"status while draining", always(draining), "GET", "/status", 200, `"state":"draining"`},
		{"status fails", never, "GET", "/status", 503, `{"error":{"code":"unavailable"`},
		{"metrics", always(serving), "GET", "/metrics", 200, "kvlift_up 1\n"},
		{"metrics fail", never, "GET", "/metrics", 200, "kvlift_up 0\n"},
		{"the runtime's", never, "GET", "/metrics", 200, "go_goroutines "},
		{"the process's", never, "GET", "/metrics", 200, "process_resident_memory_bytes "},
		{"head", always(serving), "HEAD", "/healthz", 200, ""},
		{"head of metrics", always(serving), "HEAD", "/metrics", 200, ""},
		{"post", always(serving), "POST", "/metrics", 405, ""},
		{"put", always(serving), "PUT", "/status", 405, ""},
		{"delete", always(serving), "DELETE", "/healthz", 405, ""},
		{"root", always(serving), "GET", "/", 404, ""},
		{"below", always(serving), "GET", "/metrics/x", 404, ""},
		{"debug", always(serving), "GET", "/debug/pprof/", 404, ""},
	} {
		w := get(t, Handler(c.state, quiet()), c.method, c.path)
		if w.Code != c.code || !strings.Contains(w.Body.String(), c.body) {
			t.Errorf("%s: %s %s = %d %q, want %d with %q", c.name, c.method, c.path, w.Code, w.Body, c.code, c.body)
		}
		if strings.Contains(w.Body.String(), errState.Error()) {
			t.Errorf("%s: the daemon's inner error went to the client", c.name)
		}
		if c.code == 405 && w.Header().Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: Allow is %q", c.name, w.Header().Get("Allow"))
		}
	}
}

func TestStatusIsTheDocument(t *testing.T) {
	want := fixture(t)
	want.Engines[0].EngineID = "</script>\x1b[2J\xff"
	w := get(t, Handler(always(want), quiet()), "GET", "/status")
	if ct := w.Header().Get("Content-Type"); ct != "application/json" {
		t.Errorf("Content-Type is %q", ct)
	}
	got, err := status.Parse(w.Body.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if id := got.Engines[0].EngineID; id != "</script>\x1b[2J\ufffd" || got.Counters.StoredKeys != want.Counters.StoredKeys {
		t.Errorf("engine id %q, %d stored keys", id, got.Counters.StoredKeys)
	}
	if strings.ContainsAny(w.Body.String(), "\x1b<") {
		t.Error("raw control characters or markup in the body")
	}
}

// TestFailureIsLogged sees that what the client does not hear is in the log, once.
func TestFailureIsLogged(t *testing.T) {
	for _, path := range []string{"/metrics", "/healthz", "/status"} {
		var b bytes.Buffer
		get(t, Handler(never, slog.New(slog.NewTextHandler(&b, nil))), "GET", path)
		if n := strings.Count(b.String(), errState.Error()); n != 1 {
			t.Errorf("%s: the error is %d times in the log:\n%s", path, n, b.String())
		}
	}
}

// TestPanic sees that a scrape outlives a state function that does not.
func TestPanic(t *testing.T) {
	h := Handler(func() (status.Document, error) { panic("boom") }, quiet())
	if w := get(t, h, "GET", "/metrics"); w.Code != 200 || !strings.Contains(w.Body.String(), "go_goroutines ") {
		t.Errorf("%d %q", w.Code, w.Body)
	}
}

func TestResolve(t *testing.T) {
	for _, c := range []struct {
		addr   string
		public bool
		want   string
		err    string
	}{
		{":9600", false, "127.0.0.1:9600", ""},
		{":9600", true, "127.0.0.1:9600", ""}, // not given explicitly
		{"localhost:9600", false, "127.0.0.1:9600", ""},
		{"127.0.0.1:0", false, "127.0.0.1:0", ""},
		{"127.9.8.7:1", false, "127.9.8.7:1", ""},
		{"[::1]:9600", false, "[::1]:9600", ""},
		{"[::ffff:127.0.0.1]:9600", false, "[::ffff:127.0.0.1]:9600", ""},
		{"0.0.0.0:9600", false, "", "other machines"},
		{"[::]:9600", false, "", "other machines"},
		{"10.0.0.1:9600", false, "", "other machines"},
		{"[::ffff:10.0.0.1]:9600", false, "", "other machines"},
		{"0.0.0.0:9600", true, "0.0.0.0:9600", ""},
		{"example.org:9600", true, "", "neither an IP address"},
		{"127.0.0.1.example.org:9600", false, "", "neither an IP address"},
		{"9600", false, "", "want HOST:PORT"},
		{"", false, "", "want HOST:PORT"},
		{"::1:9600", false, "", "want HOST:PORT"},
	} {
		got, err := resolve(c.addr, c.public)
		switch {
		case c.err == "" && (err != nil || got != c.want):
			t.Errorf("resolve(%q, %v) = %q, %v, want %q", c.addr, c.public, got, err, c.want)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
			t.Errorf("resolve(%q, %v) = %q, %v, want an error with %q", c.addr, c.public, got, err, c.err)
		}
	}
}

func TestServe(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	addr, wait, err := Serve(ctx, ":0", false, Handler(always(fixture(t)), quiet()), quiet())
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.Get("http://" + addr + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	if err := res.Body.Close(); err != nil {
		t.Fatal(err)
	}
	if string(b) != "ok\n" {
		t.Errorf("healthz = %q", b)
	}
	if host, _, _ := net.SplitHostPort(addr); host != "127.0.0.1" {
		t.Errorf("listens on %s", addr)
	}
	req, err := http.NewRequestWithContext(ctx, "GET", "http://"+addr+"/healthz", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Long", strings.Repeat("x", 64<<10))
	if res, err := http.DefaultClient.Do(req); err == nil { // the server may also have hung up on the rest
		if err := res.Body.Close(); err != nil {
			t.Error(err)
		}
		if res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("64 KiB of headers: %s", res.Status)
		}
	}
	// The address is taken: a second server says so at once.
	if _, _, err := Serve(ctx, addr, false, http.NotFoundHandler(), quiet()); err == nil {
		t.Error("two servers on one address")
	}
	cancel()
	for range 2 {
		if err := wait(); err != nil {
			t.Errorf("wait = %v", err)
		}
	}
	if c, err := net.Dial("tcp", addr); err == nil {
		_ = c.Close()
		t.Error("still listening after wait")
	}
}

func TestServePublic(t *testing.T) {
	_, _, err := Serve(t.Context(), "0.0.0.0:0", false, http.NotFoundHandler(), quiet())
	if !errors.Is(err, ErrPublic) {
		t.Errorf("Serve on 0.0.0.0 = %v, want ErrPublic", err)
	}
}
