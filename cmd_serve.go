package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"kvlift/arena"
	"kvlift/daemon"
	"kvlift/policy"
)

func serveCommand() *cli.Command {
	const store, access, run = "storage", "access", "operation"
	return &cli.Command{
		Name:  "serve",
		Usage: "run the daemon that keeps the KV cache",
		Description: `Reserves an arena in shared memory, adopts what an earlier daemon left in it, and answers engines on a Unix socket.

   kvlift serve --ram 8GiB
   kvlift serve --name llama --ram 64GiB --http 127.0.0.1:9470

An arena outlives its daemon: a start adopts it, whatever ended the last one. SIGTERM drains and exits 0; a second one exits at once.`,
		Flags: append(nameFlags(),
			sizeFlag("ram", "size of the arena, e.g. 8GiB (needed the first time; an arena is never resized)", "KVLIFT_RAM", store),
			&cli.StringFlag{Name: "arena", Usage: "`DIR` of the arena, on tmpfs (default: /dev/shm/kvlift-NAME)", EnvVars: []string{"KVLIFT_ARENA"}, Category: store},
			&cli.StringFlag{Name: "hugetlbfs", Usage: "`DIR` on hugetlbfs for the pages", EnvVars: []string{"KVLIFT_HUGETLBFS"}, Category: store},
			&cli.UintFlag{Name: "max-keys", DefaultText: "one for four pages", Usage: "records of the entry table", EnvVars: []string{"KVLIFT_MAX_KEYS"}, Category: store},
			&cli.IntFlag{Name: "populate-threads", DefaultText: "one per processor, at most 16", Usage: "threads that touch the pages of a new arena", EnvVars: []string{"KVLIFT_POPULATE_THREADS"}, Category: store},
			&cli.BoolFlag{Name: "reset", Usage: "begin empty; refused while an engine maps the arena", EnvVars: []string{"KVLIFT_RESET"}, Category: store},
			&cli.BoolFlag{Name: "drop-damaged", Usage: "give damaged records up and keep the rest, instead of refusing", EnvVars: []string{"KVLIFT_DROP_DAMAGED"}, Category: store},
			&cli.StringFlag{Name: "policy", Value: "lru", Usage: "what goes first: " + strings.Join(policy.Names(), " or "), EnvVars: []string{"KVLIFT_POLICY"}, Category: store},
			&cli.DurationFlag{Name: "min-idle", Value: 30 * time.Second, Usage: "a store may not evict what was used within this time; 0 turns it off", EnvVars: []string{"KVLIFT_MIN_IDLE"}, Category: store},
			&cli.Float64Flag{Name: "evict-ahead", Value: 0.02, Usage: "share of the arena kept free when several engines share keys", EnvVars: []string{"KVLIFT_EVICT_AHEAD"}, Category: store},
			&cli.StringSliceFlag{Name: "quota", Usage: "`[NAME=]SIZE` that a namespace may hold at most, e.g. llama=8GiB or 25%; NAME is a model or an id, without it every other namespace is meant; may be repeated", EnvVars: []string{"KVLIFT_QUOTA"}, Category: store},
			&cli.StringSliceFlag{Name: "allow-uid", Usage: "`UID` that may connect besides root and the daemon's own; may be repeated", EnvVars: []string{"KVLIFT_ALLOW_UID"}, Category: access},
			&cli.StringSliceFlag{Name: "allow-gid", Usage: "`GID` (effective) that may connect; may be repeated", EnvVars: []string{"KVLIFT_ALLOW_GID"}, Category: access},
			&cli.IntFlag{Name: "max-connections", Value: 1024, Usage: "connections at a time", EnvVars: []string{"KVLIFT_MAX_CONNECTIONS"}, Category: access},
			&cli.StringFlag{Name: "http", Usage: "`ADDRESS` for /metrics, /healthz and /status, e.g. 127.0.0.1:9470 (default: none)", EnvVars: []string{"KVLIFT_HTTP"}, Category: access},
			&cli.BoolFlag{Name: "http-public", Usage: "allow --http on an address that is not loopback", EnvVars: []string{"KVLIFT_HTTP_PUBLIC"}, Category: access},
			&cli.DurationFlag{Name: "shutdown-timeout", Value: 10 * time.Second, Usage: "how long SIGTERM waits for transfers under way", EnvVars: []string{"KVLIFT_SHUTDOWN_TIMEOUT"}, Category: run},
			&cli.StringFlag{Name: "log-level", Value: "info", Usage: "debug, info, warn or error", EnvVars: []string{"KVLIFT_LOG_LEVEL"}, Category: run},
			&cli.StringFlag{Name: "log-format", Value: "text", Usage: "text or json, on stderr", EnvVars: []string{"KVLIFT_LOG_FORMAT"}, Category: run},
			&cli.BoolFlag{Name: "trace-clock", Usage: "take the time from the requests: for replays of a trace", EnvVars: []string{"KVLIFT_TRACE_CLOCK"}, Category: run},
			&cli.BoolFlag{Name: "print-config", Usage: "print every setting and where it comes from, and exit", Category: run},
		),
		Action: serve,
	}
}

func serve(c *cli.Context) error {
	o, err := serveOptions(c)
	if err != nil {
		return err
	}
	if c.Bool("print-config") {
		return printConfig(c, c.App.Writer, o)
	}
	signal.Ignore(syscall.SIGHUP) // there is nothing to read again; a terminal that closes must not end a daemon
	return daemon.Run(c.Context, *o)
}

// serveOptions checks the flags and turns them into the daemon's options.
func serveOptions(c *cli.Context) (*daemon.Options, error) {
	name, err := nameOf(c)
	if err != nil {
		return nil, err
	}
	log, err := newLogger(c.App.ErrWriter, c.String("log-level"), c.String("log-format"))
	if err != nil {
		return nil, err
	}
	o := &daemon.Options{
		Name: name, Version: versionString(), Socket: socketOf(c, name), Dir: c.String("arena"), HugeDir: c.String("hugetlbfs"),
		RAMBytes: sizeOf(c, "ram"), Threads: c.Int("populate-threads"), Policy: c.String("policy"), MinIdle: c.Duration("min-idle"),
		EvictAhead: c.Float64("evict-ahead"), MaxConnections: c.Int("max-connections"), HTTP: c.String("http"), HTTPPublic: c.Bool("http-public"),
		Reset: c.Bool("reset"), DropDamaged: c.Bool("drop-damaged"), TraceClock: c.Bool("trace-clock"), ShutdownTimeout: c.Duration("shutdown-timeout"),
		Log: log, NotifyAddr: os.Getenv("NOTIFY_SOCKET"), Progress: terminalProgress(c.App.ErrWriter),
	}
	if o.Dir == "" {
		o.Dir = arena.DirFor(name)
	}
	if n := c.Uint("max-keys"); n > 1<<31 {
		return nil, &usageError{fmt.Sprintf("--max-keys %d: at most %d", n, uint64(1)<<31), ""}
	} else {
		o.MaxKeys = uint32(n)
	}
	switch {
	case !contains(policy.Names(), o.Policy):
		return nil, &usageError{fmt.Sprintf("--policy %q: there are %s", o.Policy, strings.Join(policy.Names(), " and ")), ""}
	case o.MinIdle < 0, o.ShutdownTimeout < 0:
		return nil, &usageError{"a time cannot be negative", ""}
	case !(o.EvictAhead >= 0 && o.EvictAhead <= 0.5): // NaN is neither
		return nil, &usageError{fmt.Sprintf("--evict-ahead %v: a share from 0 to 0.5, e.g. 0.02", o.EvictAhead), ""}
	case o.MaxConnections < 1 || o.MaxConnections > maxConnections:
		return nil, &usageError{fmt.Sprintf("--max-connections: 1 to %d", maxConnections), ""}
	case o.Threads < 0 || o.Threads > 1024:
		return nil, &usageError{"--populate-threads: 1 to 1024", ""}
	}
	if o.Quotas, err = parseQuotas(c.StringSlice("quota")); err != nil {
		return nil, err
	}
	if o.UIDs, err = ids(c.StringSlice("allow-uid"), "--allow-uid"); err != nil {
		return nil, err
	}
	o.UIDs = append(o.UIDs, uint32(os.Geteuid()))
	if o.GIDs, err = ids(c.StringSlice("allow-gid"), "--allow-gid"); err != nil {
		return nil, err
	}
	return o, nil
}

// maxConnections stays below the 10,000 threads at which the Go runtime ends a process: each connection's reader is one.
const maxConnections = 8192

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

func ids(list []string, flag string) ([]uint32, error) {
	var out []uint32
	for _, s := range list {
		var n uint32
		if _, err := fmt.Sscanf(s, "%d", &n); err != nil || fmt.Sprint(n) != s {
			return nil, &usageError{fmt.Sprintf("%s %q: a number", flag, s), "id -u NAME prints it"}
		}
		out = append(out, n)
	}
	return out, nil
}

func newLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, &usageError{fmt.Sprintf("--log-level %q: debug, info, warn or error", level), ""}
	}
	o := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, &usageError{fmt.Sprintf("--log-format %q: text or json", format), ""}
}

// isTerminal tells whether a stream is one that a person watches.
func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// terminalProgress draws one line that is written over, when somebody watches.
func terminalProgress(w io.Writer) func(arena.Progress) {
	if !isTerminal(w) {
		return nil
	}
	return func(p arena.Progress) {
		left := "…"
		if p.Remaining >= 0 {
			left = p.Remaining.Round(time.Second).String() + " left"
		}
		end := ""
		if p.Done == p.Total {
			left, end = "done", "\n"
		}
		fmt.Fprintf(w, "\r\x1b[Kpopulating %s of %s, %s%s", humanize.IBytes(p.Done), humanize.IBytes(p.Total), left, end)
	}
}

// printConfig writes every flag's effective value and where it came from: flag, environment or default.
func printConfig(c *cli.Context, w io.Writer, o *daemon.Options) error {
	effective := map[string]string{"socket": o.Socket, "arena": o.Dir}
	var lines []string
	for _, f := range c.Command.Flags {
		name := f.Names()[0]
		if name == "print-config" || name == "help" {
			continue
		}
		value, source := fmt.Sprint(c.Value(name)), "default"
		if v, ok := f.(cli.DocGenerationFlag); ok && c.IsSet(name) {
			source = "flag"
			for _, env := range v.GetEnvVars() {
				if _, set := os.LookupEnv(env); set && !flagGiven(c, name) {
					source = env
				}
			}
		}
		switch f.(type) {
		case *cli.StringSliceFlag:
			value = strings.Join(c.StringSlice(name), ",")
		}
		if v, ok := effective[name]; ok {
			value = v
		}
		lines = append(lines, fmt.Sprintf("%-18s %-40s # %s", name, value, source))
	}
	sort.Strings(lines)
	_, err := io.WriteString(w, strings.Join(lines, "\n")+"\n")
	return err
}

// flagGiven tells whether a flag stands on the command line itself: urfave/cli counts the environment as set, too.
func flagGiven(c *cli.Context, name string) bool {
	args, _ := c.App.Metadata["args"].([]string)
	for _, a := range args {
		if a == "--" {
			break
		}
		flag, isFlag := strings.CutPrefix(a, "-") // a value may read like a flag's name
		flag = strings.TrimPrefix(flag, "-")
		if isFlag && (flag == name || strings.HasPrefix(flag, name+"=")) {
			return true
		}
	}
	return false
}
