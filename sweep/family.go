package sweep

import (
	"regexp"
	"strings"
	"time"
)

// Family is a kind of file that a dead process leaves, and what proves that nobody uses one.
type Family struct {
	Name     string // as --family takes it
	Optional bool   // looked for only when it is asked for
	Shapes   []string
	Of       string // whose files they are
	Lies     Place
	Proof    Proof
	// MinAge delays removal even where the proof holds: for files that their writer closes and still counts on.
	MinAge time.Duration

	pattern *regexp.Regexp
}

// Place says where files of a family lie, seen from a folder that is swept.
type Place int

// Places of files.
const (
	Beside Place = iota // in the folder itself
	Arena               // in the folder kvlift-NAME of a daemon's arena
	Below               // anywhere below the folder
)

// Proof is what makes a file stale.
type Proof int

// Proofs.
const (
	ByLease   Proof = iota // a write lease is granted: nobody has it open or maps it
	ByConnect              // a connection to the socket is refused: nobody listens
)

const (
	uuid = `[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}`
	// From vLLM 0.33 on a region may be up to 32 files.
	segment = `(?:\.(?:[1-9]|[12][0-9]|3[01]))?`
)

// Families lists what sweep knows, in the order of the documentation. A name belongs to the first family that matches.
func Families() []Family {
	return []Family{
		{Name: "vllm", Of: "vLLM's CPU and tiering offload regions", Shapes: []string{"vllm_offload_<uuid|digits|hisparse_…>[_dpN].mmap[.1…31]"},
			pattern: compile(`vllm_offload_(?:` + uuid + `|[0-9]+|hisparse_[A-Za-z0-9._-]*?[A-Za-z0-9])(?:_dp[0-9]+)?\.mmap` + segment)},
		{Name: "kvlift", Of: "arenas of kvlift that were never finished", Lies: Arena, Shapes: []string{"kvlift-NAME/arena.new", "kvlift-NAME/meta.new"},
			pattern: compile(`arena\.new|meta\.new`)},
		{Name: "kvlift-arena", Optional: true, Of: "whole arenas of kvlift: a cache that a next daemon would adopt", Lies: Arena, Shapes: []string{"kvlift-NAME/meta", "kvlift-NAME/arena"},
			pattern: compile(`meta|arena`)},
		{Name: "vllm-pinned", Optional: true, Of: "offload regions of engines whose engine_id was chosen by hand", Shapes: []string{"vllm_offload_<any id>.mmap[.1…31]"},
			pattern: compile(`vllm_offload_[A-Za-z0-9][A-Za-z0-9._-]*\.mmap` + segment)},
		{Name: "vllm-mm", Optional: true, Of: "vLLM's multimodal cache", Shapes: []string{"VLLM_OBJECT_STORAGE_SHM_BUFFER[_<hex>]"},
			pattern: compile(`VLLM_OBJECT_STORAGE_SHM_BUFFER(?:_[0-9a-fA-F-]+)?`)},
		{Name: "lmcache", Optional: true, Of: "LMCache's pools", Shapes: []string{"lmcache_l1_pool_<pid>"},
			pattern: compile(`lmcache_l1_pool_[0-9]+`)},
		{Name: "sglang", Optional: true, Of: "SGLang's segments", Shapes: []string{"sgl_shm_<kind>_<pid>_<random>", "multi_tokenizer_args_<…>", "shared_mla_tp<t>_p<pid>"},
			pattern: compile(`sgl_shm_[A-Za-z0-9]+_[0-9]+_[A-Za-z0-9_]+|multi_tokenizer_args_[A-Za-z0-9_-]+|shared_mla_tp[0-9]+_p[0-9]+`)},
		{Name: "nccl", Optional: true, Of: "NCCL's segments", Shapes: []string{"nccl-<6 letters or digits>"},
			pattern: compile(`nccl-[A-Za-z0-9]{6}`)},
		{Name: "deepspeed", Optional: true, Of: "DeepSpeed's all-reduce buffers", Shapes: []string{"deepspeed_allreduce_buffer_<…>"},
			pattern: compile(`deepspeed_allreduce_buffer_[A-Za-z0-9_.-]+`)},
		{Name: "torch", Optional: true, MinAge: time.Minute, Of: "tensors that PyTorch's file_system strategy shares", Shapes: []string{"torch_<pid>_<random>[_<n>]"},
			pattern: compile(`torch_[0-9]+_[0-9]+(?:_[0-9]+)?`)},
		{Name: "python", Optional: true, Of: "Python's shared memory and semaphores; a killed vLLM engine leaves two of the one and one of the other", Shapes: []string{"psm_<8 hex>", "sem.mp-<…>", "sem.loky-<pid>-<…>"},
			pattern: compile(`psm_[0-9a-f]{8}|sem\.mp-[A-Za-z0-9_]+|sem\.loky-[0-9]+-[A-Za-z0-9_]+`)},
		{Name: "vllm-fs", Optional: true, Lies: Below, MinAge: time.Minute, Of: "what vLLM's fs tier was writing; wants `--dir`", Shapes: []string{"<hash>.bin_<digits>.tmp", ".o_direct_probe_<digits>.tmp"},
			pattern: compile(`[0-9a-f]{8,128}\.bin_[0-9]+\.tmp|\.o_direct_probe_[0-9]+\.tmp`)},
		{Name: "sockets", Optional: true, Proof: ByConnect, Of: "Unix sockets of LMCache, vLLM and FlashInfer, in /tmp unless `--dir` is given", Shapes: []string{"[engine_<uuid>_service_…]lmcache_rpc_port_<n>", "<uuid>", "cuda_fd_xchg_<…>"},
			pattern: compile(`(?:engine_` + uuid + `_service_[A-Za-z0-9_.-]*)?lmcache_rpc_port_[0-9]+|` + uuid + `|cuda_fd_xchg_[A-Za-z0-9_.-]+`)},
	}
}

func compile(shape string) *regexp.Regexp { return regexp.MustCompile(`^(?:` + shape + `)$`) }

// Has tells whether a file's name is of the family's shape.
func (f *Family) Has(name string) bool { return f.pattern.MatchString(name) }

// hidden is what a sweep calls a file while it removes it: .NAME.swept.PID or .NAME.swept.PID.N. Nobody looks for it there,
// and the next sweep finds it.
var hidden = regexp.MustCompile(`^\.(.+)\.swept\.[0-9]{1,10}(?:\.[0-9]{1,3})?$`)

// bare takes a name back to what it was before an earlier sweep began to remove it.
func bare(name string) (was string, leftover bool) {
	if m := hidden.FindStringSubmatch(name); m != nil && !strings.Contains(m[1], "/") {
		return m[1], true
	}
	return name, false
}
