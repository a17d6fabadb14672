package main

import (
	"fmt"
	"strconv"
	"strings"

	"kvlift/engine"
)

const quotaHint = "write --quota 8GiB or 50% for every namespace, --quota NAME=8GiB for those of a model or of an id; kvlift status shows both"

// parseQuotas reads the values of --quota, no name twice. An empty one says nothing, as an empty variable does.
func parseQuotas(values []string) ([]engine.Quota, error) {
	var out []engine.Quota
	seen := map[string]string{}
	for _, v := range values {
		if v == "" {
			continue
		}
		q, err := parseQuota(v)
		if err != nil {
			return nil, &usageError{fmt.Sprintf("--quota %q: %v", v, err), quotaHint}
		}
		if first, twice := seen[q.Name]; twice {
			return nil, &usageError{fmt.Sprintf("--quota %q: %q has one already, %q", v, q.Name, first), "each name has one quota; one without a name is that of *"}
		}
		seen[q.Name] = v
		out = append(out, q)
	}
	return out, nil
}

// parseQuota reads [NAME=]SIZE. A model's name may hold an equals sign, a size does not.
func parseQuota(s string) (engine.Quota, error) {
	q, size := engine.Quota{Name: "*"}, s
	if i := strings.LastIndexByte(s, '='); i >= 0 {
		q.Name, size = s[:i], s[i+1:]
		if q.Name == "" {
			return q, fmt.Errorf("a name is missing before the equals sign")
		}
	}
	percent, share := strings.CutSuffix(size, "%")
	if !share {
		var err error
		q.Bytes, err = parseSize(size)
		return q, err
	}
	p, err := strconv.ParseFloat(percent, 64)
	if err != nil || !(p >= 0 && p <= 100) || strings.Trim(percent, "0123456789.") != "" {
		return q, fmt.Errorf("%q is no share of the arena: write 0%% to 100%%", size)
	}
	q.Share = p / 100
	return q, nil
}
