package status

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"kvlift/engine"
	"kvlift/meta"
	"kvlift/restore"
)

// pageBytes is the unit of the arena; maxModel bounds the part of a model's name that a document repeats, in bytes.
const (
	pageBytes = 4096
	maxModel  = 255
)

// Daemon is what the engine does not know of the process around it.
type Daemon struct {
	Version       string
	Name          string
	PID           int
	Socket        string
	Start, Now    time.Time
	ArenaDir      string
	HugePageBytes uint64        // 0 on ordinary pages
	Adopted       bool          // the arena was there before
	Adoption      engine.Report // what Adopt found
	AdoptionTime  time.Duration
	Connections   int
	Process       Process
}

// Build makes the document of one moment. It reads nothing but its arguments and keeps nothing of them.
func Build(st engine.Status, d Daemon) Document {
	doc := Document{
		Schema: Schema, Version: d.Version, Name: d.Name, PID: d.PID, Socket: d.Socket, State: state(&st),
		UptimeSeconds: max(d.Now.Sub(d.Start).Seconds(), 0),
		Records:       Records{Total: st.Records, Free: st.FreeRecords},
		Policy:        Policy{Name: st.Policy, MinIdleSeconds: st.MinIdle.Seconds()},
		Adoption: Adoption{Adopted: d.Adopted, Seconds: d.AdoptionTime.Seconds(), Ready: d.Adoption.Ready, Reserved: d.Adoption.Reserved,
			Revived: d.Adoption.Revived, Removed: d.Adoption.Removed, Dropped: d.Adoption.Dropped, Sessions: d.Adoption.Sessions},
		Traffic:     traffic(&st.Counters),
		Counters:    counters(&st.Counters),
		Namespaces:  []Namespace{},
		Engines:     []Engine{},
		Connections: d.Connections,
		Process:     d.Process,
	}
	for i := range st.Namespaces {
		doc.Namespaces = append(doc.Namespaces, namespace(&st.Namespaces[i]))
	}
	doc.Tiers = []Tier{ram(&st, &d)}
	sessions := slices.Clone(st.Sessions)
	slices.SortFunc(sessions, func(a, b engine.SessionStatus) int {
		return cmp.Or(cmp.Compare(a.SinceMS, b.SinceMS), cmp.Compare(a.ID, b.ID))
	})
	for i := range sessions {
		doc.Engines = append(doc.Engines, session(&sessions[i], d.Now))
	}
	return doc
}

func state(st *engine.Status) State {
	switch {
	case st.Draining:
		return Draining
	case st.Unresolved > 0:
		return Recovering
	}
	return Serving
}

func ram(st *engine.Status, d *Daemon) Tier {
	t := Tier{Name: "ram", TotalBytes: st.ArenaPages * pageBytes, UsedBytes: st.ReadyPages * pageBytes,
		NeededBytes: st.WorthPages[restore.Needed] * pageBytes, OptionalBytes: st.WorthPages[restore.Optional] * pageBytes, UselessBytes: st.WorthPages[restore.Useless] * pageBytes,
		FreeBytes:    st.FreePages * pageBytes,
		PendingBytes: st.PendingPages * pageBytes, LongestFreeBytes: st.LongestRun * pageBytes, Keys: st.ReadyKeys, ReservedKeys: st.ReservedKeys,
		Dir: d.ArenaDir, HugePageBytes: d.HugePageBytes}
	if rest := st.ReadyPages + st.FreePages + st.PendingPages; rest < st.ArenaPages {
		t.ReservedBytes = (st.ArenaPages - rest) * pageBytes
	}
	for i := range st.Namespaces {
		t.Tokens += tokens(st.Namespaces[i].Groups)
	}
	return t
}

// tokens counts those of one namespace once: the groups hold different layers of the same tokens.
func tokens(groups []engine.GroupStatus) uint64 {
	var full, other uint64
	var hasFull bool
	for i := range groups {
		if groups[i].Kind == meta.Full {
			hasFull = true
			full = max(full, groups[i].Tokens)
		} else {
			other = max(other, groups[i].Tokens)
		}
	}
	if hasFull {
		return full
	}
	return other
}

func ratio(hit, prompt uint64) *float64 {
	if prompt == 0 {
		return nil
	}
	r := float64(hit) / float64(prompt)
	return &r
}

func traffic(c *engine.Counters) Traffic {
	return Traffic{Requests: c.Requests, PromptTokens: c.PromptTokens, HitTokens: c.HitTokens, HitRatioTokens: ratio(c.HitTokens, c.PromptTokens)}
}

func counters(c *engine.Counters) Counters {
	out := Counters{StoredKeys: c.Stored, StoredBytes: c.StoredBytes, LoadedKeys: c.Loads, AbortedKeys: c.Aborted, RefusedKeys: c.RefusedKeys,
		RefusedBatches: map[string]uint64{}, EvictedKeys: map[string]uint64{}, Fences: c.Fenced}
	for _, r := range engine.Reasons() {
		out.RefusedBatches[r.String()] = c.Refused[r]
	}
	for _, v := range engine.Causes() {
		out.EvictedKeys[v.String()] = c.Evicted[v]
	}
	return out
}

func namespace(n *engine.NamespaceStatus) Namespace {
	out := Namespace{Index: n.Index, ID: hex.EncodeToString(n.ID[:]), Private: n.Private, Model: model(n.Description), Sessions: n.Sessions, Groups: []Group{}}
	if q := n.Quota; q != nil {
		out.Quota = &Quota{Bytes: q.Pages * pageBytes, UsedBytes: q.UsedPages * pageBytes, RefusedBatches: q.Refused}
	}
	for g := range n.Groups {
		v := &n.Groups[g]
		w := Group{Index: g, Kind: v.Kind.String(), ChunkTokens: v.ChunkTokens, PayloadBytes: v.PayloadBytes, Keys: v.Keys, Tokens: v.Tokens, Bytes: v.Bytes}
		if v.Keys > 0 && v.OldestMS >= 0 {
			s := float64(v.OldestMS) / 1000
			w.OldestSeconds = &s
		}
		out.Groups = append(out.Groups, w)
	}
	return out
}

// model is what a description names, short enough for a document.
func model(description string) string {
	s := engine.Model(description)
	if len(s) > maxModel {
		s = strings.ToValidUTF8(s[:maxModel], "") // the cut may have hit a character
	}
	return s
}

func session(s *engine.SessionStatus, now time.Time) Engine {
	out := Engine{Session: fmt.Sprintf("%016x", s.ID), EngineID: s.EngineID, State: s.State.String(), PID: s.PID, Ranks: s.Ranks, WorldSize: s.World,
		Jobs: s.Jobs, Requests: s.Requests, Behind: s.Behind, Fenced: s.Fenced, Seconds: max(float64(now.UnixMilli()-s.SinceMS)/1000, 0),
		FinishedRequests: s.Stats.Requests, PromptTokens: s.Stats.PromptTokens, HitTokens: s.Stats.HitTokens,
		HitRatioTokens: ratio(s.Stats.HitTokens, s.Stats.PromptTokens), Why: why(s)}
	out.BlocksReuse = out.Why != ""
	if s.Namespace >= 0 {
		n := s.Namespace
		out.Namespace = &n
	}
	return out
}

// why says what a session keeps from being reused: R14 for what a lost manager left open, R15 for acknowledgements, R22
// for sessions from before a start, F3 for what a silent one had begun. Another attached engine's open jobs are its work and
// no complaint.
func why(s *engine.SessionStatus) string {
	var open []string
	if s.Behind > 0 {
		open = append(open, plural(s.Behind, "removal")+" not acknowledged")
	}
	if s.State == engine.Unresolved {
		return "unresolved since the daemon's start: no page is reused until it comes back or ends"
	}
	if s.State == engine.Detached || s.Fenced {
		if s.Jobs > 0 {
			open = append(open, plural(uint64(s.Jobs), "job")+" open")
		}
		if s.Requests > 0 {
			open = append(open, plural(uint64(s.Requests), "request")+" open")
		}
	}
	switch {
	case len(open) == 0:
		return ""
	case s.State == engine.Detached:
		return "its manager is not connected: " + strings.Join(open, ", ")
	case s.Fenced:
		return "it says nothing and is not waited for, but it has begun: " + strings.Join(open, ", ")
	}
	return strings.Join(open, ", ")
}
