// Package sweep finds what dead engines leave in shared memory, proves for each file whether anybody still uses it, and
// removes what nobody does. A file that somebody may use is never removed: see Judge for what counts as proof, and remove
// for how a name is taken away from a file that may be opened at that moment.
package sweep

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kvlift/holders"
	"kvlift/lease"
)

// Options say what to look at and what to do. All but Now, Pause and PID may be zero.
type Options struct {
	Dirs     []string // folders; none: /dev/shm, and /tmp for sockets, below Root
	Root     string   // in which proc lies
	Families []string // optional ones that are asked for
	Delete   bool     // else nothing is changed
	MinAge   time.Duration
	// DefaultAge takes the families' own minimum ages, and a minute where nothing is proven, instead of MinAge.
	DefaultAge bool
	UID        uint32   // whose files may be removed,
	Owners     []uint32 // and whose besides;
	AnyOwner   bool     // or everybody's
	Force      []string // paths of files that are removed although their verdict is unknown
	// Wait is how long to look again while files are held or starting, for what is about to end.
	Wait  time.Duration
	Now   func() time.Time // monotonic
	Pause func(context.Context, time.Duration) error
	PID   int // marks the names of files that are being removed
	Note  func(format string, args ...any)

	wrap func(Names) Names // what removal works through; nil: the folder itself
}

// UnknownFamilyError names a family that does not exist.
type UnknownFamilyError struct{ Name string }

func (e *UnknownFamilyError) Error() string { return fmt.Sprintf("there is no family %q", e.Name) }

// ErrNeedsDir says that a family is only looked for in folders that are named.
var ErrNeedsDir = errors.New("is looked for only in a folder that is named")

// Check finds mistakes in the options: UnknownFamilyError, ErrNeedsDir.
func (o *Options) Check() error {
	all := Families()
	for _, name := range o.Families {
		i := slices.IndexFunc(all, func(f Family) bool { return f.Name == name })
		if i < 0 {
			return &UnknownFamilyError{name}
		}
		if all[i].Lies == Below && len(o.Dirs) == 0 {
			return fmt.Errorf("family %s %w", name, ErrNeedsDir)
		}
	}
	return nil
}

// How long to wait for another sweep of the same folder, and how often to look.
const (
	lockWait = 10 * time.Second
	lockLook = 5 * time.Millisecond
	waitLook = 100 * time.Millisecond
)

// Run sweeps once, or again and again within Wait. The report is complete also with an error of the context. One file that
// fails does not keep the others: it is in the report. Nor does a folder that cannot be swept: the error is a *FolderError,
// or of several joined, and the report has the files of the others.
func Run(ctx context.Context, o Options) (*Report, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	if o.Note == nil {
		o.Note = func(string, ...any) {}
	}
	k := lease.Open(o.Now)
	defer k.Close()
	end := o.Now().Add(o.Wait)
	var before []File // removed in earlier rounds
	for round := 0; ; round++ {
		r, bad, err := once(ctx, o, k, round == 0)
		r.Files = append(append([]File{}, before...), r.Files...)
		for _, f := range before {
			r.FreedBytes += freed(&f)
		}
		if err != nil || !o.Now().Before(end) || r.Count(Live, "")+r.Count(Starting, "") == 0 {
			slices.SortFunc(r.Files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
			return r, errors.Join(bad, err)
		}
		before = slices.DeleteFunc(slices.Clone(r.Files), func(f File) bool { return f.Action != Removed })
		if err := o.Pause(ctx, waitLook); err != nil {
			return r, errors.Join(bad, err)
		}
	}
}

// FolderError says why a folder was not swept.
type FolderError struct {
	Dir string // as it was named
	Err error
}

func (e *FolderError) Error() string { return fmt.Sprintf("%s was not swept: %v", e.Dir, e.Err) }
func (e *FolderError) Unwrap() error { return e.Err }

// once is one round. bad is of the folders that were left out; err ends the sweep.
func once(ctx context.Context, o Options, k *lease.Kernel, first bool) (r *Report, bad, err error) {
	r = &Report{Schema: 1, Files: []File{}, Nameless: []Nameless{}}
	l := lister{families: Families(), asked: map[string]bool{}, note: o.Note}
	for _, name := range o.Families {
		l.asked[name] = true
	}
	for _, f := range l.families {
		l.walk = l.walk || f.Lies == Below && l.asked[f.Name]
	}
	dirs, given := o.Dirs, len(o.Dirs) > 0
	if !given {
		dirs = []string{filepath.Join(cmp.Or(o.Root, "/"), "dev/shm")}
		if l.asked["sockets"] {
			dirs = append(dirs, filepath.Join(cmp.Or(o.Root, "/"), "tmp"))
		}
	}
	var places []holders.Folder
	swept := map[holders.ID]bool{}
	for _, dir := range dirs {
		d, steps, err := openFolder(dir, k)
		if errors.Is(err, fs.ErrNotExist) && !given {
			continue
		}
		if err != nil {
			bad = errors.Join(bad, &FolderError{dir, err})
			continue
		}
		defer d.Close() // opened for reading; locks go with it
		again := swept[d.id]
		swept[d.id] = true
		if first && !again {
			noteProbe(o.Note, d, steps)
		}
		seen, err := seenFrom(o.Root, dir)
		if err != nil {
			return r, bad, err
		}
		places = append(places, holders.Folder{Path: seen, Dev: d.dev})
		if again { // under another name, which processes may know it by
			continue
		}
		if err := d.lock(ctx, o); err != nil {
			return r, bad, err
		}
		n := len(l.entries)
		if err := l.list(ctx, d, "", Beside, 0); ctx.Err() != nil {
			return r, bad, err
		} else if err != nil {
			l.entries = l.entries[:n] // half of an arena must not look like the whole
			bad = errors.Join(bad, &FolderError{dir, err})
		}
	}
	want := map[holders.ID]bool{}
	for _, e := range l.entries {
		want[idOf(e.stat)] = true
	}
	scan, err := holders.FS{Root: o.Root}.Scan(ctx, want, places)
	if err != nil {
		if ctx.Err() != nil {
			return r, bad, err
		}
		o.Note("processes cannot be seen: %v", err)
	} else {
		o.Note("%d processes seen, %d of them unreadable", scan.Processes, scan.Unreadable)
		r.NamelessBytes = scan.NamelessBytes
		for _, n := range scan.Nameless {
			r.Nameless = append(r.Nameless, Nameless{n.PID, n.Comm, n.Bytes})
		}
	}
	s := sweeper{o: o, scan: scan}
	for _, e := range l.entries {
		if ctx.Err() != nil {
			return r, bad, context.Cause(ctx)
		}
		f, ok := s.file(e)
		if ok {
			r.Files = append(r.Files, f)
			r.FreedBytes += freed(&f)
		}
	}
	return r, bad, s.close()
}

// seenFrom is a path as it stands in files below root.
func seenFrom(root, path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil || root == "" {
		return path, err
	}
	if root, err = filepath.Abs(root); err != nil {
		return "", err
	}
	if in, ok := strings.CutPrefix(path, strings.TrimSuffix(root, "/")+"/"); ok {
		return "/" + in, nil
	}
	return path, nil
}

func noteProbe(note func(string, ...any), d *folder, steps []lease.Step) {
	for _, s := range steps {
		if s.Err != nil {
			note("%s: write lease: %s: no: %v", d.path, s.What, s.Err)
		} else {
			note("%s: write lease: %s: yes", d.path, s.What)
		}
	}
	if d.noLease != nil {
		note("%s: %v", d.path, d.noLease)
	}
}

// lock keeps sweeps of one folder apart: each would see the other's lease as somebody who holds the file. Nothing else
// depends on it, so a folder that somebody else keeps locked is swept all the same.
func (d *folder) lock(ctx context.Context, o Options) error {
	for end := o.Now().Add(lockWait); ; {
		err := unix.Flock(d.fd(), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK), !o.Now().Before(end):
			o.Note("%s: swept without its lock: %v", d.path, err)
			return nil
		}
		if err := o.Pause(ctx, lockLook); err != nil {
			return err
		}
	}
}

// freed is what the removal of a file gave back.
func freed(f *File) uint64 {
	if f.Action != Removed || f.links > 1 {
		return 0
	}
	return uint64(f.AllocatedBytes)
}

// sweeper judges entries one by one, with the folder of the last one open.
type sweeper struct {
	o    Options
	scan *holders.Scan

	top *folder
	sub string
	d   *folder
}

// enter opens the entry's folder.
func (s *sweeper) enter(e *entry) (err error) {
	if s.d != nil && s.top == e.top && s.sub == e.sub {
		return nil
	}
	if err := s.close(); err != nil {
		return err
	}
	s.top, s.sub = e.top, e.sub
	s.d, err = e.top.at(e.sub)
	return err
}

func (s *sweeper) close() error {
	if s.d == nil {
		return nil
	}
	d := s.d
	s.d = nil
	return d.Close()
}

// judge looks at one entry. The error is errReplaced, fs.ErrNotExist, or that the folder cannot be read.
func (s *sweeper) judge(e *entry) (Facts, Judgement, error) {
	var by []holders.Holder
	if s.scan != nil {
		by = s.scan.Holders[idOf(e.stat)]
	}
	if err := s.enter(e); err != nil {
		return Facts{}, Judgement{}, err
	}
	facts, err := s.d.facts(e.name, e.stat, e.family.Proof, s.scan != nil, by, s.o.Now())
	return facts, Judge(facts, s.rules(e)), err
}

const replaced = "another file has its name since: left for the next sweep"

// file judges one entry and does what is to be done. It is false for a name that is gone.
func (s *sweeper) file(e *entry) (File, bool) {
	f := File{Path: e.path(), Family: e.family.Name, Evidence: []string{}, Owners: []Owner{}, SizeBytes: e.stat.Size, AllocatedBytes: e.stat.Blocks * 512, Action: Kept, links: uint64(e.stat.Nlink)}
	facts, j, err := s.judge(e)
	for _, h := range facts.Holders {
		f.Owners = append(f.Owners, Owner{h.PID, h.Comm})
	}
	f.AgeSeconds = facts.Age.Seconds()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return f, false
	case errors.Is(err, errReplaced):
		f.Verdict, f.Reason = Starting, replaced
		return f, true
	case err != nil:
		f.Verdict, f.Action, f.Reason = Unknown, Failed, err.Error()
		return f, true
	}
	f.Verdict, f.Evidence, f.Reason, f.otherUser = j.Verdict, j.Evidence, j.Reason, j.OtherUser
	forced := f.Verdict == Unknown && slices.Contains(s.o.Force, f.Path)
	switch {
	case f.Verdict == Stale && s.partKept(e):
		f.Reason += "; kept beside the other file of its arena"
	case f.Verdict != Stale && !forced:
		if facts.Leftover && f.Verdict == Live && s.o.Delete {
			s.giveBack(e, &f)
		}
	case !s.o.Delete:
		f.Action = WouldRemove
	default:
		if !s.take(e, idOf(e.stat), forced, &f) {
			return f, false
		}
	}
	e.kept = f.Action == Kept || f.Action == Failed
	return f, true
}

// partKept tells whether the other file of a whole arena stays. They go together, meta first, or not at all: an engine that
// outlives its daemon holds the one, and its next daemon needs the other.
func (s *sweeper) partKept(e *entry) bool {
	switch {
	case e.family.Lies != Arena || e.other == nil:
		return false
	case e.name == "arena":
		return e.other.kept
	}
	_, j, err := s.judge(e.other)
	return j.Verdict != Stale && !errors.Is(err, fs.ErrNotExist)
}

func (s *sweeper) rules(e *entry) Rules {
	r := Rules{Proof: e.family.Proof, MinAge: s.o.MinAge, Asked: e.asked, Owned: func(uid uint32) bool {
		return s.o.AnyOwner || uid == s.o.UID || slices.Contains(s.o.Owners, uid)
	}}
	if s.o.DefaultAge {
		r.MinAge = -1
		if e.family.MinAge > 0 {
			r.MinAge = e.family.MinAge
		}
	}
	if !e.asked {
		r.Why = fmt.Sprintf("the next kvlift serve of its name adopts it, --family %s removes it", e.family.Name)
	}
	return r
}

// names is the entry's folder as removal needs it.
func (s *sweeper) names(e *entry, forced bool) (n Names) {
	switch {
	case e.family.Proof == ByConnect:
		n = sockets{s.d}
	case forced, e.stat.Size == 0: // an emptied leftover: nothing else of no size is removed
		n = unproven{s.d}
	default:
		n = s.d
	}
	if s.o.wrap != nil {
		n = s.o.wrap(n)
	}
	return n
}

// take removes the entry. It is false when another hand has.
func (s *sweeper) take(e *entry, id holders.ID, forced bool, f *File) bool {
	n := s.names(e, forced)
	hide := e.name
	if _, leftover := bare(e.name); !leftover {
		var err error
		if hide, err = hideAs(n, e.name, s.o.PID); err != nil {
			f.Action, f.Reason = Failed, err.Error()
			return true
		}
	}
	out := remove(n, e.name, hide, id)
	if out.name != "" {
		f.Path = path.Join(e.top.path, e.sub, out.name)
	}
	switch {
	case out.removed:
		f.Action = Removed
		if out.err != nil {
			s.o.Note("%s: removed, but %v", f.Path, out.err)
		}
	case out.err == nil:
		return false
	case errors.Is(out.err, lease.ErrHeld), errors.Is(out.err, errCame):
		f.Verdict, f.Evidence, f.Reason = Live, []string{"lease"}, out.err.Error()
		if e.family.Proof == ByConnect {
			f.Evidence = []string{"connect"}
		}
	case errors.Is(out.err, errReplaced):
		f.Verdict, f.Evidence, f.Reason = Starting, []string{}, replaced
	case errors.Is(out.err, lease.ErrNoAnswer):
		f.Verdict, f.Evidence, f.Reason = Unknown, []string{}, out.err.Error()
	default:
		f.Action, f.Reason = Failed, out.err.Error()
	}
	return true
}

// giveBack gives a file its name that an earlier sweep hid and that somebody holds after all.
func (s *sweeper) giveBack(e *entry, f *File) {
	was, _ := bare(e.name)
	out := restore(s.d, was, outcome{name: e.name})
	switch {
	case out.err != nil:
		f.Reason += "; " + out.err.Error()
	case out.name != "":
		f.Path = path.Join(e.top.path, e.sub, was)
		f.Reason += "; an earlier sweep had hidden it, it has its name again"
	}
}

// hideAs finds a name for the file meanwhile that is free. A taken one is what a killed sweep with this pid left.
func hideAs(n Names, name string, pid int) (string, error) {
	for i := range 1000 {
		hide := fmt.Sprintf(".%s.swept.%d", name, pid)
		if i > 0 {
			hide = fmt.Sprintf("%s.%d", hide, i)
		}
		if _, err := n.Lookup(hide); errors.Is(err, fs.ErrNotExist) {
			return hide, nil
		} else if err != nil {
			return "", err
		}
	}
	return "", fmt.Errorf("a thousand files are hidden as .%s.swept.%d", name, pid)
}
