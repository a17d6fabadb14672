package adapter

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What models of the hub say of their layers, cut to what is looked at.
var configs = []struct {
	name, text string
	want       Model
}{
	{"dense", `{"model_type": "llama", "num_hidden_layers": 32}`, Model{}},
	{"window of all", `{"model_type": "mistral", "sliding_window": 4096}`, Model{Window: 4096}},
	{"no window", `{"model_type": "mistral", "sliding_window": null}`, Model{}},
	{"window switched off", `{"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": false}`, Model{}},
	{"window of no layer", `{"sliding_window": 128, "layer_types": ["full_attention", "full_attention"]}`, Model{}},
	{"gpt-oss", `{"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}`, Model{Window: 128}},
	{"gemma, with a picture model", `{"text_config": {"sliding_window": 1024, "layer_types": ["sliding_attention"]}, "vision_config": {}}`, Model{Window: 1024}},
	{"llama 4", `{"text_config": {"attention_chunk_size": 8192, "layer_types": ["chunked_attention", "full_attention"]}}`, Model{Window: 8192}},
	{"qwen3-next", `{"linear_num_value_heads": 32, "layer_types": ["linear_attention", "full_attention"]}`, Model{State: true}},
	{"qwen3.5 by its interval", `{"linear_num_value_heads": 48, "full_attention_interval": 4}`, Model{State: true}},
	{"jamba", `{"mamba_d_state": 16, "attn_layer_period": 2}`, Model{State: true}},
	{"nemotron-h", `{"hybrid_override_pattern": "M-M*", "ssm_state_size": 128}`, Model{State: true}},
	{"kimi linear", `{"linear_attn_config": {"full_attn_layers": [4]}}`, Model{State: true}},
	{"bamba", `{"layers_block_type": ["mamba", "attention"]}`, Model{State: true}},
}

func TestParseModel(t *testing.T) {
	for _, c := range configs {
		if got, err := parseModel([]byte(c.text)); err != nil || got != c.want {
			t.Errorf("%s: %+v, %v, want %+v", c.name, got, err, c.want)
		}
	}
	for _, bad := range []string{"", "[]", `{"sliding_window": -1}`, `{"layer_types": "full"}`, `{"sliding_window": 1e30}`, `{"sliding_window": 18446744073709551615}`} {
		if m, err := parseModel([]byte(bad)); err == nil {
			t.Errorf("%q is taken for %+v", bad, m)
		}
	}
}

func TestReadModelIsBounded(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"x": "`+strings.Repeat("x", maxConfig)+`"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadModel(dir); err == nil || !strings.Contains(err.Error(), "longer than") {
		t.Errorf("error %v", err)
	}
}

func FuzzParseModel(f *testing.F) {
	for _, c := range configs {
		f.Add([]byte(c.text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseModel(b)
		if err != nil && m != (Model{}) {
			t.Errorf("%+v beside %v", m, err)
		}
	})
}

func TestParseRelease(t *testing.T) {
	for s, want := range map[string]Release{"0.27.1": {27, 1}, "v0.33.0": {33, 0}, "0.32.0rc1": {32, 0}, "0.30.2+cpu": {30, 2}, "0.31.0.post1": {31, 0}} {
		if got, err := ParseRelease(s); err != nil || got != want {
			t.Errorf("%s: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "0.32", "1.0.0", "0.-1.0", "0.x.0", "0.32.x", "latest"} {
		if got, err := ParseRelease(s); err == nil {
			t.Errorf("%q is taken for %v", s, got)
		}
	}
}

func TestModelOf(t *testing.T) {
	for _, c := range []struct{ command, want string }{
		{"vllm serve m --x", "m"},
		{"vllm serve --model m", "m"},
		{"python -m vllm.entrypoints.openai.api_server --model=/a/b", "/a/b"},
		{"vllm serve --port 1", ""},
		{"vllm serve", ""},
		{"", ""},
	} {
		if got := ModelOf(strings.Fields(c.command)); got != c.want {
			t.Errorf("%q: model %q, want %q", c.command, got, c.want)
		}
	}
}

// TestSeed: the variable is asked for exactly where keys would differ from process to process.
func TestSeed(t *testing.T) {
	release := func(minor int) *Release { return &Release{minor, 0} }
	for _, c := range []struct {
		release *Release
		algo    string
		want    bool
	}{
		{nil, "", true}, {release(28), "", true}, {release(28), "sha256_cbor", true}, {release(29), "", false},
		{release(29), "sha256_cbor", false}, {release(33), "xxhash", true}, {release(33), "xxhash_cbor", true},
	} {
		var command []string
		if c.algo != "" {
			command = []string{"vllm", "serve", "m", "--prefix-caching-hash-algo", c.algo}
		}
		a := Advise(command, c.release, &Model{}, func(string) string { return "" })
		if got := slices.Contains(a.Environment, "PYTHONHASHSEED=0"); got != c.want {
			t.Errorf("%v %q: %v, want %v", c.release, c.algo, got, c.want)
		}
	}
}
