// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/safefile"
)

const (
	// batch is how many names of one directory are held and sorted at a time; a larger directory is sorted in parts.
	batch = 50_000
	// deepest is how far down a walk goes: each level holds a descriptor.
	deepest = 1000
)

var errTooDeep = errors.New("directories are nested too deeply")

// openDir opens a directory below another for reading, not through a link.
func openDir(at int, name string) (*os.File, error) {
	fd, err := safefile.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// visit sees each entry of a directory in order, before what is in it. descend says whether to go into a directory.
type visit func(dir int, name string, level int, isDir bool) (descend bool, err error)

// walk goes through a directory. Entries that vanish or cannot be read on the way are skipped: the tree is alive.
func walk(ctx context.Context, dir *os.File, level int, see visit) error {
	if level > deepest {
		return errTooDeep
	}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		entries, readErr := dir.ReadDir(batch)
		slices.SortFunc(entries, func(a, b os.DirEntry) int {
			if a.Name() < b.Name() {
				return -1
			}
			return 1
		})
		for _, e := range entries {
			descend, err := see(int(dir.Fd()), e.Name(), level, e.IsDir())
			if err != nil {
				return err
			}
			if !descend || !e.IsDir() {
				continue
			}
			sub, err := openDir(int(dir.Fd()), e.Name())
			if err != nil {
				continue
			}
			// /proc has no files for us, and no end.
			if safefile.CheckNotProc(int(sub.Fd())) == nil {
				err = walk(ctx, sub, level+1, see)
			}
			_ = sub.Close()
			if err != nil {
				return err
			}
		}
		if readErr != nil {
			if errors.Is(readErr, io.EOF) || errors.Is(readErr, os.ErrNotExist) {
				return nil
			}
			return readErr
		}
		if len(entries) == 0 {
			return nil
		}
	}
}

// removeAll deletes a name and all that is below it. What is not there is not missed.
func removeAll(ctx context.Context, at int, name string, level int) error {
	err := unix.Unlinkat(at, name, 0)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err != unix.EISDIR && err != unix.EPERM {
		return err
	}
	if level > deepest {
		return errTooDeep
	}
	dir, openErr := openDir(at, name)
	if openErr != nil {
		if openErr == unix.ENOENT {
			return nil
		}
		return err
	}
	defer dir.Close()
	if err := safefile.CheckNotProc(int(dir.Fd())); err != nil {
		return err
	}
	// Deleting moves the position of the rest in some filesystems: read from the start until nothing is left.
	for last := error(nil); ; last = nil {
		if err := ctx.Err(); err != nil {
			return err
		}
		names, err := dir.Readdirnames(1024)
		if len(names) == 0 {
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			break
		}
		for _, n := range names {
			if err := removeAll(ctx, int(dir.Fd()), n, level+1); err != nil {
				last = err
			}
		}
		if last != nil {
			return last
		}
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
	if err := unix.Unlinkat(at, name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return err
	}
	return nil
}
