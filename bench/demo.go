package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/dustin/go-humanize"

	"kvlift/block"
	"kvlift/client"
	"kvlift/trace"
)

// Demo shows the engine's main job on real requests: it replays the first half of a trace through a daemon of its own,
// kills the daemon, starts it again, checks that every key is still there with its bytes, and replays the second half.
type Demo struct {
	Binary        string
	Capacity      uint64 // blocks
	BytesPerBlock int
	Out           io.Writer
}

// Run takes the requests of open(), which is called once. An error tells what did not hold.
func (d Demo) Run(ctx context.Context, src *trace.Reader, requests int) (err error) {
	say := func(format string, args ...any) { fmt.Fprintf(d.Out, format+"\n", args...) }
	bytes := d.Capacity * block.Pages(uint64(d.BytesPerBlock)) * block.PageSize
	say("1. start a daemon on a temporary arena of %s", humanize.IBytes(bytes))
	dm, err := StartDaemon(ctx, d.Binary, "--ram", fmt.Sprint(bytes), "--max-keys", fmt.Sprint(d.Capacity), "--min-idle", "0s", "--trace-clock")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dm.Close()) }()
	say("   pid %d, %s", dm.PID(), dm.Socket)
	e, err := client.Open(ctx, EngineConfig(dm.Socket, "demo", d.BytesPerBlock))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	o := Replay{Name: "first half", Policy: "lru", Capacity: d.Capacity, BytesPerBlock: d.BytesPerBlock, Batch: 16, Limit: requests / 2}
	p := NewReplayer(e, o)
	say("2. replay %d real requests, every loaded byte checked", o.Limit)
	if err := p.Run(ctx, src, nil); err != nil {
		return err
	}
	first := p.Result(ctx, dm.Socket, dm.PID())
	kept := map[block.Key]block.Ref{}
	e.Keys(func(k block.Key, c client.Copy) bool { kept[k] = c.Ref; return true })
	say("   %s of %s blocks served by the tier, %s kept, %s checked", humanize.Comma(int64(first.Hits)), humanize.Comma(int64(first.References)), humanize.Comma(int64(len(kept))), humanize.IBytes(first.BytesChecked))
	say("3. kill -9 the daemon; the engine stays")
	if err := dm.Kill(); err != nil {
		return err
	}
	start := time.Now()
	if err := dm.Start(ctx); err != nil {
		return err
	}
	if err := reattach(ctx, e); err != nil {
		return err
	}
	say("   restarted and attached again in %v", time.Since(start).Round(time.Millisecond))
	checked, err := CheckAll(e, d.BytesPerBlock, kept)
	if err != nil {
		return err
	}
	say("4. all %s keys are still there, %s compared, 0 wrong bytes", humanize.Comma(int64(len(kept))), humanize.IBytes(checked))
	p.o.Limit = 0
	if err := p.Run(ctx, src, nil); err != nil {
		return err
	}
	all := p.Result(ctx, dm.Socket, dm.PID())
	say("5. replay the other half\n")
	return Table(d.Out, []Row{{"first half, then kill -9", first}, {"whole, one restart between", all}})
}

// reattach waits until an engine has come back to its daemon.
func reattach(ctx context.Context, e *client.Engine) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	// The end of the old stream is acted on outside a window, so a step must end before being attached means anything.
	for e.StepEnd(); !e.Attached(); e.StepEnd() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the engine does not come back: %w", context.Cause(ctx))
		case <-tick.C:
		}
	}
	return nil
}

// CheckAll compares the content of every key with the generator and returns the bytes compared. Each key must be in the
// engine's mirror under the same ref. The keys are looked up and pinned as loads are.
func CheckAll(e *client.Engine, bytesPerBlock int, kept map[block.Key]block.Ref) (uint64, error) {
	buf, checked := make([]byte, bytesPerBlock), uint64(0)
	var xs []block.Extent
	for k, ref := range kept {
		c, ok := e.Lookup(&k)
		if !ok {
			return checked, fmt.Errorf("key %v is lost", k)
		}
		if c.Ref != ref {
			return checked, fmt.Errorf("key %v: entry %d generation %d became %d generation %d", k, ref.Entry, ref.Gen, c.Ref.Entry, c.Ref.Gen)
		}
		off := 0
		xs = c.Extents(xs[:0])
		for _, x := range xs {
			off += copy(buf[off:], e.Workers[0].Bytes(x))
		}
		if at := Check(buf, &k, 0); at >= 0 {
			return checked, fmt.Errorf("%w: key %v, byte %d", ErrWrongBytes, k, at)
		}
		checked += uint64(bytesPerBlock)
	}
	e.StepEnd()
	return checked, nil
}
