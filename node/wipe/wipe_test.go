// SPDX-License-Identifier: Apache-2.0

package wipe_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wipe"
)

func gone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("%s is still there (%v)", path, err)
	}
}

// nest makes a chain of directories, deeper than any path can be long.
func nest(t *testing.T, root string, depth int) {
	t.Helper()
	fd, err := unix.Open(root, unix.O_DIRECTORY, 0)
	for range depth {
		if err != nil {
			t.Fatal(err)
		}
		if err = unix.Mkdirat(fd, "d", 0o700); err != nil {
			continue
		}
		var next int
		next, err = unix.Openat(fd, "d", unix.O_DIRECTORY, 0)
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
}

func TestTreeDeeperThanDescriptorsReach(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(t.TempDir(), "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	nest(t, root, 1500)
	few := old
	few.Cur = 64
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	err := wipe.Tree(root)
	if back := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); back != nil {
		t.Fatal(back)
	}
	if err != nil {
		t.Fatal(err)
	}
	gone(t, root)
}

func TestOrdinaryTree(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	for i := range 3 {
		for j := range 3 {
			dir := filepath.Join(root, fmt.Sprint(i), fmt.Sprint(j), "x", "y")
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			for k := range 1500 / 9 { // more than one portion of names in all
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(k)), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	// A name that lift would choose itself.
	if err := os.MkdirAll(filepath.Join(root, ".wipe-1", "z", "z"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := wipe.Tree(root); err != nil {
		t.Fatal(err)
	}
	gone(t, root)
}

func TestManyNamesInOneDirectory(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	for i := range 1200 {
		if err := os.MkdirAll(filepath.Join(root, fmt.Sprint(i), "a"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := wipe.Tree(root); err != nil {
		t.Fatal(err)
	}
	gone(t, root)
}

func TestLinksAreRemovedNotFollowed(t *testing.T) {
	dir := t.TempDir()
	kept := filepath.Join(dir, "kept")
	if err := os.MkdirAll(filepath.Join(kept, "inside"), 0o700); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "root")
	if err := os.MkdirAll(filepath.Join(root, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{filepath.Join(root, "a"), filepath.Join(root, "sub", "b"), filepath.Join(dir, "top")} {
		if err := os.Symlink(kept, link); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(root, "sub", "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{root, filepath.Join(dir, "top")} {
		if err := wipe.Tree(path); err != nil {
			t.Fatal(err)
		}
		gone(t, path)
	}
	if _, err := os.Stat(filepath.Join(kept, "inside")); err != nil {
		t.Error(err)
	}
}

func TestMissingIsRemovedAlready(t *testing.T) {
	if err := wipe.Tree(filepath.Join(t.TempDir(), "no", "such")); err != nil {
		t.Error(err)
	}
}

func TestSingleFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := wipe.Tree(path); err != nil {
		t.Fatal(err)
	}
	gone(t, path)
}
