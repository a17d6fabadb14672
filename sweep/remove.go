package sweep

import (
	"errors"
	"fmt"
	"io/fs"

	"kvlift/holders"
)

// Removal takes a name away without taking a file from anybody. Between "nobody holds it" and unlink somebody may open the
// file, and then would hold memory that nobody else can find: of an engine whose ranks meet at a name, one would work on
// memory of its own, without an error. So the door is closed first, and then it is looked who came in:
//
//	claim     open the file, see that it is the one that was judged, take the write lease: from here on who opens it waits
//	hide      rename it to .NAME.swept.PID: from here on nobody finds it
//	look      does somebody wait? then give it its name back and the lease up: that one opens it as if nothing had been
//	empty     cut it to zero bytes
//	unlink    take the hidden name away
//	release   give the lease up
//
// What is left open by that is narrow, and fails loudly. Who has found the file before it was hidden and asks for it after
// the look gets an empty file without a name, which an engine refuses. So does who waits at the look while another has
// made a new file of the same name: that one is then not overwritten. A process killed at any step leaves the file under
// one name, and the next sweep ends what was begun.
//
// The kernel has no "rename only this inode". If the name is given to another file between the last look at it and the
// rename, that file is hidden instead, which is seen at once, and it gets its name back.

// Names is a folder as removal needs it. Names are plain, without a slash.
type Names interface {
	// Lookup tells which file a name is, without following a link. No such name is fs.ErrNotExist.
	Lookup(name string) (holders.ID, error)
	// Rename never replaces: a name that is taken is fs.ErrExist.
	Rename(from, to string) error
	Unlink(name string) error
	// Claim makes sure that the file is id and that nobody else holds it, and keeps newcomers waiting as far as the
	// family's proof can. The error wraps errReplaced, lease.ErrHeld, lease.ErrNoAnswer or fs.ErrNotExist.
	Claim(name string, id holders.ID) (Claim, error)
}

// Claim is the hold on one file.
type Claim interface {
	// Alone tells whether nobody has come since.
	Alone() bool
	// Empty gives the file's memory back, so that who finds it yet finds nothing.
	Empty() error
	// Release ends the claim. The file may be gone by then.
	Release() error
}

// errReplaced says that a name is another file now.
var errReplaced = errors.New("the name is another file now")

// errCame says that somebody came while the file was being removed.
var errCame = errors.New("somebody opened it while it was being removed, and has it")

// outcome is what became of a name.
type outcome struct {
	removed bool   // by this call: the name is gone
	name    string // that the file has now, when it is still there
	err     error  // why it is still there, or what else went wrong
}

// remove takes the name away if it still is the file id and nobody holds it. hide is what the file is called meanwhile. That
// the name is gone by another hand is an outcome without an error that removed nothing.
func remove(n Names, name, hide string, id holders.ID) (out outcome) {
	out.name = name
	c, err := n.Claim(name, id)
	if err != nil {
		return gone(out, err)
	}
	defer func() { out.err = errors.Join(out.err, c.Release()) }()
	if at, err := n.Lookup(name); err != nil {
		return gone(out, err)
	} else if at != id {
		out.err = errReplaced
		return out
	}
	if name != hide {
		if err := n.Rename(name, hide); err != nil {
			return gone(out, err)
		}
		out.name = hide
		if at, err := n.Lookup(hide); err != nil {
			return gone(out, err)
		} else if at != id {
			out.err = errReplaced
			return restore(n, name, out)
		}
	}
	if !c.Alone() {
		out.err = errCame
		if out = restore(n, name, out); !errors.Is(out.err, fs.ErrExist) {
			return out
		}
		// The name is taken by a new file. Who waits for the old one must not get its memory.
		out.err = nil
	}
	if err := c.Empty(); err != nil {
		out.err = err
		return restore(n, name, out)
	}
	if err := n.Unlink(hide); err != nil {
		return gone(out, err)
	}
	out.removed, out.name = true, ""
	return out
}

// gone ends a removal that an error has stopped; a name that is not there any more was taken by another hand.
func gone(out outcome, err error) outcome {
	if errors.Is(err, fs.ErrNotExist) {
		out.name = ""
		return out
	}
	out.err = err
	return out
}

// restore gives a hidden file its name back. If that is taken, the error wraps fs.ErrExist and the file stays hidden.
func restore(n Names, name string, out outcome) outcome {
	if out.name == name {
		return out
	}
	switch err := n.Rename(out.name, name); {
	case err == nil:
		out.name = name
	case errors.Is(err, fs.ErrNotExist):
		out.name = ""
	default:
		out.err = errors.Join(out.err, fmt.Errorf("it stays as %s: %w", out.name, err))
	}
	return out
}
