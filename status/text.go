package status

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/dustin/go-humanize"
)

// Rows of a table on the screen; the JSON has all.
const (
	maxGroupRows  = 24
	maxEngineRows = 16
)

// Columns of the words at the left edge, and of names: at most, and in the narrowest table.
const (
	labelColumns = 9
	maxName      = 64
	minName      = 8
)

// Text writes one screen for people: plain characters, no colour. Lines are broken and long names cut to fit width
// columns; 0 does neither. Control characters in what engines said are escaped, so that a name cannot steer a terminal.
func (d *Document) Text(w io.Writer, width int) error {
	p := &page{width: width}
	d.head(p)
	d.numbers(p)
	d.groups(p)
	d.engines(p)
	_, err := w.Write(p.b.Bytes())
	return err
}

func (d *Document) head(p *page) {
	p.words("kvlift ", clean(d.Name)+": "+clean(string(d.State)), "up "+span(d.UptimeSeconds), "version "+clean(d.Version), fmt.Sprintf("pid %d", d.PID),
		plural(uint64(max(d.Connections, 0)), "connection"))
	p.words(label("socket"), clean(d.Socket))
	unresolved := 0
	for i := range d.Engines {
		if d.Engines[i].State == "unresolved" {
			unresolved++
		}
	}
	if d.State == Draining {
		p.words(label("!"), "it is ending: stores are refused")
	}
	if unresolved > 0 {
		p.words(label("!"), plural(uint64(unresolved), "engine")+" unresolved since the daemon's start", "no page is reused until that is settled")
	}
}

func (d *Document) numbers(p *page) {
	for i := range d.Tiers {
		t := &d.Tiers[i]
		used := size(t.UsedBytes) + " of " + size(t.TotalBytes) + " used"
		if t.TotalBytes > 0 {
			used += " (" + percent(float64(t.UsedBytes)/float64(t.TotalBytes)) + ")"
		}
		free := size(t.FreeBytes) + " free"
		if t.FreeBytes > 0 {
			free += " (longest run " + size(t.LongestFreeBytes) + ")"
		}
		p.words(label(clean(t.Name)), used, free, size(t.ReservedBytes)+" being stored", size(t.PendingBytes)+" removed but not reusable yet")
		where := clean(t.Dir)
		if t.HugePageBytes > 0 {
			where += " in pages of " + size(t.HugePageBytes)
		}
		p.words(label(""), plural(t.Keys, "key"), plural(t.Tokens, "token"), where)
	}
	p.words(label("records"), count(d.Records.Total-min(d.Records.Free, d.Records.Total))+" of "+count(d.Records.Total)+" in use")
	idle := "no idle guard"
	if d.Policy.MinIdleSeconds > 0 {
		idle = "keeps what was used in the last " + span(d.Policy.MinIdleSeconds)
	}
	p.words(label("policy"), clean(d.Policy.Name), idle)
	d.start(p)
	t := &d.Traffic
	if t.HitRatioTokens == nil {
		p.words(label("hits"), "no prompt tokens since the start", plural(t.Requests, "request")+" finished")
	} else {
		p.words(label("hits"), percent(*t.HitRatioTokens)+" of prompt tokens since the start",
			count(t.HitTokens)+" of "+count(t.PromptTokens)+" in "+plural(t.Requests, "request"))
	}
	c := &d.Counters
	p.words(label("stored"), plural(c.StoredKeys, "key")+" ("+size(c.StoredBytes)+")", count(c.AbortedKeys)+" aborted", plural(c.LoadedKeys, "key")+" loaded")
	p.words(label("evicted"), tally(c.EvictedKeys, "key")...)
	refused := tally(c.RefusedBatches, "batch")
	if c.RefusedKeys > 0 {
		refused = append(refused, "with "+plural(c.RefusedKeys, "key"))
	}
	p.words(label("refused"), refused...)
	p.words(label("daemon"), "heap "+size(d.Process.HeapBytes), plural(uint64(max(d.Process.Goroutines, 0)), "goroutine"),
		fmt.Sprintf("CPU %.1f s user and %.1f s system", d.Process.CPUUserSeconds, d.Process.CPUSystemSeconds))
}

func (d *Document) start(p *page) {
	a := &d.Adoption
	if !a.Adopted {
		p.words(label("start"), "with a new arena")
		return
	}
	parts := []string{fmt.Sprintf("%s adopted in %.2f s", plural(uint64(max(a.Ready, 0)), "key"), a.Seconds)}
	for _, v := range []struct {
		n    int
		name string
	}{{a.Reserved, "half stored"}, {a.Revived, "taken back from eviction"}, {a.Removed, "on their way out"}, {a.Dropped, "damaged and dropped"}} {
		if v.n > 0 {
			parts = append(parts, count(uint64(v.n))+" "+v.name)
		}
	}
	if a.Sessions > 0 {
		parts = append(parts, plural(uint64(a.Sessions), "engine")+" alive")
	}
	p.words(label("start"), parts...)
}

func (d *Document) groups(p *page) {
	type row struct {
		ns *Namespace
		g  *Group
	}
	var rows []row
	for i := range d.Namespaces {
		n := &d.Namespaces[i]
		for g := range n.Groups {
			rows = append(rows, row{n, &n.Groups[g]})
		}
	}
	p.b.WriteByte('\n')
	if len(rows) == 0 {
		p.words("", "no namespace: no engine has described its cache yet")
		return
	}
	// Of too many, the largest are shown, in the order of their indices.
	shown := slices.Clone(rows)
	if len(rows) > maxGroupRows {
		slices.SortStableFunc(shown, func(a, b row) int { return cmp.Compare(b.g.Bytes, a.g.Bytes) })
		shown = shown[:maxGroupRows]
		slices.SortFunc(shown, func(a, b row) int {
			return cmp.Or(cmp.Compare(a.ns.Index, b.ns.Index), cmp.Compare(a.g.Index, b.g.Index))
		})
	}
	t := table{head: []string{"NS", "GROUP", "KIND", "CHUNK", "PAYLOAD", "KEYS", "TOKENS", "BYTES", "OLDEST"}, flex: 2, right: []int{3, 4, 5, 6, 7, 8}}
	var last *Namespace
	for _, r := range shown {
		if r.ns != last {
			t.above = append(t.above, r.ns.title())
			last = r.ns
		} else {
			t.above = append(t.above, nil)
		}
		oldest := "-"
		if r.g.OldestSeconds != nil {
			oldest = span(*r.g.OldestSeconds)
		}
		t.rows = append(t.rows, []string{strconv.Itoa(r.ns.Index), strconv.Itoa(r.g.Index), clean(r.g.Kind), strconv.FormatUint(uint64(r.g.ChunkTokens), 10),
			size(uint64(r.g.PayloadBytes)), count(r.g.Keys), count(r.g.Tokens), size(r.g.Bytes), oldest})
	}
	p.table(&t)
	if n := len(rows) - len(shown); n > 0 {
		p.words("", plural(uint64(n), "smaller group")+" not shown")
	}
}

func (n *Namespace) title() []string {
	parts := []string{cut(clean(n.Model), maxName), "id " + clean(n.ID[:min(len(n.ID), 12)]), plural(uint64(max(n.Sessions, 0)), "engine")}
	if n.Model == "" {
		parts[0] = "unnamed model"
	}
	if n.Private {
		parts = append(parts, "private since a reset")
	}
	if q := n.Quota; q != nil {
		parts = append(parts, size(q.UsedBytes)+" of a quota of "+size(q.Bytes)+" used")
		if q.RefusedBatches > 0 {
			parts = append(parts, plural(q.RefusedBatches, "batch")+" refused for it")
		}
	}
	return parts
}

func (d *Document) engines(p *page) {
	p.b.WriteByte('\n')
	if len(d.Engines) == 0 {
		p.words("", "no engine is attached")
		return
	}
	shown := make([]*Engine, len(d.Engines))
	for i := range d.Engines {
		shown[i] = &d.Engines[i]
	}
	if len(shown) > maxEngineRows {
		// Those that keep pages are what one looks for.
		slices.SortStableFunc(shown, func(a, b *Engine) int { return cmp.Compare(rank(a), rank(b)) })
		shown = shown[:maxEngineRows]
	}
	t := table{head: []string{"ENGINE", "STATE", "NS", "PID", "RANKS", "JOBS", "REQS", "BEHIND", "FOR", "HITS"}, flex: 0, right: []int{3, 4, 5, 6, 7, 8, 9}}
	for _, e := range shown {
		ns, hits, pid := "-", "-", "-"
		if e.Namespace != nil {
			ns = strconv.Itoa(*e.Namespace)
		}
		if e.HitRatioTokens != nil {
			hits = percent(*e.HitRatioTokens)
		}
		if e.PID != 0 {
			pid = strconv.FormatUint(uint64(e.PID), 10)
		}
		t.rows = append(t.rows, []string{cut(clean(cmp.Or(e.EngineID, e.Session)), maxName), clean(e.State), ns, pid, fmt.Sprintf("%d/%d", e.Ranks, e.WorldSize),
			strconv.Itoa(e.Jobs), strconv.Itoa(e.Requests), count(e.Behind), span(e.Seconds), hits})
		var note []string
		if e.Fenced {
			note = []string{"silent, not waited for"}
		}
		if e.BlocksReuse {
			note = strings.Split("keeps pages: "+clean(e.Why), ", ")
		}
		t.below = append(t.below, note)
	}
	p.table(&t)
	if n := len(d.Engines) - len(shown); n > 0 {
		p.words("", plural(uint64(n), "engine")+" not shown")
	}
}

func rank(e *Engine) int {
	if e.BlocksReuse {
		return 0
	}
	return 1
}

// page collects the lines of a screen.
type page struct {
	b     bytes.Buffer
	width int
}

// words writes parts with commas between them behind a lead, and goes on under the first part when the line is full. A
// part that fits on no line is broken between words.
func (p *page) words(lead string, parts ...string) {
	p.b.WriteString(lead)
	indent := utf8.RuneCountInString(lead)
	at := indent
	put := func(s string) {
		n := utf8.RuneCountInString(s)
		if at > indent && p.width > 0 && at+1+n > p.width {
			p.b.WriteString("\n" + strings.Repeat(" ", indent))
			at = indent
		} else if at > indent {
			p.b.WriteByte(' ')
			at++
		}
		p.b.WriteString(s)
		at += n
	}
	for i, s := range parts {
		if i < len(parts)-1 {
			s += ","
		}
		if p.width > 0 && indent+utf8.RuneCountInString(s) > p.width {
			for word := range strings.FieldsSeq(s) {
				put(word)
			}
		} else {
			put(s)
		}
	}
	p.b.WriteByte('\n')
}

// table is what is laid out in columns. What stands above or below a row has lines of its own, as words takes them.
type table struct {
	head  []string
	rows  [][]string
	above [][]string // as many as rows, or none
	below [][]string
	flex  int   // the column that may be cut
	right []int // columns of numbers
}

func (p *page) table(t *table) {
	lines := t.render(math.MaxInt)
	if p.width > 0 {
		wide, name := 0, utf8.RuneCountInString(t.head[t.flex])
		for _, l := range lines {
			wide = max(wide, utf8.RuneCountInString(l))
		}
		for _, r := range t.rows {
			name = max(name, utf8.RuneCountInString(r[t.flex]))
		}
		if wide > p.width {
			lines = t.render(max(name-(wide-p.width), minName))
		}
	}
	p.b.WriteString(lines[0] + "\n")
	for i, l := range lines[1:] {
		if i < len(t.above) && len(t.above[i]) > 0 {
			p.words("", t.above[i]...)
		}
		p.b.WriteString(l + "\n")
		if i < len(t.below) && len(t.below[i]) > 0 {
			p.words("    ", t.below[i]...)
		}
	}
}

// render lays the table out with at most so many columns for the flexible cell.
func (t *table) render(most int) []string {
	rows := [][]string{t.head}
	for _, r := range t.rows {
		r = slices.Clone(r)
		r[t.flex] = cut(r[t.flex], most)
		rows = append(rows, r)
	}
	rows[0] = slices.Clone(t.head)
	for _, c := range t.right {
		n := 0
		for _, r := range rows {
			n = max(n, utf8.RuneCountInString(r[c]))
		}
		for _, r := range rows {
			r[c] = strings.Repeat(" ", n-utf8.RuneCountInString(r[c])) + r[c]
		}
	}
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for _, r := range rows {
		// A bytes.Buffer takes everything: neither this nor Flush can fail.
		_, _ = io.WriteString(w, strings.Join(r, "\t")+"\n")
	}
	_ = w.Flush()
	return strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
}

// cut shortens in the middle: names of one machine begin alike, and their ends tell them apart.
func cut(s string, most int) string {
	r := []rune(s)
	if len(r) <= most {
		return s
	}
	head := (most - 2) / 2
	return string(r[:head]) + ".." + string(r[len(r)-(most-2-head):])
}

// clean escapes what is not a printable character, and backslashes, so that the text is unambiguous.
func clean(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case r == '\\':
			b.WriteString(`\\`)
		case strconv.IsPrint(r):
			b.WriteRune(r)
		default:
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		}
		s = s[n:]
	}
	return b.String()
}

func label(s string) string { return fmt.Sprintf("%-*s", labelColumns, s) }

func count(n uint64) string { return humanize.Comma(int64(min(n, math.MaxInt64))) }

func size(n uint64) string { return humanize.IBytesN(n, 3) }

func plural(n uint64, noun string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(noun, "ch"):
		noun += "es"
	default:
		noun += "s"
	}
	return count(n) + " " + noun
}

// percent never rounds up to all or down to nothing.
func percent(ratio float64) string {
	if ratio > 0 && ratio < 0.001 {
		return "<0.1 %"
	}
	return fmt.Sprintf("%.1f %%", math.Floor(ratio*1000+1e-9)/10)
}

// span writes a duration with its two largest units.
func span(seconds float64) string {
	if seconds < 10 {
		return fmt.Sprintf("%.1fs", seconds)
	}
	d := time.Duration(min(seconds, 9e9) * 1e9).Truncate(time.Second)
	day := 24 * time.Hour
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", d/time.Minute, d%time.Minute/time.Second)
	case d < day:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%dh", d/day, d%day/time.Hour)
}

// tally writes a sum and what it is made of, most first.
func tally(by map[string]uint64, noun string) []string {
	names := slices.SortedFunc(maps.Keys(by), func(a, b string) int { return cmp.Or(cmp.Compare(by[b], by[a]), cmp.Compare(a, b)) })
	var sum uint64
	var parts []string
	for _, k := range names {
		if by[k] > 0 {
			sum += by[k]
			parts = append(parts, clean(k)+" "+count(by[k]))
		}
	}
	if sum == 0 {
		return []string{"nothing since the start"}
	}
	parts[0] = plural(sum, noun) + " since the start: " + parts[0]
	return parts
}
