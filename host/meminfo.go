package host

import (
	"errors"
	"fmt"
	"strings"
)

// Meminfo is the part of /proc/meminfo that decides how large an arena may be. In a container it usually describes the
// whole machine: see CgroupMemory for the container's share.
type Meminfo struct {
	TotalBytes     uint64
	FreeBytes      uint64
	AvailableBytes uint64 // the kernel's estimate of what new work can have without swapping
	ShmemBytes     uint64 // tmpfs, memfd and shared anonymous memory

	// Huge pages of the default size, as counts. Of the free ones, those reserved are promised to others. All are zero
	// on a kernel without hugetlb.
	HugePagesTotal    uint64
	HugePagesFree     uint64
	HugePagesReserved uint64
	HugePageBytes     uint64 // the default huge page size
}

// Meminfo reads /proc/meminfo.
func (f FS) Meminfo() (Meminfo, error) {
	b, err := f.read("proc/meminfo", 64<<10)
	if err != nil {
		return Meminfo{}, err
	}
	m, err := parseMeminfo(b)
	if err != nil {
		return Meminfo{}, fmt.Errorf("proc/meminfo: %w", err)
	}
	return m, nil
}

// MemAvailable is how many bytes new work can have without swapping, by the kernel's estimate for the whole machine.
func (f FS) MemAvailable() (bytes uint64, err error) {
	m, err := f.Meminfo()
	return m.AvailableBytes, err
}

// parseMeminfo fails when MemTotal or MemAvailable is missing: zero would be a lie. The other fields are optional.
func parseMeminfo(b []byte) (Meminfo, error) {
	ls, err := lines(b)
	if err != nil {
		return Meminfo{}, err
	}
	var m Meminfo
	var haveTotal, haveAvailable bool
	for _, line := range ls {
		name, value, _ := strings.Cut(line, ":")
		var dst *uint64
		unit := " kB"
		switch name {
		case "MemTotal":
			dst, haveTotal = &m.TotalBytes, true
		case "MemFree":
			dst = &m.FreeBytes
		case "MemAvailable":
			dst, haveAvailable = &m.AvailableBytes, true
		case "Shmem":
			dst = &m.ShmemBytes
		case "HugePages_Total":
			dst, unit = &m.HugePagesTotal, ""
		case "HugePages_Free":
			dst, unit = &m.HugePagesFree, ""
		case "HugePages_Rsvd":
			dst, unit = &m.HugePagesReserved, ""
		case "Hugepagesize":
			dst = &m.HugePageBytes
		default:
			continue
		}
		digits, ok := strings.CutSuffix(strings.TrimLeft(value, " "), unit)
		if !ok {
			return Meminfo{}, fmt.Errorf("%s: %.40q is not in kB", name, value)
		}
		n, err := parseUint(digits)
		if err != nil {
			return Meminfo{}, fmt.Errorf("%s: %w", name, err)
		}
		if unit != "" {
			if n, ok = scale(n, 1024); !ok {
				return Meminfo{}, fmt.Errorf("%s: %s kB is out of range", name, digits)
			}
		}
		*dst = n
	}
	if !haveTotal || !haveAvailable {
		return Meminfo{}, errors.New("no MemTotal or no MemAvailable")
	}
	return m, nil
}
