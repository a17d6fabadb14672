package recording

import (
	"strings"

	"kvlift/block"
)

// infer finds out what a recording does not say.
func (s *Session) infer() {
	s.prompts()
	s.kinds()
	s.places()
}

// prompts gives each request the length of its prompt, when there are as many as the phases asked for.
func (s *Session) prompts() {
	total := 0
	for _, p := range s.Phases {
		total += p.Requests
	}
	if total != s.Requests {
		return
	}
	for _, p := range s.Phases {
		for range p.Requests {
			s.Prompts = append(s.Prompts, p.Tokens)
		}
	}
}

// recurrent are parts of the names of layers that keep a state.
var recurrent = []string{"linear_attn", "mamba", "mixer", "short_conv"}

func (s *Session) kinds() {
	read := make([]uint32, len(s.Groups)) // the most chunks that a load has read
	short := make([]bool, len(s.Groups))  // a load has read less than of another group
	for i := range s.Calls {
		if s.Calls[i].Method != PrepareLoad {
			continue
		}
		counts, most := make([]uint32, len(s.Groups)), uint64(0)
		for j := range s.Calls[i].Keys {
			counts[s.Group(&s.Calls[i].Keys[j])]++
		}
		for g, n := range counts {
			read[g] = max(read[g], n)
			most = max(most, uint64(n)*uint64(s.Groups[g].ChunkTokens))
		}
		for g, n := range counts {
			// A prompt that ends in the middle of a chunk reads a part of one more.
			short[g] = short[g] || uint64(n+1)*uint64(s.Groups[g].ChunkTokens) < most
		}
	}
	for g := range s.Groups {
		v := &s.Groups[g]
		switch {
		case hasState(v.Layers):
			v.Kind = "state"
		case short[g] && read[g] > 0:
			v.Kind, v.Window = "window", read[g]
		default:
			v.Kind = "full"
		}
	}
}

func hasState(layers []string) bool {
	for _, l := range layers {
		for _, part := range recurrent {
			if strings.Contains(l, part) {
				return true
			}
		}
	}
	return false
}

// places finds the positions of the full groups' keys.
func (s *Session) places() {
	s.positions = map[string]uint32{}
	type at struct{ request, group int }
	next := map[at]uint32{} // where a request goes on in a group
	for i := range s.Calls {
		c := &s.Calls[i]
		if c.Method != PrepareLoad && c.Method != PrepareStore || c.Request < 0 {
			continue
		}
		of := make([][]*block.Key, len(s.Groups))
		for j := range c.Keys {
			g := s.Group(&c.Keys[j])
			of[g] = append(of[g], &c.Keys[j])
		}
		for g, keys := range of {
			if s.Groups[g].Kind == "full" && len(keys) > 0 {
				next[at{c.Request, g}] = s.place(c.Request, s.Groups[g].ChunkTokens, keys, next[at{c.Request, g}])
			}
		}
	}
}

// place gives the keys of one call and full group their positions: they are consecutive, and what is known of one of them says
// where they begin, else where the request has come to. It returns the end of the last whole chunk.
func (s *Session) place(request int, chunk uint32, keys []*block.Key, start uint32) uint32 {
	for i, k := range keys {
		if p := s.Position(k); p%chunk == 0 && p >= uint32(i+1)*chunk {
			start = p - uint32(i+1)*chunk
			break
		}
	}
	for _, k := range keys {
		hash, _ := split(k)
		end := start + chunk
		if tail := s.tail(request); tail > start && end > s.Prompts[request] && s.hashTokens < chunk {
			// Not a whole chunk of the prompt: the part of one in which it ends.
			if s.positions[hash] == 0 {
				s.positions[hash] = tail
			}
			return start
		}
		if s.positions[hash] == 0 {
			s.positions[hash] = end
		}
		start = end
	}
	return start
}

// tail is the deepest boundary of hashes in a request's prompt: its last token is always computed.
func (s *Session) tail(request int) uint32 {
	if request >= len(s.Prompts) || s.Prompts[request] == 0 || s.hashTokens == 0 {
		return 0
	}
	return (s.Prompts[request] - 1) / s.hashTokens * s.hashTokens
}
