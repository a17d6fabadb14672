package gpu

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestList(t *testing.T) {
	for _, c := range []struct {
		root string
		drv  Driver
		want []Device
	}{
		{"h200", Driver{"580.159.04", true}, []Device{{Address: "0000:00:06.0", Model: "NVIDIA H200", UUID: "GPU-00000000-0000-0000-0000-000000000000",
			BIOS: "96.00.a5.00.1a", Firmware: "580.159.04", Minor: new(0), Excluded: new(false),
			Link: Link{Speed: new(32.0), MaxSpeed: new(32.0), Width: new(16), MaxWidth: new(16)}}}},
		{"pair", Driver{"535.104.05", false}, []Device{
			{Address: "0000:18:00.0", Model: "NVIDIA GeForce RTX 3090", Minor: new(1), Excluded: new(true), NUMANode: new(1),
				Link: Link{Speed: new(2.5), MaxSpeed: new(16.0), Width: new(8), MaxWidth: new(16)}},
			{Address: "10000:01:00.0", Model: "NVIDIA GeForce RTX 3090", Minor: new(0)}}},
		{"none", Driver{}, nil}, // there is no such folder: a machine without any of the files
	} {
		got, drv, err := List(filepath.Join("testdata", c.root))
		if err != nil || drv != c.drv || show(t, got) != show(t, c.want) {
			t.Errorf("%s: %s, %+v, %v\nwant %s, %+v", c.root, show(t, got), drv, err, show(t, c.want), c.drv)
		}
	}
}

// show writes devices with what their pointers point to.
func show(t *testing.T, v []Device) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestPartial sees that what cannot be read is named and does not hide the rest.
func TestPartial(t *testing.T) {
	root := t.TempDir()
	for name, content := range map[string]string{
		"proc/driver/nvidia/version":                       "NVRM version: something else\n",
		"proc/driver/nvidia/gpus/0000:18:00.0/information": "Model: \t A card\nBus Location: \t 0000:19:00.0\n",
		"proc/driver/nvidia/gpus/0000:1a:00.0/information": "Model: \t Another\n",
		"proc/driver/nvidia/gpus/stray/information":        "Model: \t None\n",
		"proc/driver/nvidia/gpus/0000:1b:00.0/other":       "",
		"sys/bus/pci/devices/0000:1a:00.0/numa_node":       "0\n",
		"sys/bus/pci/devices/0000:1a:00.0/max_link_width":  strings.Repeat("1", maxFile+1),
	} {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, _, err := List(root)
	if len(got) != 3 || got[1].Model != "Another" || got[1].NUMANode == nil || *got[1].NUMANode != 0 {
		t.Errorf("devices: %s", show(t, got))
	}
	for _, want := range []string{"nvidia/version: no kernel module", "0000:18:00.0/information: it describes", "stray", "max_link_width: more than"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}

func TestThisMachine(t *testing.T) {
	if d, v, err := List("/"); err != nil || len(d) > 0 && v.Version == "" {
		t.Errorf("List(/) = %s, %+v, %v", show(t, d), v, err)
	}
}

func TestAttributes(t *testing.T) {
	for in, want := range map[string]any{"32.0 GT/s PCIe\n": 32.0, "8 GT/s\n": 8.0, "2.5 GT/s PCIe\n": 2.5, "Unknown\n": nil, "Unknown speed\n": nil,
		"": false, "32.0 GT/s PCIe": false, "x GT/s\n": false, "0 GT/s\n": false, "1.25 GT/s\n": false, "1. GT/s\n": false, "9999 GT/s\n": false, "5\n": false, "5.0 GT/s\n5.0 GT/s\n": false} {
		got, err := parseSpeed([]byte(in))
		switch w := want.(type) {
		case float64:
			if err != nil || got == nil || *got != w {
				t.Errorf("parseSpeed(%q): %v, %v", in, got, err)
			}
		case bool:
			if err == nil {
				t.Errorf("parseSpeed(%q): %v, no error", in, *got)
			}
		default:
			if err != nil || got != nil {
				t.Errorf("parseSpeed(%q): %v, %v", in, got, err)
			}
		}
	}
	for in, want := range map[string]int{"16\n": 16, "1\n": 1, "0\n": -1, "63\n": -1, "255\n": -1, "Unknown\n": -1, "256\n": -2, "-1\n": -2, "x\n": -2, "16": -2} {
		got, err := parseWidth([]byte(in))
		if (want == -2) != (err != nil) || (want > 0) != (got != nil) || got != nil && *got != want {
			t.Errorf("parseWidth(%q): %v, %v", in, got, err)
		}
	}
}

// parsers is every parser with a valid file of its kind.
func parsers(t testing.TB) map[string]struct {
	valid []byte
	parse func([]byte) error
} {
	file := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join("testdata", "h200", name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	const sys = "sys/bus/pci/devices/0000:00:06.0/"
	return map[string]struct {
		valid []byte
		parse func([]byte) error
	}{
		"version": {file("proc/driver/nvidia/version"), func(b []byte) error {
			v, err := parseVersion(b)
			if err == nil && !versionPattern.MatchString(v.Version) {
				t.Errorf("version %q of %q", v.Version, b)
			}
			return err
		}},
		"information": {file("proc/driver/nvidia/gpus/0000:00:06.0/information"), func(b []byte) error {
			d := Device{Address: "0000:00:06.0"}
			err := parseInformation(b, &d)
			for _, s := range []string{d.Model, d.UUID, d.BIOS, d.Firmware} {
				if strings.ContainsAny(s, "\n\x1b\x00") || strings.Contains(s, "??") {
					t.Errorf("%q of %q", s, b)
				}
			}
			return err
		}},
		"speed": {file(sys + "max_link_speed"), func(b []byte) error {
			v, err := parseSpeed(b)
			if v != nil && (err != nil || *v <= 0 || *v >= 1024) {
				t.Errorf("speed %v, %v of %q", *v, err, b)
			}
			return err
		}},
		"width": {file(sys + "max_link_width"), func(b []byte) error {
			v, err := parseWidth(b)
			if v != nil && (err != nil || *v < 1 || *v > 32) {
				t.Errorf("width %v, %v of %q", *v, err, b)
			}
			return err
		}},
		"node": {file(sys + "numa_node"), func(b []byte) error {
			v, err := parseNode(b)
			if v != nil && (err != nil || *v < 0) {
				t.Errorf("node %v, %v of %q", *v, err, b)
			}
			return err
		}},
	}
}

// TestPrefixes cuts each file short everywhere: what does not end with a line is refused.
func TestPrefixes(t *testing.T) {
	for name, p := range parsers(t) {
		if err := p.parse(p.valid); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for n := range p.valid {
			if err := p.parse(p.valid[:n]); err == nil && (n == 0 || p.valid[n-1] != '\n') {
				t.Errorf("%s: accepted the first %d bytes", name, n)
			}
		}
	}
}

func fuzz(f *testing.F, name string) {
	f.Add(parsers(f)[name].valid)
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := parsers(t)[name].parse(b); err == nil && (len(b) == 0 || b[len(b)-1] != '\n') {
			t.Errorf("accepted %q, which is cut short", b)
		}
	})
}

func FuzzVersion(f *testing.F)     { fuzz(f, "version") }
func FuzzInformation(f *testing.F) { fuzz(f, "information") }
func FuzzSpeed(f *testing.F)       { fuzz(f, "speed") }
func FuzzWidth(f *testing.F)       { fuzz(f, "width") }
func FuzzNode(f *testing.F)        { fuzz(f, "node") }
