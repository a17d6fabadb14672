package bench

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/dustin/go-humanize"
)

// Text prints a result for people.
func (r *Result) Text(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, name+"\t"+format+"\n", args...) }
	row("trace", "%s, %s requests, %s references", r.Trace, humanize.Comma(int64(r.Requests)), humanize.Comma(int64(r.References)))
	row("tier", "%s, %s blocks of %s, idle guard %gs", r.Policy, humanize.Comma(int64(r.Capacity)), humanize.IBytes(uint64(r.BytesPerBlock)), r.MinIdleSeconds)
	row("hits", "%d blocks, %.4f of blocks, %.4f of tokens", r.Hits, r.HitRatioBlocks, r.HitRatioTokens)
	row("stored", "%s blocks, %s; evicted %s, refused %s", humanize.Comma(int64(r.StoredBlocks)), humanize.IBytes(r.BytesWritten), humanize.Comma(int64(r.EvictedBlocks)), humanize.Comma(int64(r.RefusedBlocks)))
	row("checked", "%s loaded, %d wrong blocks", humanize.IBytes(r.BytesChecked), r.WrongBlocks)
	row("per key", "lookup %.2f µs, reserve + commit %.2f µs (batches of %d), pin + unpin %.2f µs", r.LookupUS, r.StoreUS, r.Batch, r.LoadUS)
	row("copies", "store %.1f GB/s, load %.1f GB/s, memcpy %.1f GB/s", r.StoreGBps, r.LoadGBps, r.MemcpyGBps)
	row("daemon", "%.2f s CPU, %s resident", r.DaemonCPU, humanize.IBytes(r.DaemonRSS))
	row("wall", "%.1f s", r.WallSeconds)
	return t.Flush()
}

// Row is a named result of a table.
type Row struct {
	Name   string
	Result Result
}

// Table prints results side by side.
func Table(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "requests\tblocks\thits\thit blocks\thit tokens\tstored\tevicted\tchecked\twrong\tµs/key\t ")
	for _, r := range rows {
		v := &r.Result
		fmt.Fprintf(t, "%d\t%d\t%d\t%.4f\t%.4f\t%d\t%d\t%s\t%d\t%.2f\t %s\n", v.Requests, v.References, v.Hits, v.HitRatioBlocks, v.HitRatioTokens,
			v.StoredBlocks, v.EvictedBlocks, humanize.IBytes(v.BytesChecked), v.WrongBlocks, v.StoreUS, r.Name)
	}
	return t.Flush()
}
