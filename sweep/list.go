package sweep

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// entry is a name that is of a family's shape, and what was there when its folder was listed.
type entry struct {
	top    *folder
	sub    string // where below top its folder is; "" is top itself
	name   string
	family *Family
	asked  bool
	stat   *unix.Stat_t
	other  *entry // of meta its arena, and the other way round
	kept   bool   // it was looked at, and stays
}

func (e *entry) path() string { return path.Join(e.top.path, e.sub, e.name) }

// arenaPrefix begins the name of the folder of an arena.
const arenaPrefix = "kvlift-"

// maxDepth bounds the walk below a folder; vLLM's fs tier is three folders deep, below one of a model's name or two.
const maxDepth = 8

// lister collects the entries of one folder and of those below it that families lie in.
type lister struct {
	families []Family
	asked    map[string]bool
	walk     bool // a family lies anywhere below
	note     func(format string, args ...any)
	entries  []*entry
}

// list reads the folder at sub, which is a place of the given kind. Of what is made or removed meanwhile it may see either.
func (l *lister) list(ctx context.Context, top *folder, sub string, kind Place, depth int) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d, err := top.at(sub)
	if err != nil {
		if errors.Is(err, fs.ErrPermission) && sub != "" { // another user's; what it holds is not this user's to judge
			l.note("%s: may not be opened: left out", path.Join(top.path, sub))
			return nil
		}
		return vanishedOr(err)
	}
	defer d.Close() // opened for reading
	names, err := d.dir.Readdirnames(-1)
	if err != nil {
		return vanishedOr(&fs.PathError{Op: "list", Path: d.path, Err: err})
	}
	slices.Sort(names)
	if kind == Arena {
		slices.Reverse(names) // meta before arena: without the one the other is nothing, and not the other way round
	}
	for _, name := range names {
		st, err := d.stat(name)
		if err != nil {
			if err = vanishedOr(err); err != nil {
				return err
			}
			continue
		}
		folder := st.Mode&unix.S_IFMT == unix.S_IFDIR
		if kind != Arena || !folder { // a folder of a region's name is shown; arena is a name of folders, too
			l.match(top, sub, name, st, kind)
		}
		if !folder || kind == Arena {
			continue
		}
		next := path.Join(sub, name)
		switch {
		case kind == Beside && strings.HasPrefix(name, arenaPrefix):
			err = l.list(ctx, top, next, Arena, depth+1)
		case l.walk && depth < maxDepth:
			err = l.list(ctx, top, next, Below, depth+1)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// vanishedOr drops the errors of a name that is gone, or is no folder any more.
func vanishedOr(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	return err
}

// match adds the name if a family has it. Arenas are shown without being asked for: they are memory.
func (l *lister) match(top *folder, sub, name string, st *unix.Stat_t, kind Place) {
	was, _ := bare(name)
	for i := range l.families {
		f := &l.families[i]
		asked := !f.Optional || l.asked[f.Name]
		here := f.Lies == kind || f.Lies == Below && kind == Beside
		if here && (asked || kind == Arena) && f.Has(was) {
			e := &entry{top: top, sub: sub, name: name, family: f, asked: asked, stat: st}
			for i := len(l.entries) - 1; kind == Arena && name == "arena" && i >= 0 && l.entries[i].sub == sub && l.entries[i].top == top; i-- {
				if l.entries[i].name == "meta" {
					e.other, l.entries[i].other = l.entries[i], e
				}
			}
			l.entries = append(l.entries, e)
			return
		}
	}
}
