// Package gpu reads what the kernel and NVIDIA's driver tell about GPUs in files: the driver's version, which devices it
// serves, and how each is attached to the machine (NUMA node, PCIe link). It links nothing and runs nothing, so it works
// in a static binary, without the driver, and in containers that show only a part of these files.
//
//	/proc/driver/nvidia/version                the driver
//	/proc/driver/nvidia/gpus/<address>/information   one device
//	/sys/bus/pci/devices/<address>/…           numa_node, {current,max}_link_{speed,width}
//
// A file that is absent is an absent fact and no error: a machine without GPUs has no devices, a container may hide
// sysfs. A file that does not read as documented is an error that names it. All of it is input: sizes are bounded, the
// parsers are pure functions on bytes, and no content makes one panic.
//
// Memory, ECC, clocks and processes are not in these files. NVML knows them; it is added behind a build tag of its own
// when doctor needs it, since it cannot be linked statically.
package gpu

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Driver is NVIDIA's kernel driver. The zero value means that none is loaded, or that its files are not shown here.
type Driver struct {
	Version string // "580.159.04"; empty when unknown
	Open    bool   // the open kernel modules
}

// Device is one GPU that the driver serves. A nil pointer or an empty string is a fact that nobody told.
type Device struct {
	Address  string // PCI: domain, bus, device and function, "0000:18:00.0"
	Model    string // "NVIDIA H200"
	UUID     string // "GPU-…", once the driver has initialised the device
	BIOS     string // of the card
	Firmware string // GSP; usually the driver's version
	Minor    *int   // N of /dev/nvidiaN
	Excluded *bool  // the driver was told to leave it alone
	NUMANode *int   // whose memory is near; nil also when the kernel knows none
	Link     Link
}

// Link is a PCIe link: what it does now and what the device could do. A device at rest may run a slower link than under
// load; a width does not change by itself.
type Link struct {
	Speed, MaxSpeed *float64 // GT/s per lane
	Width, MaxWidth *int     // lanes
}

// List reads the machine whose root directory is root, "/" for this one. Devices come in the order of their addresses.
// The error joins what could not be read; the rest is returned beside it.
func List(root string) ([]Device, Driver, error) {
	var drv Driver
	var errs []error
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	b, ok, err := read(root, "proc/driver/nvidia/version")
	if note(err); ok {
		drv, err = parseVersion(b)
		note(named("proc/driver/nvidia/version", err))
	}
	const gpus = "proc/driver/nvidia/gpus"
	dirs, err := os.ReadDir(filepath.Join(root, gpus))
	if err != nil && !absent(err) {
		note(err)
	}
	var devices []Device
	for _, d := range dirs {
		address := strings.ToLower(d.Name())
		if !isAddress(address) {
			note(fmt.Errorf("%s: %.40q is not a PCI address", gpus, d.Name()))
			continue
		}
		v := Device{Address: address}
		name := gpus + "/" + d.Name() + "/information"
		b, ok, err := read(root, name)
		if note(err); ok {
			note(named(name, parseInformation(b, &v)))
		}
		note(attachment(root, &v))
		devices = append(devices, v)
	}
	slices.SortFunc(devices, func(a, b Device) int { return strings.Compare(a.Address, b.Address) })
	return devices, drv, errors.Join(errs...)
}

// attachment reads how the device is attached.
func attachment(root string, d *Device) error {
	var errs []error
	for _, f := range []struct {
		name  string
		parse func([]byte) error
	}{
		{"numa_node", func(b []byte) (err error) { d.NUMANode, err = parseNode(b); return }},
		{"current_link_speed", func(b []byte) (err error) { d.Link.Speed, err = parseSpeed(b); return }},
		{"max_link_speed", func(b []byte) (err error) { d.Link.MaxSpeed, err = parseSpeed(b); return }},
		{"current_link_width", func(b []byte) (err error) { d.Link.Width, err = parseWidth(b); return }},
		{"max_link_width", func(b []byte) (err error) { d.Link.MaxWidth, err = parseWidth(b); return }},
	} {
		name := "sys/bus/pci/devices/" + d.Address + "/" + f.name
		b, ok, err := read(root, name)
		if ok {
			err = named(name, f.parse(b))
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func named(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", name, err)
}

// absent tells that a file is not there, or that its device went away while it was read.
func absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ENODEV)
}

// maxFile bounds a file; the longest of them has some hundred bytes.
const maxFile = 16 << 10

// read returns a kernel file's content; ok is false when it is absent.
func read(root, name string) (b []byte, ok bool, err error) {
	f, err := os.Open(filepath.Join(root, name))
	if err != nil {
		if absent(err) {
			err = nil
		}
		return nil, false, err
	}
	defer f.Close() // opened for reading: Close has nothing to report
	b, err = io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case absent(err):
		return nil, false, nil
	case err != nil:
		return nil, false, err
	case len(b) > maxFile:
		return nil, false, fmt.Errorf("%s: more than %d bytes", name, maxFile)
	}
	return b, true, nil
}
