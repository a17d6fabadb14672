package sweep

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"kvlift/holders"
	"kvlift/lease"
)

// Verdict says what a file is.
type Verdict string

// Verdicts.
const (
	Live     Verdict = "live"     // somebody holds it
	Starting Verdict = "starting" // perhaps somebody is about to
	Stale    Verdict = "stale"    // proven: nobody does
	Unknown  Verdict = "unknown"  // neither is proven
	Foreign  Verdict = "foreign"  // not this command's to judge
)

// Facts is all that a verdict is made of. Whatever was not asked is zero.
type Facts struct {
	What      string // what a file is that is no regular file or socket as its family's are; else ""
	Mounted   bool   // it lies on another file system than its folder
	UID       uint32
	SizeBytes int64
	Age       time.Duration // since it was last changed, by whichever of the file's times is later
	Leftover  bool          // an earlier sweep has begun to remove it
	Seen      bool          // processes were looked at; Holders are those that were found
	Holders   []holders.Holder
	// Answers of the kernel, in the order in which they are asked for.
	Flock, Ranges, Lease, Connect Answer
}

// Answer is what the kernel said to one question.
type Answer struct {
	Asked bool
	Err   error // nil: nobody; wraps lease.ErrHeld: somebody; else the kernel did not say
}

func (a Answer) held() bool { return a.Asked && errors.Is(a.Err, lease.ErrHeld) }

// Rules are what the caller of a sweep has decided.
type Rules struct {
	Proof  Proof
	MinAge time.Duration // younger files are starting; below 0: nothing while a lease proves that nobody holds them, else noLeaseAge
	Owned  func(uid uint32) bool
	// Asked is false for a file that is shown and was not asked for.
	Asked bool
	Why   string // why it was not asked for
}

// noLeaseAge is how young a file may be to be called starting where no lease can tell.
const noLeaseAge = time.Minute

// Judgement is a verdict with what it rests on.
type Judgement struct {
	Verdict  Verdict
	Evidence []string // maps, fd, flock, ofd, lease, connect
	Reason   string
	// OtherUser says that the file is foreign for its owner's sake alone.
	OtherUser bool
}

// Judge is a pure function of facts. Only a granted lease, or a refused connection, makes a file stale: what could not be
// asked or read is never taken for an absence.
func Judge(f Facts, r Rules) Judgement {
	verdict := func(v Verdict, evidence []string, format string, args ...any) Judgement {
		if evidence == nil {
			evidence = []string{}
		}
		return Judgement{Verdict: v, Evidence: evidence, Reason: fmt.Sprintf(format, args...)}
	}
	if f.What != "" {
		return verdict(Foreign, nil, "%s: refused", f.What)
	}
	if f.Mounted {
		return verdict(Foreign, nil, "mounted from another file system: refused")
	}
	evidence, why := held(f)
	switch {
	case f.SizeBytes == 0 && r.Proof == ByLease && f.Leftover:
		// Whoever has it open came too late for what it was, and learns that from a file without a name.
		return verdict(Stale, evidence, "an earlier sweep was killed after it had emptied it")
	case f.SizeBytes == 0 && r.Proof == ByLease:
		return verdict(Starting, evidence, "empty: its owner has made it and not yet sized it")
	case len(evidence) > 0:
		return verdict(Live, evidence, "%s", why)
	}
	proof, name := f.Lease, "lease"
	if r.Proof == ByConnect {
		proof, name = f.Connect, "connect"
	}
	if !proof.Asked || proof.Err != nil {
		age := r.MinAge
		if age < 0 && !errors.Is(proof.Err, fs.ErrPermission) { // there time tells nothing: another user would know at once
			age = noLeaseAge
		}
		if f.Age < age {
			return verdict(Starting, nil, "changed %s ago, and %v", seconds(f.Age), proof.Err)
		}
		return verdict(Unknown, nil, "no holder is seen, but %v", proof.Err)
	}
	age := r.MinAge
	if age < 0 && r.Proof == ByConnect {
		age = noLeaseAge // it may be bound and not yet listened at
	}
	switch evidence = free(f, name); {
	case f.Age < age:
		return verdict(Starting, evidence, "nobody holds it, but it was changed %s ago", seconds(f.Age))
	case !r.Asked:
		return verdict(Foreign, evidence, "nobody holds it; %s", r.Why)
	case !r.Owned(f.UID):
		j := verdict(Foreign, evidence, "nobody holds it, but it belongs to uid %d: --owner %d", f.UID, f.UID)
		j.OtherUser = true
		return j
	case r.Proof == ByConnect:
		return verdict(Stale, evidence, "nobody listens")
	case f.Leftover:
		return verdict(Stale, evidence, "nobody holds it; an earlier sweep was killed while it removed it")
	}
	return verdict(Stale, evidence, "nobody holds it: no process is seen that maps or opens it, no lock, and the kernel grants a write lease")
}

// held collects what shows a holder, and says who it is.
func held(f Facts) (evidence []string, why string) {
	var mapped, open []string
	for _, h := range f.Holders {
		name := fmt.Sprintf("%d (%s)", h.PID, h.Comm)
		if h.Mapped {
			mapped = append(mapped, name)
		} else {
			open = append(open, name)
		}
	}
	var parts []string
	if len(mapped) > 0 {
		evidence, parts = append(evidence, "maps"), append(parts, "mapped by "+some(mapped))
	}
	for _, h := range f.Holders {
		if h.Open {
			evidence = append(evidence, "fd")
			break
		}
	}
	if len(open) > 0 {
		parts = append(parts, "open in "+some(open))
	}
	for _, a := range []struct {
		answer    Answer
		name, why string
	}{
		{f.Flock, "flock", "its flock is taken"},
		{f.Ranges, "ofd", "bytes of it are locked"},
		{f.Lease, "lease", "held by a process that cannot be seen from here: the kernel refuses a write lease"},
		{f.Connect, "connect", "somebody listens"},
	} {
		if a.answer.held() {
			evidence, parts = append(evidence, a.name), append(parts, a.why)
		}
	}
	return evidence, strings.Join(parts, ", ")
}

// free names the questions that were answered with "nobody".
func free(f Facts, proof string) []string {
	if proof == "connect" {
		return []string{"connect"}
	}
	evidence := []string{}
	if f.Seen {
		evidence = append(evidence, "maps", "fd")
	}
	if f.Flock.Asked && f.Flock.Err == nil {
		evidence = append(evidence, "flock")
	}
	if f.Ranges.Asked && f.Ranges.Err == nil {
		evidence = append(evidence, "ofd")
	}
	return append(evidence, "lease")
}

// some lists at most three names.
func some(names []string) string {
	if len(names) > 3 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:3], ", "), len(names)-3)
	}
	return strings.Join(names, ", ")
}

func seconds(d time.Duration) string { return d.Round(time.Second).String() }
