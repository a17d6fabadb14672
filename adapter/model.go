package adapter

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
)

// maxConfig bounds what is read of a model's config.json.
const maxConfig = 4 << 20

// maxWindow is more tokens than any model sees.
const maxWindow = 1 << 40

// Model is what a model's config.json says of the kinds of its layers.
type Model struct {
	Window uint64 // tokens of the sliding window of some layers; 0 when none has one
	State  bool   // some layers keep a recurrent state
}

type modelConfig struct {
	Text             *modelConfig `json:"text_config"`
	LayerTypes       []string     `json:"layer_types"`
	BlockTypes       []string     `json:"layers_block_type"`
	SlidingWindow    *uint64      `json:"sliding_window"`
	UseSlidingWindow *bool        `json:"use_sliding_window"`
	ChunkedWindow    uint64       `json:"attention_chunk_size"`

	// What only configurations of models with recurrent layers have.
	LinearHeads  uint64 `json:"linear_num_value_heads"`
	LinearConv   any    `json:"linear_attn_config"`
	MambaState   uint64 `json:"mamba_d_state"`
	MambaHeads   uint64 `json:"mamba_num_heads"`
	StateSize    uint64 `json:"ssm_state_size"`
	MixedPattern string `json:"hybrid_override_pattern"`
}

// ReadModel reads config.json in a model's folder. A number or a name of another type than expected is an error, unknown
// ones are passed over.
func ReadModel(dir string) (Model, error) {
	name := filepath.Join(dir, "config.json")
	f, err := os.Open(name)
	if err != nil {
		return Model{}, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return Model{}, err
	}
	if len(b) > maxConfig {
		return Model{}, fmt.Errorf("%s: longer than %d bytes", name, maxConfig)
	}
	m, err := parseModel(b)
	if err != nil {
		return m, fmt.Errorf("%s: %w", name, err)
	}
	return m, nil
}

func parseModel(b []byte) (Model, error) {
	var c modelConfig
	if err := json.Unmarshal(b, &c); err != nil {
		return Model{}, err
	}
	m := c.kinds()
	if c.Text != nil { // of a model that sees or hears, too
		t := c.Text.kinds()
		m.Window, m.State = max(m.Window, t.Window), m.State || t.State
	}
	if m.Window > maxWindow {
		return Model{}, fmt.Errorf("a window of %d tokens", m.Window)
	}
	return m, nil
}

func (c *modelConfig) kinds() Model {
	kinds := slices.Concat(c.LayerTypes, c.BlockTypes)
	has := func(names ...string) bool {
		return slices.ContainsFunc(kinds, func(k string) bool { return slices.Contains(names, k) })
	}
	var m Model
	m.State = has("linear_attention", "mamba", "mamba2", "recurrent", "conv") || c.LinearHeads > 0 || c.LinearConv != nil ||
		c.MambaState > 0 || c.MambaHeads > 0 || c.StateSize > 0 || c.MixedPattern != ""
	on := c.UseSlidingWindow == nil || *c.UseSlidingWindow
	if c.SlidingWindow != nil && on && (len(c.LayerTypes) == 0 || has("sliding_attention")) {
		m.Window = *c.SlidingWindow
	}
	if has("chunked_attention") {
		m.Window = max(m.Window, c.ChunkedWindow)
	}
	return m
}
