package bench

import (
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"kvlift/block"
	"kvlift/wire"
)

// ThisMachine reads what figures depend on.
func ThisMachine() Machine {
	m := Machine{CPU: "unknown", CPUs: runtime.NumCPU()}
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if name, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				m.CPU = strings.TrimSpace(v)
				break
			}
		}
	}
	return m
}

// ReserveBytes and ReservedBytes are the frames of a reserve of n keys and its answer when each evicts one.
func ReserveBytes(n int) int {
	return wire.HeaderSize + len(wire.AppendReserve(nil, &wire.Reserve{Keys: make([]block.Offer, n)}))
}

// ReservedBytes is the answer's frame, and the delta of the commit before it.
func ReservedBytes(n int) int {
	return 2*wire.HeaderSize + wire.DeltaSize(0, n, n) + len(wire.AppendReserved(nil, &wire.Reserved{Slots: make([]wire.Slot, n), Removed: make([]wire.GoneKey, n)})) + n*wire.ExtentSize
}
