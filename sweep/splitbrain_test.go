package sweep

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// rankMode joins regions as vLLM's workers do (SharedOffloadRegion): whoever makes the file sizes it, the others open it
// and wait for the size. A command is "join PATH SIZE NANOSECONDS", the answer the inode or why there is none; "leave" lets
// the region go.
func rankMode([]string) error {
	in := bufio.NewScanner(os.Stdin)
	var f *os.File
	var mem []byte
	fmt.Println("ready")
	for in.Scan() {
		var path string
		var size, delay int64
		switch n, _ := fmt.Sscanf(in.Text(), "join %s %d %d", &path, &size, &delay); {
		case n == 3:
			time.Sleep(time.Duration(delay)) // the random moment itself
			var err error
			if f, mem, err = join(path, size); err != nil {
				fmt.Println("failed", strings.ReplaceAll(err.Error(), "\n", " "))
				continue
			}
			var st unix.Stat_t
			if err := unix.Fstat(int(f.Fd()), &st); err != nil {
				return err
			}
			fmt.Println("inode", st.Ino)
		case in.Text() == "leave":
			if f != nil {
				if err := errors.Join(unix.Munmap(mem), f.Close()); err != nil {
					return err
				}
				f = nil
			}
			fmt.Println("left")
		default:
			return fmt.Errorf("command %q", in.Text())
		}
	}
	return in.Err()
}

func join(path string, size int64) (*os.File, []byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	switch {
	case errors.Is(err, fs.ErrExist):
		if f, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
			return nil, nil, err
		}
		for {
			var st unix.Stat_t
			if err := unix.Fstat(int(f.Fd()), &st); err != nil {
				return nil, nil, err
			}
			if st.Size >= size {
				break
			}
			if st.Nlink == 0 {
				return nil, nil, errors.Join(errors.New("creator failed during initialization"), f.Close())
			}
		}
	case err != nil:
		return nil, nil, err
	default:
		if err := f.Truncate(size); err != nil {
			return nil, nil, err
		}
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return f, mem, nil
}

// TestLateJoiner has the ranks of an engine meet at a name while a sweep that sees no process runs in a tight loop. In half
// of the runs a dead engine has left a region of the same name (an engine_id chosen by hand), so that a rank may open what is
// being removed. Ranks may fail, loudly; those that do not must have one region, and a late rank must find it.
//
// The same has to split engines, or this test shows nothing, with a removal that takes the lease and unlinks, without
// closing the door and without a second look; and with one that has all this and leaves the file its memory: some ranks
// ask for the file after the look.
func TestLateJoiner(t *testing.T) {
	runs := 1000
	if raceDetector || testing.Short() {
		runs = 200
	}
	// A batch in which the sweep never had a processor shows nothing, so there is another one.
	met := false
	for tries := 0; !met && tries < 10; tries++ {
		split, took := splitBrains(t, "whole", runs)
		if met = took > 0; split > 0 {
			t.Errorf("%d of %d engines were split", split, runs)
		}
	}
	if !met {
		t.Error("the sweep never took a file")
	}
	for _, how := range []string{"naive", "unemptied"} {
		split := 0
		for tries := 0; split == 0 && tries < 10; tries++ {
			split, _ = splitBrains(t, how, 300)
		}
		if split == 0 {
			t.Errorf("%s: no engine was split: the test cannot fail", how)
		}
	}
}

// splitBrains returns how many engines were split, and how many files the sweep took, for good or for a moment.
func splitBrains(t *testing.T, how string, runs int) (split, took int) {
	dir := shm(t)
	sweeper := spawn(t, "loop", nil, dir, how)
	sweeper.expect("ready")
	ranks := []*helper{spawn(t, "rank", nil), spawn(t, "rank", nil)}
	for _, r := range ranks {
		r.expect("ready")
	}
	rng := rand.New(rand.NewPCG(1, 2)) // moments: the machine adds its own
	failed := 0
	for i := range runs {
		path := filepath.Join(dir, fmt.Sprintf("vllm_offload_%d.mmap", i))
		stale := filepath.Join(dir, "made") // of no family's shape
		if err := os.WriteFile(stale, make([]byte, regionSize), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, r := range ranks {
			r.tell("join %s %d %d", path, regionSize, rng.IntN(500_000))
		}
		if i%2 == 0 { // unless a rank was quicker
			if err := unix.Renameat2(unix.AT_FDCWD, stale, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE); err != nil && !errors.Is(err, fs.ErrExist) {
				t.Fatal(err)
			}
		}
		var inodes []uint64
		for _, r := range ranks {
			var n uint64
			if s := r.line(); strings.HasPrefix(s, "failed") {
				failed++
			} else if _, err := fmt.Sscanf(s, "inode %d", &n); err != nil {
				t.Fatalf("rank: %s", s)
			} else {
				inodes = append(inodes, n)
			}
		}
		// The late one: it makes the file if the name is free, and has then another than the ranks.
		late, mem, err := join(path, regionSize)
		if err == nil {
			inodes = append(inodes, inodeOf(t, late))
			if err := errors.Join(unix.Munmap(mem), late.Close()); err != nil {
				t.Fatal(err)
			}
		} else {
			failed++
		}
		for _, n := range inodes {
			if n != inodes[0] {
				split++
				break
			}
		}
		for _, r := range ranks {
			r.tell("leave")
			r.expect("left")
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	var rounds, removed, gaveBack int
	if _, err := fmt.Sscan(sweeper.finish(), &rounds, &removed, &gaveBack); err != nil {
		t.Fatal(err)
	}
	for _, r := range ranks {
		r.finish()
	}
	t.Logf("%s: %d runs, %d split brains; %d ranks failed loudly; %d sweeps removed %d files and gave %d back", how, runs, split, failed, rounds, removed, gaveBack)
	return split, removed + gaveBack
}

func inodeOf(t *testing.T, f *os.File) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}
