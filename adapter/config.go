package adapter

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Transfer is what vLLM's --kv-transfer-config takes.
type Transfer struct {
	Connector string `json:"kv_connector"`
	Role      string `json:"kv_role"`
	Extra     Extra  `json:"kv_connector_extra_config"`
}

// Extra are vLLM's own settings of the connector and kvlift's.
type Extra struct {
	SpecName       string  `json:"spec_name"`
	SpecModule     string  `json:"spec_module_path"`
	Socket         string  `json:"kvlift_socket"`
	DeadlineMS     float64 `json:"kvlift_deadline_ms,omitempty"`
	WeightsID      string  `json:"weights_id,omitempty"`
	BlocksPerChunk int     `json:"blocks_per_chunk,omitempty"`
}

// NewTransfer is the setting for the daemon at a socket.
func NewTransfer(socket string) Transfer {
	return Transfer{Connector: "OffloadingConnector", Role: "kv_both", Extra: Extra{SpecName: Spec, SpecModule: Package, Socket: socket}}
}

// Release is a version of vLLM: minor and patch of 0.minor.patch.
type Release struct{ Minor, Patch int }

// The releases that the adapter is tested on, first and last.
var (
	first = Release{27, 1}
	last  = Release{33, 0}
)

// ParseRelease reads "0.32.0"; what follows the patch, as in 0.32.0rc1 or 0.32.0+cpu, is passed over.
func ParseRelease(s string) (Release, error) {
	p := strings.SplitN(strings.TrimPrefix(s, "v"), ".", 3)
	var r Release
	if len(p) == 3 && p[0] == "0" {
		patch, err2 := strconv.Atoi(digits(p[2]))
		minor, err := strconv.Atoi(p[1])
		if r = (Release{minor, patch}); err == nil && err2 == nil && minor >= 0 {
			return r, nil
		}
	}
	return r, fmt.Errorf("%q is no release of vLLM: write 0.32.0", s)
}

func digits(s string) string {
	if i := strings.IndexFunc(s, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		return s[:i]
	}
	return s
}

func (r Release) String() string { return fmt.Sprintf("0.%d.%d", r.Minor, r.Patch) }

func (r Release) before(o Release) bool {
	return r.Minor < o.Minor || r.Minor == o.Minor && r.Patch < o.Patch
}

// Advice is what else an engine's command needs.
type Advice struct {
	Environment []string // NAME=VALUE
	Flags       []string // for the engine's command line
	Notes       []string // for people: what is not decided here, and why
	Problems    []string // the engine would not start, or not with kvlift
}

// Advise says what the command needs beside the transfer. release is nil when it is not known; model is nil when its
// config.json is not at hand. command is that of the engine and may be empty; getenv reads the environment that it will have.
func Advise(command []string, release *Release, model *Model, getenv func(string) string) Advice {
	var a Advice
	a.seed(command, release, getenv)
	a.retention(command, release, model)
	if release != nil && (release.before(first) || last.before(*release)) {
		a.Notes = append(a.Notes, fmt.Sprintf("the adapter is tested on vLLM %v to %v; it looks at %v when it starts and stays off when something does not fit", first, last, *release))
	}
	if _, ok := option(command, "--kv-transfer-config"); ok {
		a.Problems = append(a.Problems, "the command has a --kv-transfer-config already")
	}
	if _, ok := option(command, "--kv-offloading-size"); ok {
		a.Problems = append(a.Problems, "--kv-offloading-size puts vLLM's own tier in the place of this connector")
	}
	if strings.Contains(getenv("PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True") {
		a.Problems = append(a.Problems, "vLLM refuses every connector while PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True")
	}
	return a
}

// seed: keys are chains of hashes that begin with one of this variable. Where it is random, nobody finds them again.
func (a *Advice) seed(command []string, release *Release, getenv func(string) string) {
	algo, _ := option(command, "--prefix-caching-hash-algo")
	if release != nil && !release.before(Release{29, 0}) && !strings.HasPrefix(algo, "xxhash") {
		return // it has a fixed beginning of its own
	}
	v := getenv("PYTHONHASHSEED")
	if v == "random" {
		v = ""
	}
	if v == "" {
		v = "0"
	}
	a.Environment = append(a.Environment, "PYTHONHASHSEED="+v)
	if release == nil {
		a.Notes = append(a.Notes, "PYTHONHASHSEED is needed up to vLLM 0.28 and with the xxhash algorithms; elsewhere it does no harm")
	}
}

// retention: from 0.30 vLLM keeps of windows and states what the end of a prompt needs, and nothing before it.
func (a *Advice) retention(command []string, release *Release, model *Model) {
	const flag = "--prefix-cache-retention-interval"
	if _, ok := option(command, flag); ok || release != nil && release.before(Release{30, 0}) {
		return
	}
	if _, ok := option(command, "--speculative-config"); ok {
		a.Notes = append(a.Notes, "a drafter whose layers have windows needs "+flag+", a multiple of the block size that vLLM logs at its start; without one such a model may never hit")
	}
	switch {
	case model == nil:
		a.Notes = append(a.Notes, "a model with sliding windows or recurrent states needs "+flag+": without it only whole prompts are found again, not their beginnings. Name the model's folder to have it looked at")
	case model.State:
		a.Notes = append(a.Notes, "the model keeps recurrent states: "+flag+" must be a multiple of its block size, which vLLM works out and logs at its start, and which is not worked out here. Without it only whole prompts are found again, not their beginnings")
	case model.Window > 0:
		const unit = 1024 // a multiple of every usual block size
		n := (model.Window + unit - 1) / unit * unit
		a.Flags = append(a.Flags, flag, strconv.FormatUint(n, 10))
		a.Notes = append(a.Notes, fmt.Sprintf("some layers see %d tokens: a restore point every %d tokens lets beginnings of prompts be found, too. It must be a multiple of the block size", model.Window, n))
	}
}

// option finds a flag of a command in both its forms.
func option(command []string, name string) (value string, ok bool) {
	for i, w := range command {
		if w == name {
			if i+1 < len(command) {
				value = command[i+1]
			}
			return value, true
		}
		if v, ok := strings.CutPrefix(w, name+"="); ok {
			return v, true
		}
	}
	return "", false
}

// ModelOf finds the model in the words of an engine's command: vllm serve MODEL, or --model of the API server. It is empty
// when there is none.
func ModelOf(command []string) string {
	if m, ok := option(command, "--model"); ok {
		return m
	}
	if i := slices.Index(command, "serve"); i >= 0 && i+1 < len(command) && !strings.HasPrefix(command[i+1], "-") {
		return command[i+1]
	}
	return ""
}
