// SPDX-License-Identifier: Apache-2.0

// Package wipe removes trees that hostile programs made.
//
// os.RemoveAll holds one descriptor for each level it is down, and nothing keeps a program from nesting
// directories deeper than a process may have descriptors: the tree would stay, and the process would be out of
// descriptors meanwhile. This way holds two, however deep it goes: what is found below the second level is moved up
// to the first, so that every directory is emptied near the top.
package wipe

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Tree removes path and everything below it. It follows no link. A path that is not there is removed already.
//
//	err := wipe.Tree("/var/lib/opensandbox/fs/sandboxes/" + id)
func Tree(path string) error {
	parent, err := openDir(unix.AT_FDCWD, filepath.Dir(path))
	if err != nil {
		return ignoreMissing(named(path, err))
	}
	defer unix.Close(parent)
	return named(path, At(parent, filepath.Base(path)))
}

// At is Tree for a name in an open directory.
func At(parent int, name string) error {
	gone, err := remove(parent, name)
	if gone || err != nil {
		return err
	}
	top, err := openDir(parent, name)
	if err != nil {
		return ignoreMissing(err)
	}
	defer unix.Close(top)
	w := &wiper{top: top}
	for {
		// Directories that were moved up meanwhile are found by the next round.
		left, err := w.round()
		if err != nil {
			return err
		}
		if !left {
			break
		}
	}
	return ignoreMissing(unix.Unlinkat(parent, name, unix.AT_REMOVEDIR))
}

// wiper empties one directory.
type wiper struct {
	top   int
	moved int
}

// round removes all that lies directly in the top; left tells that something was moved there.
func (w *wiper) round() (left bool, err error) {
	before := w.moved
	err = each(w.top, func(name string) error {
		gone, err := remove(w.top, name)
		if gone || err != nil {
			return err
		}
		child, err := openDir(w.top, name)
		if err != nil {
			return ignoreMissing(err)
		}
		defer unix.Close(child)
		if err := each(child, func(inner string) error {
			gone, err := remove(child, inner)
			if gone || err != nil {
				return err
			}
			return w.lift(child, inner)
		}); err != nil {
			return err
		}
		return ignoreMissing(unix.Unlinkat(w.top, name, unix.AT_REMOVEDIR))
	})
	return w.moved > before, err
}

// lift moves a directory to the top, under a name that is free there.
func (w *wiper) lift(parent int, name string) error {
	for {
		w.moved++
		err := unix.Renameat2(parent, name, w.top, ".wipe-"+strconv.Itoa(w.moved), unix.RENAME_NOREPLACE)
		if !errors.Is(err, unix.EEXIST) {
			return ignoreMissing(err)
		}
	}
}

// remove takes away a file or an empty directory; gone is false for a directory that has something in it.
func remove(parent int, name string) (gone bool, err error) {
	err = unix.Unlinkat(parent, name, 0)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) { // EPERM is what POSIX says for a directory
		err = unix.Unlinkat(parent, name, unix.AT_REMOVEDIR)
		if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
			return false, nil
		}
	}
	return err == nil || errors.Is(err, unix.ENOENT), ignoreMissing(err)
}

// each calls do for every name in a directory. Names come in portions: a directory may have millions of them.
func each(dir int, do func(name string) error) error {
	// A second descriptor with a position of its own, closed by the file.
	fd, err := openDir(dir, ".")
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "")
	defer f.Close()
	for {
		names, err := f.Readdirnames(1024)
		for _, name := range names {
			if err := do(name); err != nil {
				return err
			}
		}
		if err != nil || len(names) == 0 {
			return nil // io.EOF; what could not be read keeps the directory from being removed, which is told then
		}
	}
}

func openDir(parent int, name string) (int, error) {
	return unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

func ignoreMissing(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func named(path string, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: "remove", Path: path, Err: err}
}
