package metrics

import (
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvlift/status"
)

// Bounds of what one scrape shows, those of the daemon's own tables.
const (
	maxNamespaces = 64
	maxGroups     = 64
	maxValues     = 64 // of a reason or a cause
)

// reading is what all values of one scrape are made from.
type reading struct {
	status.Document
	up      bool
	seconds float64 // that it took
}

// family is one metric: what is exposed and what docs/metrics-fragment.md says are made from the same table.
type family struct {
	name, help string
	labels     []string
	kind       prometheus.ValueType
	always     bool // also without a document
	collect    func(r *reading, emit emit)
	desc       *prometheus.Desc
}

type emit func(v float64, labels ...string)

// collector reads one document per scrape. It has no state; Collect may be called concurrently.
type collector struct {
	state    func() (status.Document, error)
	log      *slog.Logger
	now      func() time.Time
	families []family
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for i := range c.families {
		ch <- c.families[i].desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	start := c.now()
	d, err := c.state()
	if err != nil {
		c.log.Warn("no state for a scrape", "error", err)
	}
	r := reading{Document: d, up: err == nil, seconds: c.now().Sub(start).Seconds()}
	for i := range c.families {
		f := &c.families[i]
		if !r.up && !f.always {
			continue
		}
		f.collect(&r, func(v float64, labels ...string) {
			for i := range labels {
				labels[i] = strings.ToValidUTF8(labels[i], "\ufffd")
			}
			m, err := prometheus.NewConstMetric(f.desc, f.kind, v, labels...)
			if err != nil {
				m = prometheus.NewInvalidMetric(f.desc, err)
			}
			ch <- m
		})
	}
}

// families lists every metric of the daemon itself, in the order of the documentation.
func families() []family {
	var fs []family
	add := func(kind prometheus.ValueType, name, help string, labels []string, collect func(*reading, emit)) *family {
		name = "kvlift_" + name
		fs = append(fs, family{name: name, help: help, labels: labels, kind: kind, collect: collect, desc: prometheus.NewDesc(name, help, labels, nil)})
		return &fs[len(fs)-1]
	}
	gauge := func(name, help string, v func(*reading) float64) *family {
		return add(prometheus.GaugeValue, name, help, nil, func(r *reading, emit emit) { emit(v(r)) })
	}
	counter := func(name, help string, v func(*reading) uint64) {
		add(prometheus.CounterValue, name, help, nil, func(r *reading, emit emit) { emit(float64(v(r))) })
	}
	tally := func(name, help, label string, v func(*reading) map[string]uint64) {
		add(prometheus.CounterValue, name, help, []string{label}, func(r *reading, emit emit) {
			n := 0
			for k, v := range v(r) {
				if n++; n <= maxValues {
					emit(float64(v), k)
				}
			}
		})
	}
	tier := func(name, help string, v func(*status.Tier) uint64) {
		add(prometheus.GaugeValue, name, help, []string{"tier"}, func(r *reading, emit emit) {
			for i := range r.Tiers {
				emit(float64(v(&r.Tiers[i])), r.Tiers[i].Name)
			}
		})
	}
	group := func(name, help string, v func(*status.Group) (float64, bool)) {
		add(prometheus.GaugeValue, name, help, []string{"namespace", "group", "kind"}, func(r *reading, emit emit) {
			for i := range r.Namespaces[:min(len(r.Namespaces), maxNamespaces)] {
				n := &r.Namespaces[i]
				for g := range n.Groups[:min(len(n.Groups), maxGroups)] {
					if v, ok := v(&n.Groups[g]); ok {
						emit(v, strconv.Itoa(n.Index), strconv.Itoa(n.Groups[g].Index), n.Groups[g].Kind)
					}
				}
			}
		})
	}

	gauge("up", "1 when the daemon's state could be read for this scrape; else 0, and everything but the process's own metrics is missing.",
		func(r *reading) float64 { return truth(r.up) }).always = true
	gauge("scrape_duration_seconds", "Time that reading the daemon's state took for this scrape.",
		func(r *reading) float64 { return r.seconds }).always = true
	add(prometheus.GaugeValue, "build_info", "Always 1; the version of the daemon.", []string{"version"}, func(r *reading, emit emit) { emit(1, r.Version) })
	add(prometheus.GaugeValue, "policy_info", "Always 1; the eviction policy.", []string{"policy"}, func(r *reading, emit emit) { emit(1, r.Policy.Name) })
	add(prometheus.GaugeValue, "state", "1 for what the daemon is doing, 0 for the other states. While recovering, no page is reused; while draining, stores are refused.",
		[]string{"state"}, func(r *reading, emit emit) {
			for _, s := range []status.State{status.Serving, status.Recovering, status.Draining} {
				emit(truth(r.State == s), string(s))
			}
		})
	gauge("uptime_seconds", "Time since the daemon's start; all counters began at zero then.", func(r *reading) float64 { return r.UptimeSeconds })
	gauge("min_idle_seconds", "A store may not evict what was used within this time; 0 turns the guard off.", func(r *reading) float64 { return r.Policy.MinIdleSeconds })

	tier("tier_size_bytes", "Size of the tier: the used, free, reserved and pending bytes together.", func(t *status.Tier) uint64 { return t.TotalBytes })
	tier("tier_used_bytes", "Pages of stored keys.", func(t *status.Tier) uint64 { return t.UsedBytes })
	tier("tier_free_bytes", "Pages that a store may take at once.", func(t *status.Tier) uint64 { return t.FreeBytes })
	tier("tier_reserved_bytes", "Pages of stores that are under way.", func(t *status.Tier) uint64 { return t.ReservedBytes })
	tier("tier_pending_bytes", "Pages of removed keys that may not be reused yet, since an engine has not acknowledged the removal or still copies.",
		func(t *status.Tier) uint64 { return t.PendingBytes })
	tier("tier_longest_free_bytes", "Longest run of free pages.", func(t *status.Tier) uint64 { return t.LongestFreeBytes })
	tier("tier_keys", "Stored keys.", func(t *status.Tier) uint64 { return t.Keys })
	tier("tier_reserved_keys", "Keys of stores that are under way.", func(t *status.Tier) uint64 { return t.ReservedKeys })
	tier("tier_tokens", "Stored tokens, each counted once per namespace: by the full-attention group that has most.", func(t *status.Tier) uint64 { return t.Tokens })
	gauge("records", "Records of the entry table; each key needs one.", func(r *reading) float64 { return float64(r.Records.Total) })
	gauge("free_records", "Records of the entry table that are free.", func(r *reading) float64 { return float64(r.Records.Free) })

	counter("requests_total", "Requests that engines finished.", func(r *reading) uint64 { return r.Traffic.Requests })
	counter("prompt_tokens_total", "Prompt tokens of finished requests.", func(r *reading) uint64 { return r.Traffic.PromptTokens })
	counter("hit_tokens_total", "Prompt tokens of finished requests that were loaded instead of computed.", func(r *reading) uint64 { return r.Traffic.HitTokens })
	counter("stored_keys_total", "Keys stored.", func(r *reading) uint64 { return r.Counters.StoredKeys })
	counter("stored_bytes_total", "Payload bytes stored.", func(r *reading) uint64 { return r.Counters.StoredBytes })
	counter("loaded_keys_total", "Keys pinned for a load.", func(r *reading) uint64 { return r.Counters.LoadedKeys })
	counter("aborted_keys_total", "Keys reserved for a store that ended without a payload.", func(r *reading) uint64 { return r.Counters.AbortedKeys })
	counter("refused_keys_total", "Keys that were offered and not taken.", func(r *reading) uint64 { return r.Counters.RefusedKeys })
	tally("refused_batches_total", "Batches of which the rest was refused, by reason: no-room, too-young, waiting, no-records, too-big, draining or quota.", "reason",
		func(r *reading) map[string]uint64 { return r.Counters.RefusedBatches })
	tally("evicted_keys_total", "Keys removed, by cause: store (in the reply to a store), ahead (announced before room was needed), reset, or end (a private namespace lost its session).", "cause",
		func(r *reading) map[string]uint64 { return r.Counters.EvictedKeys })

	counter("fences_total", "Times an engine was silent for so long that its acknowledgements were done without.", func(r *reading) uint64 { return r.Counters.Fences })

	add(prometheus.GaugeValue, "namespace_sessions", "Engines that share the namespace, by its place in the namespace table.", []string{"namespace"},
		func(r *reading, emit emit) {
			for i := range r.Namespaces[:min(len(r.Namespaces), maxNamespaces)] {
				emit(float64(r.Namespaces[i].Sessions), strconv.Itoa(r.Namespaces[i].Index))
			}
		})
	quota := func(kind prometheus.ValueType, name, help string, v func(*status.Quota) uint64) {
		add(kind, name, help, []string{"namespace"}, func(r *reading, emit emit) {
			for i := range r.Namespaces[:min(len(r.Namespaces), maxNamespaces)] {
				if q := r.Namespaces[i].Quota; q != nil {
					emit(float64(v(q)), strconv.Itoa(r.Namespaces[i].Index))
				}
			}
		})
	}
	quota(prometheus.GaugeValue, "namespace_quota_bytes", "Pages that the namespace may hold; missing without a quota, as are the two below.", func(q *status.Quota) uint64 { return q.Bytes })
	quota(prometheus.GaugeValue, "namespace_quota_used_bytes", "Pages that count against the quota: stored, being stored, and removed but not reusable yet. A private namespace shows those of the one that it came from.",
		func(q *status.Quota) uint64 { return q.UsedBytes })
	quota(prometheus.CounterValue, "namespace_quota_refused_batches_total", "Batches of which the rest was refused for the quota's sake.", func(q *status.Quota) uint64 { return q.RefusedBatches })
	group("group_keys", "Stored keys of the group.", func(g *status.Group) (float64, bool) { return float64(g.Keys), true })
	group("group_tokens", "Stored tokens of the group: keys by tokens of a chunk.", func(g *status.Group) (float64, bool) { return float64(g.Tokens), true })
	group("group_bytes", "Pages that hold the group's keys.", func(g *status.Group) (float64, bool) { return float64(g.Bytes), true })
	group("group_payload_bytes", "Payload of one chunk over all ranks.", func(g *status.Group) (float64, bool) { return float64(g.PayloadBytes), true })
	group("group_chunk_tokens", "Tokens of one chunk.", func(g *status.Group) (float64, bool) { return float64(g.ChunkTokens), true })
	group("group_oldest_seconds", "Time since the group's least recently used key was used; missing while the group has no keys.", func(g *status.Group) (float64, bool) {
		if g.OldestSeconds == nil {
			return 0, false
		}
		return *g.OldestSeconds, true
	})

	add(prometheus.GaugeValue, "sessions", "Engines by state: forming, attached, detached or unresolved.", []string{"state"}, func(r *reading, emit emit) {
		n := map[string]int{}
		for i := range r.Engines {
			n[r.Engines[i].State]++
		}
		for _, s := range []string{"forming", "attached", "detached", "unresolved"} {
			emit(float64(n[s]), s)
		}
	})
	gauge("blocking_sessions", "Engines that keep pages from being reused at this moment; the status document says which and why.", func(r *reading) float64 {
		return sum(r, func(e *status.Engine) uint64 { return uint64(truth(e.BlocksReuse)) })
	})
	gauge("fenced_sessions", "Engines that are silent and not waited for at this moment.", func(r *reading) float64 {
		return sum(r, func(e *status.Engine) uint64 { return uint64(truth(e.Fenced)) })
	})
	gauge("unacknowledged_removals", "Removals that engines have not acknowledged, summed over engines.", func(r *reading) float64 {
		return sum(r, func(e *status.Engine) uint64 { return e.Behind })
	})
	gauge("open_jobs", "Loads and stores that engines have not ended.", func(r *reading) float64 {
		return sum(r, func(e *status.Engine) uint64 { return uint64(max(e.Jobs, 0)) })
	})
	gauge("open_requests", "Requests that engines have not finished.", func(r *reading) float64 {
		return sum(r, func(e *status.Engine) uint64 { return uint64(max(e.Requests, 0)) })
	})
	gauge("connections", "Open connections on the daemon's socket.", func(r *reading) float64 { return float64(r.Connections) })

	gauge("adopted", "1 when the daemon took over the arena of an earlier one at its start.", func(r *reading) float64 { return truth(r.Adoption.Adopted) })
	gauge("adoption_duration_seconds", "Time that this took.", func(r *reading) float64 { return r.Adoption.Seconds })
	gauge("adoption_ready_keys", "Keys that were taken over.", func(r *reading) float64 { return float64(r.Adoption.Ready) })
	gauge("adoption_reserved_keys", "Keys of stores that were under way.", func(r *reading) float64 { return float64(r.Adoption.Reserved) })
	gauge("adoption_revived_keys", "Keys among those taken over whose removal had been announced and not ended.", func(r *reading) float64 { return float64(r.Adoption.Revived) })
	gauge("adoption_removed_keys", "Keys that an earlier reset had removed and that were still on their way out.", func(r *reading) float64 { return float64(r.Adoption.Removed) })
	gauge("adoption_dropped_keys", "Damaged records that were given up.", func(r *reading) float64 { return float64(r.Adoption.Dropped) })
	gauge("adoption_sessions", "Engines that had outlived the earlier daemon.", func(r *reading) float64 { return float64(r.Adoption.Sessions) })
	return fs
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func sum(r *reading, v func(*status.Engine) uint64) float64 {
	var n uint64
	for i := range r.Engines {
		n += v(&r.Engines[i])
	}
	return float64(n)
}
