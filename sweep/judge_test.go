package sweep

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvlift/holders"
	"kvlift/lease"
)

var (
	nobody  = Answer{Asked: true}
	taken   = Answer{Asked: true, Err: fmt.Errorf("%w: x", lease.ErrHeld)}
	silent  = Answer{Asked: true, Err: fmt.Errorf("%w: x", lease.ErrNoAnswer)}
	refused = Answer{Asked: true, Err: fmt.Errorf("%w: x (%w)", lease.ErrNoAnswer, fs.ErrPermission)}
)

func TestJudge(t *testing.T) {
	mine := Rules{MinAge: -1, Owned: func(uid uint32) bool { return uid == 0 }, Asked: true}
	sockets := mine
	sockets.Proof = ByConnect
	patient := mine
	patient.MinAge = time.Hour
	unasked := mine
	unasked.Asked, unasked.Why = false, "not asked for"
	idle := Facts{SizeBytes: 1, Seen: true, Flock: nobody, Ranges: nobody, Lease: nobody}
	with := func(change func(*Facts)) Facts { f := idle; change(&f); return f }
	for _, c := range []struct {
		name     string
		f        Facts
		r        Rules
		want     Verdict
		evidence string
	}{
		{"nobody", idle, mine, Stale, "maps fd flock ofd lease"},
		{"nobody, processes not seen", with(func(f *Facts) { f.Seen = false }), mine, Stale, "flock ofd lease"},
		{"no locks on this file system", with(func(f *Facts) { f.Flock, f.Ranges = silent, silent }), mine, Stale, "maps fd lease"},
		{"mapped", with(func(f *Facts) { f.Holders = []holders.Holder{{PID: 7, Mapped: true}} }), mine, Live, "maps"},
		{"mapped and open", with(func(f *Facts) { f.Holders = []holders.Holder{{PID: 7, Mapped: true, Open: true}} }), mine, Live, "maps fd"},
		{"open", with(func(f *Facts) { f.Holders = []holders.Holder{{PID: 7, Open: true}} }), mine, Live, "fd"},
		{"flock", with(func(f *Facts) { f.Flock = taken }), mine, Live, "flock"},
		{"byte lock", with(func(f *Facts) { f.Ranges = taken }), mine, Live, "ofd"},
		{"lease refused", with(func(f *Facts) { f.Lease = taken }), mine, Live, "lease"},
		{"lease refused, young and patient", with(func(f *Facts) { f.Lease = taken }), patient, Live, "lease"},
		{"no lease, young", with(func(f *Facts) { f.Lease = silent }), mine, Starting, ""},
		{"no lease, old", with(func(f *Facts) { f.Lease, f.Age = silent, time.Hour }), mine, Unknown, ""},
		{"not permitted", with(func(f *Facts) { f.Lease = refused }), mine, Unknown, ""},
		{"not asked", with(func(f *Facts) { f.Lease, f.Age = Answer{}, time.Hour }), mine, Unknown, ""},
		{"young and patient", with(func(f *Facts) { f.Age = time.Minute }), patient, Starting, "maps fd flock ofd lease"},
		{"old and patient", with(func(f *Facts) { f.Age = 2 * time.Hour }), patient, Stale, "maps fd flock ofd lease"},
		{"empty", Facts{Seen: true}, mine, Starting, ""},
		{"empty and held", Facts{Seen: true, Holders: []holders.Holder{{PID: 7, Open: true}}}, mine, Starting, "fd"},
		{"empty, of a killed sweep", Facts{Seen: true, Leftover: true}, mine, Stale, ""},
		{"of a killed sweep", with(func(f *Facts) { f.Leftover = true }), mine, Stale, "maps fd flock ofd lease"},
		{"of a killed sweep, held", with(func(f *Facts) { f.Leftover, f.Lease = true, taken }), mine, Live, "lease"},
		{"a link", Facts{What: "a symbolic link", SizeBytes: 9}, mine, Foreign, ""},
		{"mounted", with(func(f *Facts) { f.Mounted = true }), mine, Foreign, ""},
		{"another's", with(func(f *Facts) { f.UID = 5 }), mine, Foreign, "maps fd flock ofd lease"},
		{"another's, held", with(func(f *Facts) { f.UID, f.Lease = 5, taken }), mine, Live, "lease"},
		{"not asked for", idle, unasked, Foreign, "maps fd flock ofd lease"},
		{"socket, refused", Facts{Connect: nobody, Age: time.Hour}, sockets, Stale, "connect"},
		{"socket, refused, young", Facts{Connect: nobody}, sockets, Starting, "connect"},
		{"socket, accepted", Facts{Connect: taken, Age: time.Hour}, sockets, Live, "connect"},
		{"socket, no answer", Facts{Connect: silent, Age: time.Hour}, sockets, Unknown, ""},
	} {
		j := Judge(c.f, c.r)
		if j.Verdict != c.want || strings.Join(j.Evidence, " ") != c.evidence || j.Reason == "" || strings.Contains(j.Reason, "%!") {
			t.Errorf("%s: %+v, want %s by %q", c.name, j, c.want, c.evidence)
		}
	}
}

// TestNeverStale: whatever the facts are, a file is stale only where the family's proof is there, and nothing shows a holder.
func TestNeverStale(t *testing.T) {
	answer := rapid.SampledFrom([]Answer{{}, nobody, taken, silent, refused, {Asked: true, Err: errors.New("x")}})
	rapid.Check(t, func(t *rapid.T) {
		f := Facts{
			What: rapid.SampledFrom([]string{"", "a folder"}).Draw(t, "what"), Mounted: rapid.Bool().Draw(t, "mounted"),
			UID: rapid.Uint32Range(0, 1).Draw(t, "uid"), SizeBytes: rapid.Int64Range(0, 2).Draw(t, "size"), Age: time.Duration(rapid.Int64Range(0, int64(2*time.Minute)).Draw(t, "age")),
			Leftover: rapid.Bool().Draw(t, "leftover"), Seen: rapid.Bool().Draw(t, "seen"),
			Flock: answer.Draw(t, "flock"), Ranges: answer.Draw(t, "ofd"), Lease: answer.Draw(t, "lease"), Connect: answer.Draw(t, "connect"),
		}
		if rapid.Bool().Draw(t, "held") {
			f.Holders = []holders.Holder{{PID: 1, Mapped: rapid.Bool().Draw(t, "mapped"), Open: true}}
		}
		r := Rules{Proof: rapid.SampledFrom([]Proof{ByLease, ByConnect}).Draw(t, "proof"), MinAge: time.Duration(rapid.Int64Range(-1, int64(time.Minute)).Draw(t, "min age")),
			Owned: func(uid uint32) bool { return uid == 0 }, Asked: rapid.Bool().Draw(t, "asked")}
		j := Judge(f, r)
		if j.Evidence == nil || j.Reason == "" {
			t.Fatalf("%+v", j)
		}
		if j.Verdict != Stale || r.Proof == ByLease && f.Leftover && f.SizeBytes == 0 { // nothing is left in that one
			return
		}
		proof := f.Lease
		if r.Proof == ByConnect {
			proof = f.Connect
		}
		held := slices.ContainsFunc([]Answer{f.Flock, f.Ranges, f.Lease, f.Connect}, Answer.held)
		if proof != nobody || len(f.Holders) > 0 || held || f.What != "" || f.Mounted || f.UID != 0 || !r.Asked || f.Age < r.MinAge || r.Proof == ByLease && f.SizeBytes == 0 {
			t.Fatalf("stale: %+v by %+v", f, j)
		}
	})
}

func TestFamilies(t *testing.T) {
	const id = "7d2c4a10-51aa-4f0e-8f53-6b1a90c2d4e8"
	names := map[string]string{
		"vllm_offload_" + id + ".mmap": "vllm", "vllm_offload_" + id + "_dp3.mmap": "vllm", "vllm_offload_1780928262818256525_dp0.mmap": "vllm",
		"vllm_offload_" + id + ".mmap.1": "vllm", "vllm_offload_" + id + ".mmap.31": "vllm", "vllm_offload_hisparse_0_dp1.mmap": "vllm",
		"vllm_offload_hisparse_a.b-c.mmap.10": "vllm", "vllm_offload_" + strings.ToUpper(id) + ".mmap": "vllm",
		"vllm_offload_" + id + ".mmap.32": "", "vllm_offload_" + id + ".mmap.0": "", "vllm_offload_" + id + ".mmap.01": "", "vllm_offload_" + id + ".mmap.bak": "",
		"vllm_offload.mmap": "", "vllm_offload_.mmap": "", "vllm_offload_hisparse_.mmap": "vllm-pinned", "xvllm_offload_1.mmap": "", "vllm_offload_1.mmapx": "",
		"vllm_offload_1.mmap\n": "", "vllm_offload_" + id[:35] + ".mmap": "vllm-pinned", "vllm_offload_a.mmap": "vllm-pinned", "vllm_offload_my-engine_dp0.mmap.3": "vllm-pinned",
		"vllm_offload_a/b.mmap": "", "arena.new": "kvlift", "meta.new": "kvlift", "arena": "kvlift-arena", "meta": "kvlift-arena", "arena.old": "",
		"VLLM_OBJECT_STORAGE_SHM_BUFFER": "vllm-mm", "VLLM_OBJECT_STORAGE_SHM_BUFFER_0a1b": "vllm-mm", "VLLM": "", "VLLM_OBJECT_STORAGE_SHM_BUFFERS": "",
		"lmcache_l1_pool_412": "lmcache", "lmcache_l1_pool_": "", "ai_toolkit_cache": "",
		"sgl_shm_mm_412_a1b2": "sglang", "multi_tokenizer_args_7": "sglang", "shared_mla_tp0_p412": "sglang", "sgl_shm_mm": "",
		"nccl-Ab12Cd": "nccl", "nccl-Ab12C": "", "nccl-Ab12Cde": "", "deepspeed_allreduce_buffer_0_1": "deepspeed",
		"torch_412_1234567890": "torch", "torch_412_1234567890_0": "torch", "torch_412": "",
		"psm_3fa91c02": "python", "psm_3fa91c0": "", "psm_3fa91c0g": "", "sem.mp-k2x_1": "python", "sem.loky-412-abc": "python", "sem.other": "",
		"0123456789abcdef.bin_42.tmp": "vllm-fs", ".o_direct_probe_42.tmp": "vllm-fs", "0123456789abcdef.bin": "", "x.bin_42.tmp": "",
		"lmcache_rpc_port_0": "sockets", "engine_" + id + "_service_lookup_tp0_lmcache_rpc_port_0": "sockets", id: "sockets", "cuda_fd_xchg_1": "sockets",
	}
	for name, want := range names {
		got := ""
		for _, f := range Families() {
			if f.Has(name) {
				got = f.Name
				break
			}
		}
		if got != want {
			t.Errorf("%q is of %q, want %q", name, got, want)
		}
		hidden := "." + name + ".swept.412"
		if was, left := bare(hidden); !left || was != name {
			if !strings.Contains(name, "/") && !strings.Contains(name, "\n") {
				t.Errorf("%q was %q, %v", hidden, was, left)
			}
		}
		if was, left := bare(name); left || was != name {
			t.Errorf("%q is what a sweep leaves of %q", name, was)
		}
	}
	for _, name := range []string{".swept.1", "..swept.1", ".x.swept.", ".x.swept.1x", "x.swept.1", ".x.swept.1.2.3", ".x.swept.12345678901"} {
		if was, left := bare(name); left {
			t.Errorf("%q is what a sweep leaves of %q", name, was)
		}
	}
	if was, left := bare(".x.swept.1.2"); !left || was != "x" {
		t.Errorf("%q, %v", was, left)
	}
}
