package engine

import (
	"encoding/hex"
	"encoding/json"
	"math"
	"strings"

	"kvlift/meta"
	"kvlift/policy"
	"kvlift/restore"
)

// Quota caps the pages that a namespace may hold: those of all its records that are not free, whatever became of them.
// It reserves nothing: a namespace below its quota may be pushed out by others as without one.
type Quota struct {
	// Name says whose it is: the model that an identity names, 8 or more of the hex digits that an id begins with, or "*"
	// for every namespace that nothing else names. An id goes before a model, more digits before fewer.
	Name  string
	Bytes uint64  // of pages, rounded down
	Share float64 // of the arena, 0 to 1; added to Bytes
}

// MinIDDigits is how many digits of a namespace's id name it in a quota at least.
const MinIDDigits = 8

// idDigits is how many of them tell namespaces apart: a private generation shares these with the one that it came from.
const idDigits = 2 * len(account{}.id)

// NamesID tells whether a quota's name can stand for the beginning of an id.
func NamesID(name string) bool {
	if len(name) < MinIDDigits || len(name) > 64 {
		return false
	}
	return strings.Trim(name, "0123456789abcdef") == ""
}

// limit is the cap in pages.
func (q *Quota) limit(arenaPages uint32) uint64 {
	return q.Bytes/4096 + uint64(q.Share*float64(arenaPages)+1e-6)
}

// noLimit is the limit of an account that no quota names.
const noLimit = math.MaxUint64

// account is what counts against one quota: a namespace and the private generations that resets made of it. An engine
// that resets while others go on would have twice its quota otherwise. They make room in one order.
type account struct {
	id      [16]byte // the first half of the namespace's id, and of its private generations'
	number  int      // of its lists
	model   string
	spaces  int    // namespaces that count here
	limit   uint64 // pages
	used    uint64 // pages of records that are not free
	pending uint64 // of these, of EVICTING and REMOVED ones
	refused uint64 // batches
}

// listOf numbers the order of an account's idle entries of a class.
func (a *account) listOf(c restore.Class) int { return a.number*int(restore.Useless+1) + int(c) }

// openAccount says where a namespace counts. Without any quota there are no accounts, and nothing is counted.
func (e *Engine) openAccount(ns *namespace) {
	if e.own == nil {
		return
	}
	free := -1
	for i, a := range e.accounts {
		if a == nil && free < 0 {
			free = i
		}
		if a != nil && a.id == [16]byte(ns.ID[:16]) {
			ns.account = a
		}
	}
	if ns.account == nil { // one is free: there is a place for each namespace
		ns.account = &account{id: [16]byte(ns.ID[:16]), number: free}
		e.accounts[free] = ns.account
	}
	ns.account.spaces++
	e.nameAccount(ns.account, ns.Description)
}

// nameAccount looks for the account's quota. The text that the table keeps may be cut before the model; the whole one
// comes with an engine, and only engines store.
func (e *Engine) nameAccount(a *account, description string) {
	if a == nil {
		return
	}
	if a.model == "" {
		a.model = Model(description)
	}
	id, best := hex.EncodeToString(a.id[:]), -1
	a.limit = noLimit
	for i := range e.opts.Quotas {
		q := &e.opts.Quotas[i]
		rank := -1
		switch {
		case NamesID(q.Name) && strings.HasPrefix(id, q.Name[:min(len(q.Name), idDigits)]):
			rank = 1 + len(q.Name)
		case q.Name == a.model && a.model != "":
			rank = 1
		case q.Name == "*":
			rank = 0
		}
		if rank > best {
			best, a.limit = rank, q.limit(e.table.Header.ArenaPages)
		}
	}
}

// closeAccount is called for a namespace that goes: it has no record left.
func (e *Engine) closeAccount(ns *namespace) {
	if a := ns.account; a != nil {
		if a.spaces--; a.spaces == 0 {
			e.accounts[a.number] = nil
		}
	}
}

// atQuota tells whether a session's namespace may not hold so many pages more.
func (e *Engine) atQuota(s *Session, need uint32) bool {
	a := s.ns.account
	return a != nil && a.used+uint64(need) > a.limit
}

// enlist puts an idle entry into its account's order, which is one by recency whatever the policy is.
func (e *Engine) enlist(id uint32, class restore.Class, lane policy.Lane) {
	if e.own != nil {
		e.own.Push(e.spaces[e.slots[id].ns].account.listOf(class), id, lane)
	}
}

// delist takes an idle entry out of it.
func (e *Engine) delist(id uint32) {
	if e.own != nil {
		e.own.Remove(id)
	}
}

// coldestOf is what should go first of an account's entries.
func (e *Engine) coldestOf(a *account, usable func(uint32) bool) (uint32, bool) {
	for c := int(restore.Useless); c >= int(restore.Needed); c-- {
		if id, ok := e.own.Coldest(a.listOf(restore.Class(c)), usable, coldestLimit); ok {
			return id, true
		}
	}
	return 0, false
}

// walkOf visits an account's idle entries in the order in which they would go.
func (e *Engine) walkOf(a *account, f func(id uint32) bool) {
	for c := int(restore.Useless); c >= int(restore.Needed) && e.own.Walk(a.listOf(restore.Class(c)), f); c-- {
	}
}

// makeOwnRoom takes so much from a namespace that is at its quota that one more key of the group fits into it. Nothing is
// taken when that, or the room in the arena, would not be enough. It returns like makeRoom.
func (e *Engine) makeOwnRoom(s *Session, q *request, need uint32, out *Reply) (r Reason, handedOver bool) {
	a := s.ns.account
	if e.unknown > 0 || uint64(need) > a.limit || a.used > a.limit { // what a lowered quota left over is shrink's to take
		return OverQuota, false
	}
	e.settleForAsker(s)
	e.asker = s
	for first := true; a.used+uint64(need) > a.limit; first = false {
		id, ok := e.coldestOf(a, e.canGo)
		if (!ok || e.slots[id].class == restore.Needed) && e.trim(q) { // first what the request itself has overtaken
			id, ok = e.coldestOf(a, e.canGo)
		}
		if !ok {
			return OverQuota, false
		}
		want := uint32(0)
		if first {
			_, _, _, n := e.table.Place(id)
			if n == need {
				want = need // it is all that is missing, in the quota and in the arena
			} else if over := a.used + uint64(need) - a.limit; uint64(n) < over && !e.ownEnough(a, over) {
				return OverQuota, false
			} else if e.pages.Free()+n < need {
				if r := e.enough(s, need); r != Fits {
					return r, false
				}
			}
		}
		if e.evictNow(s, id, want, out) {
			return Fits, true
		}
	}
	return Fits, false
}

// ownEnough looks ahead whether an account's victims that may go now hold so many pages.
func (e *Engine) ownEnough(a *account, over uint64) bool {
	have, looked := uint64(0), 0
	e.walkOf(a, func(id uint32) bool {
		if !e.canGo(id) {
			looked++
			return looked < coldestLimit
		}
		_, _, _, n := e.table.Place(id)
		have += uint64(n)
		return have < over
	})
	return have >= over
}

// shrinkLimit is how many entries go at one reserve of a namespace that holds more than a quota that was lowered.
const shrinkLimit = 256

// shrink takes some of what a namespace has above its quota, before the batch is looked at.
func (e *Engine) shrink(s *Session, out *Reply) {
	a := s.ns.account
	if a == nil || a.used <= a.limit || e.unknown > 0 || e.draining {
		return
	}
	e.settleForAsker(s)
	e.asker = s
	for range shrinkLimit {
		id, ok := e.coldestOf(a, e.canGo)
		if a.used <= a.limit || !ok {
			return
		}
		e.evictNow(s, id, 0, out)
	}
}

// evictOwnAhead announces removals of a namespace that is at its quota and whose keys several sessions share: the share
// of Options.EvictAhead of the quota, and what this batch did not get for the quota's sake.
func (e *Engine) evictOwnAhead(s *Session, refused uint64) {
	a := s.ns.account
	if a == nil || a.limit == noLimit {
		return
	}
	want := uint64(float64(a.limit)*e.opts.EvictAhead) + refused
	for n := 0; n < shrinkLimit && a.used-a.pending+want > a.limit; n++ {
		id, ok := e.coldestOf(a, e.oldEnough)
		if !ok || e.inline(s, id) {
			return
		}
		e.announce(id, meta.Evicting)
		e.counters.Evicted[Ahead]++
	}
}

// Model finds identity.model in the canonical description of a namespace, "" when it names none. A long description was
// cut by the meta file and is not whole JSON any more, so it is read token by token, as far as the model.
func Model(description string) string {
	d := json.NewDecoder(strings.NewReader(description))
	d.UseNumber()
	if !enter(d, "identity") || !enter(d, "model") {
		return ""
	}
	t, err := d.Token()
	if err != nil {
		return ""
	}
	s, _ := t.(string)
	return s
}

// enter reads the object that comes next up to the value of a member. It returns false when there is no object, or none
// with this member.
func enter(d *json.Decoder, member string) bool {
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return false
	}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return false
		}
		if t == member {
			return true
		}
		var skipped json.RawMessage
		if err := d.Decode(&skipped); err != nil {
			return false
		}
	}
	return false
}
