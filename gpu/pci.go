package gpu

import (
	"fmt"
	"strconv"
	"strings"
)

// one returns the only line of a sysfs attribute.
func one(b []byte) (string, error) {
	all, err := text(b)
	if err != nil {
		return "", err
	}
	if len(all) != 1 {
		return "", fmt.Errorf("%d lines, want 1", len(all))
	}
	return all[0], nil
}

// parseNode reads a NUMA node; -1 is the kernel's word for unknown.
func parseNode(b []byte) (*int, error) {
	s, err := one(b)
	if err != nil || s == "-1" {
		return nil, err
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("node %.40q", s)
	}
	return new(int(n)), nil
}

// parseSpeed reads "32.0 GT/s PCIe", or "8 GT/s" of kernels before 5.8. "Unknown" is what a device without a link, or one
// asleep, is said to have.
func parseSpeed(b []byte) (*float64, error) {
	s, err := one(b)
	if err != nil || strings.HasPrefix(s, "Unknown") {
		return nil, err
	}
	number, unit, ok := strings.Cut(s, " ")
	if !ok || unit != "GT/s" && unit != "GT/s PCIe" {
		return nil, fmt.Errorf("speed %.40q", s)
	}
	whole, tenths, _ := strings.Cut(number, ".")
	w, err := strconv.ParseUint(whole, 10, 10)
	t := uint64(0)
	if err == nil && tenths != "" {
		t, err = strconv.ParseUint(tenths, 10, 4)
	}
	if err != nil || t > 9 || w+t == 0 || len(tenths) > 1 || strings.HasSuffix(number, ".") {
		return nil, fmt.Errorf("speed %.40q", s)
	}
	return new(float64(w) + float64(t)/10), nil
}

// parseWidth reads a number of lanes. 0, and what a register full of ones gives, are no link.
func parseWidth(b []byte) (*int, error) {
	s, err := one(b)
	if err != nil || strings.HasPrefix(s, "Unknown") {
		return nil, err
	}
	n, err := strconv.ParseUint(s, 10, 8)
	if err != nil {
		return nil, fmt.Errorf("width %.40q", s)
	}
	if n == 0 || n > 32 {
		return nil, nil
	}
	return new(int(n)), nil
}
