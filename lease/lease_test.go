package lease_test

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/lease"
)

func TestProbe(t *testing.T) {
	k := lease.Open(time.Now)
	defer k.Close()
	for _, dir := range []string{"/dev/shm", t.TempDir()} {
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		steps, err := k.Probe(int(f.Fd()))
		t.Log(dir, steps, err)
		f.Close()
	}
	p, _ := os.Open("/proc")
	_, err := k.Probe(int(p.Fd()))
	t.Log(err)
	_ = errors.Is
	_ = unix.F_GETLEASE
}
