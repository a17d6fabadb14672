package sweep

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"kvlift/holders"
	"kvlift/lease"
)

// errNoAnswer is what the kernel says where it has no leases.
var errNoAnswer = lease.ErrNoAnswer

// kernel is this one, for a test.
func kernel(t testing.TB) *lease.Kernel {
	k := lease.Open(time.Now)
	t.Cleanup(k.Close)
	return k
}

// steps are the calls of a removal in their order.
var steps = []string{"claim", "lookup", "rename", "lookup again", "alone", "empty", "unlink", "release"}

// hooked is a folder in which something happens before a step of a removal, or the step fails.
type hooked struct {
	Names
	before func(step string, c Claim) error
	seen   map[string]bool
	claim  Claim
}

func hook(n Names, before func(step string, c Claim) error) *hooked {
	return &hooked{Names: n, before: before, seen: map[string]bool{}}
}

func (h *hooked) at(step string) error {
	h.seen[step] = true
	return h.before(step, h.claim)
}

func (h *hooked) Lookup(name string) (holders.ID, error) {
	step := "lookup"
	if _, hidden := bare(name); hidden {
		step = "lookup again"
	}
	if h.claim != nil { // before, it is looked for a name that is free
		if err := h.at(step); err != nil {
			return holders.ID{}, err
		}
	}
	return h.Names.Lookup(name)
}

func (h *hooked) Rename(from, to string) error {
	step := "rename"
	if _, hidden := bare(from); hidden {
		step = "rename back"
	}
	if err := h.at(step); err != nil {
		return err
	}
	return h.Names.Rename(from, to)
}

func (h *hooked) Unlink(name string) error {
	if err := h.at("unlink"); err != nil {
		return err
	}
	return h.Names.Unlink(name)
}

func (h *hooked) Claim(name string, id holders.ID) (Claim, error) {
	if err := h.at("claim"); err != nil {
		return nil, err
	}
	c, err := h.Names.Claim(name, id)
	if err != nil {
		return nil, err
	}
	h.claim = c
	return &hookedClaim{c, h}, nil
}

type hookedClaim struct {
	Claim
	h *hooked
}

func (c *hookedClaim) Alone() bool {
	if err := c.h.at("alone"); err != nil {
		return false
	}
	return c.Claim.Alone()
}

func (c *hookedClaim) Empty() error {
	if err := c.h.at("empty"); err != nil {
		return err
	}
	return c.Claim.Empty()
}

func (c *hookedClaim) Release() error {
	err := c.h.at("release")
	return errors.Join(err, c.Claim.Release())
}

// naive removes as one might: it takes the lease, so nobody holds the file, and unlinks it.
type naive struct {
	Names
	name, hide string // what is not called by another name meanwhile
}

func (n *naive) Rename(from, to string) error {
	n.name, n.hide = from, to
	return nil
}

func (n *naive) real(name string) string {
	if name == n.hide && name != "" {
		return n.name
	}
	return name
}

func (n *naive) Lookup(name string) (holders.ID, error) { return n.Names.Lookup(n.real(name)) }
func (n *naive) Unlink(name string) error               { return n.Names.Unlink(n.real(name)) }

func (n *naive) Claim(name string, id holders.ID) (Claim, error) {
	c, err := n.Names.Claim(name, id)
	if err != nil {
		return nil, err
	}
	return naiveClaim{c}, nil
}

// unemptied leaves a removed file its memory.
type unemptied struct{ Names }

func (n unemptied) Claim(name string, id holders.ID) (Claim, error) {
	c, err := n.Names.Claim(name, id)
	if err != nil {
		return nil, err
	}
	return unemptiedClaim{c}, nil
}

type unemptiedClaim struct{ Claim }

func (unemptiedClaim) Empty() error { return nil }

type naiveClaim struct{ Claim }

func (naiveClaim) Alone() bool  { return true }
func (naiveClaim) Empty() error { return nil }

// loopMode DIR HOW sweeps again and again until its standard input ends, and says how many files it removed and how many it
// gave back. It looks at no processes, as if all were in other namespaces, and keeps what a sweep finds out once: so it is
// at the files all the time.
func loopMode(args []string) error {
	o := options(args[0])
	gaveBack := 0
	o.wrap = func(n Names) Names {
		switch args[1] {
		case "naive":
			n = &naive{Names: n}
		case "unemptied":
			n = unemptied{n}
		}
		return hook(n, func(step string, _ Claim) error {
			if step == "rename back" {
				gaveBack++
			}
			time.Sleep(10 * time.Microsecond) // that others come in between
			return nil
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		waitForEnd()
		cancel()
	}()
	d, _, err := openFolder(args[0], lease.Open(time.Now))
	if err != nil {
		return err
	}
	if d.noLease != nil {
		return d.noLease
	}
	fmt.Println("ready")
	rounds, removed, families := 0, 0, Families()
	s := sweeper{o: o}
	for ; ctx.Err() == nil; rounds++ {
		l := lister{families: families}
		if err := l.list(context.Background(), d, "", Beside, 0); err != nil {
			return err
		}
		for _, e := range l.entries {
			f, ok := s.file(e)
			switch {
			case ok && f.Action == Failed:
				return fmt.Errorf("failed: %+v", f)
			case ok && f.Action == Removed:
				removed++
			}
		}
	}
	fmt.Println(rounds, removed, gaveBack)
	return s.close()
}

// stopMode DIR NAME STEP begins to remove a file and stops before a step until it is killed.
func stopMode(args []string) error {
	k := lease.Open(time.Now)
	d, _, err := openFolder(args[0], k)
	if err != nil {
		return err
	}
	id, err := d.Lookup(args[1])
	if err != nil {
		return err
	}
	h := hook(d, func(step string, _ Claim) error {
		if step == args[2] {
			fmt.Println("at", step)
			waitForEnd()
			os.Exit(0)
		}
		return nil
	})
	hide, err := hideAs(d, args[1], os.Getpid())
	if err != nil {
		return err
	}
	if strings.HasPrefix(args[1], ".") {
		hide = args[1]
	}
	out := remove(h, args[1], hide, id)
	return fmt.Errorf("it ended: %+v", out)
}
