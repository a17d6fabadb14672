package wire

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// canonicalCase is a namespace as it comes in a hello and the text that Python writes for it.
type canonicalCase struct {
	Name      string
	Namespace json.RawMessage
	Canonical string
}

func readCanonical(t testing.TB) []canonicalCase {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(vectorDir, "canonical.json"))
	if err != nil {
		t.Fatal(err)
	}
	var out []canonicalCase
	if err := json.Unmarshal(b, &out); err != nil || len(out) == 0 {
		t.Fatalf("canonical.json: %d cases, %v", len(out), err)
	}
	return out
}

// TestCanonical: Go and Python hash the same text, else an engine of either would never meet the keys of the other.
func TestCanonical(t *testing.T) {
	for _, c := range readCanonical(t) {
		t.Run(c.Name, func(t *testing.T) {
			var n Namespace
			if err := ParseJSON(c.Namespace, &n); err != nil {
				t.Fatal(err)
			}
			got, err := n.Canonical()
			if err != nil {
				t.Fatal(err)
			}
			if got != c.Canonical {
				t.Errorf("Canonical =\n%s, want\n%s", got, c.Canonical)
			}
		})
	}
}
