package sweep

import (
	"os"
	"testing"
)

// TestNameless explains memory that no file accounts for.
func TestNameless(t *testing.T) {
	dir := small(t, "size=64m")
	path := region(t, dir, regionName)
	h := spawn(t, "hold", nil, path, "mapped")
	h.expect("ready")
	o := spawn(t, "hold", nil, path, "open")
	o.expect("ready")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	r := run(t, dir, nil)
	if r.NamelessBytes != regionSize || len(r.Nameless) != 2 || len(r.Files) != 0 {
		t.Fatalf("%+v", r)
	}
	for _, n := range r.Nameless {
		if n.Bytes != regionSize || n.PID != h.cmd.Process.Pid && n.PID != o.cmd.Process.Pid {
			t.Errorf("%+v", n)
		}
	}
	t.Logf("%d bytes in files without a name, held by %d and %d", r.NamelessBytes, r.Nameless[0].PID, r.Nameless[1].PID)
	h.kill()
	o.kill()
	if r := run(t, dir, nil); r.NamelessBytes != 0 || len(r.Nameless) != 0 {
		t.Errorf("after the end: %+v", r)
	}
}

// TestQuiet: a host with nothing of ours.
func TestQuiet(t *testing.T) {
	r := run(t, shm(t), nil)
	if len(r.Files) != 0 || r.FreedBytes != 0 {
		t.Errorf("%+v", r)
	}
}
