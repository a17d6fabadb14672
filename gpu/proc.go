package gpu

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

var (
	addressPattern = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
	versionPattern = regexp.MustCompile(`^[0-9]{1,5}(\.[0-9]{1,5}){1,3}$`)
)

func isAddress(s string) bool { return addressPattern.MatchString(s) }

// text splits a kernel file into lines. A file cut short is refused, so that a part of a value is never taken for a whole
// one.
func text(b []byte) ([]string, error) {
	s, ok := strings.CutSuffix(string(b), "\n")
	if !ok {
		return nil, errors.New("does not end in a newline")
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }) {
		return nil, errors.New("is not text")
	}
	return strings.Split(s, "\n"), nil
}

// parseVersion reads the driver's own line, one of
//
//	NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
//	NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@host)
//
// and no further: what follows is about the compiler.
func parseVersion(b []byte) (Driver, error) {
	all, err := text(b)
	if err != nil {
		return Driver{}, err
	}
	rest, ok := strings.CutPrefix(all[0], "NVRM version:")
	if !ok {
		return Driver{}, fmt.Errorf("%.40q is not a driver's version", all[0])
	}
	kind, rest, ok := strings.Cut(rest, "Kernel Module")
	if !ok {
		return Driver{}, fmt.Errorf("no kernel module in %.60q", all[0])
	}
	for _, f := range strings.Fields(rest) {
		if versionPattern.MatchString(f) {
			return Driver{Version: f, Open: strings.HasSuffix(kind, " Open ")}, nil
		}
	}
	return Driver{}, fmt.Errorf("no version number in %.80q", all[0])
}

// parseInformation reads lines of "Name: value". Names that it does not know are passed over; "?" in a value is how the
// driver says that it has not asked the device yet.
func parseInformation(b []byte, d *Device) error {
	all, err := text(b)
	if err != nil {
		return err
	}
	for _, line := range all {
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return fmt.Errorf("no name in %.40q", line)
		}
		value = strings.TrimSpace(value)
		if value == "" || value == "N/A" || strings.Contains(value, "??") {
			continue
		}
		switch strings.TrimSpace(name) {
		case "Model":
			d.Model = value
		case "GPU UUID":
			d.UUID = value
		case "Video BIOS":
			d.BIOS = value
		case "GPU Firmware":
			d.Firmware = value
		case "Bus Location":
			if got := strings.ToLower(value); got != d.Address {
				return fmt.Errorf("it describes the device at %.40q", value)
			}
		case "Device Minor":
			n, err := strconv.ParseUint(value, 10, 20) // minor numbers have 20 bits
			if err != nil {
				return fmt.Errorf("device minor %.40q", value)
			}
			d.Minor = new(int(n))
		case "GPU Excluded":
			switch value {
			case "Yes":
				d.Excluded = new(true)
			case "No":
				d.Excluded = new(false)
			default:
				return fmt.Errorf("excluded %.40q", value)
			}
		}
	}
	return nil
}
