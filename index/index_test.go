package index

import (
	"testing"

	"pgregory.net/rapid"

	"kvlift/block"
)

// keyOf makes a key of a number; two namespaces hold the same keys.
func keyOf(n int) block.Key {
	k, _ := block.MakeKey([]byte{byte(n), byte(n >> 8), 1})
	return k
}

// record is what the entry table would hold.
type record struct {
	ns  uint16
	key block.Key
}

// hashAt makes a hash whose search begins at slot home of a table with this mask. Hashes of one home differ in their tag
// when high does.
func hashAt(home, mask, high uint32) uint64 {
	return uint64(home&mask|high*(mask+1))<<32 | 0xdeadbeef
}

// TestModel compares the index with a map. The hashes are made by hand: a few homes, the last slots of the table among
// them, so that clusters run into each other and around the end; a few tags, so that different keys look alike.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		entries := rapid.Uint32Range(0, 24).Draw(t, "entries")
		table := map[uint32]record{}
		x := New(entries, func(id uint32, ns uint16, k *block.Key) bool {
			r, ok := table[id]
			if !ok {
				t.Fatalf("asked for record %d, which is not in the index", id)
			}
			return r.ns == ns && r.key == *k
		})
		capacity := len(x.slots) * 3 / 4
		homes := rapid.SliceOfN(rapid.OneOf(rapid.Uint32Range(0, 2), rapid.Uint32Range(x.mask-2, x.mask), rapid.Uint32Range(0, x.mask)), 1, 4).Draw(t, "homes")
		tags := rapid.Uint32Range(1, 3).Draw(t, "tags")
		hash := func(r record) uint64 { // equal for equal arguments
			n := uint32(r.key.Bytes[0]) + uint32(r.ns)*7
			return hashAt(homes[n%uint32(len(homes))], x.mask, n%tags)
		}
		in := map[record]uint32{}
		draw := func(t *rapid.T) record {
			return record{rapid.Uint16Range(0, 1).Draw(t, "namespace"), keyOf(rapid.IntRange(0, 19).Draw(t, "key"))}
		}
		next := uint32(0)
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				if x.Len() != len(in) {
					t.Fatalf("Len = %d, want %d", x.Len(), len(in))
				}
				for r, want := range in {
					if got, ok := x.Find(hash(r), r.ns, &r.key); !ok || got != want {
						t.Fatalf("Find(%v) = %d, %v, want %d", r, got, ok, want)
					}
				}
				checkSlots(t, x)
			},
			"find": func(t *rapid.T) {
				r := draw(t)
				want, ok := in[r]
				if !ok {
					want = block.NoEntry
				}
				if got, found := x.Find(hash(r), r.ns, &r.key); found != ok || got != want {
					t.Fatalf("Find(%v) = %d, %v, want %d, %v", r, got, found, want, ok)
				}
				x.Touch(hash(r))
			},
			"put": func(t *rapid.T) {
				r := draw(t)
				if _, ok := in[r]; ok || len(in) == capacity {
					return
				}
				table[next], in[r] = r, next
				x.Put(hash(r), next)
				next++
			},
			"remove": func(t *rapid.T) {
				r := draw(t)
				id, ok := in[r]
				if !ok {
					id = next // a number that was never put in
				}
				if got := x.Remove(hash(r), id); got != ok {
					t.Fatalf("Remove(%v) = %v, want %v", r, got, ok)
				}
				delete(in, r)
				delete(table, id)
			},
			"remove of another hash": func(t *rapid.T) {
				for r, id := range in {
					if x.Remove(hash(r)+1<<32, id) {
						t.Fatalf("Remove(%v) under a hash that it does not have", r)
					}
					return
				}
			},
		})
	})
}

// checkSlots: every used slot is reached from its home without crossing an empty one, and no number stands twice.
func checkSlots(t *rapid.T, x *Index) {
	seen, used := map[uint32]bool{}, 0
	for i, s := range x.slots {
		if s == 0 {
			continue
		}
		used++
		if id := uint32(s) - 1; seen[id] {
			t.Fatalf("record %d stands in two slots", id)
		}
		seen[uint32(s)-1] = true
		for j := uint32(s>>32) & x.mask; j != uint32(i); j = (j + 1) & x.mask {
			if x.slots[j] == 0 {
				t.Fatalf("slot %d cannot be reached from its home %d: slot %d is empty", i, uint32(s>>32)&x.mask, j)
			}
		}
	}
	if used != x.Len() {
		t.Fatalf("%d slots are used, Len = %d", used, x.Len())
	}
}

// TestFull fills tables to three quarters, all in one cluster around the end of the slots, and empties them in several
// orders.
func TestFull(t *testing.T) {
	for _, entries := range []uint32{0, 1, 6, 7, 12, 13, 100, 1000} {
		orders := map[string]func(i, n int) int{
			"first in, first out": func(i, n int) int { return i },
			"last in, first out":  func(i, n int) int { return n - 1 - i },
			"from the middle":     func(i, n int) int { return (i + n/2) % n },
		}
		for name, order := range orders {
			keys := map[uint32]block.Key{}
			x := New(entries, func(id uint32, _ uint16, k *block.Key) bool { return keys[id] == *k })
			n := len(x.slots) * 3 / 4
			if uint32(n) < entries {
				t.Fatalf("a table for %d records takes %d", entries, n)
			}
			hash := func(i int) uint64 { return hashAt(x.mask-1+uint32(i%3), x.mask, uint32(i)) }
			for i := range n {
				keys[uint32(i)] = keyOf(i)
				x.Put(hash(i), uint32(i))
			}
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%d entries: a record above three quarters of the slots was taken", entries)
					}
				}()
				x.Put(hash(n), uint32(n))
			}()
			gone := map[int]bool{}
			for i := range n {
				victim := order(i, n)
				if !x.Remove(hash(victim), uint32(victim)) {
					t.Fatalf("%d entries, %s: record %d is not there", entries, name, victim)
				}
				gone[victim] = true
				if n > 100 && i%97 > 0 { // looking for all of them after each removal is too much for a large table
					continue
				}
				for j := range n {
					k := keyOf(j)
					if _, ok := x.Find(hash(j), 0, &k); ok == gone[j] {
						t.Fatalf("%d entries, %s, after %d removals: record %d found: %v", entries, name, i+1, j, ok)
					}
				}
			}
			for i, s := range x.slots {
				if s != 0 {
					t.Fatalf("%d entries, %s: slot %d is used in an empty table", entries, name, i)
				}
			}
		}
	}
}

// TestSize: the package comment promises 11 to 22 bytes for a record.
func TestSize(t *testing.T) {
	for entries := uint32(1000); entries < 5000; entries++ {
		x := New(entries, nil)
		if b := float64(8*len(x.slots)) / float64(entries); b < 10.6 || b > 22 || uint32(len(x.slots)*3/4) < entries {
			t.Fatalf("%d entries: %d slots, %.1f bytes for each", entries, len(x.slots), b)
		}
	}
}

// TestHash: namespaces share no fingerprints, and one process answers always the same.
func TestHash(t *testing.T) {
	x := New(10, nil)
	seen := map[uint64]record{}
	for ns := range uint16(64) {
		for n := range 100 {
			r := record{ns, keyOf(n)}
			h := x.Hash(r.ns, &r.key)
			if h != x.Hash(r.ns, &r.key) {
				t.Fatal("a key has two hashes")
			}
			if o, ok := seen[h]; ok {
				t.Fatalf("%v and %v have one hash", r, o)
			}
			seen[h] = r
		}
	}
	k := keyOf(1)
	if n := testing.AllocsPerRun(100, func() { x.Hash(1, &k) }); n != 0 {
		t.Errorf("Hash: %v allocations, want none", n)
	}
}
