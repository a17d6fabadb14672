// Package adapter carries the Python package that runs inside vLLM, and says how an engine is started with it.
package adapter

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Package is the name by which Python imports it: the folder that Install makes.
const Package = "kvlift_vllm"

// Spec is the class in it that vLLM is told to load.
const Spec = "KvliftSpec"

//go:embed kvlift_vllm/*.py kvlift_vllm/py.typed
var files embed.FS

// ErrForeign says that what stands in the way is not the adapter.
var ErrForeign = errors.New("not kvlift's")

// mark is how a folder is known as the adapter: it begins its __init__.py.
var mark = []byte(`"""kvlift's side inside vLLM`)

// Install writes the package to dir/kvlift_vllm, in place of an earlier one, and returns that path and how many files it
// has. dir is made when it is missing. The folder appears whole or not at all. Files of an earlier version do not stay.
func Install(dir string) (path string, n int, err error) {
	path = filepath.Join(dir, Package)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return path, 0, err
	}
	old, err := present(path)
	if err != nil {
		return path, 0, err
	}
	staged, err := os.MkdirTemp(dir, "."+Package+"-")
	if err != nil {
		return path, 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(staged)) }()
	fresh := filepath.Join(staged, "new")
	if n, err = write(fresh); err != nil {
		return path, 0, err
	}
	if old {
		if err := os.Rename(path, filepath.Join(staged, "old")); err != nil {
			return path, 0, err
		}
	}
	return path, n, os.Rename(fresh, path)
}

// present tells whether an adapter is at path; anything else there is ErrForeign.
func present(path string) (bool, error) {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	if !st.IsDir() {
		return false, fmt.Errorf("%s: %w", path, ErrForeign)
	}
	f, err := os.Open(filepath.Join(path, "__init__.py"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("%s: %w", path, ErrForeign)
	} else if err != nil {
		return false, err
	}
	defer f.Close()
	head := make([]byte, len(mark))
	if n, _ := f.Read(head); !bytes.Equal(head[:n], mark) {
		return false, fmt.Errorf("%s: %w", path, ErrForeign)
	}
	return true, nil
}

func write(dir string) (n int, err error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return 0, err
	}
	err = fs.WalkDir(files, Package, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := files.ReadFile(p)
		if err != nil {
			return err
		}
		n++
		return os.WriteFile(filepath.Join(dir, d.Name()), b, 0o644)
	})
	return n, err
}

// Installed tells whether dir/kvlift_vllm is the package that this binary carries, file by file.
func Installed(dir string) (bool, error) {
	if ok, err := present(filepath.Join(dir, Package)); !ok || err != nil {
		return false, err
	}
	same := true
	err := fs.WalkDir(files, Package, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		want, err := files.ReadFile(p)
		if err != nil {
			return err
		}
		got, err := os.ReadFile(filepath.Join(dir, Package, d.Name()))
		if errors.Is(err, fs.ErrNotExist) || err == nil && !bytes.Equal(got, want) {
			same = false
			return fs.SkipAll
		}
		return err
	})
	return same, err
}
